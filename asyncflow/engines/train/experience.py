"""Messages between the train engine of a trainer outside and the desk: experience on its way there, weights on their way back.

No torch here: they pass through the driver.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np

from asyncflow.engines.base import MicroBatch


class Experience(msgspec.Struct, frozen=True):
    """Micro-batch on its way: R rows with one prompt. Ragged columns are values end to end, with `lengths` for each row.

    indices int64 [R]; prompt_ids int64 [Lp]; lengths int64 [R]; response_ids int64 [T]; loss_mask uint8 [T]; rollout_logprobs
    float32 [T]; advantages float32 [T], of the run's algorithm; rewards float32 [R]; staleness int64 [R].
    """

    indices: np.ndarray
    prompt_ids: np.ndarray
    lengths: np.ndarray
    response_ids: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    rewards: np.ndarray
    staleness: np.ndarray

    @classmethod
    def of(cls, batch: MicroBatch) -> Experience:
        """A micro-batch in this form."""
        ragged = batch.response_ids
        return cls(
            indices=batch.indices,
            prompt_ids=batch.prompt_ids,
            lengths=ragged.lengths,
            response_ids=ragged.values,
            loss_mask=batch.loss_mask.values,
            rollout_logprobs=batch.rollout_logprobs.values,
            advantages=batch.token_advantages,
            rewards=np.zeros(len(batch.indices), np.float32) if batch.rewards is None else batch.rewards,
            staleness=batch.staleness,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, once, and of the responses."""
        return len(self.prompt_ids) + len(self.response_ids)


class Published(msgspec.Struct, frozen=True):
    """Weights that were made outside. `path`: a safetensors file, or a folder with such files, on this machine; empty: the update
    was skipped, and the weights stay as they are. The figures are those of the outside optimiser."""

    path: str
    grad_norm: float = 0.0
    learning_rate: float = 0.0


class Desk(Protocol):
    """The side of the desk that an engine sees."""

    async def begin(self, step: int) -> None:
        """Begin a step."""

    async def offer(self, batches: list[Experience]) -> None:
        """Offer micro-batches of the step to outside trainers."""

    async def update(self, normaliser: int) -> Published:
        """Wait for the weights that come of the step's micro-batches, all of which have been offered."""
        ...

    async def report_taken(self, why_not: str) -> None:
        """Report that the engine has taken the weights of `update`; with a reason, that it has not, and will ask again."""

    async def discard(self) -> None:
        """Discard the step: no weights come of it."""
