"""The mathematics of policy-gradient losses, as pure functions.

Equation numbers are those of "Periodic Asynchrony: An On-Policy Approach for Accelerating LLM Reinforcement Learning" (PA),
in its order, read per token as the field does and not per response as PA prints them. Importance weights, which PA does not need,
come last, with sources of their own.

R rows of a group or micro-batch, T response tokens of a micro-batch end to end. Everything named `log_...` is a natural
logarithm; KL divergences and entropies are in nats.

Only methods of the tensors are used, no torch function: importing this file costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from asyncflow.types import Array

if TYPE_CHECKING:
    from torch import Tensor


def group_advantages(rewards_R: Array, epsilon: float) -> Array:
    """A_i = (r_i - mean r) / (std r + epsilon) over one group (PA 1).

    rewards_R float32 [R] -> float32 [R]. `std` is the sample's, which divides by R - 1: PA does not say, TRL and verl do so.
    A group whose rewards are all equal, or of one row, has nothing to compare: its advantages are exactly 0, and its tokens
    still count in the normaliser.

    Raises:
        ValueError: a reward is not finite, or there is not one axis.
    """
    # In float64 the mean of equal float32 numbers is exact, so that a small epsilon has no rounding to blow up.
    rewards = np.asarray(rewards_R, np.float32).astype(np.float64)
    if rewards.ndim != 1:
        raise ValueError(f"the rewards of a group have one axis, not shape {rewards.shape}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards of a group must be finite: {rewards.tolist()}")
    if len(rewards) < 2:
        return np.zeros(len(rewards), np.float32)
    return ((rewards - rewards.mean()) / (rewards.std(ddof=1) + epsilon)).astype(np.float32)


def log_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    """log R = log pi_theta - log pi_old of each token (PA 2), float32 [T], and 0 where the mask (0 or 1) is 0.

    Of any two policies, likewise. A token that the policy did not produce may have any old log-prob, even NaN: the choice keeps it
    out of sum and gradient.
    """
    return (logprobs_T - old_logprobs_T).where(mask_T > 0, 0.0)


def clipped_surrogate(ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """L = min(R A, clip(R, 1 - clip_low, 1 + clip_high) A) of each token (PA 2), float32 [T]: to be maximised."""
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    return (ratio_T * advantages_T).minimum(clipped_T * advantages_T)


def is_clipped(ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """bool [T]: where the surrogate is the clipped one, so that the token has no gradient."""
    return ((advantages_T > 0) & (ratio_T > 1 + clip_high)) | ((advantages_T < 0) & (ratio_T < 1 - clip_low))


def k3_divergence(log_s_T: Tensor) -> Tensor:
    """s - log s - 1 >= 0 of each token (PA 3), float32 [T]: the "k3" estimator, unbiased and never negative.

    With tokens drawn from q and s = p / q it estimates KL(q || p).
    """
    return log_s_T.expm1() - log_s_T


def sequence_weights(mask_T: Tensor, row_T: Tensor, row_tokens_R: Tensor) -> Tensor:
    """1 / |o_i| for each token of response i, |o_i| counting its masked tokens (PA 3), float32 [T], and 0 where the mask is.

    Divided by the number of responses of a step this is the mean over responses of the mean over each one's tokens.
    """
    return mask_T / row_tokens_R.clamp(min=1.0)[row_T]


def sequence_log_ratio(log_ratio_T: Tensor, row_T: Tensor, row_tokens_R: Tensor, *, is_mean: bool) -> Tensor:
    """The log-ratio of the whole response for each of its tokens, float32 [T]: log of the product over t of ratio_t.

    With `is_mean`, log of their geometric mean, (1 / |o_i|) times that: the length-normalised ratio of GSPO
    (arXiv:2507.18071), |o_i| counting masked tokens. `log_ratio_T` holds whole rows, and is 0 where the mask is (`log_ratio`).
    """
    sums_R = log_ratio_T.new_zeros(len(row_tokens_R)).index_add(0, row_T, log_ratio_T)
    if is_mean:
        sums_R = sums_R / row_tokens_R.clamp(min=1.0)
    return sums_R[row_T]


def importance_ratio(log_ratio_T: Tensor) -> Tensor:
    """rho = exp(log rho), float32 [T], without gradient, cut off at e^80 so that no product with it overflows.

    With log rho = log pi_old - log pi_rollout of tokens that pi_rollout drew, it is the first factor of decoupled PPO,
    pi_prox / pi_behave (arXiv:2110.00641; AReaL, arXiv:2505.24298). The expectation of rho f over such tokens
    is that of f over tokens of pi_old; of whole responses that holds for the product over their tokens.
    """
    return log_ratio_T.detach().clamp(max=80.0).exp()


def is_outside(ratio_T: Tensor, low: float, high: float) -> Tensor:
    """bool [T]: where the ratio does not lie in [low, high]."""
    return (ratio_T < low) | (ratio_T > high)


def truncated(ratio_T: Tensor, high: float) -> Tensor:
    """min(rho, high), float32 [T]: truncated importance sampling (Ionides 2008; rho-bar of V-trace, arXiv:1802.01561).

    The bound on the weight bounds the variance; the price is a bias towards pi_rollout where rho exceeds it.
    """
    return ratio_T.clamp(max=high)


def masked(ratio_T: Tensor, low: float, high: float) -> Tensor:
    """rho where it lies in [low, high], else 0, float32 [T]: masked importance sampling (for tokens: IcePop's M, arXiv:2510.18855).

    A token that one of the two policies finds far likelier than the other does teaches nothing, in either direction.
    """
    return ratio_T.where(~is_outside(ratio_T, low, high), 0.0)
