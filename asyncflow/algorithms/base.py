"""The contract of an algorithm.

    advantages   ScoredGroup -> a number a row (float32 [R]) or a token (ragged), over ONE group: never over what arrives together
    loss         TokenBatch -> LossSums, over ONE micro-batch: a sum, so that micro-batches may be added in any order
    critic       values, where advantages need them: a model of its own, with a loss and returns of its own
    normaliser   what divides the gradient of an update, once, at the optimiser step: a count of its tokens or rows, or a constant

So neither arrival order nor the cut into micro-batches changes what is optimised. What an algorithm needs besides, it says by the
flags of `Algorithm`, and the run is built accordingly: which tasks there are, which columns, what training waits for. A class that
inherits from `Algorithm` has all of them as they are here, which is what needs nothing.

A statistic of the whole batch is the one thing that streaming forbids. An algorithm that has one (`waits_for_batch`) gives each
group's share of it as sums (`statistics`), which are added without rounding, so that their order does not show, and makes its
advantages from the total (`normalised`). Training then begins with the last group of a step: nothing of it overlaps generation,
and two runs are still equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from asyncflow.algorithms.off_policy import Correction
from asyncflow.types import Advantages, Objective, ScoredGroup, ValueObjective

Normaliser = Literal["tokens", "sequences"]


class ModelObjective(Protocol):
    """Objective of one model's training."""

    normaliser: Normaliser | int
    """`tokens`: the masked response tokens of the update; `sequences`: its rows that have any; an integer: just that."""

    waits_for_batch: bool = False
    """Whether its advantages are made from a statistic of the whole step: see the head, `statistics` and `normalised`."""

    is_zero_without_advantages: bool = False
    """Whether a micro-batch whose advantages are all 0 has a loss of 0 and no gradient, so that it need not be computed."""

    def advantages(self, group: ScoredGroup) -> Advantages:
        """The advantages of the rows of one group: float32 [R], or ragged float32, a number for each token of each response."""
        ...

    def statistics(self, group: ScoredGroup, advantages: Advantages) -> Sequence[float]:
        """Share of a group in the step's statistic, where the algorithm `waits_for_batch`: finite sums (float64), as many for every
        group."""
        return ()

    def normalised(self, advantages: Advantages, sums: Sequence[float]) -> Advantages:
        """Advantages of a group, where the algorithm `waits_for_batch`, once the sums over all groups of the step are known."""
        return advantages


class Critic(ModelObjective, ValueObjective, Protocol):
    """Objective of a model of values. In the place of advantages it has returns: what each token's value should become."""


class Algorithm(ModelObjective, Objective, Protocol):
    """Built once with the options of the config; stateless from then on."""

    needs_reference: bool = False
    """Whether the loss or the rewards need the log-probs of a frozen reference model."""

    needs_reference_ahead: bool = False
    """Whether `advantages` needs them already (a KL term in the reward), so that they are computed by a task ahead of training."""

    correction: Correction
    """Weights of tokens that another policy sampled than the old one: with `none` it is right only where they are the same."""

    critic: Critic | None = None
    """Training of the critic whose values its advantages need (`ScoredGroup.values`); None: it needs none."""

    needs_turns: bool = False
    """Whether its advantages need the rewards of single turns (`ScoredGroup.turn_rewards`), which only an environment gives."""

    wants_varied_groups: bool = False
    """Whether a step trains only groups whose rewards are not all equal: it takes other prompts for those where they are, until it
    has as many as `train.prompts_per_step`, the first ones in the order of the data."""

    held_steps: int = 0
    """Number of steps at the run's beginning that leave the policy as it is, while the critic learns what to expect of it."""
