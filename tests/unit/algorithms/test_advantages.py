"""Every algorithm's advantages: numbers worked by hand, and plain floats or numpy written apart from the code."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import numpy as np
import pytest

from asyncflow.algorithms import ALGORITHMS, functional
from asyncflow.algorithms.dapo import DAPO
from asyncflow.algorithms.dr_grpo import DrGRPO
from asyncflow.algorithms.grpo import GRPO
from asyncflow.algorithms.policy_loss import PolicyLoss
from asyncflow.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from asyncflow.algorithms.rloo import RLOO
from asyncflow.registry import build
from asyncflow.types import Advantages, Array, Ragged, ScoredGroup, UserError
from tests.unit.algorithms.batches import scored_group

OF_A_GROUP = sorted(ALGORITHMS.keys() - {"ppo", "reinforce_plus_plus"})
"""Those whose advantages are a group's rewards compared with each other."""


def dense(advantages: Advantages) -> Array:
    assert not isinstance(advantages, Ragged) and advantages.dtype == np.float32
    return advantages


def make(name: str, **options: Any) -> PolicyLoss:
    own = {"loss_constant": 8} if name == "dr_grpo" else {}
    algorithm: PolicyLoss = build("algorithm", name, {**own, **options}, ALGORITHMS)
    return algorithm


def step_of(algorithm: PolicyLoss, groups: list[ScoredGroup]) -> list[Advantages]:
    own = [algorithm.advantages(group) for group in groups]
    if not algorithm.waits_for_batch:
        return own
    sums = [algorithm.statistics(group, advantages) for group, advantages in zip(groups, own, strict=True)]
    total = [math.fsum(column) for column in zip(*sums, strict=True)]
    return [algorithm.normalised(advantages, total) for advantages in own]


def of_tokens(groups: list[ScoredGroup], advantages: list[Advantages]) -> list[float]:
    """Of the policy's own tokens, end to end."""
    found: list[float] = []
    for group, own in zip(groups, advantages, strict=True):
        values = own.values if isinstance(own, Ragged) else np.repeat(dense(own), group.response_lengths)
        assert values.dtype == np.float32
        found += values[group.loss_mask.values > 0].tolist()
    return found


# All of them, as they are by default.

STANDARDISED = [2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5]
BY_HAND = {  # rewards 3, 0 and 0, a token each: 2, -1 and -1 from their mean
    "cispo": STANDARDISED,  # by the sample's deviation: of (4 + 1 + 1) / 2
    "dapo": STANDARDISED,
    "dr_grpo": [2.0, -1.0, -1.0],  # by none
    "gspo": STANDARDISED,
    "grpo": STANDARDISED,
    "ppo": [2.5, -0.25, 0.0],  # by values of 0.5, 0.25 and 0
    "reinforce_plus_plus": [2**0.5, -(0.5**0.5), -(0.5**0.5)],  # by the deviation over all tokens there are: of (4 + 1 + 1) / 3
    "rloo": [3.0, -1.5, -1.5],  # 3 against (0 + 0) / 2; 0 against (3 + 0) / 2
}


def expected(name: str, groups: list[ScoredGroup]) -> list[float]:
    """Of the policy's own tokens, end to end, by floats of 64 bits and Python's own statistics, a response at a time."""
    found: list[float] = []
    for group in groups:
        rewards: list[float] = group.rewards.astype(float).tolist()
        for i, reward in enumerate(rewards):
            own = group.loss_mask[i] > 0
            if name in ("grpo", "dapo", "gspo", "cispo"):
                advantage = (reward - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6)
            elif name == "dr_grpo":
                advantage = reward - statistics.mean(rewards)
            elif name == "rloo":
                advantage = reward - statistics.mean(rewards[:i] + rewards[i + 1 :])
            elif name == "reinforce_plus_plus":
                advantage = reward
            elif name == "ppo":
                assert group.values is not None
                values = [*group.values[i][own].astype(float).tolist(), 0.0]
                deltas = [after - before for before, after in itertools.pairwise(values)]
                if deltas:
                    deltas[-1] += reward
                found += [math.fsum(0.95**k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]
                continue
            else:
                raise KeyError(name)
            found += [advantage] * int(own.sum())
    if name == "reinforce_plus_plus":
        return [(value - statistics.mean(found)) / (statistics.pstdev(found) + 1e-6) for value in found]
    return found


def test_every_algorithm_is_here() -> None:
    assert ALGORITHMS.keys() == BY_HAND.keys()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_advantages_worked_by_hand(name: str) -> None:
    groups = [scored_group([3.0, 0.0, 0.0], lengths=[1, 1, 1], values=[[0.5], [0.25], [0.0]])]
    assert of_tokens(groups, step_of(make(name), groups)) == pytest.approx(BY_HAND[name], rel=2e-6)
    assert expected(name, groups) == pytest.approx(BY_HAND[name], rel=2e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("num_rows", [2, 5, 16])
def test_advantages_agree_with_plain_floats(name: str, num_rows: int) -> None:
    generator = np.random.default_rng(num_rows)
    groups = []
    for _ in range(3):
        mask = [(generator.random(length) > 0.3).astype(int) for length in generator.integers(1, 9, num_rows)]
        values = [generator.normal(size=len(row)) for row in mask]
        groups.append(scored_group(generator.normal(3.0, 2.0, num_rows).tolist(), mask=mask, values=values))
    found, wanted = of_tokens(groups, step_of(make(name), groups)), expected(name, groups)
    assert len(wanted) > num_rows
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [0.7] * 7, [1.0], []])
@pytest.mark.parametrize("name", OF_A_GROUP)
def test_a_group_with_nothing_to_compare_has_exactly_no_advantage(name: str, rewards: list[float]) -> None:
    assert dense(make(name).advantages(scored_group(rewards))).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("function", [functional.centred_advantages, functional.leave_one_out_advantages])
def test_rewards_that_are_no_numbers_or_of_several_groups_are_refused(function: Any) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        function(np.array([math.nan, 1.0], np.float32))
    with pytest.raises(ValueError, match="one axis"):
        function(np.zeros((2, 3), np.float32))


def test_leaving_one_out_is_unbiased_and_dividing_by_the_deviation_is_not() -> None:
    """Two tokens to choose from, rewards 0 and 1, groups of three: all groups, each by its probability."""
    p = np.array([0.3, 0.7])
    score = np.array([[1, 0], [0, 1]]) - p  # d log softmax / d logits of either choice
    wanted = (p[:, None] * score * np.array([[0.0], [1.0]])).sum(0)  # of the expected reward
    found = {}
    for algorithm in (RLOO(), DrGRPO(loss_constant=1), GRPO()):
        total = np.zeros(2)
        for choices in itertools.product((0, 1), repeat=3):
            advantages = dense(algorithm.advantages(scored_group([float(c) for c in choices])))
            total += np.prod(p[list(choices)]) * (advantages[:, None] * score[list(choices)]).mean(0)
        found[type(algorithm)] = total
    np.testing.assert_allclose(found[RLOO], wanted, rtol=1e-6)
    np.testing.assert_allclose(found[DrGRPO], wanted * 2 / 3, rtol=1e-6)  # (R - 1) / R: its own reward is in the mean
    assert abs(found[GRPO] / wanted - 1).max() > 0.1


# Overlong responses.


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (19, -0.75), (20, -1.0), (21, -1.0), (500, -1.0)]
)
def test_the_overlong_penalty_worked_by_hand(length: int, penalty: float) -> None:
    # as the paper's 20,480 and 4,096, a thousand times shorter
    assert functional.overlong_penalty(np.array([length]), longest=20, buffer=4).tolist() == [penalty]


def test_dapo_takes_the_penalty_off_the_reward_before_it_compares() -> None:
    group = scored_group([1.0, 1.0, 0.0], lengths=[10, 18, 20])
    algorithm = DAPO(overlong_length=20, overlong_buffer=4)
    assert dense(algorithm.rewards(group)).tolist() == [1.0, 0.5, -1.0]
    shaped = np.array([1.0, 0.5, -1.0])
    wanted = (shaped - shaped.mean()) / (shaped.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(dense(algorithm.advantages(group)), wanted, rtol=1e-6)
    np.testing.assert_array_equal(dense(DAPO().advantages(group)), dense(GRPO().advantages(group)))


def test_the_overlong_filter_takes_no_gradient_from_what_the_limit_ended() -> None:
    group = scored_group([1.0, 0.0, 0.0], truncated=[0, 0, 1])
    plain, filtered = dense(DAPO().advantages(group)), dense(DAPO(overlong_filter=True).advantages(group))
    assert plain[2] != 0 and filtered.tolist() == [plain[0], plain[1], 0.0]


# A KL term in the reward.

ROLLOUT = [[-1.0, -2.0, -0.5], [-1.5, -0.25]]
REFERENCE = [[-1.5, -1.0, -0.5], [-2.5, 7.0]]
MASK = [[1, 1, 1], [1, 0]]  # the last token is a tool's: the policy has no say in it


def of_kl(rewards: list[float], *, reference: Any = REFERENCE) -> ScoredGroup:
    return scored_group(rewards, mask=MASK, rollout=ROLLOUT, reference=reference)


@pytest.mark.parametrize(
    ("estimator", "kl"),
    [
        # log s = -0.5, 1, 0 and -1
        ("k1", [[0.5, -1.0, 0.0], [1.0]]),
        ("k2", [[0.125, 0.5, 0.0], [0.5]]),
        ("k3", [[math.exp(-0.5) - 0.5, math.e - 2, 0.0], [math.exp(-1)]]),
    ],
)
def test_the_kl_term_of_whole_responses_is_taken_off_the_rewards(estimator: Any, kl: list[list[float]]) -> None:
    algorithms: list[PolicyLoss] = [
        RLOO(kl_coefficient=0.1, kl_estimator=estimator),
        GRPO(kl_coefficient=0.1, kl_estimator=estimator, kl_place="reward"),
        DAPO(kl_coefficient=0.1, kl_estimator=estimator, kl_place="reward", overlong_length=9, overlong_buffer=6),
    ]
    shaped = np.array([2.0 - 0.1 * sum(kl[0]), 1.0 - 0.1 * sum(kl[1])])
    for algorithm in algorithms:
        np.testing.assert_allclose(dense(algorithm.rewards(of_kl([2.0, 1.0]))), shaped, rtol=1e-6)
    difference = shaped[0] - shaped[1]
    np.testing.assert_allclose(dense(algorithms[0].advantages(of_kl([2.0, 1.0]))), [difference, -difference], rtol=1e-5)
    np.testing.assert_allclose(dense(algorithms[1].advantages(of_kl([2.0, 1.0]))), [0.5**0.5, -(0.5**0.5)], rtol=1e-5)


@pytest.mark.parametrize("name", OF_A_GROUP)
def test_rewards_are_compared_after_the_kl_term(name: str) -> None:
    plain, shaping = make(name), make(name, kl_coefficient=0.5, kl_place="reward", kl_estimator="k1")
    rollout, reference = [[-1.0, -2.0]] * 3, [[-1.0, -2.0], [-2.0, -2.0], [0.0, -4.0]]  # k1: 0, 1, 1
    found = shaping.advantages(scored_group([1.0, 1.0, 0.0], lengths=[2] * 3, rollout=rollout, reference=reference))
    assert dense(found).tolist() == dense(plain.advantages(scored_group([1.0, 0.5, -0.5], lengths=[2] * 3))).tolist()
    assert dense(found).tolist() != dense(plain.advantages(scored_group([1.0, 1.0, 0.0], lengths=[2] * 3))).tolist()


def test_a_kl_term_in_the_reward_needs_the_reference_ahead() -> None:
    for algorithm in (RLOO(kl_coefficient=0.1), ReinforcePlusPlus(kl_coefficient=0.1)):
        assert algorithm.needs_reference_ahead
        with pytest.raises(UserError, match=r"set train\.reference=task"):
            algorithm.advantages(of_kl([1.0, 0.0], reference=None))
    for other in (RLOO(), ReinforcePlusPlus(), ReinforcePlusPlus(baseline="group", kl_coefficient=0.1), GRPO(kl_coefficient=0.1)):
        assert not other.needs_reference_ahead
        other.advantages(of_kl([1.0, 0.0], reference=None))


# REINFORCE++: a statistic of the step.


def test_returns_to_go_worked_by_hand() -> None:
    assert functional.returns_to_go(2.0, np.array([0.25, -0.5, 1.0])).tolist() == [1.25, 1.5, 1.0]


def test_reinforce_plus_plus_worked_by_hand() -> None:
    # rewards 3 and 0 of one token each, and 1 of two: mean 5/4, mean square 11/4, variance 19/16
    groups = [scored_group([3.0, 0.0], lengths=[1, 1]), scored_group([1.0], lengths=[2])]
    algorithm = ReinforcePlusPlus()
    assert algorithm.waits_for_batch and not GRPO().waits_for_batch
    assert [*algorithm.statistics(groups[1], algorithm.advantages(groups[1]))] == [2.0, 2.0, 2.0]
    first, second = step_of(algorithm, groups)
    deviation = (19 / 16) ** 0.5
    np.testing.assert_allclose(dense(first), [1.75 / deviation, -1.25 / deviation], rtol=1e-5)
    np.testing.assert_allclose(dense(second), [-0.25 / deviation], rtol=1e-5)


@pytest.mark.parametrize("baseline", ["none", "group"])
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_reinforce_plus_plus_agrees_with_numpy(baseline: Any, kl: float) -> None:
    generator = np.random.default_rng(3)
    groups = []
    for _ in range(4):
        lengths = generator.integers(1, 9, 5)
        mask, rollout, reference = [], [], []
        for length in lengths:
            mask.append((generator.random(length) > 0.3).astype(int))
            rollout.append(-generator.random(length))
            reference.append(np.where(mask[-1] > 0, -generator.random(length), math.nan))
        groups.append(scored_group(generator.normal(size=5).tolist(), mask=mask, rollout=rollout, reference=reference))
    options: dict[str, Any] = {"kl_place": "reward"} if kl else {}
    algorithm = ReinforcePlusPlus(baseline=baseline, kl_coefficient=kl, kl_estimator="k1", **options)
    found = step_of(algorithm, groups)

    returns, masks = [], []  # token by token, by two loops
    for group in groups:
        base = np.mean(group.rewards.astype(float)) if baseline == "group" else 0.0
        for i, reward in enumerate(group.rewards.astype(float)):
            own_mask = group.loss_mask[i]
            assert group.ref_logprobs is not None
            for t in range(len(own_mask)):
                later = [u for u in range(t, len(own_mask)) if own_mask[u]]
                penalty = sum(float(group.rollout_logprobs[i][u]) - float(group.ref_logprobs[i][u]) for u in later)
                returns.append(reward - base - kl * penalty)
                masks.append(own_mask[t])
    values = np.array(returns)
    counted = values[np.array(masks) > 0]
    wanted = (values - counted.mean()) / (counted.std() + 1e-6)
    tokens = []
    for group, advantages in zip(groups, found, strict=True):
        assert isinstance(advantages, Ragged) == bool(kl)
        tokens.append(advantages.values if isinstance(advantages, Ragged) else np.repeat(advantages, group.response_lengths))
    np.testing.assert_allclose(np.concatenate(tokens), wanted, rtol=2e-5, atol=2e-6)
    of_counted = np.concatenate(tokens)[np.array(masks) > 0].astype(float)
    assert abs(of_counted.mean()) < 1e-6 and of_counted.std() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("reward", [0.1, 0.0, -7.3])
def test_a_step_of_equal_rewards_has_next_to_no_advantage(reward: float) -> None:
    found = step_of(ReinforcePlusPlus(), [scored_group([reward] * 3, lengths=[1, 2, 9]), scored_group([reward], lengths=[5])])
    assert all(abs(dense(advantages)).max() < 1e-6 for advantages in found)


def test_a_step_without_a_token_to_train_on_has_no_advantage() -> None:
    assert dense(step_of(ReinforcePlusPlus(), [scored_group([1.0, 2.0], mask=[[0], [0, 0]])])[0]).tolist() == [0.0, 0.0]


def of_turns(*rewards: list[float]) -> ScoredGroup:
    """Episodes whose turns have these rewards (NaN: none), of two tokens each, with one observed token before each turn."""
    turns = [[[1 + 3 * turn, 2, 0, 0] for turn in range(len(each))] for each in rewards]
    masks = [np.array([0, 1, 1] * len(each), np.uint8) for each in rewards]
    return ScoredGroup(
        rewards=np.array([np.nansum(each) for each in rewards], np.float32),
        truncated=np.zeros(len(rewards), np.uint8),
        loss_mask=Ragged.from_arrays(masks, "uint8"),
        rollout_logprobs=Ragged.from_arrays([np.zeros(len(mask), np.float32) for mask in masks], "float32"),
        turns=Ragged.from_arrays([np.array(each, np.int64).reshape(-1) for each in turns], "int64"),
        turn_rewards=Ragged.from_arrays([np.array(each, np.float32) for each in rewards], "float32"),
    )


def test_credit_by_turn_compares_each_turn_s_return_with_those_of_others() -> None:
    found = GRPO(credit="turn", advantage_epsilon=1e-9).advantages(of_turns([1.0, math.nan, 3.0], [2.0, 1.0], [0.0]))
    assert isinstance(found, Ragged)
    by_turn = [[4.0, 3.0, 3.0], [3.0, 1.0], [0.0]]  # returns
    for row, returns in enumerate(by_turn):
        for turn, value in enumerate(returns):
            others = [each[turn] for each in by_turn if turn < len(each)]
            expected = (value - statistics.mean(others)) / statistics.stdev(others) if len(others) > 1 else 0.0
            assert found[row][3 * turn : 3 * turn + 3].tolist() == pytest.approx([0.0, expected, expected], abs=1e-6)


def test_a_reward_beyond_the_turns_comes_with_the_last_one() -> None:
    rewards, turns = np.array([3.0, 0.0], np.float32), Ragged.from_arrays([np.array([1.0, 0.0]), np.array([0.0, 0.0])], "float32")
    found = functional.turn_advantages(rewards, turns, 1e-9)
    assert found[0].tolist() == pytest.approx([2**-0.5] * 2) and found[1].tolist() == pytest.approx([-(2**-0.5)] * 2)


def test_credit_has_two_kinds() -> None:
    with pytest.raises(UserError, match="take episode or turn"):
        GRPO(credit="token")  # type: ignore[arg-type]
    assert isinstance(GRPO().advantages(of_turns([1.0], [0.0])), np.ndarray)
