"""Every algorithm's loss and gradient against numpy in float64, response by response, with the gradient worked out by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncflow.algorithms import ALGORITHMS
from asyncflow.algorithms.grpo import GRPO
from asyncflow.algorithms.policy_loss import PolicyLoss
from asyncflow.registry import build
from asyncflow.types import LossSums, TokenBatch, UserError
from tests.unit.algorithms.batches import LENGTHS, check_parts, cut_within_rows, random_batch, rows_of

CLIPS = {  # 1 - clip_low, 1 + clip_high, by default
    "cispo": (0.0, 5.0),
    "dapo": (0.8, 1.28),
    "dr_grpo": (0.8, 1.2),
    "grpo": (0.8, 1.28),
    "gspo": (1 - 3e-4, 1 + 4e-4),
    "ppo": (0.8, 1.2),
    "reinforce_plus_plus": (0.8, 1.2),
    "rloo": (0.8, 1.2),
}
NORMALISERS: dict[str, tuple[str, float | None]] = {
    **dict.fromkeys(CLIPS, ("tokens", None)),
    "dr_grpo": ("constant", 64.0),
    "gspo": ("sequences", None),
    "rloo": ("constant", 1.0),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in CLIPS),
    *((name, {"clip_low": 0.3, "clip_high": 0.5}) for name in CLIPS),
    *((name, {"kl_coefficient": 0.2, "kl_place": "loss", "kl_estimator": kl}) for name in CLIPS for kl in ("k1", "k2", "k3")),
    *((name, {"entropy_coefficient": 0.3}) for name in CLIPS),
    *((name, {"loss_normaliser": "sequences"}) for name in CLIPS),
    *((name, {"loss_normaliser": "tokens"}) for name in CLIPS),
    *((name, {"loss_normaliser": "constant", "loss_constant": 7.5, "correction": "truncated"}) for name in CLIPS),
    ("reinforce_plus_plus", {"baseline": "group", "kl_coefficient": 0.2}),
]


def make(name: str, options: dict[str, Any]) -> PolicyLoss:
    own = {"loss_constant": 64} if name == "dr_grpo" and "loss_normaliser" not in options else {}
    algorithm: PolicyLoss = build("algorithm", name, {**own, **options}, ALGORITHMS)
    return algorithm


def batch_of(seed: int = 0) -> TokenBatch:
    """With a gradient of the entropies, and with ratios close enough to 1 that GSPO clips some responses and some not."""
    batch = random_batch(seed)
    return replace(batch, entropy_T=batch.entropy_T.requires_grad_())


def expected(name: str, options: dict[str, Any], batch: TokenBatch) -> tuple[float, np.ndarray, np.ndarray, float]:
    """The loss, its gradients by log-prob and by entropy, and how many tokens are clipped."""
    low, high = CLIPS[name]
    low, high = 1 - options.get("clip_low", 1 - low), 1 + options.get("clip_high", high - 1)
    normaliser, constant = NORMALISERS[name]
    if "loss_normaliser" in options:
        normaliser, constant = options["loss_normaliser"], options.get("loss_constant")
    beta, alpha = options.get("kl_coefficient", 0.0), options.get("entropy_coefficient", 0.0)
    estimator = options.get("kl_estimator", "k2" if options.get("baseline") == "group" else "k3")
    loss, clipped, position = 0.0, 0, 0
    by_logprob, by_entropy = np.zeros(sum(LENGTHS)), np.zeros(sum(LENGTHS))
    for length in LENGTHS:
        own = slice(position, position + length)
        position += length
        mask = batch.mask_T[own].numpy() > 0
        tokens = int(mask.sum())
        if not tokens:
            continue
        logp, old, rollout, ref, entropy = (
            getattr(batch, column)[own].detach().numpy()[mask]
            for column in ("logprobs_T", "old_logprobs_T", "rollout_logprobs_T", "ref_logprobs_T", "entropy_T")
        )
        advantage = float(batch.advantages_T[own][0])
        weight = {"tokens": 1.0, "sequences": 1 / tokens, "constant": 1 / (constant or math.nan)}[normaliser]
        importance = np.minimum(np.exp(old) / np.exp(rollout), 2.0) if options.get("correction") else np.ones(tokens)
        ratio = np.exp(logp) / np.exp(old)
        if name == "gspo":
            ratio = np.full(tokens, np.prod(ratio) ** (1 / tokens))
        bounded = np.clip(ratio, low, high)
        if name == "cispo":
            value, slope = bounded * advantage * logp, bounded * advantage
            clipped += int((bounded != ratio).sum())
        else:
            value = np.minimum(ratio * advantage, bounded * advantage)
            is_free = ratio * advantage <= bounded * advantage
            slope = is_free * ratio * advantage
            clipped += int((~is_free).sum())
        d = logp - ref
        kl = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[estimator]
        kl_slope = {"k1": np.ones(tokens), "k2": d, "k3": 1 - np.exp(-d)}[estimator]
        loss -= weight * (importance * value - beta * kl + alpha * entropy).sum()
        by_logprob[own][mask] = -weight * (importance * slope - beta * kl_slope)
        by_entropy[own][mask] = -weight * alpha
    return float(loss), by_logprob, by_entropy, clipped


def test_every_algorithm_is_here() -> None:
    assert ALGORITHMS.keys() == CLIPS.keys()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_loss_and_gradient_agree_with_numpy(name: str, options: dict[str, Any]) -> None:
    algorithm, batch = make(name, options), batch_of(13)
    sums = algorithm.loss(batch)
    loss, by_logprob, by_entropy, clipped = expected(name, options, batch)
    assert sums.loss.item() == pytest.approx(loss, rel=1e-11)
    found = torch.autograd.grad(sums.loss, (batch.logprobs_T, batch.entropy_T), allow_unused=True)
    assert found[0] is not None
    np.testing.assert_allclose(found[0].numpy(), by_logprob, rtol=1e-10, atol=1e-13)
    if options.get("entropy_coefficient"):
        assert found[1] is not None and by_entropy.any()
        np.testing.assert_allclose(found[1].numpy(), by_entropy, rtol=1e-12)
    else:
        assert found[1] is None  # the head is told that it need not make it
    assert sums.metrics["policy/clip_ratio"] == clipped and 0 < clipped < batch.mask_T.sum()
    assert not any(value.requires_grad for value in sums.metrics.values())


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_sum_over_responses_is_the_sum_over_the_whole(name: str, options: dict[str, Any]) -> None:
    algorithm, batch = make(name, options), random_batch(2)
    whole = algorithm.loss(batch)
    parts = [algorithm.loss(rows_of(batch, range(*bounds))) for bounds in ((0, 1), (1, 3), (3, 4))]
    check_parts(parts, whole)
    if algorithm.is_token_local:
        check_parts(cut_within_rows(algorithm, batch), whole)
    else:
        parts = cut_within_rows(algorithm, batch)
        assert sum(part.loss.item() for part in parts) != pytest.approx(whole.loss.item(), rel=1e-6)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_what_is_masked_may_be_nan_and_leaks_nowhere(name: str, options: dict[str, Any]) -> None:
    algorithm, batch = make(name, options), random_batch(7)
    gone_T = batch.mask_T == 0
    columns = ("old_logprobs_T", "rollout_logprobs_T", "ref_logprobs_T")
    poisoned = replace(batch, **{column: getattr(batch, column).masked_fill(gone_T, math.nan) for column in columns})
    clean, found = algorithm.loss(batch), algorithm.loss(poisoned)
    assert found.loss.item() == clean.loss.item()
    assert {n: v.item() for n, v in found.metrics.items()} == {n: v.item() for n, v in clean.metrics.items()}
    gradients = [torch.autograd.grad(sums.loss, batch.logprobs_T)[0] for sums in (clean, found)]
    assert gradients[0].equal(gradients[1]) and not gradients[1][gone_T].any()


@pytest.mark.parametrize(("name", "options"), [*CASES, *((name, {"kl_coefficient": 0.2, "kl_place": "reward"}) for name in CLIPS)])
def test_it_says_whether_rows_without_advantages_have_a_gradient(name: str, options: dict[str, Any]) -> None:
    algorithm, batch = make(name, options), batch_of()
    sums = algorithm.loss(replace(batch, advantages_T=torch.zeros_like(batch.advantages_T)))
    gradients = torch.autograd.grad(sums.loss, [batch.logprobs_T, batch.entropy_T], allow_unused=True)
    is_zero = sums.loss.item() == 0.0 and not any(each is not None and each.any() for each in gradients)
    assert algorithm.is_zero_without_advantages is is_zero


def test_a_loss_of_ones_own_does_not_say_so() -> None:
    class Own(GRPO):
        def loss(self, batch: TokenBatch) -> LossSums:
            return super().loss(batch)

    assert GRPO().is_zero_without_advantages and not Own().is_zero_without_advantages


@pytest.mark.parametrize("name", CLIPS)
def test_on_policy_the_gradient_is_minus_the_weighted_advantage(name: str) -> None:
    algorithm, batch = make(name, {}), random_batch(3)
    batch = replace(batch, old_logprobs_T=batch.logprobs_T.detach(), ref_logprobs_T=None)
    sums = algorithm.loss(batch)
    (gradient_T,) = torch.autograd.grad(sums.loss, batch.logprobs_T)
    normaliser, constant = NORMALISERS[name]
    weight_T = batch.mask_T / (batch.row_tokens_R.clamp(min=1)[batch.row_T] if normaliser == "sequences" else constant or 1.0)
    torch.testing.assert_close(gradient_T, -batch.advantages_T * weight_T, rtol=1e-12, atol=0)
    assert sums.metrics["policy/kl"] == 0 and sums.metrics["policy/clip_ratio"] == 0


def one_response(log_ratio: list[float], advantage: float, log_ref: list[float] | None = None) -> TokenBatch:
    """Log-probs of - 1, an old policy as far below."""
    logprobs_T = torch.full((len(log_ratio),), -1.0, dtype=torch.float64)
    ones_T = torch.ones_like(logprobs_T)
    return TokenBatch(
        logprobs_T=logprobs_T.clone().requires_grad_(),
        old_logprobs_T=logprobs_T - torch.tensor(log_ratio, dtype=torch.float64),
        rollout_logprobs_T=logprobs_T,
        ref_logprobs_T=None if log_ref is None else torch.tensor(log_ref, dtype=torch.float64),
        entropy_T=ones_T.clone().requires_grad_(),
        advantages_T=advantage * ones_T,
        mask_T=ones_T,
        row_T=torch.zeros(len(log_ratio), dtype=torch.int64),
        row_tokens_R=ones_T.sum()[None],
    )


def test_gspo_clips_a_response_as_a_whole() -> None:
    # ratios 2 and 1/2: each of them far outside, their mean inside; ratios 1.001 and 1.001: the mean outside
    inside = make("gspo", {}).loss(batch := one_response([math.log(2), -math.log(2)], 3.0))
    assert inside.loss.item() == pytest.approx(-3.0) and inside.metrics["policy/clip_ratio"] == 0
    (gradient_T,) = torch.autograd.grad(inside.loss, batch.logprobs_T)
    assert gradient_T.tolist() == pytest.approx([-1.5, -1.5])
    outside = make("gspo", {}).loss(batch := one_response([math.log(1.001)] * 2, 3.0))
    assert outside.loss.item() == pytest.approx(-3.0 * 1.0004) and outside.metrics["policy/clip_ratio"] == 2
    assert torch.autograd.grad(outside.loss, batch.logprobs_T)[0].tolist() == [0.0, 0.0]
    token_by_token = make("grpo", {}).loss(one_response([math.log(2), -math.log(2)], 3.0))
    assert token_by_token.metrics["policy/clip_ratio"] == 1


@pytest.mark.parametrize("seed", range(3))
def test_gspo_token_by_token_is_gspo(seed: int) -> None:
    """The gradient of the paper's eq. 5, written down as it is there: a mean over responses of one clipped number each."""
    batch = random_batch(seed)
    batch = replace(batch, old_logprobs_T=batch.logprobs_T.detach() + 1e-3 * (batch.old_logprobs_T - batch.logprobs_T.detach()))
    objective = torch.zeros((), dtype=torch.float64)
    for row in range(len(LENGTHS)):
        own_T = (batch.row_T == row) & (batch.mask_T > 0)
        if own_T.any():
            s = (batch.logprobs_T - batch.old_logprobs_T)[own_T].mean().exp()
            advantage = batch.advantages_T[own_T][0]
            objective = objective + torch.minimum(s * advantage, s.clamp(1 - 3e-4, 1 + 4e-4) * advantage)
    sums = make("gspo", {}).loss(batch)
    assert sums.loss.item() == pytest.approx(-objective.item(), rel=1e-12)
    wanted_T, found_T = (torch.autograd.grad(x, batch.logprobs_T)[0] for x in (-objective, sums.loss))
    torch.testing.assert_close(found_T, wanted_T, rtol=1e-12, atol=1e-15)
    assert found_T.any()


def test_cispo_keeps_a_gradient_where_the_others_lose_it() -> None:
    # a ratio of 8, of a good token: weight 5, not 8; the clipped surrogate has nothing to say
    sums = make("cispo", {}).loss(batch := one_response([math.log(8)], 2.0))
    (gradient_T,) = torch.autograd.grad(sums.loss, batch.logprobs_T)
    assert gradient_T.tolist() == pytest.approx([-5 * 2.0]) and sums.loss.item() == pytest.approx(-5 * 2.0 * -1.0)
    assert sums.metrics["policy/clip_ratio"] == 1
    (lost_T,) = torch.autograd.grad(make("grpo", {}).loss(batch).loss, batch.logprobs_T)
    assert lost_T.tolist() == [0.0]
    # bounded from below only if asked to
    for options, weight in (({}, 0.125), ({"clip_low": 0.5}, 0.5)):
        (gradient_T,) = torch.autograd.grad(make("cispo", options).loss(b := one_response([-math.log(8)], 2.0)).loss, b.logprobs_T)
        assert gradient_T.tolist() == pytest.approx([-weight * 2.0])


def test_normalisers_worked_by_hand() -> None:
    # on policy the surrogate is A = 2 for each of four tokens
    batch = one_response([0.0] * 4, 2.0)
    for options, loss, divided_by in (
        ({}, -8.0, "tokens"),
        ({"loss_normaliser": "sequences"}, -2.0, "sequences"),
        ({"loss_normaliser": "constant", "loss_constant": 16}, -0.5, "sequences"),
    ):
        algorithm = make("grpo", options)
        assert algorithm.loss(batch).loss.item() == pytest.approx(loss) and algorithm.normaliser == divided_by
    assert make("rloo", {}).loss(batch).loss.item() == pytest.approx(-8.0) and make("rloo", {}).normaliser == "sequences"
    assert make("dr_grpo", {"loss_constant": 32}).loss(batch).loss.item() == pytest.approx(-0.25)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", -math.log(2), 1.0), ("k2", math.log(2) ** 2 / 2, -math.log(2)), ("k3", 1 - math.log(2), -1.0)],
)
def test_kl_estimators_worked_by_hand(estimator: str, value: float, slope: float) -> None:
    # the reference finds the token twice as likely: log s = log 2, s = 2
    batch = one_response([0.0], 0.0, [-1.0 + math.log(2)])
    algorithm = make("grpo", {"kl_coefficient": 0.5, "kl_estimator": estimator})
    sums = algorithm.loss(batch)
    assert algorithm.needs_reference and not algorithm.needs_reference_ahead
    assert sums.loss.item() == pytest.approx(0.5 * value)
    assert torch.autograd.grad(sums.loss, batch.logprobs_T)[0].item() == pytest.approx(0.5 * slope)
    assert sums.metrics["policy/kl"].item() == pytest.approx(1 - math.log(2))  # k3, whatever is optimised


def test_which_gradient_each_estimator_has() -> None:
    """In expectation over the policy's own tokens, summed exactly (arXiv:2510.01555)."""
    theta, ref = torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64), torch.tensor([-0.2, 0.8, 0.1], dtype=torch.float64)
    p = theta.softmax(0)

    def gradient(loss: Any) -> torch.Tensor:
        leaf = theta.clone().requires_grad_()
        return torch.autograd.grad(loss(leaf.log_softmax(0), ref.log_softmax(0)), leaf)[0]

    reverse = gradient(lambda q, r: (q.exp() * (q - r)).sum())
    forward = gradient(lambda q, r: (r.exp() * (r - q)).sum())
    found = {}
    for estimator in ("k1", "k2", "k3"):
        algorithm = make("grpo", {"kl_coefficient": 1.0, "kl_estimator": estimator})

        def loss(q: torch.Tensor, r: torch.Tensor, algorithm: PolicyLoss = algorithm) -> torch.Tensor:
            # each token as often as it is drawn: by the mask, which is a weight here
            zeros_T = torch.zeros(3, dtype=torch.float64)
            batch = TokenBatch(q, q.detach(), q.detach(), r, zeros_T, zeros_T, p, torch.arange(3), torch.ones(3))
            return algorithm.loss(batch).loss

        found[estimator] = gradient(loss)
    torch.testing.assert_close(found["k1"], torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(found["k2"], reverse, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found["k3"], forward, rtol=1e-10, atol=1e-12)
    assert (reverse - forward).abs().max() > 0.01


def test_an_entropy_bonus_is_a_bonus() -> None:
    sums = make("grpo", {"entropy_coefficient": 0.25}).loss(batch := one_response([0.0, 0.0], 0.0))
    assert sums.loss.item() == pytest.approx(-0.5)  # an entropy of 1 for each of two tokens
    assert torch.autograd.grad(sums.loss, batch.entropy_T)[0].tolist() == [-0.25, -0.25]


def test_a_kl_term_in_the_reward_is_not_in_the_loss() -> None:
    algorithm = make("grpo", {"kl_coefficient": 0.5, "kl_place": "reward"})
    assert algorithm.needs_reference and algorithm.needs_reference_ahead
    batch = random_batch()
    assert algorithm.loss(batch).loss.item() == make("grpo", {}).loss(batch).loss.item()
    algorithm.loss(replace(batch, ref_logprobs_T=None))
    with pytest.raises(UserError, match="needs a reference model's log-probs"):
        make("grpo", {"kl_coefficient": 0.5}).loss(replace(batch, ref_logprobs_T=None))
    assert not make("grpo", {"kl_place": "reward"}).needs_reference_ahead  # a coefficient of 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *((name, {"clip_high": -1.0}, "clip_high must be a number from 0 up") for name in CLIPS),
        *((name, {"clip_low": 1.1}, r"clip_low must lie in \[0, 1.*1.1") for name in CLIPS),
        ("gspo", {"clip_low": 1.0}, "clip_low"),
        ("grpo", {"kl_estimator": "k4"}, "kl_estimator must be k1, k2 or k3, (but is|not) .k4"),
        ("grpo", {"kl_place": "advantage"}, "kl_place must be loss or reward"),
        ("grpo", {"entropy_coefficient": -0.1}, "entropy_coefficient must be a number from 0 up"),
        ("grpo", {"entropy_coefficient": math.nan}, "entropy_coefficient"),
        ("grpo", {"loss_normaliser": "constant"}, "needs loss_constant, a number of tokens, such as"),
        ("grpo", {"loss_constant": 3.0}, "loss_constant is for loss_normaliser=constant, and it is tokens"),
        ("grpo", {"loss_normaliser": "constant", "loss_constant": 0}, "loss_constant must be a number above 0"),
        ("rloo", {"loss_normaliser": "sequences", "loss_constant": 2.0}, "loss_constant is for"),
        ("gspo", {"advantage_epsilon": 0.0}, "advantage_epsilon must be a number above 0"),
        ("cispo", {"advantage_epsilon": -1.0}, "advantage_epsilon"),
        ("reinforce_plus_plus", {"advantage_epsilon": math.inf}, "advantage_epsilon"),
        ("reinforce_plus_plus", {"baseline": "critic"}, "baseline must be none or group, not .critic"),
        ("dapo", {"overlong_length": 10}, "go together"),
        ("dapo", {"overlong_buffer": 10}, "go together"),
        ("dapo", {"overlong_length": 10, "overlong_buffer": 11}, r"must lie in 1\.\.overlong_length.*11 of 10"),
        ("dapo", {"overlong_length": 10, "overlong_buffer": 0}, "must lie in 1"),
        ("dapo", {"advantage_epsilon": 0}, "advantage_epsilon"),
        *((name, {"epsilon": 1}, "has no option 'epsilon'") for name in CLIPS),
    ],
)
def test_an_option_outside_its_range_is_refused_in_one_sentence(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make(name, options)
    assert "\n" not in str(caught.value)


def test_dr_grpo_asks_for_its_constant() -> None:
    with pytest.raises(UserError, match="needs loss_constant"):
        build("algorithm", "dr_grpo", {}, ALGORITHMS)
    assert build("algorithm", "dr_grpo", {"loss_normaliser": "tokens"}, ALGORITHMS).normaliser == "tokens"


def test_the_driver_can_build_them_all_without_torch() -> None:
    code = (
        "import sys; from asyncflow.algorithms import ALGORITHMS; from asyncflow.registry import load; "
        "[load('algorithm', target) for target in ALGORITHMS.values()]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
