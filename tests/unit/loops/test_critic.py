"""The critic's two loops: the values of a step are those of the critic's version of that number."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncflow.attestation import Attestation
from asyncflow.control.critic_versions import CriticVersions
from asyncflow.control.signal import Signal
from asyncflow.loops.context import LoopContext
from asyncflow.loops.critic import add_values
from asyncflow.loops.samples import VALUES_COLUMN, VALUES_TASK, Shape
from asyncflow.telemetry.spans import Recorder, Span
from asyncflow.transfer_queue.leases import Want
from asyncflow.types import Array, Batch, Ragged
from asyncflow.weight_sync.base import Manifest, WeightSyncError
from tests.builders import loop_turns

STEPS = 2


class Queue:
    """Each step has one group, of its number, with responses of one and two tokens. The values that come are noted, by group."""

    def __init__(self) -> None:
        self.left, self.values = [*range(STEPS)], dict[int, list[list[float]]]()

    async def lease(self, task: str, want: Want) -> Any:
        if want.partition not in self.left:
            return None
        self.left.remove(want.partition)
        columns = {
            "prompt_ids": Ragged.from_arrays([np.arange(2)], "int64"),
            "response_ids": Ragged.from_arrays([np.arange(1), np.arange(2)], "int64"),
        }
        rows = np.array([2 * want.partition, 2 * want.partition + 1], np.int64)
        return SimpleNamespace(lease=None, batch=Batch(rows, np.array([want.partition], np.int64), columns))

    async def complete(self, lease: Any, columns: Batch) -> list[bool]:
        self.values[int(columns.groups[0])] = [row.tolist() for row in columns.ragged(VALUES_COLUMN.name)]
        return [True] * len(columns)


class Receiver:
    """Of the versions that are kept; the tensors of a version are its number. What was fetched is held until it is released."""

    def __init__(self, *kept: int) -> None:
        self.kept, self.held = {*kept}, 0
        self.on_fetch: Any = partial(asyncio.sleep, 0)

    async def fetch(self, manifest: Manifest) -> Any:
        await self.on_fetch()
        if manifest.version not in self.kept:
            raise WeightSyncError(f"version {manifest.version} is no longer kept")
        self.held += 1
        return manifest.version

    async def release(self) -> None:
        self.held -= 1


class Adding:
    """`add_values` under way, until there are no more than `STEPS` steps. Each value is the version that the engine has."""

    def __init__(self, versions: CriticVersions, receiver: Any = None) -> None:
        self.queue, self.installed, self.spans = Queue(), 0, list[Span]()
        engine: Any = SimpleNamespace(values=self._values, install=self._install, attest=self._attest)
        ledger: Any = SimpleNamespace(may_start=self._may_start)
        client: Any = self.queue
        nobodys: Any = None
        shape, recorder = Shape(1, 2, 1, 0, 1.0, 8, 1), Recorder("critic", partial(next, count()), self.spans.append)
        context = LoopContext(client, ledger, nobodys, nobodys, shape, recorder)
        self.task = asyncio.create_task(asyncio.wait_for(add_values(context, engine, versions, receiver), 5))

    async def _values(self, prompt_ids: Array, response_ids: Ragged) -> Ragged:
        return Ragged(np.full(len(response_ids.values), self.installed, np.float32), response_ids.offsets)

    async def _install(self, tensors: Any) -> None:
        self.installed = tensors

    async def _attest(self) -> Attestation:
        return Attestation([(["head"], self.installed)])

    async def _may_start(self, task: str, step: int) -> bool:
        assert task == VALUES_TASK
        return step < STEPS


def published(version: int) -> Manifest:
    return Manifest("critic", version, "", "", 0, {}, sums={"head": version})


async def test_the_values_of_a_step_wait_for_the_critics_version_of_that_number() -> None:
    versions = CriticVersions(Signal())
    adding = Adding(versions)
    await loop_turns()
    assert adding.queue.values == {0: [[0.0], [0.0, 0.0]]}
    adding.installed = 1  # by training: the engine is the critic's own
    await versions.publish(1, None)
    await loop_turns()
    assert adding.queue.values == {0: [[0.0], [0.0, 0.0]], 1: [[1.0], [1.0, 1.0]]}
    await versions.publish(2, None)
    await adding.task
    assert [(span.step, span.version) for span in adding.spans if span.task == VALUES_TASK] == [(0, 0), (1, 1)]


async def test_a_worker_of_a_pool_installs_the_version_of_the_step_and_lets_its_file_go() -> None:
    versions, receiver = CriticVersions(Signal()), Receiver(1, 2)
    adding = Adding(versions, receiver)
    await loop_turns()
    await versions.publish(1, published(1))
    await loop_turns()
    assert adding.queue.values == {0: [[0.0], [0.0, 0.0]], 1: [[1.0], [1.0, 1.0]]} and receiver.held == 0
    versions.stop()
    await adding.task
    assert [(span.step, span.version) for span in adding.spans if span.task == "install"] == [(1, 1)]


async def test_a_worker_that_is_late_goes_on_with_the_step_that_is_not_trained_yet() -> None:
    versions, receiver = CriticVersions(Signal(), first=1), Receiver(1)

    async def overtaken() -> None:
        receiver.on_fetch = partial(asyncio.sleep, 0)
        await versions.publish(1, published(1))

    await versions.publish(0, published(0))
    receiver.on_fetch = overtaken
    adding = Adding(versions, receiver)
    await loop_turns()
    assert adding.queue.values == {1: [[1.0], [1.0, 1.0]]}, "of step 0 others have made the values"
    versions.stop()
    await adding.task


async def test_weights_that_cannot_be_had_end_the_worker_while_nothing_newer_is_there() -> None:
    versions, receiver = CriticVersions(Signal()), Receiver()
    adding = Adding(versions, receiver)
    await versions.publish(1, published(1))
    with pytest.raises(WeightSyncError, match="version 1 is no longer kept"):
        await adding.task


async def test_a_worker_ends_that_would_compute_values_by_other_weights_than_the_critics() -> None:
    versions, receiver = CriticVersions(Signal()), Receiver(1)
    adding = Adding(versions, receiver)
    await loop_turns()
    await versions.publish(1, msgspec.structs.replace(published(1), sums={"head": 7}))
    with pytest.raises(WeightSyncError, match=r"by other weights than the critic's: .* version 1 in 1 of 1 parts, head the first"):
        await adding.task
    assert adding.queue.values == {0: [[0.0], [0.0, 0.0]]}, "no value by those weights"


async def test_weights_that_do_not_come_since_the_run_is_stopping_are_no_error() -> None:
    versions, receiver = CriticVersions(Signal()), Receiver()

    async def stopped() -> None:
        versions.stop()

    receiver.on_fetch = stopped
    adding = Adding(versions, receiver)
    await versions.publish(1, published(1))
    await adding.task
    assert not adding.installed
