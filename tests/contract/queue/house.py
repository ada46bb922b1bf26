"""A queue reached one way or another, and what the tests of it do with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from asyncflow.transfer_queue.client import Leased, TransferQueueClient
from asyncflow.transfer_queue.controller import TaskStatus
from asyncflow.transfer_queue.leases import Want
from asyncflow.transfer_queue.node import serve_controller, serve_unit
from asyncflow.transfer_queue.queue import TransferQueue
from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.transfer_queue.storage.base import Storage
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.transfer_queue.unit import UnitOptions
from asyncflow.transport import ConnectionLost, Credentials, Server
from asyncflow.types import Batch, Column, Ragged, Values
from tests.builders import meta
from tests.patience import patience

T = TypeVar("T")
BITS = 2
COLUMNS = (
    Column("prompt", "int64", ragged=True, per="group", counts_tokens=True),
    Column("temperature", "float32", per="group"),
    Column("image", "uint8", shape=(2, 3)),
    Column("features", "float32", ragged=True, shape=(2,)),
    Column("flag", "bool"),
    Column("ids", "int64", ragged=True, counts_tokens=True),
    Column("reward", "float32"),
)
OUTPUTS = ("ids", "reward")
LEASE_SECONDS = 0.25
SHORT = 0.02  # long enough for whatever is under way to have happened


def schema(lease_seconds: float = 30.0) -> Schema:
    tasks = (
        TaskSpec("rollout", ("prompt",), OUTPUTS, whole_groups=False, max_failures=2),
        TaskSpec("train", ("prompt", *OUTPUTS), topic="train"),
        TaskSpec("eval", OUTPUTS, topic="eval"),
    )
    return Schema(COLUMNS, tuple(msgspec.structs.replace(task, lease_seconds=lease_seconds) for task in tasks), BITS)


class House:
    """A queue, reached one way or another, and clients of it.

    process   all in this process          unix, tls   all in one process, served
    units     the units served elsewhere   apart       the controllers too (apart-tls: over TLS)
    """

    def __init__(self, way: str, num_units: int, folder: Path, key: Credentials, **options: Any) -> None:
        self.way, self.num_units, self.folder = way, num_units, folder
        self.credentials = key if "tls" in way else None
        self.schema = options.pop("schema", None) or schema(options.pop("lease_seconds", 30.0))
        make: Callable[[int], Storage] = options.pop("storage", lambda number: MemoryStorage())
        self.make_storage, self.events = make, options.pop("events", None)
        self.options = UnitOptions(**options)  # of every unit
        self.storages = [make(number) for number in range(num_units)]
        self.address, self.num_doors = "", 0
        self.clients: dict[str, TransferQueueClient] = {}
        self.serving: dict[str, asyncio.Task[None]] = {}
        has_units, has_controllers = way in ("process", "unix", "tls"), not way.startswith("apart")
        self.queue = TransferQueue(
            self.schema,
            self.storages if has_units else [],
            tasks=None if has_controllers else [],
            events=self.events,
            credentials=self.credentials,
            unit_options=self.options,
        )
        self.queue.places.patience_seconds = 10.0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[House]:
        self.server = server = Server(self.queue.services, self.queue.abandon, credentials=self.credentials)
        async with self.queue.running():
            self.address = await server.start(self._door("hub"))
            try:
                if self.way in ("units", "apart", "apart-tls"):
                    await asyncio.gather(*(self.start_unit(n, self.storages[n]) for n in range(self.num_units)))
                if self.way.startswith("apart"):
                    await asyncio.gather(*(self.start_controller(task.name) for task in self.schema.tasks))
                yield self
            finally:
                for client in self.clients.values():
                    await client.disconnect()
                for name in list(self.serving):
                    await self.stop(name)
                await server.close()

    def _door(self, name: str) -> str | Path:
        """Another one each time."""
        self.num_doors += 1
        return "tls:127.0.0.1:0" if self.credentials else self.folder / f"{name.replace('/', '-')}-{self.num_doors}.sock"

    async def start_unit(self, number: int, storage: Storage) -> None:
        """In a server of its own, joined to the queue when this returns."""
        door = self._door(f"unit/{number}")
        serving = serve_unit(self.address, number, storage, door, options=self.options, credentials=self.credentials)
        await self._joined(f"unit/{number}", serving)

    async def start_controller(self, task: str) -> None:
        name = f"controller/{task}"
        await self._joined(name, serve_controller(self.address, task, self._door(name), credentials=self.credentials))

    async def _joined(self, name: str, serving: Coroutine[Any, Any, None]) -> None:
        before = self.queue.directory.current.version
        self.serving[name] = asyncio.create_task(serving)
        async with asyncio.timeout(patience(5)):
            while self.queue.directory.current.version == before or name not in self.queue.directory.current.places:
                await asyncio.sleep(0.005)
                if self.serving[name].done():
                    await self.serving[name]

    async def stop(self, name: str) -> None:
        serving = self.serving.pop(name)
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionLost, ExceptionGroup):
            await serving

    async def connect(self, name: str) -> TransferQueueClient:
        if self.way == "process":
            return self.queue.client()
        client = await TransferQueueClient.connect(self.address, name, credentials=self.credentials, patience_seconds=10.0)
        self.clients[name] = client
        return client

    async def leave(self, name: str) -> None:
        if self.way == "process":
            self.queue.abandon("driver")
        else:
            await self.clients.pop(name).disconnect()


WAYS = ("process-1", "process-3", "unix-1", "unix-3", "units-1", "apart-3", "tls-1", "apart-tls-1")
Open = Callable[..., Awaitable[House]]
over = lambda *ways: pytest.mark.parametrize("open_house", ways, indirect=True)  # noqa: E731
alone = over("process-1")


async def within(request: Awaitable[T], seconds: float = 5.0) -> T:
    return await asyncio.wait_for(request, seconds)


async def leased(
    client: TransferQueueClient, task: str = "rollout", *, columns: Sequence[str] | None = None, **wanted: Any
) -> Leased:
    """A lease that has to be there."""
    found = await within(client.lease(task, Want(**wanted), columns=columns))
    assert found is not None
    return found


async def until(condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    async with asyncio.timeout(patience(5)):
        while not await condition():
            await asyncio.sleep(0.01)


async def parked(request: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A request that is known to wait."""
    task = asyncio.create_task(request)
    await asyncio.sleep(SHORT)
    assert not task.done()
    return task


def prompt_of(group: int) -> list[int]:
    return [group] * (group + 1)


async def put(client: TransferQueueClient, *groups: int, row_bytes: int = 0, **of_meta: Any) -> None:
    prompts = Ragged.from_arrays([np.array(prompt_of(group)) for group in groups], "int64")
    metas = [meta(group, **of_meta) for group in groups]
    batch = Batch(np.empty(0, np.int64), np.array(groups), {"prompt": prompts})
    await within(client.put(metas, batch, row_bytes=row_bytes))


def outputs(*rows: int) -> Batch:
    """Row r has r times r, and reward r / 2."""
    ids = Ragged.from_arrays([np.full(row, row) for row in rows], "int64")
    indices = np.array(rows)
    return Batch(
        indices, np.array(list(dict.fromkeys(row >> BITS for row in rows))), {"ids": ids, "reward": indices.astype(np.float32) / 2}
    )


async def generate(client: TransferQueueClient, groups: int = 99) -> None:
    """Lease what is ready for rollout and complete it."""
    lease = (await leased(client, groups=groups)).lease
    assert (await within(client.complete(lease, outputs(*lease.indices)))).all()


async def status(client: TransferQueueClient, task: str) -> TaskStatus:
    return (await within(client.status()))[0][task]


async def counts(client: TransferQueueClient, task: str) -> dict[str, int]:
    """The states that there are rows in."""
    found = (await status(client, task)).counts
    return {state: found[state] for state in ("waiting", "ready", "leased", "done", "dead", "filtered") if found[state]}


async def stored_bytes(client: TransferQueueClient) -> int:
    return sum(unit.stored_bytes for unit in (await within(client.status()))[1].values())


def prompts_in(found: Leased) -> dict[int, list[int]]:
    return {group: found.batch.ragged("prompt")[i].tolist() for i, group in enumerate(found.batch.groups.tolist())}


def is_outputs(found: Leased) -> bool:
    """Whether all rows have their own outputs, in the order of the lease."""
    rows = found.lease.indices
    assert found.batch.indices.tolist() == rows and found.batch.dense("reward").tolist() == [row / 2 for row in rows]
    return [ids.tolist() for ids in found.batch.ragged("ids")] == [[row] * row for row in rows]


def same(found: Batch, wanted: Batch) -> bool:
    """Bit by bit, dtypes and shapes too."""

    def parts(batch: Batch) -> list[tuple[str, Any, str, bytes]]:
        arrays = [("indices", batch.indices), ("groups", batch.groups)]
        for name, values in sorted(batch.columns.items()):
            arrays += [(name, values.values), (name, values.lengths)] if isinstance(values, Ragged) else [(name, values)]
        return [(name, array.shape, array.dtype.str, array.tobytes()) for name, array in arrays]

    return parts(found) == parts(wanted)


def everything(groups: Sequence[int]) -> Batch:
    """All columns of groups of 4 rows, the same ones for the same group."""
    rows = [4 * group + sample for group in groups for sample in range(4)]
    noise = {row: np.random.default_rng(row) for row in rows}
    features = [noise[row].standard_normal((row % 3, 2), np.float32) for row in rows]
    offsets = np.cumsum([0, *map(len, features)])
    columns: dict[str, Values] = {
        "prompt": Ragged.from_arrays([np.array(prompt_of(group)) for group in groups], "int64"),
        "temperature": np.array([np.nextafter(np.float32(group), np.float32(9)) for group in groups], np.float32),
        "image": np.stack([noise[row].integers(0, 256, (2, 3), np.uint8) for row in rows]),
        "features": Ragged(np.concatenate(features), offsets),
        "flag": np.array([row % 3 == 0 for row in rows]),
        "ids": Ragged.from_arrays([np.full(row % 5, (1 << 62) + row) for row in rows], "int64"),
        "reward": np.array([np.nan if row == 5 else -0.0 for row in rows], np.float32),
    }
    return Batch(np.array(rows, np.int64), np.array(groups), columns)


async def room(client: TransferQueueClient) -> Any:
    return (await within(client.status()))[1][0].capacity
