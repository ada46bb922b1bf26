"""The mathematics against numbers worked by hand."""

import math

import numpy as np
import pytest
import torch

from asyncflow.algorithms import functional

EPSILON = 1e-6


def test_advantages_are_the_standardised_rewards_of_the_group() -> None:
    # mean 1, deviations -1 0 1; the sample's variance is 2 / (3 - 1) = 1, the population's would be 2 / 3
    advantages = functional.group_advantages(np.array([0.0, 1.0, 2.0], np.float32), EPSILON)
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, [-1 / (1 + EPSILON), 0, 1 / (1 + EPSILON)], rtol=1e-7)


@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [0.7] * 7, [1.0], []])
def test_a_group_with_nothing_to_compare_has_exactly_no_advantage(rewards: list[float]) -> None:
    # computed in float32, the mean of 0.1, 0.1, 0.1 is not 0.1: over a small epsilon that would be a large advantage
    advantages = functional.group_advantages(np.array(rewards, np.float32), 1e-12)
    assert advantages.tolist() == [0.0] * len(rewards)


def test_advantages_depend_on_neither_order_nor_shift() -> None:
    rewards = np.random.default_rng(0).normal(size=8).astype(np.float32)
    order = np.random.default_rng(1).permutation(8)
    advantages = functional.group_advantages(rewards, EPSILON)
    np.testing.assert_allclose(functional.group_advantages(rewards[order] + 3, EPSILON), advantages[order], atol=1e-6)


@pytest.mark.parametrize("rewards", [[0.0, math.nan], [math.inf, 1.0]])
def test_a_reward_that_is_no_number_is_refused(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        functional.group_advantages(np.array(rewards, np.float32), EPSILON)


def test_rewards_of_several_groups_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="one axis"):
        functional.group_advantages(np.zeros((2, 3), np.float32), EPSILON)


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "is_clipped"),
    [
        (1.0, 2.0, 2.0, False),
        (1.5, 2.0, 1.3 * 2, True),  # good and already likelier: no further
        (0.5, 2.0, 0.5 * 2, False),  # good but less likely: pulled back with full force
        (1.5, -2.0, 1.5 * -2, False),  # bad and likelier: pushed down with full force
        (0.5, -2.0, 0.8 * -2, True),  # bad and already less likely: no further
        (1.25, 1.0, 1.25, False),  # between 1 + clip_low and 1 + clip_high
        (0.75, -1.0, -0.8, True),  # between 1 - clip_high and 1 - clip_low
        (2.0, 0.0, 0.0, False),
    ],
)
def test_the_clipped_surrogate(ratio: float, advantage: float, surrogate: float, is_clipped: bool) -> None:
    ratio_T = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    advantages_T = torch.tensor([advantage], dtype=torch.float64)
    value_T = functional.clipped_surrogate(ratio_T, advantages_T, clip_low=0.2, clip_high=0.3)
    assert value_T.item() == pytest.approx(surrogate)
    assert functional.is_clipped(ratio_T, advantages_T, clip_low=0.2, clip_high=0.3).item() is is_clipped
    (gradient_T,) = torch.autograd.grad(value_T.sum(), ratio_T)
    assert gradient_T.item() == pytest.approx(0.0 if is_clipped else advantage)


def test_k3_is_never_negative_and_estimates_the_divergence_without_bias() -> None:
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    p = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    k3 = functional.k3_divergence(p.log() - q.log())
    assert (k3 >= 0).all() and k3[1] == 0
    # its mean under q is KL(q || p), here summed exactly
    assert (q * k3).sum().item() == pytest.approx((q * (q.log() - p.log())).sum().item())


def test_k3_keeps_small_differences() -> None:
    # s - log s - 1 = x^2 / 2 for a small x = log s; worked out as written, float32 is wrong by a fifth and more
    log_s_T = torch.tensor([1e-3, -1e-3, 3e-4])
    torch.testing.assert_close(functional.k3_divergence(log_s_T), log_s_T**2 / 2, rtol=0.01, atol=0)


def test_log_ratio_ignores_what_is_masked_even_nan() -> None:
    logprobs_T = torch.tensor([-1.0, -2.0], requires_grad=True)
    ratio_T = functional.log_ratio(logprobs_T, torch.tensor([-1.5, math.nan]), torch.tensor([1.0, 0.0]))
    assert ratio_T.tolist() == [0.5, 0.0]
    (gradient_T,) = torch.autograd.grad(ratio_T.exp().sum(), logprobs_T)
    assert gradient_T.tolist() == [pytest.approx(math.exp(0.5)), 0.0]


def test_sequence_weights_count_masked_tokens_only() -> None:
    mask_T = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    row_T = torch.tensor([0, 0, 0, 1, 2, 2])
    weights_T = functional.sequence_weights(mask_T, row_T, row_tokens_R=torch.tensor([2.0, 1.0, 0.0]))
    assert weights_T.tolist() == [0.5, 0.5, 0.0, 1.0, 0.0, 0.0]


def test_the_weight_of_a_log_prob_has_no_gradient_and_what_is_masked_leaks_nowhere() -> None:
    logprobs_T = torch.tensor([-1.0, math.nan, -2.0], requires_grad=True)
    ratio_T = torch.tensor([0.5, 1.0, 9.0], requires_grad=True)
    advantages_T, mask_T = torch.tensor([2.0, 2.0, -1.0]), torch.tensor([1.0, 0.0, 1.0])
    value_T = functional.weighted_log_prob(logprobs_T, ratio_T, advantages_T, mask_T, clip_low=1.0, clip_high=4.0)
    assert value_T.tolist() == [-1.0, 0.0, 10.0]
    gradients = torch.autograd.grad(value_T.sum(), (logprobs_T, ratio_T), allow_unused=True)
    assert gradients[0].tolist() == [1.0, 0.0, -5.0] and gradients[1] is None
