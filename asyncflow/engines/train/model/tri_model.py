"""The tri-model (PA 4.2): policy, old policy and reference on one layout, in one micro-step.

    packed micro-batch --+--> policy ------> log-probs, with gradient
                         +--> old ---------> old log-probs        (`train.old`)
                         +--> reference ---> reference log-probs  (a KL term asks for it)

What the old policy of the ratio R = pi_theta / pi_old is (PA 2):

| `old` | is | right for | costs |
|---|---|---|---|
| `current` | the policy itself, detached: R = 1, and its gradient that of log pi | staleness 0, one update a step | nothing |
| `step_start` | the weights at the start of the step | staleness 0, any number of updates a step | a model, a forward |
| `previous` | theta_t for rows of staleness 1; for the others the policy itself | staleness 0 and 1, one update a step | the same |
| `rollout` | the engine that sampled, by its own log-probs | any staleness; corrects for the engine, too | nothing |

Why `current` at staleness 0: the weights that generated batch t are those that it is trained on, since nothing is updated before
the whole batch is consumed (PA, Theorem 1). PA's algorithm moves the policy into the old model right before each update (line 20),
which leaves it one update behind: theta_t while policy and rollout are theta_(t+1). For a batch of staleness 0 that is the wrong
policy; it is the right one where rollout runs one version behind, and that is what `previous` means here. Rows are told apart by
their own staleness, since the first batch of such a run has none.

Where the loss weighs each token by old policy / rollout (`algorithm.correction`), the old policy need not be the one that sampled,
and each of these is right for any staleness: `current` and `step_start` are then the proximal policy of decoupled PPO.
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from asyncflow.engines.base import MicroBatch
from asyncflow.types import SAMPLED_UP_TO, Array, Old

# R rows.

OLD_MODELS: tuple[Old, ...] = ("step_start", "previous")
"""Those that take a second model."""


class Weights(Protocol):
    """A model whose weights can be taken over by one like it."""

    def move_from(self, policy: Any, /) -> None:
        """Take over the policy's weights as they are now."""
        ...


Model = TypeVar("Model", bound=Weights)


class TriModel(Generic[Model]):
    """Which of the frozen models a micro-batch needs; `begin_step` and `before_update` move weights."""

    def __init__(
        self,
        policy: object,
        old: Old,
        old_model: Model | None,
        reference: Model | None,
        *,
        is_corrected: bool = False,
    ) -> None:
        """`old_model` is there for `OLD_MODELS` alone. `is_corrected`: rows may be staler than `old` by itself is right for."""
        self.policy, self.old, self.old_model, self.reference = policy, old, old_model, reference
        self.is_corrected = is_corrected

    def begin_step(self) -> None:
        """The policy is at the start of a step."""
        if self.old == "step_start" and self.old_model is not None:
            self.old_model.move_from(self.policy)

    def before_update(self) -> None:
        """The policy is about to be updated (Algorithm 1, line 20). After update t, `previous` is theta_t, to the
        bit unless it is kept in a narrower dtype."""
        if self.old == "previous" and self.old_model is not None:
            self.old_model.move_from(self.policy)

    def is_policy(self, micro_batch: MicroBatch) -> Array:
        """Bool [R]: the rows whose old policy is the policy itself.

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

    def asks_old_model(self, micro_batch: MicroBatch) -> bool:
        """Whether the old model's log-probs are needed. Raises as `is_policy`."""
        return self.old_model is not None and not self.is_policy(micro_batch).all()
