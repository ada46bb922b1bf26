"""Calls of a train engine, made in its compute thread, and in the ranks that follow it if the model is sharded.

consumes: micro-batches with a loss, optimiser steps, requests for log-probs and weights
waits for: the call before it (one compute thread, which is also the engine's lock); the same call on the other ranks
is unblocked by: each call as it comes; a follower by its leader's calls

    a leader's loop --call--> LedEngine --call (calls.py)--> the LedEngines that follow
                                  |                                    |
                              in its thread: a `Training`, with the other ranks'
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from asyncflow.engines.base import MicroBatch, MicroBatchResult, OptimResult, TrainEngineOptions
from asyncflow.engines.train.parallel import calls
from asyncflow.threads import ComputeThread
from asyncflow.types import Array, Objective, Ragged, RunError, TensorSpec, WeightSource

if TYPE_CHECKING:
    from asyncflow.engines.train.parallel.ranks import Ranks


class Training(Protocol):
    """`TrainEngine` without coroutines, called in one thread. `TrainEngine` documents the methods of the same names.

    On several ranks every method is called on all ranks of a data-parallel group, and by all groups alike.
    """

    @property
    def data_parallel_rank(self) -> int | None:
        """Rank of the data-parallel group, from 0, in its leader; None in a rank that follows."""
        ...

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Shapes and dtypes of all weights by Hugging Face name, in the order in which they are gathered."""
        ...

    def begin_step(self) -> None:
        """See `TrainEngine.begin_step`."""
        ...

    def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[MicroBatchResult]:
        """See `TrainEngine.forward_backward`."""
        ...

    def optim_step(self, normaliser: int) -> OptimResult:
        """See `TrainEngine.optim_step`."""
        ...

    def discard(self) -> None:
        """See `TrainEngine.discard`."""
        ...

    def log_probs(self, prompt_ids: Array, response_ids: Ragged) -> Ragged:
        """See `LogProbEngine.log_probs`."""
        ...

    def gather(self, name: str) -> Tensor | None:
        """Whole weight of that name, on the CPU, contiguous; None on all ranks but rank 0."""
        ...

    def fingerprint(self) -> Mapping[str, str]:
        """See `TrainEngine.fingerprint`."""
        ...

    def save(self, path: Path) -> None:
        """See `TrainEngine.save`."""
        ...

    def save_state(self, folder: Path) -> Future[None]:
        """See `TrainEngine.save_state`."""
        ...

    def load_state(self, folder: Path) -> None:
        """See `TrainEngine.load_state`."""
        ...


class LeaderEngine:
    """`TrainEngine` that makes each call on a `Training` in the compute thread, and on the ranks that follow this one."""

    def __init__(self, training: Training, options: TrainEngineOptions, ranks: Ranks | None) -> None:
        """`ranks`: those that the engine is sharded over, which it leaves when it is closed; None if there is only one."""
        self.training, self._ranks = training, ranks
        self.device, self.data_parallel_rank = options.device, training.data_parallel_rank
        self._end = ""  # what ended the exchange with the other ranks
        # The count holds for GEMMs only when it is set inside the thread that calls them.
        self._thread = ComputeThread("train-engine", setup=lambda: self._set_up(options.num_threads))

    async def follow(self, objective: Objective, busy: Callable[[str], AbstractContextManager[object]]) -> None:
        """See `TrainEngine.follow`."""
        if self._ranks is None or self.data_parallel_rank is not None:
            return
        written: Future[None] | None = None
        while not isinstance(call := await self._thread.run(self._ranks.receive), calls.Close):
            with busy(calls.name_of(call)):
                done = await self._thread.run(self._do, call, objective)
                if isinstance(call, calls.SaveState):
                    done.add_done_callback(_look_at)
                    written = done
        if written is not None:  # this process must not end before its part of the state is written
            await asyncio.wait([asyncio.wrap_future(written)])
        await self.close()

    async def begin_step(self) -> None:
        """See `TrainEngine.begin_step`."""
        await self._lead(calls.BeginStep())

    async def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[MicroBatchResult]:
        """See `TrainEngine.forward_backward`. Raises `RunError` when sharing the prompt changes the numbers."""
        results: list[MicroBatchResult] = await self._lead(calls.ForwardBackward(list(micro_batches)), objective)
        return results

    async def optim_step(self, normaliser: int) -> OptimResult:
        """See `TrainEngine.optim_step`. Also skipped when nothing was accumulated. Raises `ValueError` if `normaliser` < 1."""
        if normaliser < 1:
            raise ValueError(f"a step cannot be divided by {normaliser}")
        result: OptimResult = await self._lead(calls.OptimStep(normaliser))
        return result

    async def discard(self) -> None:
        """See `TrainEngine.discard`."""
        await self._lead(calls.Discard())

    async def log_probs(self, prompt_ids: Array, response_ids: Ragged) -> Ragged:
        """See `LogProbEngine.log_probs`. The log-probs are those under the policy's current weights."""
        log_probs: Ragged = await self._lead(calls.LogProbs(prompt_ids, response_ids))
        return log_probs

    async def export_weights(self) -> WeightSource:
        """See `TrainEngine.export_weights`. The weights are float32."""
        return _GatheredWeights(self.training.specs, self._gather)

    async def fingerprint(self) -> Mapping[str, str]:
        """See `TrainEngine.fingerprint`."""
        fingerprint: Mapping[str, str] = await self._lead(calls.Fingerprint())
        return fingerprint

    async def save(self, path: Path) -> None:
        """Write config, generation config and float32 weights. The caller copies the tokenizer's files."""
        await self._lead(calls.Save(path))

    async def save_state(self, folder: Path) -> Awaitable[None]:
        """See `TrainEngine.save_state`."""
        return asyncio.wrap_future(await self._lead(calls.SaveState(folder)))

    async def load_state(self, folder: Path) -> None:
        """See `TrainEngine.load_state`."""
        await self._lead(calls.LoadState(folder))

    async def close(self) -> None:
        """Stop the compute thread; the ranks that follow this one close, too."""
        if self._ranks is not None and not self._end:
            await self._thread.run(self._leave, self._ranks)
        self._thread.close()

    async def _gather(self, name: str) -> Tensor | None:
        tensor: Tensor | None = await self._lead(calls.Gather(name))
        return tensor

    async def _lead(self, call: calls.Call, objective: Objective | None = None) -> Any:
        """Make a call on this rank and on those that follow it."""
        return await self._thread.run(self._tell_and_do, call, objective)

    def _tell_and_do(self, call: calls.Call, objective: Objective | None) -> Any:
        if self._ranks is not None and not self._end:
            self._ranks.broadcast(call)
        return self._do(call, objective)

    def _do(self, call: calls.Call, objective: Objective | None) -> Any:
        if self._end:
            raise RunError(f"this rank is of no use to the others any more: {self._end}")
        try:
            with nullcontext() if self._ranks is None else self._ranks.named(calls.name_of(call)):
                return self._made(call, objective)
        except BaseException as error:
            if self._ranks is not None:  # the others wait for this one until its process has ended
                self._end = f"{calls.name_of(call)} had failed ({error})"
            raise

    def _made(self, call: calls.Call, objective: Objective | None) -> Any:
        training = self.training
        match call:
            case calls.BeginStep():
                return training.begin_step()
            case calls.ForwardBackward(micro_batches):
                assert objective is not None
                return training.forward_backward(micro_batches, objective)
            case calls.OptimStep(normaliser):
                return training.optim_step(normaliser)
            case calls.Discard():
                return training.discard()
            case calls.LogProbs(prompt_ids, response_ids):
                return training.log_probs(prompt_ids, response_ids)
            case calls.Gather(name):
                return training.gather(name)
            case calls.Fingerprint():
                return training.fingerprint()
            case calls.Save(path):
                return training.save(path)
            case calls.SaveState(folder):
                return training.save_state(folder)
            case calls.LoadState(folder):
                return training.load_state(folder)
            case calls.Close():
                return None

    def _set_up(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        if self._ranks is not None and (index := self._ranks.device.index) is not None:
            torch.accelerator.set_device_index(index)  # which is a thread's own, too

    def _leave(self, ranks: Ranks) -> None:
        self._end = "it was closed"
        if self.data_parallel_rank is not None:
            with suppress(RunError):  # a rank that has ended already needs no notice
                ranks.broadcast(calls.Close())
        ranks.leave()


class _GatheredWeights:
    """`WeightSource` of weights that are sharded over several ranks, gathered one at a time."""

    are_lasting = False

    def __init__(self, specs: Mapping[str, TensorSpec], gather: Callable[[str], Awaitable[Tensor | None]]) -> None:
        self.specs, self._gather = specs, gather
        self._gathered = asyncio.Event()

    async def tensors(self) -> AsyncIterator[tuple[str, Tensor]]:
        """See `WeightSource.tensors`."""
        for number, name in enumerate(self.specs, 1):
            tensor = await self._gather(name)
            if number == len(self.specs):  # now, since the consumer may stop after the last tensor
                self._gathered.set()
            if tensor is not None:
                yield name, tensor
                del tensor  # one at a time

    async def gathered(self) -> None:
        """See `WeightSource.gathered`."""
        await self._gathered.wait()


def _look_at(written: Any) -> None:
    """Retrieve the error of a follower's write, so that it is not logged here: rank 0, which waits for all, reports it."""
    written.exception()
