"""The contract of an algorithm.

    advantages   float32 [R] -> float32 [R], over ONE group: never over the rows that happen to arrive together
    loss         TokenBatch -> LossSums, over ONE micro-batch: a sum, so that micro-batches may be added in any order
    normaliser   which integer count of the whole step divides the gradient, once, at the optimiser step

So neither arrival order nor the cut into micro-batches changes what is optimised.
"""

from __future__ import annotations

from typing import Literal, Protocol

from asyncflow.algorithms.off_policy import Correction
from asyncflow.types import Array, Objective

Normaliser = Literal["tokens", "sequences"]


class Algorithm(Objective, Protocol):
    """Built once with the options of the config; stateless from then on."""

    normaliser: Normaliser
    """`tokens`: the masked response tokens of the step; `sequences`: its rows."""

    needs_reference: bool
    """Whether the loss needs the log-probs of a frozen reference model."""

    correction: Correction
    """How it weighs tokens that another policy sampled than the old one: with `none` it is right only where they are the same."""

    def advantages(self, rewards: Array) -> Array:
        """Advantages (float32 [R]) of the rows of one group from their rewards (float32 [R])."""
        ...
