"""Keyed noise: a pure function of (seed, prompt, sample, position), uniform, and drawing what the distribution says."""

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from asyncflow.engines.rollout.sampling import SORTED, Truncation, draw_tokens, inverse_cdf, stream_keys, truncated, uniforms


def noise(seed: int, prompt_index: int, sample: int, positions: np.ndarray) -> np.ndarray:
    return uniforms(np.repeat(stream_keys(seed, prompt_index, np.array([sample])), len(positions)), positions)


def test_a_number_depends_on_its_key_alone() -> None:
    together = stream_keys(7, 3, np.array([0, 1, 2, 5]))
    alone = stream_keys(7, 3, np.array([5]))
    positions = np.array([9, 9, 9, 4])
    assert uniforms(together, positions)[3] == uniforms(alone, np.array([4]))[0]


def test_every_part_of_the_key_counts() -> None:
    positions = np.arange(50)
    keys = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (-1, 1, 1), (2**63, 1, 1), (1, 2**40, 1))
    streams = [noise(*key, positions) for key in keys]
    streams.append(noise(1, 1, 1, positions + 50))
    assert len(np.unique(np.concatenate(streams))) == 50 * len(streams)


def test_numbers_do_not_change_between_releases() -> None:
    assert noise(1, 2, 3, np.array([0, 1])).tolist() == GOLDEN


def test_uniform_within_and_across_streams() -> None:
    within = noise(0, 0, 0, np.arange(40_000))
    across = uniforms(np.concatenate([stream_keys(0, p, np.arange(8)) for p in range(5_000)]), np.zeros(40_000, np.int64))
    for numbers in (within, across):
        assert numbers.min() > 0 and numbers.max() < 1
        counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
        chi2 = ((counts - 400) ** 2 / 400).sum()
        assert 60 < chi2 < 150  # 99 degrees of freedom: mean 99, deviation 14
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


def test_tokens_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.0, 0.2, 0.05, 0.25, 0.0])
    tokens = inverse_cdf(probs.expand(20_000, -1), torch.from_numpy(noise(3, 0, 0, np.arange(20_000)))).numpy()
    counts, expected = np.bincount(tokens, minlength=6), 20_000 * probs.double().numpy()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert ((counts - expected)[possible] ** 2 / expected[possible]).sum() < 16.3  # 3 degrees of freedom: exceeded once in 1,000


def test_extreme_quantiles_draw_possible_tokens() -> None:
    probs = torch.tensor([[0.0, 0.3, 0.7, 0.0]])
    for quantile, token in ((2.0**-60, 1), (1 - 2.0**-53, 2), (0.2999, 1), (0.3001, 2)):
        assert inverse_cdf(probs, torch.tensor([quantile], dtype=torch.float64)).item() == token


GOLDEN = [0.7470577890135189, 0.07166370763826013]


def cut(count: int, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> Truncation:
    return Truncation(np.full(count, top_p, np.float32), np.full(count, top_k, np.int64), np.full(count, min_p, np.float32))


def weights_of(logits_NV: torch.Tensor) -> torch.Tensor:
    return (logits_NV - logits_NV.amax(-1, keepdim=True)).exp()


@pytest.mark.parametrize("scale", [0.05, 1.0, 4.0])  # of a flat distribution, top-p takes more than are sorted at first
@pytest.mark.parametrize("options", [{"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.1}, {"top_p": 0.5, "top_k": 400}])
def test_the_tokens_left_are_those_that_transformers_leaves(options: dict[str, float], scale: float) -> None:
    logits_NV = torch.randn(5, 4 * SORTED, generator=torch.Generator().manual_seed(1)) * scale
    expected = logits_NV
    for name, warper in (("min_p", MinPLogitsWarper), ("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper)):
        if name in options:
            expected = warper(options[name])(None, expected)
    left = truncated(weights_of(logits_NV), cut(5, **options)) > 0
    assert torch.equal(left, expected.isfinite()) and (scale < 1 or not left.all())


def test_rows_are_cut_each_by_its_own_numbers_and_alike_whatever_lies_beside_them() -> None:
    logits_NV = torch.randn(4, 3 * SORTED, generator=torch.Generator().manual_seed(2)) * torch.tensor([[0.1], [1], [3], [1]])
    by = Truncation(
        np.array([0.9, 1, 0.3, 0.7], np.float32), np.array([0, 5, 0, 2 * SORTED]), np.array([0, 0, 0.01, 0], np.float32)
    )
    together = truncated(weights_of(logits_NV), by)
    for row in range(4):
        alone = Truncation(by.top_p[row : row + 1], by.top_k[row : row + 1], by.min_p[row : row + 1])
        assert torch.equal(truncated(weights_of(logits_NV[row : row + 1]), alone)[0], together[row])
    assert (together > 0).sum(1)[1] == 5


def test_log_probs_are_those_of_what_is_left_and_greedy_rows_are_not_cut() -> None:
    logits_NV = torch.randn(3, 50, generator=torch.Generator().manual_seed(3))
    temperatures, noise = np.array([0.5, 2, 0], np.float32), np.array([0.999, 0.999, 0.5])
    by = Truncation(np.array([1, 0.6, 1], np.float32), np.array([3, 0, 0]), np.zeros(3, np.float32))
    tokens, logprobs = draw_tokens(logits_NV, temperatures, noise, by)
    for row, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        scaled = logits_NV[row : row + 1] / (temperatures[row] or 1)
        warped = TopKLogitsWarper(3)(None, scaled) if row == 0 else TopPLogitsWarper(0.6)(None, scaled) if row == 1 else scaled
        assert logprob == pytest.approx(warped.log_softmax(-1)[0, token].item(), abs=1e-6)
    assert tokens[2] == logits_NV[2].argmax()
