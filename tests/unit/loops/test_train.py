"""The consumer's loop: what of a publication the next step waits for. Queue and ledger are real, the others note calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from asyncflow.algorithms.grpo import GRPO
from asyncflow.control.modes import Bounded
from asyncflow.control.policy_versions import PolicyVersions
from asyncflow.engines.base import MicroBatch, MicroBatchResult, OptimResult, TrainEngine
from asyncflow.loops.algorithm1 import train
from asyncflow.telemetry.attribution import attributed
from asyncflow.telemetry.batches import StepLogs
from asyncflow.telemetry.idle import busy_and_idle
from asyncflow.telemetry.spans import Recorder, Span
from asyncflow.types import CheckpointPlace, TensorSpec, WeightSource, first_error
from asyncflow.weight_sync.base import Manifest, WeightSender, WeightSyncError
from tests.builders import loop_turns
from tests.unit.loops.test_rounds import World, a_world


class Weights:
    """`WeightSource` of one tensor, which the engine gathers when the test says so, or which is there."""

    def __init__(self, calls: list[str], may_gather: asyncio.Event | None) -> None:
        self.specs: Mapping[str, TensorSpec] = {"w": TensorSpec((1,), "float32")}
        self.are_lasting, self.are_gathered = may_gather is None, may_gather is not None
        self._calls, self._may_gather, self._is_gathered = calls, may_gather, asyncio.Event()

    async def tensors(self) -> AsyncIterator[tuple[str, Tensor]]:
        if self._may_gather is not None:
            await self._may_gather.wait()
            self._calls.append("gather")
        yield "w", torch.zeros(1)
        self._is_gathered.set()

    async def gathered(self) -> None:
        if self._may_gather is not None:
            await self._is_gathered.wait()


class Run:
    """A trainer of steps of two groups, its engine, its sender, its versions and its keeper: `calls` are theirs, in order."""

    data_parallel_rank = 0

    def __init__(self, world: World, *, gathers: bool = False, is_kept: bool = False) -> None:
        self.calls: list[str] = []
        self.may_publish, self.failure, self._is_kept = asyncio.Event(), "", is_kept
        self.may_gather = asyncio.Event() if gathers else None
        self.now, self.spans = 0.0, list[Span]()
        self.recorder = Recorder("trainer/0", lambda: self.now, self.spans.append)
        context = replace(world.context(), versions=cast(PolicyVersions, Noted(self)), spans=self.recorder)
        parts = cast(TrainEngine, self), GRPO(), cast(WeightSender, Sender(self))
        self.training = asyncio.create_task(train(context, *parts, StepLogs(), self))

    async def begin_step(self) -> None:
        self.calls.append("begin")

    async def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Any) -> list[MicroBatchResult]:
        self.calls.append("forward")
        return [MicroBatchResult(0.5, 2, 4) for _ in micro_batches]

    async def optim_step(self, normaliser: int) -> OptimResult:
        self.calls.append("update")
        return OptimResult(1.0, 1.0)

    async def export_weights(self) -> WeightSource:
        return Weights(self.calls, self.may_gather)

    async def committed(
        self, version: int, asked: CheckpointPlace | None, published: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        if self._is_kept and published is not None:
            await published()
        self.calls.append(f"keep {version}")


class Sender:
    def __init__(self, run: Run) -> None:
        self._run = run

    async def publish(self, version: int, source: WeightSource) -> Manifest:
        async for _ in source.tensors():
            pass
        try:
            await self._run.may_publish.wait()
        except asyncio.CancelledError:
            self._run.calls.append("cancelled")
            raise
        if self._run.failure:
            raise WeightSyncError(self._run.failure)
        return Manifest("", version, "", "", 0, {})

    def retain(self, versions: Collection[int]) -> None: ...


class Noted:
    def __init__(self, run: Run) -> None:
        self._run = run

    async def probe_ids(self, version: int) -> list[int]:
        return []

    async def retained(self) -> list[int]:
        return []

    async def publish(self, manifest: Manifest) -> None:
        self._run.calls.append(f"published {manifest.version}")


@contextlib.asynccontextmanager
async def a_run(num_steps: int = 2, **how: bool) -> AsyncIterator[tuple[World, Run]]:
    """Of steps whose groups are all there; the first one is trained."""
    async with a_world(Bounded(max_staleness=2)) as world:
        await world.admit(num_steps)
        world.service.allow(num_steps, num_steps)
        run = Run(world, **how)
        await world.complete(*range(2 * num_steps))
        await loop_turns(500)
        yield world, run


FIRST = ["begin", "forward", "forward", "update"]


async def test_the_next_step_is_computed_while_weights_are_published_and_changes_them_afterwards() -> None:
    async with a_run() as (world, run):
        assert run.calls == [*FIRST, "keep 1", "begin", "forward", "forward"]
        run.may_publish.set()
        await loop_turns(500)
        assert run.calls[8:10] == ["published 1", "update"] and sorted(run.calls[10:]) == ["keep 2", "published 2"]
        world.service.stop()
        assert await asyncio.wait_for(run.training, 5) == 2


async def test_weights_on_several_ranks_are_gathered_before_the_engine_is_called_again() -> None:
    async with a_run(gathers=True) as (_, run):
        assert run.calls == FIRST
        assert run.may_gather is not None
        run.may_gather.set()
        await loop_turns(500)
        assert run.calls == [*FIRST, "gather", "keep 1", "begin", "forward", "forward"]
        run.training.cancel()


@pytest.mark.parametrize("gathers", [False, True])
async def test_a_publication_that_fails_ends_the_training_before_the_next_update(gathers: bool) -> None:
    async with a_run(gathers=gathers) as (_, run):
        if run.may_gather is not None:
            run.may_gather.set()
            await loop_turns(500)
        assert run.calls[-3:] == ["begin", "forward", "forward"]
        run.failure = "no room"
        run.may_publish.set()
        with pytest.raises(BaseExceptionGroup) as raised:
            await asyncio.wait_for(run.training, 5)
        assert isinstance(error := first_error(raised.value), WeightSyncError) and str(error) == "no room"
        assert run.calls.count("update") == 1 and not any(call.startswith("published") for call in run.calls)


async def test_one_that_is_told_to_stop_publishes_what_it_has_made() -> None:
    async with a_world(Bounded(max_staleness=2)) as world:
        await world.admit(1)
        world.service.allow(2, 2)
        run = Run(world)
        await world.complete(0, 1)
        await loop_turns(500)
        world.service.stop()
        await loop_turns(500)
        assert run.calls == [*FIRST, "keep 1", "begin"] and not run.training.done()
        run.may_publish.set()
        assert await asyncio.wait_for(run.training, 5) == 1
        assert run.calls[-1] == "published 1"


async def test_one_that_is_cancelled_cancels_what_it_publishes() -> None:
    async with a_run() as (_, run):
        run.training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(run.training, 5)
        assert run.calls[-1] == "cancelled"


async def test_what_a_checkpoint_is_of_is_published_before() -> None:
    async with a_run(is_kept=True) as (_, run):
        assert run.calls == FIRST
        run.may_publish.set()
        await loop_turns(500)
        assert run.calls[4:7] == ["published 1", "keep 1", "begin"]
        run.training.cancel()


async def test_the_lane_waits_for_weights_only_while_they_hold_it_up() -> None:
    async with a_run() as (_, run):
        run.now = 3.0  # all that was computed took no time
        run.may_publish.set()
        await loop_turns(500)
        run.now = 4.0
        run.recorder.flush()
        spans = attributed(run.spans)
        assert busy_and_idle(spans, "trainer/0", 0.0, 3.0).idle == {"weights": 3.0}
        told = [(span.start, span.end, span.step, span.version) for span in spans if span.task == "publish"]
        assert told == [(0.0, 3.0, 0, 1), (3.0, 3.0, 1, 2)] and not any(span.is_lane for span in spans if span.task == "publish")
        run.training.cancel()
