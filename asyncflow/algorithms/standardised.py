"""Advantages that are standardised over all masked tokens of a step: mean 0, deviation 1 (`Algorithm.waits_for_batch`).

groups --statistics--> (tokens, sum, sum of squares) each --summed over the step--> normalised --> advantages of each group
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncflow.algorithms import functional
from asyncflow.algorithms.policy_loss import PolicyLoss
from asyncflow.types import Advantages, Ragged, ScoredGroup


class StandardisedLoss(PolicyLoss):
    """A `PolicyLoss` with the two methods; `advantage_epsilon` is added to the deviation."""

    advantage_epsilon: float

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
