"""Advantages that several algorithms have: within a group, or standardised over all masked tokens of a step.

groups --statistics--> (tokens, sum, sum of squares) each --summed over the step--> normalised --> advantages of each group
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import numpy as np

from asyncflow.algorithms import functional
from asyncflow.algorithms.policy_loss import PolicyLoss, SharedOptions, check_above_zero
from asyncflow.algorithms.surrogate import Surrogate
from asyncflow.types import Advantages, Ragged, ScoredGroup


class DividedOptions(SharedOptions, total=False):
    """The options that every algorithm takes whose advantages are divided by a deviation."""

    advantage_epsilon: float


class DividedLoss(PolicyLoss):
    """A `PolicyLoss` whose advantages are divided by a deviation."""

    def __init__(self, surrogate: Surrogate, *, advantage_epsilon: float = 1e-6, **shared: Unpack[SharedOptions]) -> None:
        """`advantage_epsilon` is added to the deviation. Raises `UserError` if an option lies outside its range."""
        super().__init__(surrogate, **shared)
        check_above_zero(advantage_epsilon=advantage_epsilon)
        self.advantage_epsilon = advantage_epsilon


class GroupRelativeLoss(DividedLoss):
    """A `PolicyLoss` whose advantages are (r - mean r) / (std r + advantage_epsilon) over the group (PA 1)."""

    def advantages(self, group: ScoredGroup) -> Advantages:
        """float32 [R], see `functional.group_advantages`."""
        return functional.group_advantages(self.rewards(group), self.advantage_epsilon)


class StandardisedLoss(DividedLoss):
    """A `PolicyLoss` whose advantages have mean 0 and deviation 1 over a step (`Algorithm.waits_for_batch`)."""

    def statistics(self, group: ScoredGroup, advantages: Advantages) -> Sequence[float]:
        """The group's masked tokens, and the sums of their advantages and of the squares of these."""
        if isinstance(advantages, Ragged):
            return functional.moments(advantages.values, group.loss_mask.values > 0)
        return functional.moments(advantages, np.array([(mask > 0).sum() for mask in group.loss_mask]))

    def normalised(self, advantages: Advantages, sums: Sequence[float]) -> Advantages:
        """See `functional.standardised`."""
        count, total, squares = sums
        values = advantages.values if isinstance(advantages, Ragged) else advantages
        standardised = functional.standardised(values, count, total, squares, self.advantage_epsilon)
        return Ragged(standardised, advantages.offsets) if isinstance(advantages, Ragged) else standardised
