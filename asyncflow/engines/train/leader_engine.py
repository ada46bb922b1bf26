"""Calls of a train engine, made in its compute thread, and in the ranks that follow it if the model is sharded.

consumes: micro-batches with a loss, optimiser steps, requests for log-probs and weights
waits for: the call before it (one compute thread, which is also the engine's lock); the same call on the other ranks
is unblocked by: each call as it comes; a follower by its leader's calls

    a leader's loop --call--> LeaderEngine --call (calls.py)--> the LeaderEngines that follow
                                   |                                      |
                               in its thread: a `Training`, with the other ranks'
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from asyncflow.engines.base import (
    Hyperparameters,
    MicroBatch,
    MicroBatchResult,
    ModelTraining,
    OptimResult,
    TrainEngine,
    TrainEngineOptions,
)
from asyncflow.engines.devices import use_device
from asyncflow.engines.train.parallel.calls import Call
from asyncflow.engines.train.training import PolicyTraining, Training
from asyncflow.threads import ComputeThread
from asyncflow.types import Array, Objective, Ragged, RunError, TensorSpec, WeightSource

T = TypeVar("T", bound=Training)


class TrainingEngine(ModelTraining, Generic[T]):
    """`ModelTraining` that makes each call on a `Training` in the compute thread, and on the ranks that follow this one."""

    def __init__(self, training: T, options: TrainEngineOptions) -> None:
        """The engine leaves the ranks of `training` when it is closed."""
        self.training, self._ranks = training, training.ranks
        self.device, self.data_parallel_rank = options.device, training.data_parallel_rank
        self.helpers = training.helpers
        """Helpers of this process, if it has any."""
        self._end = ""  # what ended the exchange with the other ranks
        # The count holds for GEMMs only when it is set inside the thread that calls them.
        self._thread = ComputeThread("train-engine", setup=lambda: self._set_up(options.num_threads))

    async def use_threads(self, count: int) -> None:
        """Compute with so many threads from the next call on, as the ranks do that follow."""
        await self._lead("use_threads", count)

    async def begin_step(self) -> None:
        await self._lead("begin_step")

    async def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Any) -> list[MicroBatchResult]:
        """See `TrainEngine.forward_backward`. Raises `RunError` when sharing the prompt changes the numbers."""
        return await self._lead("forward_backward", list(micro_batches), objective=objective)

    async def set_hyperparameters(self, chosen: Hyperparameters) -> None:
        """See `ModelTraining.set_hyperparameters`."""
        await self._lead("set_hyperparameters", chosen)

    async def optim_step(self, normaliser: int) -> OptimResult:
        """See `ModelTraining.optim_step`. Also skipped when nothing was accumulated. Raises `ValueError` if `normaliser` < 1."""
        if normaliser < 1:
            raise ValueError(f"a step cannot be divided by {normaliser}")
        return await self._lead("optim_step", normaliser)

    async def discard(self) -> None:
        await self._lead("discard")

    async def fingerprint(self) -> Mapping[str, str]:
        return await self._lead("fingerprint")

    async def save(self, path: Path) -> None:
        """Write config, generation config and float32 weights. The caller copies the tokenizer's files."""
        await self._lead("save", path)

    async def save_state(self, folder: Path) -> Awaitable[None]:
        return asyncio.wrap_future(await self._lead("save_state", folder))

    async def load_state(self, folder: Path) -> None:
        await self._lead("load_state", folder)

    async def close(self) -> None:
        """Stop the compute thread and the helpers; the ranks that follow this one close, too."""
        if self._ranks is not None and not self._end:
            await self._thread.run(self._leave)
        self._thread.close()
        if self.helpers is not None:
            self.helpers.close()

    async def _lead(self, method: str, *arguments: Any, objective: object = None) -> Any:
        """Make a call on this rank and on those that follow it."""
        return await self._thread.run(self._broadcast_and_do, Call(method, arguments), objective)

    def _broadcast_and_do(self, call: Call, objective: object) -> Any:
        if self._ranks is not None and not self._end:
            self._ranks.broadcast(call)
        return self._do(call, objective)

    def _do(self, call: Call, objective: object) -> Any:
        if self._end:
            raise RunError(f"this rank is of no use to the others any more: {self._end}")
        try:
            with nullcontext() if self._ranks is None else self._ranks.named(call.method):
                with_objective = (objective,) if call.method == "forward_backward" else ()
                return getattr(self.training, call.method)(*call.arguments, *with_objective)
        except BaseException as error:
            if self._ranks is not None:  # the others wait for this one until its process has ended
                self._end = f"{call.method} had failed ({error})"
            raise

    def _set_up(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        if self._ranks is not None:
            use_device(self._ranks.device)

    def _leave(self) -> None:
        assert self._ranks is not None
        self._end = "it was closed"
        if self.data_parallel_rank is not None:
            with suppress(RunError):  # a rank that has ended already needs no notice
                self._ranks.broadcast(Call("close"))
        self._ranks.leave()


class LeaderEngine(TrainingEngine[PolicyTraining], TrainEngine):
    """`TrainEngine` of a policy: a leader's, or that of a rank that follows one."""

    async def follow(self, objective: Objective, busy: Callable[[str], AbstractContextManager[object]]) -> None:
        if self._ranks is None or self.data_parallel_rank is not None:
            return
        written: Future[None] | None = None
        while (call := await self._thread.run(self._ranks.receive)).method != "close":
            with busy(call.method):
                done = await self._thread.run(self._do, call, objective)
                if call.method == "save_state":
                    done.add_done_callback(_look_at)
                    written = done
        if written is not None:  # this process must not end before its part of the state is written
            await asyncio.wait([asyncio.wrap_future(written)])
        await self.close()

    async def log_probs(
        self,
        prompt_ids: Array,
        response_ids: Ragged,
        target_ids: Ragged | None = None,
        temperature: float | None = None,
        rounded_to: str | None = None,
    ) -> Ragged:
        """See `TrainEngine.log_probs`. The log-probs are those under the policy's current weights."""
        return await self._lead("log_probs", prompt_ids, response_ids, target_ids, temperature, rounded_to)

    async def export_weights(self) -> WeightSource:
        """See `TrainEngine.export_weights`. The weights are float32."""
        return _GatheredWeights(self.training.specs, lambda name: self._lead("gather", name))


class _GatheredWeights(WeightSource):
    """`WeightSource` of weights that are sharded over several ranks. The ranks gather a tensor while the one before it is used, so
    that the first rank has two at a time."""

    are_lasting, are_gathered = False, True

    def __init__(self, specs: Mapping[str, TensorSpec], gather: Callable[[str], Awaitable[Tensor | None]]) -> None:
        self.specs, self._gather = specs, gather
        *_, self._last = specs
        self._gathered = asyncio.Event()

    async def tensors(self) -> AsyncIterator[tuple[str, Tensor]]:
        coming = asyncio.create_task(self._next(next(iter(self.specs))))
        try:
            for name, following in pairwise([*self.specs, ""]):
                tensor = await coming
                if following:
                    coming = asyncio.create_task(self._next(following))
                if tensor is not None:
                    yield name, tensor
                    del tensor  # two at a time
        finally:
            coming.cancel()  # a reader that fails needs no more

    async def gathered(self) -> None:
        await self._gathered.wait()

    async def _next(self, name: str) -> Tensor | None:
        tensor = await self._gather(name)
        if name == self._last:  # now, not when the reader comes to it
            self._gathered.set()
        return tensor


def _look_at(written: Any) -> None:
    """Retrieve the error of a follower's write, so that it is not logged here: rank 0, which waits for all, reports it."""
    written.exception()
