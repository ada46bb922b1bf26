"""Tri-model (PA 4.2): policy, old policy and reference on one layout, in one micro-step.

    packed micro-batch --+--> policy ------> log-probs, with gradient
                         +--> old ---------> old log-probs        (`train.old`)
                         +--> reference ---> reference log-probs  (a KL term asks for it)

The old policy of the ratio R = pi_theta / pi_old (PA 2), by `train.old`:

| `old` | is | right for | costs |
|---|---|---|---|
| `current` | the policy itself, detached: R = 1, and its gradient that of log pi | staleness 0, one update a step | nothing |
| `step_start` | the weights at the start of the step | staleness 0, any number of updates a step | a model, a forward |
| `previous` | theta_t for rows of staleness 1; for the others the policy itself | staleness 0 and 1, one update a step | the same |
| `rollout` | the engine that sampled, by its own log-probs | any staleness; corrects for the engine, too | nothing |

Why `current` at staleness 0: batch t is trained on the same weights that generated it, since nothing is updated before the whole
batch is consumed (PA, Theorem 1). PA's algorithm copies the policy into the old model right before each update (line 20). So the
old model is one update behind: theta_t while policy and rollout are theta_(t+1). For a batch of staleness 0 that is the wrong
policy. It is the right one if the rollout runs one version behind, and that is what `previous` means here. Each row's own staleness
decides, since the first batch of such a run has staleness 0.

If the loss weighs each token by old policy / rollout (`algorithm.correction`), the old policy need not be the one that sampled, and
each of these is right for any staleness: `current` and `step_start` are then the proximal policy of decoupled PPO.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from asyncflow.engines.base import MicroBatch, TrainEngineOptions
from asyncflow.types import SAMPLED_UP_TO, Array

# R rows.


class Weights(Protocol):
    """Frozen model that can copy the policy's weights."""

    def move_from(self, policy: Any, /) -> None:
        """Copy the policy's present weights into this model."""
        ...


ModelT = TypeVar("ModelT", bound=Weights)


class TriModel(Generic[ModelT]):
    """Policy with its old policy and reference: decides which frozen model a micro-batch needs, and keeps their weights up to date.

    The engine calls `begin_step` and `before_update`, which copy the policy's weights to the old model when `old` asks for it.
    """

    def __init__(
        self,
        policy: object,
        options: TrainEngineOptions,
        frozen: Callable[[], ModelT],
        reference: Callable[[], ModelT] | None = None,
    ) -> None:
        """`frozen` makes a model with the policy's first weights: the old policy if `options.old` needs one, and the reference,
        unless `reference` makes that."""
        self.policy, self.old, self.is_corrected = policy, options.old, options.is_corrected
        self.old_model = frozen() if self.old in ("step_start", "previous") else None
        self.reference = (reference or frozen)() if options.has_reference else None

    @property
    def frozen(self) -> list[ModelT]:
        """The frozen models that there are."""
        return [model for model in (self.old_model, self.reference) if model is not None]

    def begin_step(self) -> None:
        """Note that a step begins: with `step_start`, copy the policy's weights to the old model."""
        if self.old == "step_start" and self.old_model is not None:
            self.old_model.move_from(self.policy)

    def before_update(self) -> None:
        """Note that an update follows: with `previous`, copy the policy's weights to the old model (Algorithm 1, line 20).

        So after update t the old model is theta_t, to the bit unless it is kept in a narrower dtype.
        """
        if self.old == "previous" and self.old_model is not None:
            self.old_model.move_from(self.policy)

    def is_policy(self, micro_batch: MicroBatch) -> Array:
        """Rows whose old policy is the policy itself, bool [R].

        Raises `ValueError` for rows that are too stale for the old policy, unless the loss corrects for that.
        """
        limit = None if self.is_corrected else SAMPLED_UP_TO.get(self.old)
        if limit is not None and (stale := micro_batch.staleness > limit).any():
            row, staleness = int(micro_batch.indices[stale][0]), int(micro_batch.staleness[stale][0])
            why = f"row {row} has staleness {staleness}, and train.old={self.old} is right up to {limit} only"
            raise ValueError(f"{why}: take train.old=rollout")
        if self.old == "previous":
            is_new: Array = micro_batch.staleness == 0
            return is_new
        return np.full(len(micro_batch.indices), self.old == "current")

    def asked(self, micro_batches: Sequence[MicroBatch]) -> tuple[bool, bool]:
        """Whether micro-batches need log-probs of the old model, and of the reference. Raises `ValueError` as `is_policy`."""
        asks_old = [self.old_model is not None and not self.is_policy(each).all() for each in micro_batches]  # of all: it may raise
        return any(asks_old), self.reference is not None and any(each.ref_logprobs is None for each in micro_batches)
