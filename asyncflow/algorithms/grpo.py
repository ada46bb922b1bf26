"""GRPO: group-relative advantages, a clipped ratio, and optionally a KL term to a frozen reference (PA 1-3).

    surrogate   min(R A, clip(R, 1 - clip_low, 1 + clip_high) A)     R = pi_theta / pi_old, token by token
    A           (r - mean r) / (std r + advantage_epsilon), over the group

DeepSeekMath's (arXiv:2402.03300: loss eq. 3, KL term eq. 4, A in section 4.1.2) has the normaliser `sequences`, each response's
mean; the default here is `tokens`. KL, normalisers, entropy and importance weights: policy_loss.py.
"""

from __future__ import annotations

from typing import Unpack

from asyncflow.algorithms.policy_loss import SharedOptions
from asyncflow.algorithms.shared_advantages import GroupRelativeLoss
from asyncflow.algorithms.surrogate import ClippedRatio


class GRPO(GroupRelativeLoss):
    """See the module's head."""

    def __init__(
        self,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        advantage_epsilon: float = 1e-6,
        **shared: Unpack[SharedOptions],
    ) -> None:
        """`clip_high` above `clip_low` lets an unlikely token that did well grow further than one that did badly shrinks.

        Raises `UserError` if an option lies outside its range, or contradicts another.
        """
        super().__init__(ClippedRatio(clip_low, clip_high), advantage_epsilon, **shared)
