"""RLOO: REINFORCE with the group's other responses for a baseline (arXiv:2402.14740v2, section 2.3; Kool et al. 2019).

    surrogate   min(R A, clip(R, 1 - clip_low, 1 + clip_high) A)     R = pi_theta / pi_old, token by token
    A           r - the mean reward of the group's other responses
    normaliser  constant, 1 token: a response counts by the log-probability of the whole of it, the sum over its tokens
    KL          in the reward, by k1, if there is any

With one update a step R is 1, and the gradient is the paper's, A grad log pi(o). The clip is of later updates, which the paper has
not; it goes by token, as everywhere here. `loss_constant` scales the gradient, and nothing else: with AdamW it matters to
`train.max_grad_norm` alone.
"""

from __future__ import annotations

from typing import Unpack

from asyncflow.algorithms import functional
from asyncflow.algorithms.policy_loss import PolicyLoss, SharedOptions
from asyncflow.algorithms.surrogate import ClippedRatio
from asyncflow.types import Advantages, ScoredGroup


class RLOO(PolicyLoss):
    """RLOO (arXiv:2402.14740): REINFORCE whose baseline is the mean reward of the group's other responses."""

    def __init__(self, *, clip_low: float = 0.2, clip_high: float = 0.2, **shared: Unpack[SharedOptions]) -> None:
        """Raises `UserError` if an option lies outside its range."""
        options: SharedOptions = {"kl_place": "reward", "kl_estimator": "k1", **shared}
        if "loss_normaliser" not in options:
            options = {"loss_normaliser": "constant", "loss_constant": 1.0, **options}
        super().__init__(ClippedRatio(clip_low, clip_high), **options)

    def advantages(self, group: ScoredGroup) -> Advantages:
        """float32 [R], see `functional.leave_one_out_advantages`."""
        return functional.leave_one_out_advantages(self.rewards(group))
