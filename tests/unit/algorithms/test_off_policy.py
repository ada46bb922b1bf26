"""Importance weights: what they promise in expectation, summed exactly over all sequences; their bounds; what is refused."""

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncflow.algorithms.cispo import CISPO
from asyncflow.algorithms.grpo import GRPO
from asyncflow.algorithms.off_policy import ImportanceWeights, check_correction, default_correction
from asyncflow.types import TokenBatch, UserError

NUM_TOKENS = 3  # of the toy policies' vocabulary
UNBOUNDED = {"correction_high": math.inf, "clip_low": 0.999999, "clip_high": 1e9}

# A policy is a table of logits [P, V]: one row of a softmax for each prefix of up to L - 1 tokens.


def prefixes(length: int) -> list[tuple[int, ...]]:
    return [prefix for n in range(length) for prefix in itertools.product(range(NUM_TOKENS), repeat=n)]


def random_policy(length: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(prefixes(length)), NUM_TOKENS, generator=generator, dtype=torch.float64) * scale


def log_probs(policy_PV: torch.Tensor, length: int) -> torch.Tensor:
    """[R, L]: of each token of each of the V^L sequences."""
    position = {prefix: p for p, prefix in enumerate(prefixes(length))}
    sequences = list(itertools.product(range(NUM_TOKENS), repeat=length))
    rows = torch.tensor([[position[s[:t]] for t in range(length)] for s in sequences])
    return policy_PV.log_softmax(1)[rows, torch.tensor(sequences)]


def true_gradient(policy_PV: torch.Tensor, rewards_R: torch.Tensor, length: int) -> torch.Tensor:
    """Of the expected reward under the policy, by autograd through the probabilities of all sequences."""
    leaf_PV = policy_PV.clone().requires_grad_()
    (gradient_PV,) = torch.autograd.grad((log_probs(leaf_PV, length).sum(1).exp() * rewards_R).sum(), leaf_PV)
    return gradient_PV


def expected_gradient(
    algorithm: GRPO, policy_PV: torch.Tensor, old_PV: torch.Tensor, sampler_PV: torch.Tensor, rewards_R: torch.Tensor, length: int
) -> torch.Tensor:
    """Of minus the loss, over sequences of the sampler: each of them once, with its reward times its probability as advantage."""
    leaf_PV = policy_PV.clone().requires_grad_()
    logprobs_T, old_T, rollout_T = (log_probs(p, length).flatten() for p in (leaf_PV, old_PV, sampler_PV))
    probability_R = log_probs(sampler_PV, length).sum(1).exp()
    row_T = torch.arange(len(rewards_R)).repeat_interleave(length)
    ones_T = torch.ones_like(old_T)
    batch = TokenBatch(
        logprobs_T=logprobs_T,
        old_logprobs_T=old_T,
        rollout_logprobs_T=rollout_T,
        ref_logprobs_T=None,
        entropy_T=0 * ones_T,
        advantages_T=(probability_R * rewards_R)[row_T],
        mask_T=ones_T,
        row_T=row_T,
        row_tokens_R=torch.full_like(rewards_R, length),
    )
    (gradient_PV,) = torch.autograd.grad(-algorithm.loss(batch).loss, leaf_PV)
    return gradient_PV


def rewards(length: int) -> torch.Tensor:
    return torch.randn(NUM_TOKENS**length, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def test_untruncated_sequence_weights_give_the_gradient_on_policy() -> None:
    policy_PV, sampler_PV, rewards_R = random_policy(3, 0), random_policy(3, 1), rewards(3)
    wanted_PV = true_gradient(policy_PV, rewards_R, 3)
    found = {}
    for level in ("token", "sequence", "geometric"):
        algorithm = GRPO(correction="truncated", correction_level=level, **UNBOUNDED)
        found[level] = expected_gradient(algorithm, policy_PV, policy_PV, sampler_PV, rewards_R, 3)
    torch.testing.assert_close(found["sequence"], wanted_PV, rtol=1e-10, atol=1e-14)
    # A token's own ratio leaves out how likely the other tokens of its response were.
    for other_PV in (found["token"], found["geometric"], expected_gradient(GRPO(), policy_PV, policy_PV, sampler_PV, rewards_R, 3)):
        assert (other_PV - wanted_PV).abs().max() > 0.01


def test_a_bound_on_the_weights_is_a_bias_that_vanishes_with_it() -> None:
    policy_PV, sampler_PV, rewards_R = random_policy(3, 0), random_policy(3, 1), rewards(3)
    wanted_PV = true_gradient(policy_PV, rewards_R, 3)
    for correction in ("truncated", "masked"):
        errors = []
        for high in (1.5, 10.0, 1e3):
            algorithm = GRPO(correction=correction, correction_level="sequence", correction_high=high)
            found_PV = expected_gradient(algorithm, policy_PV, policy_PV, sampler_PV, rewards_R, 3)
            errors.append((found_PV - wanted_PV).norm().item())
        assert errors[0] > errors[1] > errors[2] < 1e-12, (correction, errors)


def test_decoupled_is_unbiased_whatever_the_proximal_policy_is() -> None:
    # one token each: there a token's ratio is its sequence's
    policy_PV, sampler_PV, rewards_R = random_policy(1, 0), random_policy(1, 1), rewards(1)
    wanted_PV = true_gradient(policy_PV, rewards_R, 1)
    for seed in range(3):
        proximal_PV = random_policy(1, 10 + seed)
        found_PV = expected_gradient(GRPO(correction="decoupled", **UNBOUNDED), policy_PV, proximal_PV, sampler_PV, rewards_R, 1)
        torch.testing.assert_close(found_PV, wanted_PV, rtol=1e-10, atol=1e-14)
        without_PV = expected_gradient(GRPO(clip_low=0.999999, clip_high=1e9), policy_PV, proximal_PV, sampler_PV, rewards_R, 1)
        assert (without_PV - wanted_PV).abs().max() > 0.01


def test_cispo_by_what_sampled_is_decoupled_with_the_same_bound() -> None:
    log_rho = [math.log(rho) for rho in (0.25, 1.0, 4.0, 8.0)]
    found = []
    for algorithm, is_old_rollout in (
        (CISPO(correction="decoupled"), False),
        (CISPO(), True),
        (GRPO(correction="decoupled"), False),
    ):
        batch = one_row(log_rho, is_old_rollout=is_old_rollout)
        found.append(torch.autograd.grad(algorithm.loss(batch).loss, batch.logprobs_T)[0].tolist())
    assert found[0] == pytest.approx([-0.25, -1.0, -4.0, -5.0])
    assert found[1] == pytest.approx(found[0]) and found[2] == pytest.approx(found[0])


def test_decoupled_clips_around_the_proximal_policy_and_not_around_the_one_that_sampled() -> None:
    # pi_theta / pi_prox = 1: no update yet, no clip; pi_theta / pi_rollout = 2 would have been clipped, gradient and all
    batch = one_row([math.log(2.0)])
    sums = GRPO(correction="decoupled").loss(batch)
    (gradient_T,) = torch.autograd.grad(sums.loss, batch.logprobs_T)
    assert gradient_T.tolist() == pytest.approx([-2.0]) and sums.metrics["policy/clip_ratio"] == 0
    coupled = GRPO().loss(one_row([math.log(2.0)], is_old_rollout=True))
    assert coupled.metrics["policy/clip_ratio"] == 1


def one_row(log_rho: list[float], *, mask: list[float] | None = None, is_old_rollout: bool = False) -> TokenBatch:
    """A response of advantage 1, with the policy as old policy unless the sampler is."""
    zeros_T, log_rho_T = torch.zeros(len(log_rho)), torch.tensor(log_rho)
    mask_T = torch.ones(len(log_rho)) if mask is None else torch.tensor(mask)
    return TokenBatch(
        logprobs_T=zeros_T.clone().requires_grad_(),
        old_logprobs_T=-log_rho_T if is_old_rollout else zeros_T,
        rollout_logprobs_T=-log_rho_T,
        ref_logprobs_T=None,
        entropy_T=zeros_T,
        advantages_T=torch.ones(len(log_rho)),
        mask_T=mask_T,
        row_T=torch.zeros(len(log_rho), dtype=torch.int64),
        row_tokens_R=mask_T.sum()[None],
    )


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (ImportanceWeights("truncated"), [0.25, 1.0, 2.0, 2.0]),
        (ImportanceWeights("decoupled"), [0.25, 1.0, 4.0, 5.0]),
        (ImportanceWeights("masked"), [0.0, 1.0, 0.0, 0.0]),
        (ImportanceWeights("masked", low=0.25, high=4.0), [0.25, 1.0, 4.0, 0.0]),  # the bounds lie inside
        (ImportanceWeights("truncated", "sequence", high=100.0), [8.0] * 4),
        (ImportanceWeights("truncated", "geometric", high=100.0), [8.0**0.25] * 4),
        (ImportanceWeights("masked", "geometric", high=1.5), [0.0] * 4),
    ],
)
def test_weights_worked_by_hand(weights: ImportanceWeights, expected: list[float]) -> None:
    batch = one_row([math.log(rho) for rho in (0.25, 1.0, 4.0, 8.0)])
    assert weights.weigh(batch)[0].tolist() == pytest.approx(expected)


def test_a_sequence_is_its_masked_tokens() -> None:
    batch = one_row([math.log(2.0), math.nan, math.log(8.0)], mask=[1.0, 0.0, 1.0])
    assert ImportanceWeights("truncated", "sequence", high=100.0).weigh(batch)[0].tolist() == pytest.approx([16.0] * 3)
    assert ImportanceWeights("truncated", "geometric", high=100.0).weigh(batch)[0].tolist() == pytest.approx([4.0] * 3)
    whole = replace(batch, row_tokens_R=torch.tensor([9.0]))  # a row with other sequences, too
    assert ImportanceWeights("truncated", "geometric", high=100.0).weigh(whole)[0].tolist() == pytest.approx([4.0] * 3)
    # the mask's own ratio of 1 is no weight of any token
    assert ImportanceWeights("truncated").weigh(one_row([math.log(0.5), 0.0], mask=[1.0, 0.0]))[1]["importance_weight/max"] == 0.5
    nothing = one_row([math.nan], mask=[0.0])
    for level in ("token", "sequence", "geometric"):
        assert ImportanceWeights("masked", level, high=2.0).weigh(nothing)[0].tolist() == [1.0]


@pytest.mark.parametrize("correction", ["truncated", "masked", "decoupled"])
@pytest.mark.parametrize("log_rho", [1e4, -1e4])
def test_ratios_beyond_float32_stay_finite(correction: Any, log_rho: float) -> None:
    sums = GRPO(correction=correction).loss(batch := one_row([log_rho]))
    (gradient_T,) = torch.autograd.grad(sums.loss, batch.logprobs_T)
    weight = 0.0 if log_rho < 0 or correction == "masked" else {"truncated": 2.0, "decoupled": 5.0}[correction]
    assert gradient_T.item() == -weight
    assert all(value.isfinite() for name, value in sums.metrics.items() if name.startswith("importance_weight/"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction": "tis"}, "correction must be one of"),
        ({"correction": "masked", "level": "row"}, "correction_level must be one of token, sequence, geometric, but is 'row'"),
        ({"correction": "none", "high": 2.0}, "correction is none, so its level and bounds mean nothing"),
        ({"correction": "none", "low": 0.5}, "correction is none"),
        ({"correction": "none", "level": "sequence"}, "correction is none"),
        ({"correction": "decoupled", "level": "sequence"}, "token by token, not by sequence: take correction=truncated"),
        ({"correction": "truncated", "low": 0.5}, "correction_low is for correction=masked"),
        ({"correction": "decoupled", "low": 0.5}, "correction_low is for correction=masked"),
        ({"correction": "masked", "level": "geometric"}, "geometric needs correction_high"),
        ({"correction": "truncated", "high": 0.9}, "correction_high must be a number from 1 up.*0.9"),
        ({"correction": "truncated", "high": math.nan}, "correction_high"),
        ({"correction": "masked", "low": 1.1}, r"correction_low must lie in \[0, 1\].*1.1"),
        ({"correction": "masked", "low": -0.1}, "correction_low"),
    ],
)
def test_options_that_contradict_each_other_are_refused_in_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        ImportanceWeights(**options)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "max_staleness", "correction"),
    [
        ("current", 0, "none"),
        ("step_start", 0, "none"),
        ("current", 1, "decoupled"),
        ("step_start", 4, "decoupled"),
        ("previous", 1, "none"),
        ("rollout", 0, "none"),
        ("rollout", 8, "none"),
    ],
)
def test_what_is_corrected_by_default_needs_it_and_is_right(old: str, max_staleness: int, correction: str) -> None:
    assert default_correction(old, max_staleness) == correction
    check_correction(default_correction(old, max_staleness), old, max_staleness)


@pytest.mark.parametrize(
    ("correction", "old", "max_staleness", "message"),
    [
        ("none", "current", 1, "staleness up to 1, train.old=current is the policy that sampled up to 0 only"),
        ("none", "step_start", 1, "train.old=step_start"),
        ("none", "previous", 2, "up to 1 only"),
        ("truncated", "rollout", 0, "nothing left to correct"),
        ("masked", "rollout", 3, "nothing left to correct"),
        ("decoupled", "rollout", 1, "nothing left to correct"),
        ("decoupled", "previous", 1, "newer than what sampled"),
    ],
)
def test_an_old_policy_that_corrects_twice_or_not_at_all_is_refused(
    correction: Any, old: str, max_staleness: int, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_correction(correction, old, max_staleness)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("correction", "old"), [("truncated", "current"), ("masked", "step_start"), ("truncated", "previous")])
def test_a_correction_is_right_with_any_staleness(correction: Any, old: str) -> None:
    for max_staleness in (0, 1, 5):
        check_correction(correction, old, max_staleness)


def test_the_driver_can_choose_a_correction_without_torch() -> None:
    code = (
        "import sys, asyncflow.algorithms.grpo as g, asyncflow.algorithms.off_policy as o; "
        "g.GRPO(correction=o.default_correction('current', 3)); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
