"""PPO with a critic: advantages and the value loss, by numbers worked by hand and by another computation in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from asyncflow.algorithms import functional
from asyncflow.algorithms.ppo import PPO
from asyncflow.types import Array, Ragged, ScoredGroup, UserError, ValueBatch


def ragged(*rows: Any, dtype: str = "float32") -> Ragged:
    return Ragged.from_arrays([np.array(row, dtype) for row in rows], dtype)


def group(values: Any, rewards: Any, masks: Any = None, ref: Any = None, rollout: Any = None) -> ScoredGroup:
    return ScoredGroup(
        rewards=np.array(rewards, np.float32),
        truncated=np.zeros(len(rewards), np.uint8),
        loss_mask=ragged(*(masks or [[1] * len(row) for row in values]), dtype="uint8"),
        rollout_logprobs=ragged(*(rollout or [[0.0] * len(row) for row in values])),
        ref_logprobs=None if ref is None else ragged(*ref),
        values=ragged(*values),
    )


def test_advantages_and_returns_by_hand() -> None:
    """discount 0.9, decay 0.8. deltas: 0.18 - 0.5 = -0.32, 0.36 - 0.2 = 0.16, 1 - 0.4 = 0.6; each counts 0.72 of the next one."""
    rewards, values = np.array([0, 0, 1.0]), np.array([0.5, 0.2, 0.4])
    advantages, returns = functional.generalised_advantages(rewards, values, np.ones(3), 0.9, 0.8)
    np.testing.assert_allclose(advantages, [-0.32 + 0.72 * 0.592, 0.16 + 0.72 * 0.6, 0.6], rtol=1e-6)
    np.testing.assert_allclose(returns, [0.5 + 0.10624, 0.2 + 0.592, 1.0], rtol=1e-6)
    assert advantages.dtype == returns.dtype == np.float32


def summed(rewards: Array, values: Array, mask: Array, discount: float, decay: float) -> list[float]:
    """Equation 16 of arXiv:1506.02438 as it is printed, a sum over all later deltas, over the masked tokens."""
    r, v = ([float(x) for x, m in zip(column, mask, strict=True) if m] for column in (rewards, values))
    deltas = [r[t] + discount * (v[t + 1] if t + 1 < len(v) else 0.0) - v[t] for t in range(len(r))]
    own = iter([math.fsum((discount * decay) ** (k - t) * deltas[k] for k in range(t, len(r))) for t in range(len(r))])
    return [next(own) if m else 0.0 for m in mask]


@pytest.mark.parametrize(("discount", "decay"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.7, 0.0), (0.0, 0.9)])
@pytest.mark.parametrize("seed", range(4))
def test_advantages_are_the_sum_that_the_paper_prints(discount: float, decay: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 30))
    rewards, values = rng.normal(size=n), rng.normal(size=n)
    mask = (rng.random(n) > 0.3).astype(np.uint8)
    advantages, returns = functional.generalised_advantages(rewards, values, mask, discount, decay)
    expected = np.array(summed(rewards, values, mask, discount, decay))
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(returns, np.where(mask, expected + values, 0), rtol=1e-5, atol=1e-6)


def test_without_discount_and_decay_an_advantage_is_what_comes_less_what_was_expected() -> None:
    algorithm = PPO(decay=1.0)
    advantages = algorithm.advantages(group([[0.25, 0.5, 0.75], [0.5]], [1.0, 0.0]))
    assert [row.tolist() for row in advantages] == [[0.75, 0.5, 0.25], [-0.5]]
    assert algorithm.critic.advantages(group([[0.25, 0.5, 0.75], [0.5]], [1.0, 0.0])).values.tolist() == [1, 1, 1, 0]


def test_the_reward_comes_with_the_last_token_that_the_policy_made() -> None:
    algorithm = PPO(decay=0.0)
    advantages = algorithm.advantages(group([[0.0] * 4, [0.0, 0.0]], [2.0, 3.0], masks=[[1, 0, 1, 0], [0, 0]]))
    assert [row.tolist() for row in advantages] == [[0, 0, 2, 0], [0, 0]]


def test_a_kl_term_is_taken_off_token_by_token() -> None:
    """k1 of a token is log pi - log pi_ref: 0.5 and -0.25 here, times 0.1, and undiscounted sums of what comes."""
    algorithm = PPO(decay=1.0, kl_coefficient=0.1)
    assert algorithm.needs_reference_ahead and algorithm.needs_reference
    known = group([[0.0, 0.0]], [1.0], rollout=[[-1.0, -1.0]], ref=[[-1.5, -0.75]])
    np.testing.assert_allclose(algorithm.advantages(known).values, [1 - 0.05 + 0.025, 1 + 0.025], rtol=1e-6)


def test_normalised_advantages_have_mean_0_and_deviation_1_over_the_step() -> None:
    algorithm = PPO(decay=1.0, normalise_advantages=True)
    groups = [group([[0.5, 0.25], [0.0]], [1.0, 0.0], masks=[[1, 1], [1]]), group([[0.1, 0.2, 0.3]], [0.5], masks=[[1, 0, 1]])]
    advantages = [algorithm.advantages(each) for each in groups]
    sums = [sum(column) for column in zip(*map(algorithm.statistics, groups, advantages), strict=True)]
    normalised = [algorithm.normalised(each, sums) for each in advantages]
    masked = np.concatenate([n.values[g.loss_mask.values > 0] for n, g in zip(normalised, groups, strict=True)])
    assert algorithm.waits_for_batch and len(masked) == 5
    assert abs(masked.mean()) < 1e-6 and abs(masked.std() - 1) < 1e-4
    assert not PPO().waits_for_batch


def test_values_are_needed() -> None:
    without = group([[0.0]], [1.0])
    without = ScoredGroup(**{n: getattr(without, n) for n in without.__slots__} | {"values": None})
    with pytest.raises(UserError, match="needs a critic's values"):
        PPO().advantages(without)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"discount": 1.1}, "discount must lie in"),
        ({"decay": -0.1}, "decay must lie in"),
        ({"decay": math.nan}, "decay must lie in"),
        ({"value_clip": 0.0}, "value_clip must be a number above 0"),
        ({"held_steps": -1}, "held_steps must be a whole number"),
        ({"held_steps": 1.5}, "held_steps must be a whole number"),
        ({"advantage_epsilon": 0.0}, "advantage_epsilon"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        PPO(**options)


def value_batch(values: list[float], old: list[float], returns: list[float], mask: list[float]) -> ValueBatch:
    columns = [torch.tensor(column, dtype=torch.float64) for column in (values, old, returns, mask)]
    row_T = torch.zeros(len(values), dtype=torch.int64)
    return ValueBatch(columns[0].requires_grad_(), *columns[1:], row_T, torch.tensor([sum(mask)]))


def test_the_value_loss_by_hand() -> None:
    """value_clip 0.2. Unclipped: (0.1)^2 / 2; moved away from the return, by 0.5, clipped to 0.2 and no better: the unclipped 0.5^2
    / 2; moved past the clip towards it: the clipped (1 - 0.2)^2 / 2, without gradient; the last one is not the policy's."""
    batch = value_batch([0.1, -0.5, 0.5, 9.0], [0.0, 0.0, 0.0, 0.0], [0.2, 0.0, 1.0, 0.0], [1, 1, 1, 0])
    sums = PPO(value_clip=0.2).critic.loss(batch)
    assert sums.loss.item() == pytest.approx(0.005 + 0.125 + 0.32)
    (gradient_T,) = torch.autograd.grad(sums.loss, batch.values_T)
    assert gradient_T.tolist() == pytest.approx([-0.1, -0.5, 0.0, 0.0])
    assert sums.metrics["critic/clip_ratio"].item() == 1
    assert sums.metrics["critic/return"].item() == pytest.approx(1.2)
    plain = PPO(value_clip=None).critic.loss(batch)
    assert plain.loss.item() == pytest.approx(0.005 + 0.125 + 0.125)
    assert plain.metrics["critic/clip_ratio"].item() == 0


def test_a_value_is_clipped_where_it_has_no_gradient_and_nowhere_by_a_rounding() -> None:
    """V_old + (V - V_old) is not V in float32: its error may be the larger one by a rounding, though nothing is cut off."""
    torch.manual_seed(0)
    old_T, values_T, returns_T = torch.randn(20000), torch.randn(20000, requires_grad=True), torch.rand(20000)
    error_T, clipped_T = functional.value_error(values_T, old_T, returns_T, 0.2)
    (gradient_T,) = torch.autograd.grad(error_T.sum(), values_T)
    assert torch.equal(clipped_T, gradient_T == 0) and 0.1 < clipped_T.float().mean() < 0.9
    near_T = (values_T.detach() - old_T).abs() <= 0.2
    assert near_T.sum() > 1000 and not clipped_T[near_T].any()


@pytest.mark.parametrize("clip", [None, 0.05, 0.5])
def test_the_value_loss_is_what_plain_numbers_say(clip: float | None) -> None:
    rng = np.random.default_rng(0)
    values, old, returns = (rng.normal(size=40) for _ in range(3))
    mask = (rng.random(40) > 0.25).astype(float)
    expected = 0.0
    for v, o, g, m in zip(values, old, returns, mask, strict=True):
        errors = [(v - g) ** 2]
        if clip is not None:
            errors.append((min(max(v, o - clip), o + clip) - g) ** 2)
        expected += m * 0.5 * max(errors)
    batch = value_batch(values.tolist(), old.tolist(), returns.tolist(), mask.tolist())
    assert PPO(value_clip=clip).critic.loss(batch).loss.item() == pytest.approx(expected, rel=1e-12)
