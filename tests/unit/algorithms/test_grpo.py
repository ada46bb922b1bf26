"""GRPO against an independent implementation: plain Python floats, token by token."""

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncflow.algorithms.base import Normaliser
from asyncflow.algorithms.grpo import GRPO
from asyncflow.types import TokenBatch, UserError

LENGTHS = [3, 7, 1, 5]
FIELDS = ("logprobs_T", "old_logprobs_T", "rollout_logprobs_T", "ref_logprobs_T", "entropy_T", "advantages_T", "mask_T")


def random_batch(seed: int = 0) -> TokenBatch:
    """Float64, with masked tokens, ratios on both sides of both clips, and a reference."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(LENGTHS)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(num_tokens, generator=generator, dtype=torch.float64) * scale

    row_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    logprobs_T = normal(1.0) - 3
    mask_T = (torch.rand(num_tokens, generator=generator) > 0.2).double()
    return TokenBatch(
        logprobs_T=logprobs_T.clone().requires_grad_(),
        old_logprobs_T=logprobs_T + normal(0.8),
        rollout_logprobs_T=logprobs_T + normal(0.1),
        ref_logprobs_T=logprobs_T + normal(0.5),
        entropy_T=normal(1.0).abs(),
        advantages_T=torch.tensor([1.5, -0.5, 0.0, -1.0], dtype=torch.float64)[row_T],
        mask_T=mask_T,
        row_T=row_T,
        row_tokens_R=mask_T.new_zeros(len(LENGTHS)).index_add(0, row_T, mask_T),
    )


def expected(batch: TokenBatch, algorithm: GRPO) -> tuple[float, dict[str, float]]:
    columns = {name: None if getattr(batch, name) is None else getattr(batch, name).tolist() for name in (*FIELDS, "row_T")}
    loss, metrics = 0.0, dict.fromkeys(("policy/kl", "policy/entropy", "policy/clip_ratio"), 0.0)
    for t, row in enumerate(columns["row_T"]):
        if not columns["mask_T"][t]:
            continue
        ratio = math.exp(columns["logprobs_T"][t] - columns["old_logprobs_T"][t])
        advantage = columns["advantages_T"][t]
        clipped = max(1 - algorithm.clip_low, min(1 + algorithm.clip_high, ratio))
        if columns["ref_logprobs_T"] is None:
            kl = ratio - math.log(ratio) - 1
        else:
            s = math.exp(columns["ref_logprobs_T"][t] - columns["logprobs_T"][t])
            kl = s - math.log(s) - 1
        length = sum(m for m, r in zip(columns["mask_T"], columns["row_T"], strict=True) if r == row)
        weight = 1 / length if algorithm.normaliser == "sequences" else 1.0
        loss -= weight * (min(ratio * advantage, clipped * advantage) - algorithm.kl_coefficient * kl)
        metrics["policy/kl"] += kl
        metrics["policy/entropy"] += columns["entropy_T"][t]
        metrics["policy/clip_ratio"] += clipped * advantage < ratio * advantage
    return loss, metrics


@pytest.mark.parametrize("loss_normaliser", ["tokens", "sequences"])
@pytest.mark.parametrize(("kl_coefficient", "has_reference"), [(0.0, True), (0.1, True), (0.0, False)])
def test_loss_and_metrics_agree_with_plain_python(loss_normaliser: Any, kl_coefficient: float, has_reference: bool) -> None:
    algorithm = GRPO(loss_normaliser=loss_normaliser, kl_coefficient=kl_coefficient, clip_low=0.1, clip_high=0.3)
    batch = random_batch()
    if not has_reference:
        batch = replace(batch, ref_logprobs_T=None)
    sums = algorithm.loss(batch)
    loss, metrics = expected(batch, algorithm)
    assert metrics["policy/clip_ratio"] >= 2
    assert sums.loss.item() == pytest.approx(loss, rel=1e-12)
    assert {name: value.item() for name, value in sums.metrics.items()} == pytest.approx(metrics, rel=1e-12)
    assert not any(value.requires_grad for value in sums.metrics.values())


@pytest.mark.parametrize("loss_normaliser", ["tokens", "sequences"])
def test_gradient_agrees_with_finite_differences(loss_normaliser: Any) -> None:
    algorithm = GRPO(loss_normaliser=loss_normaliser, kl_coefficient=0.05)
    batch = random_batch(1)
    (gradient_T,) = torch.autograd.grad(algorithm.loss(batch).loss, batch.logprobs_T)
    step = 1e-6
    for t in range(sum(LENGTHS)):
        shift_T = torch.zeros_like(batch.logprobs_T)
        shift_T[t] = step
        up, _ = expected(replace(batch, logprobs_T=batch.logprobs_T + shift_T), algorithm)
        down, _ = expected(replace(batch, logprobs_T=batch.logprobs_T - shift_T), algorithm)
        assert gradient_T[t].item() == pytest.approx((up - down) / (2 * step), abs=1e-6)


@pytest.mark.parametrize("loss_normaliser", ["tokens", "sequences"])
@pytest.mark.parametrize("split", [1, 2, 3])
def test_a_sum_over_micro_batches_is_the_sum_over_the_whole(loss_normaliser: Any, split: int) -> None:
    algorithm = GRPO(loss_normaliser=loss_normaliser, kl_coefficient=0.1)
    batch = random_batch(2)
    whole = algorithm.loss(batch)
    parts = [algorithm.loss(rows_of(batch, range(*bounds))) for bounds in ((0, split), (split, len(LENGTHS)))]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-12)
    for name, value in whole.metrics.items():
        assert sum(part.metrics[name].item() for part in parts) == pytest.approx(value.item(), rel=1e-12)
    (gradient_T,) = torch.autograd.grad(whole.loss, batch.logprobs_T)
    (summed_T,) = torch.autograd.grad(sum(part.loss for part in parts), batch.logprobs_T)
    torch.testing.assert_close(summed_T, gradient_T, rtol=1e-12, atol=1e-14)


def rows_of(batch: TokenBatch, rows: range) -> TokenBatch:
    chosen_T = (batch.row_T >= rows.start) & (batch.row_T < rows.stop)
    columns = {name: getattr(batch, name)[chosen_T] for name in FIELDS}
    return TokenBatch(**columns, row_T=batch.row_T[chosen_T] - rows.start, row_tokens_R=batch.row_tokens_R[rows.start : rows.stop])


@pytest.mark.parametrize("normaliser", ["tokens", "sequences"])
def test_the_loss_is_token_local(normaliser: Normaliser) -> None:
    algorithm, batch = GRPO(kl_coefficient=0.3, loss_normaliser=normaliser), random_batch(4)
    whole = algorithm.loss(batch)
    parts = []
    for part in (slice(0, 3), slice(3, 4), slice(4, None)):  # cut within rows
        columns = {name: getattr(batch, name)[part] for name in (*FIELDS, "row_T")}
        parts.append(algorithm.loss(TokenBatch(**columns, row_tokens_R=batch.row_tokens_R)))
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-12)
    for name, value in whole.metrics.items():
        assert sum(part.metrics[name].item() for part in parts) == pytest.approx(value.item(), rel=1e-12)


def test_with_old_equal_to_the_policy_the_gradient_is_minus_the_advantage() -> None:
    batch = random_batch(3)
    batch = replace(batch, old_logprobs_T=batch.logprobs_T.detach(), ref_logprobs_T=None)
    sums = GRPO().loss(batch)
    (gradient_T,) = torch.autograd.grad(sums.loss, batch.logprobs_T)
    torch.testing.assert_close(gradient_T, -batch.advantages_T * batch.mask_T)
    assert sums.metrics["policy/kl"] == 0 and sums.metrics["policy/clip_ratio"] == 0


def test_the_higher_clip_is_the_upper_one() -> None:
    low = math.log(0.75)
    high = math.log(1.25)
    zeros_T, ones_T = torch.zeros(2), torch.ones(2)
    batch = TokenBatch(
        logprobs_T=torch.tensor([low, high], requires_grad=True),
        old_logprobs_T=zeros_T,
        rollout_logprobs_T=zeros_T,
        ref_logprobs_T=None,
        entropy_T=zeros_T,
        advantages_T=torch.tensor([-1.0, 1.0]),
        mask_T=ones_T,
        row_T=torch.tensor([0, 1]),
        row_tokens_R=ones_T,
    )
    (gradient_T,) = torch.autograd.grad(GRPO(clip_low=0.2, clip_high=0.28).loss(batch).loss, batch.logprobs_T)
    assert gradient_T.tolist() == [0.0, pytest.approx(-1.25)]


def test_the_normaliser_says_what_divides() -> None:
    assert GRPO().normaliser == "tokens"
    assert GRPO(loss_normaliser="sequences").normaliser == "sequences"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": -0.1}, r"clip_low must lie in \[0, 1\).*-0.1"),
        ({"clip_low": 1.0}, "clip_low"),
        ({"clip_high": math.nan}, "clip_high"),
        ({"kl_coefficient": -1.0}, "kl_coefficient"),
        ({"advantage_epsilon": 0.0}, "advantage_epsilon"),
        ({"loss_normaliser": "batch"}, "tokens or sequences, but is 'batch'"),
    ],
)
def test_an_option_outside_its_range_is_refused_in_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        GRPO(**options)
    assert "\n" not in str(caught.value)


def test_a_kl_term_without_a_reference_is_refused() -> None:
    with pytest.raises(UserError, match="kl_coefficient"):
        GRPO(kl_coefficient=0.1).loss(replace(random_batch(), ref_logprobs_T=None))


def test_the_driver_can_build_it_without_torch() -> None:
    code = "import sys, asyncflow.algorithms.grpo as g; g.GRPO(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
