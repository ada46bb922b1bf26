"""A transfer queue served at a unix socket, by a thread of the test: rows whose columns follow from their indices."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.controller import TaskStatus
from asyncflow.transfer_queue.queue import TransferQueue
from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.transport import Server
from asyncflow.types import Array, Batch, Column, GroupMeta, Interval, Ragged
from tests.patience import patience

T = TypeVar("T")
BITS = 2
GROUP = 4


def schema(lease_seconds: float) -> Schema:
    return Schema(
        (
            Column("prompt", "int64", ragged=True, per="group"),
            Column("difficulty", "float64", per="group"),
            Column("response", "int32", ragged=True, counts_tokens=True),
            Column("hidden", "float16", ragged=True, shape=(2,)),
            Column("reward", "float32"),
            Column("image", "uint8", shape=(2, 3)),
            Column("is_right", "bool"),
            Column("score", "float32"),
            Column("logprobs", "float32", ragged=True),
        ),
        (
            TaskSpec(
                "score",
                ("prompt", "difficulty", "response", "hidden", "reward", "image", "is_right"),
                ("score", "logprobs"),
                whole_groups=False,
                lease_seconds=lease_seconds,
                max_failures=2,
            ),
            TaskSpec("train", ("response", "reward"), whole_groups=False, lease_seconds=lease_seconds),
            TaskSpec("update", ("prompt", "response", "score", "logprobs")),
        ),
        BITS,
    )


def length(row: int) -> int:
    """Of the row's response; a few are empty."""
    return row * 7 % 11


def response(row: int) -> Array:
    return np.arange(row, row + length(row), dtype=np.int32)


def prompt(group: int) -> Array:
    return np.full(1 + group % 5, group, np.int64)


def rows_of(groups: Sequence[int]) -> list[int]:
    return [(group << BITS) + i for group in groups for i in range(GROUP)]


def batch_of(groups: Sequence[int]) -> Batch:
    rows = rows_of(groups)
    responses = Ragged.from_arrays([response(row) for row in rows], "int32")
    columns = {
        "prompt": Ragged.from_arrays([prompt(group) for group in groups], "int64"),
        "difficulty": np.array(groups, np.float64) / 2,
        "response": responses,
        "hidden": Ragged(np.repeat(responses.values[:, None], 2, axis=1).astype(np.float16), responses.offsets),
        "reward": np.array(rows, np.float32),
        "image": np.array(rows).astype(np.uint8)[:, None, None] + np.arange(6, dtype=np.uint8).reshape(2, 3),
        "is_right": np.array(rows) % 3 == 0,
    }
    return Batch(np.array(rows, np.int64), np.array(groups, np.int64), columns)


class ServedQueue:
    """The test's side of it: puts, and looks."""

    def __init__(self, address: str, loop: asyncio.AbstractEventLoop, queue: TransferQueue) -> None:
        self.address, self._loop, self.queue = address, loop, queue

    def run(self, call: Callable[[TransferQueueClient], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(call(self.queue.client()), self._loop).result(patience(60))

    def put(self, groups: Sequence[int], step: int = 0) -> list[int]:
        metas = [GroupMeta(group, GROUP, step, Interval(0, 0)) for group in groups]
        self.run(lambda client: client.put(metas, batch_of(groups)))
        return rows_of(groups)

    def end_partition(self, task: str, step: int = 0) -> None:
        self.run(lambda client: client.end_partition(task, step))

    def close_task(self, task: str) -> None:
        self.run(lambda client: client.close(task))

    def status(self, task: str) -> TaskStatus:
        return self.run(lambda client: client.status())[0][task]

    def counts(self, task: str) -> dict[str, int]:
        """Rows by state."""
        counts = self.status(task).counts
        return {state: counts[state] for state in ("waiting", "ready", "leased", "done", "filtered", "dead") if counts[state]}

    def read(self, rows: Sequence[int], columns: Sequence[str]) -> Batch:
        return self.run(lambda client: client.read({0: np.array(rows, np.int64)}, columns))[0]

    def when_done(self, task: str, count: int, then: Callable[[], None]) -> None:
        """Have `then` called, in a thread, as soon as so many of the task's rows are done."""

        def wait() -> None:
            while self.counts(task).get("done", 0) < count:
                time.sleep(0.02)
            then()

        threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def served_queue(path: Path, num_units: int = 2, lease_seconds: float = 60.0) -> Iterator[ServedQueue]:
    """Leases last so long that a busy machine can always renew them in time."""
    opened: Future[ServedQueue] = Future()
    stop = asyncio.Event()

    async def serve() -> None:
        queue = TransferQueue(schema(lease_seconds), [MemoryStorage() for _ in range(num_units)])
        async with queue.running():
            server = Server(queue.services, queue.abandon)
            opened.set_result(ServedQueue(await server.start(path), asyncio.get_running_loop(), queue))
            await stop.wait()
            await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True, name="served queue")
    thread.start()
    served = opened.result(patience(60))
    yield served
    served._loop.call_soon_threadsafe(stop.set)
    thread.join(patience(60))
