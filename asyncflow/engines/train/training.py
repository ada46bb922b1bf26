"""Training of a model in its engine's compute thread: the calls of `TrainEngine`, which documents them, without coroutines.

begin_step -> forward_backward, any number of times -> optim_step or discard
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from asyncflow.engines.base import Hyperparameters, MicroBatch, MicroBatchResult, OptimResult
from asyncflow.engines.train.device_weights import HostCopies
from asyncflow.engines.train.model.tri_model import TriModel
from asyncflow.engines.train.optimizer import Optimizer
from asyncflow.engines.train.state import EngineState
from asyncflow.types import Array, Ragged, TensorSpec

if TYPE_CHECKING:
    from asyncflow.engines.train.helpers import Helpers
    from asyncflow.engines.train.parallel.ranks import Ranks


class Training(ABC):
    """Training of a policy, or of a critic.

    On several ranks every method is called on all ranks of a data-parallel group, and by all groups alike.
    """

    ranks: Ranks | None = None
    """Ranks that the model is sharded over; None if there is only one."""
    data_parallel_rank: int | None = 0
    """Rank of the data-parallel group, from 0, in its leader; None in a rank that follows."""
    models: TriModel[Any] | None = None
    """The policy with its frozen models; None for a critic."""
    helpers: Helpers[Any] | None = None
    """Helpers of this process, if it was made with any."""
    _optimizer: Optimizer
    _state: EngineState
    """State in a checkpoint. An engine that keeps another one overrides the three methods that use it."""

    def use_threads(self, count: int) -> None:
        """Compute with so many threads from now on, in the calling thread. Bits depend on their number."""
        torch.set_num_threads(count)

    def begin_step(self) -> None:
        """See `TrainEngine.begin_step`."""
        self._state.begin_step()
        if self.models is not None:
            self.models.begin_step()

    @abstractmethod
    def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Any) -> list[MicroBatchResult]:
        """See `TrainEngine.forward_backward`."""

    def set_hyperparameters(self, chosen: Hyperparameters) -> None:
        """See `ModelTraining.set_hyperparameters`."""
        self._optimizer.set_hyperparameters(chosen)

    def optim_step(self, normaliser: int) -> OptimResult:
        """See `TrainEngine.optim_step`."""
        if self.models is not None:
            self.models.before_update()
        return self._update(normaliser)

    def discard(self) -> None:
        """See `TrainEngine.discard`."""
        if self.models is not None:
            self.models.before_update()  # the version rises all the same
        self._clear()

    @abstractmethod
    def fingerprint(self) -> Mapping[str, str]:
        """See `TrainEngine.fingerprint`."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """See `TrainEngine.save`."""

    def save_state(self, folder: Path) -> Future[None]:
        """See `EngineState.save`."""
        return self._state.save(folder)

    def load_state(self, folder: Path) -> None:
        """See `EngineState.load`."""
        self._state.load(folder)

    @abstractmethod
    def _update(self, normaliser: int) -> OptimResult:
        """Update the weights by the step's sums, divided by `normaliser`, and clear the sums."""

    @abstractmethod
    def _clear(self) -> None:
        """Clear the step's sums."""


class PolicyTraining(Training):
    """`Training` of a policy. `specs`: shapes and dtypes of its weights by Hugging Face name, in the order of gathering."""

    models: TriModel[Any]
    specs: Mapping[str, TensorSpec]

    def log_probs(
        self,
        prompt_ids: Array,
        response_ids: Ragged,
        target_ids: Ragged | None = None,
        temperature: float | None = None,
        rounded_to: str | None = None,
    ) -> Ragged:
        """See `TrainEngine.log_probs`."""
        with rounded(self._trained(), rounded_to):
            return self._response_log_probs(prompt_ids, response_ids, target_ids, temperature)

    @abstractmethod
    def _response_log_probs(
        self, prompt_ids: Array, response_ids: Ragged, target_ids: Ragged | None, temperature: float | None
    ) -> Ragged:
        """See `LogProbEngine.log_probs`."""

    @abstractmethod
    def _trained(self) -> Iterable[Tensor]:
        """Memory, on this rank, of the weights that are trained, as passes read them."""

    def gather(self, name: str) -> Tensor | None:
        """Whole weight of that name, on the CPU, contiguous; None on all ranks but rank 0.

        It is to be published: valid until the one after the next is gathered.
        """
        whole = self._whole(name)
        return None if whole is None else self._copies.of(whole)

    @abstractmethod
    def _whole(self, name: str) -> Tensor | None:
        """Whole weight of that name, on any device; None on all ranks but rank 0."""

    @cached_property
    def _copies(self) -> HostCopies:
        return HostCopies(self.specs)


@contextmanager
def rounded(weights: Iterable[Tensor], dtype: str | None) -> Iterator[None]:
    """Context inside which weights have the values that they have in a dtype; None: their own. Nobody else reads them meanwhile."""
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        if dtype is not None:
            for own in (weight.detach() for weight in weights):
                kept.append((own, own.clone()))
                own.copy_(own.to(getattr(torch, dtype)))
        yield
    finally:
        for own, before in kept:
            own.copy_(before)
