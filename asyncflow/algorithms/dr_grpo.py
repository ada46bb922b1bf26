"""Dr. GRPO, GRPO done right: without two divisions that favour some responses over others (arXiv:2503.20783v2, section 3.2).

    surrogate   min(R A, clip(R, 1 - clip_low, 1 + clip_high) A)     R = pi_theta / pi_old, token by token
    A           r - mean r, over the group: not divided by its standard deviation
    normaliser  constant: a response's tokens are summed, and divided by the same number whatever its length

The constant scales the gradient, and nothing else: with AdamW it matters to `train.max_grad_norm` alone. The paper's code takes the
budget of generated tokens, which is `rollout.max_new_tokens`.
"""

from __future__ import annotations

from typing import Unpack

from asyncflow.algorithms import functional
from asyncflow.algorithms.policy_loss import PolicyLoss, SharedOptions
from asyncflow.algorithms.surrogate import ClippedRatio
from asyncflow.types import Advantages, ScoredGroup


class DrGRPO(PolicyLoss):
    """Dr. GRPO (arXiv:2503.20783): GRPO without the division by the deviation, and with a constant normaliser."""

    def __init__(self, *, clip_low: float = 0.2, clip_high: float = 0.2, **shared: Unpack[SharedOptions]) -> None:
        """Raises `UserError` if there is no `loss_constant`, or another option lies outside its range."""
        options: SharedOptions = {"loss_normaliser": "constant", **shared}
        super().__init__(ClippedRatio(clip_low, clip_high), **options)

    def advantages(self, group: ScoredGroup) -> Advantages:
        """float32 [R], see `functional.centred_advantages`."""
        return functional.centred_advantages(self.rewards(group))
