"""The mathematics of policy-gradient losses, as pure functions.

Equation numbers are those of "Periodic Asynchrony: An On-Policy Approach for Accelerating LLM Reinforcement Learning" (PA),
in its order, read per token as the field does and not per response as PA prints them. What PA does not need stands beside what it
replaces, with a source of its own: other advantages, surrogates and KL estimators. Importance weights come last. Sources are cited
by equation, and by section where they do not number it.

R rows of a group or micro-batch, T response tokens of a micro-batch end to end. Everything named `log_...` is a natural
logarithm; KL divergences and entropies are in nats.

Only methods of the tensors are used, no torch function: importing this file costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from asyncflow.types import Array, Ragged

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
"""Estimator of a KL divergence from one sample of a token."""


def group_advantages(rewards_R: Array, epsilon: float) -> Array:
    """A_i = (r_i - mean r) / (std r + epsilon) over one group (PA 1; GRPO, arXiv:2402.03300, section 4.1.2).

    rewards_R float32 [R] -> float32 [R]. `std` is the sample's, which divides by R - 1: PA does not say, TRL and verl do so.
    A group whose rewards are all equal, or of one row, has nothing to compare: its advantages are exactly 0, and its tokens
    still count in the normaliser.

    Raises `ValueError` if a reward is not finite, or there is not one axis.
    """
    rewards = _of_group(rewards_R)
    if len(rewards) < 2:
        return np.zeros(len(rewards), np.float32)
    return ((rewards - rewards.mean()) / (rewards.std(ddof=1) + epsilon)).astype(np.float32)


def turn_advantages(rewards_R: Array, turn_rewards: Ragged, epsilon: float) -> Ragged:
    """Advantages of turns: A_it = (G_it - mean_j G_jt) / (std_j G_jt + epsilon), over the rows j of the group that have a turn t.

        G_it = r_it + r_i(t+1) + ...        the return from turn t on (Sutton and Barto 2018, section 13.3: G_t in REINFORCE)

    rewards_R float32 [R]: of whole episodes; turn_rewards float32, an entry per turn, NaN: none. What an episode's reward has
    beyond its turns' (another scorer's part) comes with its last turn, so that G_i1 is its reward. Compared within a group, turn by
    turn, as in arXiv:2505.11821. float32, an entry per turn. A turn that one row alone has reached has nothing to compare: 0.
    """
    rewards, returns = _of_group(rewards_R), []
    for reward, given in zip(rewards, turn_rewards, strict=True):
        own = np.nan_to_num(given.astype(np.float64), nan=0.0)
        own[-1:] += reward - own.sum()
        returns.append(own[::-1].cumsum()[::-1])
    advantages = [np.zeros(len(each), np.float32) for each in returns]
    for turn in range(max(map(len, returns), default=0)):
        there = [i for i, each in enumerate(returns) if turn < len(each)]
        for i, advantage in zip(there, group_advantages(np.array([returns[i][turn] for i in there]), epsilon), strict=True):
            advantages[i][turn] = advantage
    return Ragged.from_arrays(advantages, "float32")


def centred_advantages(rewards_R: Array) -> Array:
    """A_i = r_i - mean r over one group: PA 1 without the division, as Dr. GRPO has it (arXiv:2503.20783v2, section 3.2: its eq. 3
    without the deviation).

    The standard deviation weighs a prompt up that nearly all responses get right, or wrong: the bias that Dr. GRPO takes out.
    Shapes, exactness and errors as in `group_advantages`.
    """
    rewards = _of_group(rewards_R)
    return (rewards - rewards.mean()).astype(np.float32) if len(rewards) else np.zeros(0, np.float32)


def leave_one_out_advantages(rewards_R: Array) -> Array:
    """A_i = r_i - mean of the others' rewards = R / (R - 1) (r_i - mean r) over one group of R (RLOO, arXiv:2402.14740v2,
    section 2.3).

    The baseline of a response is independent of it, so the estimate has no bias (Kool et al. 2019). Shapes, exactness and errors
    as in `group_advantages`.
    """
    rewards = _of_group(rewards_R)
    if len(rewards) < 2:
        return np.zeros(len(rewards), np.float32)
    return ((rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1))).astype(np.float32)


def overlong_penalty(lengths_R: Array, longest: int, buffer: int) -> Array:
    """Penalty of a response for its length, float32 [R]: 0 up to longest - buffer tokens, then falling by 1 over `buffer` tokens
    to - 1 at `longest` and beyond: soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13). lengths_R int64 [R]."""
    free = longest - buffer
    return np.clip((free - lengths_R.astype(np.float64)) / buffer, -1.0, 0.0).astype(np.float32)


def sampled_divergence(ref_logprobs_L: Array, logprobs_L: Array, mask_L: Array, estimator: Estimator) -> Array:
    """The estimate of KL(policy || reference) of each token of a response that the policy drew, float64 [L], 0 where the mask is.

    As `k1_divergence` and its neighbours with log s = ref_logprobs - logprobs, outside of torch, for a KL term in the reward (k1:
    arXiv:1909.08593, eq. 2; token by token, arXiv:2402.03300, eq. 2).
    """
    log_s_L = np.where(mask_L > 0, ref_logprobs_L.astype(np.float64) - logprobs_L, 0.0)
    if estimator == "k1":
        return -log_s_L
    return 0.5 * log_s_L**2 if estimator == "k2" else np.expm1(log_s_L) - log_s_L


def returns_to_go(reward: float, penalty_L: Array) -> Array:
    """G_t = reward - sum of penalty_u over u >= t, float32 [L]: of a response whose reward comes with its last token, undiscounted.

    With the KL terms for penalties it is REINFORCE++'s advantage before its normalisation (arXiv:2501.03262v9, eq. 4).
    """
    return (reward - np.cumsum(penalty_L[::-1])[::-1]).astype(np.float32)


def generalised_advantages(rewards_L: Array, values_L: Array, mask_L: Array, discount: float, decay: float) -> tuple[Array, Array]:
    """Advantages and returns of one response, float32 [L]: generalised advantage estimation (arXiv:1506.02438, eq. 16).

        delta_t = r_t + discount V_t+1 - V_t      A_t = delta_t + discount decay A_t+1      G_t = A_t + V_t

    The sum ends with the response, as in PPO (arXiv:1707.06347, eq. 11 and 12); G_t is that of its authors' code (baselines, ppo1
    and ppo2).

    t goes over the masked tokens alone, as if no others were there: these have 0. After the last one nothing is expected (V = 0),
    also where the length limit ended the response: it is not generated further, so nothing more will be rewarded. `values_L` and
    `rewards_L` float [L]; in float64 until the end.
    """
    advantages, returns = np.zeros(len(values_L)), np.zeros(len(values_L))
    value_after = advantage_after = 0.0
    rewards, values = rewards_L.astype(np.float64).tolist(), values_L.astype(np.float64).tolist()
    for t in reversed(np.flatnonzero(mask_L).tolist()):
        delta = rewards[t] + discount * value_after - values[t]
        advantages[t] = advantage_after = delta + discount * decay * advantage_after
        returns[t], value_after = advantage_after + values[t], values[t]
    return advantages.astype(np.float32), returns.astype(np.float32)


def moments(values: Array, weights: Array) -> tuple[float, float, float]:
    """sum w, sum w x and sum w x^2, in float64: what mean and deviation of several groups together are made from."""
    x, w = values.astype(np.float64), weights.astype(np.float64)
    return float(w.sum()), float((w * x).sum()), float((w * x**2).sum())


def standardised(values: Array, count: float, total: float, squares: float, epsilon: float) -> Array:
    """(x - mean) / (std + epsilon) by the `moments` of a whole step, float32: REINFORCE++'s global normalisation
    (arXiv:2501.03262v9, eq. 5; eq. 7 of what is centred in its group by eq. 6).

    `std` divides by the count. 0 where nothing was counted.
    """
    if not count:
        return np.zeros(values.shape, np.float32)
    mean = total / count
    std = max(squares / count - mean**2, 0.0) ** 0.5
    return ((values.astype(np.float64) - mean) / (std + epsilon)).astype(np.float32)


def _of_group(rewards_R: Array) -> Array:
    """Rewards in float64, where the mean of equal float32 numbers is exact, so that a small epsilon has no rounding to enlarge."""
    rewards = np.asarray(rewards_R, np.float32).astype(np.float64)
    if rewards.ndim != 1:
        raise ValueError(f"the rewards of a group have one axis, not shape {rewards.shape}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards of a group must be finite: {rewards.tolist()}")
    return rewards


def log_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    """log R = log pi_theta - log pi_old of each token (PA 2), float32 [T], and 0 where the mask (0 or 1) is 0.

    Of any two policies, likewise. A token that the policy did not produce may have any old log-prob, even NaN: the choice keeps it
    out of sum and gradient.
    """
    return (logprobs_T - old_logprobs_T).where(mask_T > 0, 0.0)


def clipped_surrogate(ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """L = min(R A, clip(R, 1 - clip_low, 1 + clip_high) A) of each token (PA 2), float32 [T]: to be maximised.

    PPO (arXiv:1707.06347, eq. 7); with two bounds DAPO (arXiv:2503.14476, eq. 10).
    """
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    return (ratio_T * advantages_T).minimum(clipped_T * advantages_T)


def is_clipped(ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """bool [T]: where the surrogate is the clipped one, so that the token has no gradient (1 - M of arXiv:2506.13585, eq. 7)."""
    return ((advantages_T > 0) & (ratio_T > 1 + clip_high)) | ((advantages_T < 0) & (ratio_T < 1 - clip_low))


def weighted_log_prob(
    logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, mask_T: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """sg(clip(R, 1 - clip_low, 1 + clip_high)) A log pi_theta of each token, float32 [T]: CISPO (arXiv:2506.13585, eq. 4 and 5).

    The ratio is a weight, cut off and without gradient (sg), so that every token has a gradient, however far its ratio is. 0 where
    the mask is.
    """
    weight_T = ratio_T.detach().clamp(1 - clip_low, 1 + clip_high)
    return weight_T * advantages_T * logprobs_T.where(mask_T > 0, 0.0)


def k1_divergence(log_s_T: Tensor) -> Tensor:
    """- log s of each token, float32 [T]: the "k1" estimator, unbiased, of either sign (Schulman, "Approximating KL divergence").

    Its own gradient is grad log q, whose expectation is 0: it belongs into the reward, not into the loss (arXiv:2510.01555).
    """
    return -log_s_T


def k2_divergence(log_s_T: Tensor) -> Tensor:
    """(log s)^2 / 2 of each token, float32 [T]: the "k2" estimator, biased and never negative (Schulman, as above; in the loss of
    REINFORCE++ with a baseline, arXiv:2501.03262v9, eq. 8).

    The expectation of its gradient is that of KL(q || p) itself, token by token, if the tokens are q's (arXiv:2510.01555).
    """
    return 0.5 * log_s_T**2


def k3_divergence(log_s_T: Tensor) -> Tensor:
    """s - log s - 1 >= 0 of each token (PA 3), float32 [T]: the "k3" estimator, unbiased and never negative (Schulman, as above; in
    GRPO's loss, arXiv:2402.03300, eq. 4).

    With tokens drawn from q and s = p / q it estimates KL(q || p). The expectation of its gradient is that of KL(p || q), the
    other way round, which agrees with KL(q || p)'s to first order (arXiv:2510.01555).
    """
    return log_s_T.expm1() - log_s_T


def sequence_weights(mask_T: Tensor, row_T: Tensor, row_tokens_R: Tensor) -> Tensor:
    """1 / |o_i| for each token of response i, |o_i| counting its masked tokens, float32 [T], and 0 where the mask is (PA 3; GRPO,
    arXiv:2402.03300, eq. 3).

    Divided by the number of responses of a step this is the mean over responses of the mean over each one's tokens.
    """
    return mask_T / row_tokens_R.clamp(min=1.0)[row_T]


def sequence_log_ratio(log_ratio_T: Tensor, row_T: Tensor, sequence_tokens_R: Tensor, *, is_mean: bool) -> Tensor:
    """The log-ratio of the whole response for each of its tokens, float32 [T]: log of the product over t of ratio_t.

    With `is_mean`, log of their geometric mean, (1 / |o_i|) times that: the length-normalised ratio of GSPO
    (arXiv:2507.18071, eq. 7), |o_i| counting masked tokens. `log_ratio_T` holds whole sequences, one for each row, and is 0 where
    the mask is, as `log_ratio`'s.
    """
    sums_R = log_ratio_T.new_zeros(len(sequence_tokens_R)).index_add(0, row_T, log_ratio_T)
    if is_mean:
        sums_R = sums_R / sequence_tokens_R.clamp(min=1.0)
    return sums_R[row_T]


def sequence_ratio_of_tokens(log_ratio_T: Tensor, row_T: Tensor, sequence_tokens_R: Tensor) -> Tensor:
    """log s_i,t = sg(log s_i) + log pi_theta - sg(log pi_theta) of each token, float32 [T] (GSPO-token, arXiv:2507.18071, eq. 14).

    s_i is the geometric mean of the response's ratios (eq. 7, `sequence_log_ratio`). Its value is s_i, and where all tokens of a
    response have one advantage, the sum over them has GSPO's gradient as well.
    """
    log_s_T = sequence_log_ratio(log_ratio_T.detach(), row_T, sequence_tokens_R, is_mean=True)
    return log_s_T + (log_ratio_T - log_ratio_T.detach())


def value_error(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """1/2 max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2) of each token, float32 [T], and bool [T], where V has moved
    by more than `clip` and the second is the larger, so that there is no gradient. Without `clip` the first alone.

    The value clipping is not in PPO's paper but in its authors' code (baselines, ppo2; arXiv:2005.12729, section 3): like the
    ratio's, pessimistic.
    """
    error_T = (values_T - returns_T) ** 2
    if clip is None:
        return 0.5 * error_T, error_T.detach() < 0
    moved_T = values_T - old_values_T
    clipped_error_T = (old_values_T + moved_T.clamp(-clip, clip) - returns_T) ** 2
    is_larger_T = clipped_error_T.detach() > error_T.detach()  # nearer than `clip` too, by a rounding
    return 0.5 * error_T.maximum(clipped_error_T), is_larger_T & (moved_T.detach().abs() > clip)


def importance_ratio(log_ratio_T: Tensor) -> Tensor:
    """rho = exp(log rho), float32 [T], without gradient, cut off at e^80 so that no product with it overflows.

    With log rho = log pi_old - log pi_rollout of tokens that pi_rollout drew, it is the first factor of decoupled PPO,
    pi_prox / pi_behave (arXiv:2110.00641v3, section 2; AReaL, arXiv:2505.24298, eq. 5). The expectation of rho f over such tokens
    is that of f over tokens of pi_old; of whole responses that holds for the product over their tokens.
    """
    return log_ratio_T.detach().clamp(max=80.0).exp()


def is_outside(ratio_T: Tensor, low: float, high: float) -> Tensor:
    """bool [T]: where the ratio does not lie in [low, high]."""
    return (ratio_T < low) | (ratio_T > high)


def truncated(ratio_T: Tensor, high: float) -> Tensor:
    """min(rho, high), float32 [T]: truncated importance sampling (Ionides 2008; rho_t of V-trace, arXiv:1802.01561, section 4.1,
    below eq. 1).

    The bound on the weight bounds the variance; the price is a bias towards pi_rollout where rho exceeds it.
    """
    return ratio_T.clamp(max=high)


def masked(ratio_T: Tensor, low: float, high: float) -> Tensor:
    """rho where it lies in [low, high], else 0, float32 [T]: masked importance sampling (for tokens: IcePop's M,
    arXiv:2510.18855v2, eq. 2).

    A token that one of the two policies finds far likelier than the other does teaches nothing, in either direction.
    """
    return ratio_T.where(~is_outside(ratio_T, low, high), 0.0)
