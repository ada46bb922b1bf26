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
from tests.unit.algorithms.batches import FIELDS, LENGTHS, check_parts, cut_within_rows, random_batch, rows_of

CORRECTIONS: list[dict[str, Any]] = [
    {"correction": "truncated"},
    {"correction": "truncated", "correction_level": "sequence", "correction_high": 1.5},
    {"correction": "truncated", "correction_level": "geometric", "correction_high": 1.1},
    {"correction": "masked"},
    {"correction": "masked", "correction_level": "sequence", "correction_low": 0.7, "correction_high": 1.6},
    {"correction": "masked", "correction_level": "geometric", "correction_high": 1.2},
    {"correction": "decoupled", "correction_high": 1.2},
]


def expected(batch: TokenBatch, algorithm: GRPO) -> tuple[float, dict[str, float]]:
    columns = {name: None if getattr(batch, name) is None else getattr(batch, name).tolist() for name in (*FIELDS, "row_T")}
    loss, metrics = 0.0, dict.fromkeys(("policy/kl", "policy/rollout_kl", "policy/entropy", "policy/clip_ratio"), 0.0)
    own = algorithm.importance_weights
    if algorithm.correction != "none":
        metrics |= dict.fromkeys((f"importance_weight/{name}" for name in ("mean", "square", "outside_ratio", "max")), 0.0)
    for t, row in enumerate(columns["row_T"]):
        if not columns["mask_T"][t]:
            continue
        importance = 1.0
        if algorithm.correction != "none":
            tokens = (
                [u for u, r in enumerate(columns["row_T"]) if r == row and columns["mask_T"][u]] if own.level != "token" else [t]
            )
            rho = math.prod(math.exp(columns["old_logprobs_T"][u]) / math.exp(columns["rollout_logprobs_T"][u]) for u in tokens)
            if own.level == "geometric":
                rho = rho ** (1 / len(tokens))
            importance = min(rho, own.high)
            if algorithm.correction == "masked" and not own.low <= rho <= own.high:
                importance = 0.0
            metrics["importance_weight/mean"] += importance
            metrics["importance_weight/square"] += importance**2
            metrics["importance_weight/outside_ratio"] += importance != rho
            metrics["importance_weight/max"] = max(metrics["importance_weight/max"], rho)
        ratio = math.exp(columns["logprobs_T"][t] - columns["old_logprobs_T"][t])
        advantage = columns["advantages_T"][t]
        clipped = max(1 - algorithm.surrogate.clip_low, min(1 + algorithm.surrogate.clip_high, ratio))
        if columns["ref_logprobs_T"] is None:
            kl = ratio - math.log(ratio) - 1
        else:
            s = math.exp(columns["ref_logprobs_T"][t] - columns["logprobs_T"][t])
            kl = s - math.log(s) - 1
        length = sum(m for m, r in zip(columns["mask_T"], columns["row_T"], strict=True) if r == row)
        weight = 1 / length if algorithm.normaliser == "sequences" else 1.0
        loss -= weight * (importance * min(ratio * advantage, clipped * advantage) - algorithm.loss_options.kl_coefficient * kl)
        s = math.exp(columns["logprobs_T"][t] - columns["rollout_logprobs_T"][t])
        metrics["policy/kl"] += kl
        metrics["policy/rollout_kl"] += s - math.log(s) - 1
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
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_corrected_loss_and_metrics_agree_with_plain_python(loss_normaliser: Any, correction: dict[str, Any]) -> None:
    algorithm, batch = GRPO(loss_normaliser=loss_normaliser, kl_coefficient=0.1, **correction), random_batch()
    sums = algorithm.loss(batch)
    loss, metrics = expected(batch, algorithm)
    assert 0 < metrics["importance_weight/outside_ratio"] < batch.mask_T.sum()
    assert sums.loss.item() == pytest.approx(loss, rel=1e-12)
    assert {name: value.item() for name, value in sums.metrics.items()} == pytest.approx(metrics, rel=1e-12)
    assert not any(value.requires_grad for value in sums.metrics.values())


@pytest.mark.parametrize("loss_normaliser", ["tokens", "sequences"])
@pytest.mark.parametrize("correction", [{}, *CORRECTIONS])
def test_gradient_agrees_with_finite_differences(loss_normaliser: Any, correction: dict[str, Any]) -> None:
    algorithm = GRPO(loss_normaliser=loss_normaliser, kl_coefficient=0.05, **correction)
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
@pytest.mark.parametrize("correction", [{}, *CORRECTIONS])
def test_a_sum_over_micro_batches_is_the_sum_over_the_whole(loss_normaliser: Any, split: int, correction: dict[str, Any]) -> None:
    algorithm = GRPO(loss_normaliser=loss_normaliser, kl_coefficient=0.1, **correction)
    batch = random_batch(2)
    whole = algorithm.loss(batch)
    parts = [algorithm.loss(rows_of(batch, range(*bounds))) for bounds in ((0, split), (split, len(LENGTHS)))]
    check_parts(parts, whole)
    (gradient_T,) = torch.autograd.grad(whole.loss, batch.logprobs_T)
    (summed_T,) = torch.autograd.grad(sum(part.loss for part in parts), batch.logprobs_T)
    torch.testing.assert_close(summed_T, gradient_T, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("normaliser", ["tokens", "sequences"])
@pytest.mark.parametrize("correction", [{}, *(c for c in CORRECTIONS if "correction_level" not in c)])
def test_the_loss_is_token_local(normaliser: Normaliser, correction: dict[str, Any]) -> None:
    algorithm, batch = GRPO(kl_coefficient=0.3, loss_normaliser=normaliser, **correction), random_batch(4)
    assert algorithm.is_token_local
    check_parts(cut_within_rows(algorithm, batch), algorithm.loss(batch))


@pytest.mark.parametrize("correction", [c for c in CORRECTIONS if "correction_level" in c])
def test_a_weight_of_whole_sequences_is_not_token_local(correction: dict[str, Any]) -> None:
    algorithm, batch = GRPO(**correction), random_batch(4)
    assert not algorithm.is_token_local
    parts = cut_within_rows(algorithm, batch)
    assert sum(part.loss.item() for part in parts) != pytest.approx(algorithm.loss(batch).loss.item(), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_on_policy_a_correction_changes_no_bit(dtype: torch.dtype, correction: dict[str, Any]) -> None:
    batch = random_batch(5)
    columns = {name: getattr(batch, name).detach().to(dtype) for name in (*FIELDS, "row_tokens_R")}
    columns["rollout_logprobs_T"] = columns["old_logprobs_T"]
    batch = TokenBatch(**columns, row_T=batch.row_T)
    batch.logprobs_T.requires_grad_()
    found = []
    for options in ({}, correction):
        sums = GRPO(kl_coefficient=0.1, **options).loss(batch)
        found.append((sums.loss.item(), *torch.autograd.grad(sums.loss, batch.logprobs_T)[0].tolist()))
    assert found[0] == found[1]
    tokens = batch.mask_T.sum()
    assert sums.metrics["importance_weight/mean"] == sums.metrics["importance_weight/square"] == tokens
    assert sums.metrics["importance_weight/outside_ratio"] == 0 and sums.metrics["importance_weight/max"] == 1


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_weight_scales_the_gradient_and_has_none_itself(correction: dict[str, Any]) -> None:
    batch = random_batch(6)
    batch = replace(batch, rollout_logprobs_T=batch.rollout_logprobs_T.detach().requires_grad_())
    algorithm = GRPO(**correction)
    weights_T, _ = algorithm.importance_weights.weigh(batch)
    assert not weights_T.requires_grad and weights_T.unique().numel() > 1
    corrected_T, rollout_T = torch.autograd.grad(
        algorithm.loss(batch).loss, (batch.logprobs_T, batch.rollout_logprobs_T), allow_unused=True
    )
    (plain_T,) = torch.autograd.grad(GRPO().loss(batch).loss, batch.logprobs_T)
    assert rollout_T is None
    torch.testing.assert_close(corrected_T, weights_T * plain_T, rtol=1e-12, atol=0)


@pytest.mark.parametrize("correction", [{}, *CORRECTIONS])
def test_what_is_masked_may_be_nan_and_leaks_nowhere(correction: dict[str, Any]) -> None:
    algorithm, batch = GRPO(kl_coefficient=0.1, **correction), random_batch(7)
    gone_T = batch.mask_T == 0
    assert gone_T.any()
    columns = ("old_logprobs_T", "rollout_logprobs_T", "ref_logprobs_T")
    poisoned = replace(batch, **{name: getattr(batch, name).masked_fill(gone_T, math.nan) for name in columns})
    clean, found = algorithm.loss(batch), algorithm.loss(poisoned)
    assert found.loss.item() == clean.loss.item()
    assert {n: v.item() for n, v in found.metrics.items()} == {n: v.item() for n, v in clean.metrics.items()}
    gradients = [torch.autograd.grad(sums.loss, batch.logprobs_T)[0] for sums in (clean, found)]
    assert gradients[0].equal(gradients[1]) and not gradients[1][gone_T].any()


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
        ({"loss_normaliser": "batch"}, "tokens, sequences or constant, but is 'batch'"),
        ({"correction": "clipped"}, "one of none, truncated, masked, decoupled, but is 'clipped'"),
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
