"""GRPO: group-relative advantages, a clipped ratio, and optionally a KL term to a frozen reference (PA 1-3).

    surrogate   min(R A, clip(R, 1 - clip_low, 1 + clip_high) A)     R = pi_theta / pi_old, token by token
    A           (r - mean r) / (std r + advantage_epsilon), over the group; with `credit: turn` of each turn's return

DeepSeekMath's (arXiv:2402.03300: loss eq. 3, KL term eq. 4, A in section 4.1.2) has the normaliser `sequences`, each response's
mean; the default here is `tokens`. KL, normalisers, entropy and importance weights: policy_loss.py.
"""

from __future__ import annotations

from typing import Literal, Unpack

import numpy as np

from asyncflow.algorithms import functional
from asyncflow.algorithms.shared_advantages import DividedOptions, GroupRelativeLoss
from asyncflow.algorithms.surrogate import ClippedRatio
from asyncflow.types import Advantages, Ragged, ScoredGroup, UserError


class GRPO(GroupRelativeLoss):
    """GRPO (arXiv:2402.03300): advantages relative to the group, and a clipped ratio of each token."""

    def __init__(
        self,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        credit: Literal["episode", "turn"] = "episode",
        **shared: Unpack[DividedOptions],
    ) -> None:
        """`clip_high` above `clip_low` lets an unlikely token that did well grow further than one that did badly shrinks.

        `credit`: whether all tokens of an episode have its advantage, or those of each turn the turn's own
        (`functional.turn_advantages`).

        Raises `UserError` if an option lies outside its range, or contradicts another.
        """
        super().__init__(ClippedRatio(clip_low, clip_high), **shared)
        if credit not in ("episode", "turn"):
            raise UserError(f"algorithm.credit={credit!r} is none: take episode or turn")
        self.needs_turns = credit == "turn"

    def advantages(self, group: ScoredGroup) -> Advantages:
        """float32 [R], or with `credit: turn` one for each token; those that were observed have 0."""
        if not self.needs_turns:
            return super().advantages(group)
        assert group.turns is not None and group.turn_rewards is not None, "checked when the run is prepared"
        by_turn = functional.turn_advantages(self.rewards(group), group.turn_rewards, self.advantage_epsilon)
        tokens = []
        for length, turns, advantages in zip(group.response_lengths, group.turns, by_turn, strict=True):
            tokens.append(np.zeros(length, np.float32))
            for (first, count, *_), advantage in zip(turns.reshape(-1, 4).tolist(), advantages, strict=True):
                tokens[-1][first : first + count] = advantage
        return Ragged.from_arrays(tokens, "float32")
