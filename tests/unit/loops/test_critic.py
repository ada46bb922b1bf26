"""The critic's two loops: the values of a step are those of the critic's version of that number."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np

from asyncflow.loops.context import LoopContext
from asyncflow.loops.critic import Version, add_values
from asyncflow.loops.samples import VALUES_COLUMN, VALUES_TASK, Shape
from asyncflow.telemetry.spans import Recorder, Span
from asyncflow.transfer_queue.leases import Want
from asyncflow.types import Array, Batch, Ragged
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


async def test_the_values_of_a_step_wait_for_the_critics_version_of_that_number() -> None:
    queue, version, spans = Queue(), Version(0), list[Span]()

    async def values(prompt_ids: Array, response_ids: Ragged) -> Ragged:
        return Ragged(np.full(len(response_ids.values), version.number, np.float32), response_ids.offsets)

    async def may_start(task: str, step: int) -> bool:
        assert task == VALUES_TASK
        return step < STEPS

    engine: Any = SimpleNamespace(values=values)
    ledger: Any = SimpleNamespace(may_start=may_start)
    client: Any = queue
    shape, recorder = Shape(1, 2, 1, 0, 1.0, 8, 1), Recorder("critic", partial(next, count()), spans.append)
    nobodys: Any = None
    context = LoopContext(client, ledger, nobodys, nobodys, shape, recorder)
    adding = asyncio.create_task(add_values(context, engine, version))
    await loop_turns()
    assert queue.values == {0: [[0.0], [0.0, 0.0]]}
    version.rise()
    await loop_turns()
    assert queue.values == {0: [[0.0], [0.0, 0.0]], 1: [[1.0], [1.0, 1.0]]}
    version.rise()
    await asyncio.wait_for(adding, 5)
    assert [(span.step, span.version) for span in spans if span.task == VALUES_TASK] == [(0, 0), (1, 1)]
