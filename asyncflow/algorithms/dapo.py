"""DAPO: GRPO with a higher upper clip, a mean over tokens, no KL term, and care with overlong responses (arXiv:2503.14476).

    surrogate   min(R A, clip(R, 1 - clip_low, 1 + clip_high) A), eq. 8     R = pi_theta / pi_old, token by token
    A           (r - mean r) / (std r + advantage_epsilon), over the group, of rewards after the overlong penalty, eq. 9
    normaliser  tokens

    overlong_buffer   the reward falls by 1 over the last `overlong_buffer` tokens before `overlong_length` (eq. 13)
    overlong_filter   responses that the length limit ended are not trained on; they count in the group's mean, and as tokens

    dynamic_sampling  prompts whose responses all have one reward are replaced by the next ones, eq. 11

`overlong_length` is `rollout.max_new_tokens` as a rule; a response that fills it has 1 less. Dynamic sampling looks at rewards as
they were given, before the penalty: two wrong responses of different lengths are alike. It is nothing that a loss could do: what it
asks for is `wants_varied_groups`.
"""

from __future__ import annotations

from typing import Unpack

import numpy as np

from asyncflow.algorithms import functional
from asyncflow.algorithms.shared_advantages import DividedOptions, GroupRelativeLoss
from asyncflow.algorithms.surrogate import ClippedRatio
from asyncflow.types import Array, ScoredGroup, UserError


class DAPO(GroupRelativeLoss):
    """DAPO (arXiv:2503.14476): GRPO with a higher upper clip, a mean over tokens, and care with overlong responses."""

    def __init__(
        self,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        overlong_length: int | None = None,
        overlong_buffer: int | None = None,
        overlong_filter: bool = False,
        dynamic_sampling: bool = False,
        **shared: Unpack[DividedOptions],
    ) -> None:
        """`overlong_length` and `overlong_buffer` are in tokens; without them there is no penalty.

        Raises `UserError` if an option lies outside its range, or contradicts another.
        """
        super().__init__(ClippedRatio(clip_low, clip_high), **shared)
        if (overlong_length is None) != (overlong_buffer is None):
            raise UserError("algorithm.overlong_length and overlong_buffer go together: give both, or neither.")
        if overlong_length is not None and overlong_buffer is not None and not 0 < overlong_buffer <= overlong_length:
            raise UserError(
                f"algorithm.overlong_buffer must lie in 1..overlong_length, the tokens over which the reward falls, but is "
                f"{overlong_buffer} of {overlong_length}."
            )
        self.wants_varied_groups = dynamic_sampling
        self.overlong_length, self.overlong_buffer, self.overlong_filter = overlong_length, overlong_buffer, overlong_filter

    def rewards(self, group: ScoredGroup) -> Array:
        """float32 [R]: the rewards after the penalty, see `functional.overlong_penalty`, and after `PolicyLoss.rewards`."""
        rewards = super().rewards(group)
        if self.overlong_length is None or self.overlong_buffer is None:
            return rewards
        return rewards + functional.overlong_penalty(group.response_lengths, self.overlong_length, self.overlong_buffer)

    def advantages(self, group: ScoredGroup) -> Array:
        """float32 [R], see `functional.group_advantages` (PA 1); 0 for what `overlong_filter` leaves out."""
        advantages = functional.group_advantages(self.rewards(group), self.advantage_epsilon)
        return np.where(group.truncated > 0, np.float32(0.0), advantages) if self.overlong_filter else advantages
