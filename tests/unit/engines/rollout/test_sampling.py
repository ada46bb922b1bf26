"""Keyed noise: a pure function of (seed, prompt, sample, position), uniform, and drawing what the distribution says."""

import numpy as np
import torch

from asyncflow.engines.rollout.sampling import inverse_cdf, stream_keys, uniforms


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
