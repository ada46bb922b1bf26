"""One suite over every way to the queue: in one process, over a unix socket, in processes of its own, over TLS; one unit or three."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncflow.transfer_queue import unit as unit_module
from asyncflow.transfer_queue.client import Leased, TransferQueueClient
from asyncflow.transfer_queue.controller import Controller, TaskStatus
from asyncflow.transfer_queue.node import serve_controller, serve_unit
from asyncflow.transfer_queue.notices import News, Superseded
from asyncflow.transfer_queue.queue import TransferQueue
from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.transfer_queue.storage.base import Storage
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.transfer_queue.storage.redis import RedisStorage
from asyncflow.transfer_queue.table import StaleToken, Token
from asyncflow.transfer_queue.unit import StorageUnit
from asyncflow.transport import ConnectionLost, Credentials, Server
from asyncflow.types import Batch, Column, GroupMeta, Interval, Ragged, Values

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
        TaskSpec("train", ("prompt", *OUTPUTS), purpose="train"),
        TaskSpec("eval", OUTPUTS, purpose="eval"),
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
        self.make_storage, self.callbacks = make, options.pop("callbacks", None)
        self.options = options  # of every unit
        self.storages = [make(number) for number in range(num_units)]
        self.address = ""
        self.clients: dict[str, TransferQueueClient] = {}
        self.serving: dict[str, asyncio.Task[None]] = {}
        has_units, has_controllers = way in ("process", "unix", "tls"), not way.startswith("apart")
        self.queue = TransferQueue(
            self.schema,
            self.storages if has_units else [],
            tasks=None if has_controllers else [],
            callbacks=self.callbacks,
            patience_seconds=10.0,
            credentials=self.credentials,
            **options,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[House]:
        server = Server(self.queue.services, self.queue.abandon, credentials=self.credentials)
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
        return "tls:127.0.0.1:0" if self.credentials else self.folder / f"{name.replace('/', '-')}.sock"

    async def start_unit(self, number: int, storage: Storage) -> None:
        """In a server of its own, joined to the queue when this returns."""
        door = self._door(f"unit/{number}")
        serving = serve_unit(self.address, number, storage, door, credentials=self.credentials, **self.options)
        await self._joined(f"unit/{number}", serving)

    async def start_controller(self, task: str) -> None:
        name = f"controller/{task}"
        await self._joined(name, serve_controller(self.address, task, self._door(name), credentials=self.credentials))

    async def _joined(self, name: str, serving: Coroutine[Any, Any, None]) -> None:
        before = self.queue.directory.current.version
        self.serving[name] = asyncio.create_task(serving)
        async with asyncio.timeout(5):
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


@pytest.fixture(scope="session")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return Credentials.create(tmp_path_factory.mktemp("key") / "key.pem")


@pytest.fixture(params=WAYS)
async def open_house(request: pytest.FixtureRequest, tmp_path: Path, credentials: Credentials) -> AsyncIterator[Open]:
    way, _, num_units = request.param.rpartition("-")
    async with contextlib.AsyncExitStack() as stack:

        async def opened(**options: Any) -> House:
            made = House(way, options.pop("num_units", int(num_units)), tmp_path, credentials, **options)
            return await stack.enter_async_context(made.running())

        yield opened


@pytest.fixture
async def house(open_house: Open) -> House:
    return await open_house()


@pytest.fixture
async def client(house: House) -> TransferQueueClient:
    return await house.connect("w")


@pytest.fixture
def redis_storage(redis_url: str, tmp_path: Path) -> Callable[[int], Storage]:
    prefix = "".join(c for c in tmp_path.name if c.isalnum())
    return lambda number: RedisStorage(redis_url, prefix, unit=number)


async def within(request: Awaitable[T], seconds: float = 5.0) -> T:
    return await asyncio.wait_for(request, seconds)


async def leased(client: TransferQueueClient, task: str = "rollout", **wanted: Any) -> Leased:
    """A lease that has to be there."""
    found = await within(client.lease(task, **wanted))
    assert found is not None
    return found


async def until(condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    async with asyncio.timeout(5):
        while not await condition():
            await asyncio.sleep(0.01)


async def parked(request: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A request that is known to wait."""
    task = asyncio.create_task(request)
    await asyncio.sleep(SHORT)
    assert not task.done()
    return task


def meta(group: int, *, step: int = 0, size: int = 2, purpose: str = "train", low: int | None = None) -> GroupMeta:
    return GroupMeta(group, size, step, Interval(step if low is None else low, step), purpose)


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
    return Batch(indices, np.array(list(dict.fromkeys(row >> BITS for row in rows))), {"ids": ids, "reward": indices.astype(np.float32) / 2})


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


async def held_bytes(client: TransferQueueClient) -> int:
    return sum(unit.held_bytes for unit in (await within(client.status()))[1].values())


def prompts_in(found: Leased) -> dict[int, list[int]]:
    return {group: found.batch.ragged("prompt")[i].tolist() for i, group in enumerate(found.batch.groups.tolist())}


def is_outputs(found: Leased) -> bool:
    """Whether all rows have their own outputs, in the order of the lease."""
    rows = found.lease.indices
    assert found.batch.indices.tolist() == rows and found.batch.dense("reward").tolist() == [row / 2 for row in rows]
    return [ids.tolist() for ids in found.batch.ragged("ids")] == [[row] * row for row in rows]


# -- rows go in, and out ------------------------------------------------------------------------------------------------------


async def test_what_was_put_and_completed_is_what_the_next_task_leases(client: TransferQueueClient) -> None:
    await put(client, 0, 1, 2)
    lease = (found := await leased(client, groups=9)).lease
    assert {m.group: rows for m, rows in zip(lease.groups, lease.rows, strict=True)} == {0: [0, 1], 1: [4, 5], 2: [8, 9]}
    assert found.batch.indices.tolist() == lease.indices and found.batch.groups.tolist() == [m.group for m in lease.groups]
    assert prompts_in(found) == {0: [0], 1: [1, 1], 2: [2, 2, 2]}
    for row in (5, 4, 9, 8, 0, 1):
        assert (await within(client.complete(lease, outputs(row)))).tolist() == [True]
    assert await counts(client, "rollout") == {"done": 6} and await counts(client, "train") == {"ready": 6}
    trained = await leased(client, "train", groups=9, step=0)
    assert [m.group for m in trained.lease.groups] == [1, 2, 0]  # as they became ready
    assert is_outputs(trained) and prompts_in(trained) == {0: [0], 1: [1, 1], 2: [2, 2, 2]}


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
    return Batch(np.array(rows), np.array(groups), columns)


def same(found: Batch, wanted: Batch) -> bool:
    """Bit by bit, dtypes and shapes too."""

    def parts(batch: Batch) -> list[tuple[str, Any, str, bytes]]:
        arrays = [("indices", batch.indices), ("groups", batch.groups)]
        for name, values in sorted(batch.columns.items()):
            arrays += [(name, values.values), (name, values.lengths)] if isinstance(values, Ragged) else [(name, values)]
        return [(name, array.shape, array.dtype.str, array.tobytes()) for name, array in arrays]

    return parts(found) == parts(wanted)


async def test_every_kind_of_column_comes_back_bit_by_bit_in_the_order_of_the_lease(client: TransferQueueClient) -> None:
    groups, names = [7, 1, 0, 5, 3, 2], [column.name for column in COLUMNS]
    stored = await within(client.put([meta(group, size=4) for group in groups], everything(groups)))
    assert stored.tolist() == [True] * 24
    train = await leased(client, "train", groups=6, columns=names)
    assert sorted(m.group for m in train.lease.groups) == sorted(groups)
    assert same(train.batch, everything([m.group for m in train.lease.groups]))
    assert same((await client.fetch(train.lease, [])).batch, Batch(train.batch.indices, train.batch.groups, {}))  # type: ignore[union-attr]


async def test_a_group_is_complete_with_its_last_row(client: TransferQueueClient) -> None:
    await put(client, 3, size=3)
    waiting = await parked(client.lease("train"))
    lease = (await leased(client)).lease
    for row in (12, 14):
        await client.complete(lease, outputs(row))
    await asyncio.sleep(SHORT)
    assert not waiting.done()
    await client.complete(lease, outputs(13))
    found = await within(waiting)
    assert found is not None and found.lease.rows == [[12, 13, 14]]


async def test_a_task_of_whole_groups_gets_groups_by_number_and_never_a_part(client: TransferQueueClient) -> None:
    await put(client, 0, 1, 2, size=3)
    lease = (await leased(client, groups=9)).lease
    await client.complete(lease, outputs(9, 1, 4, 0, 5, 8, 10))  # groups 0 and 1 lack a row, 2 is whole
    train = await leased(client, "train", rows=99)
    assert [(m.group, rows) for m, rows in zip(train.lease.groups, train.lease.rows, strict=True)] == [(2, [8, 9, 10])]
    await client.complete(lease, outputs(2, 6))
    assert sorted((await leased(client, "train", rows=99)).lease.rows) == [[0, 1, 2], [4, 5, 6]]


async def test_limits_on_groups_rows_and_tokens_bound_a_lease(client: TransferQueueClient) -> None:
    await put(client, 0, 3, 6, 9, size=3)  # one unit, rows of 1, 4, 7 and 10 tokens
    assert len((await leased(client, groups=1)).lease.groups) == 1
    assert [len(rows) for rows in (await leased(client, rows=2)).lease.rows] == [2]
    assert (await leased(client, tokens=5)).lease.indices == [14]  # of 4; the next row would be one of 7
    assert (await leased(client, tokens=15)).lease.indices == [24, 25]
    assert (await leased(client, tokens=1)).lease.indices == [26]  # one row, even if it is too heavy alone
    assert (await leased(client, rows=5, tokens=25)).lease.indices == [36, 37]


async def test_a_request_waits_for_at_least_so_many_rows_unless_the_step_has_no_more(client: TransferQueueClient) -> None:
    await put(client, 0, step=0)
    waiting = await parked(client.lease("rollout", rows=4, at_least=3, step=0))
    await put(client, 1, step=1)
    await asyncio.sleep(SHORT)
    assert not waiting.done()
    await put(client, 2, step=0)
    found = await within(waiting)
    assert found is not None and sorted(found.lease.indices) == [0, 1, 8, 9]


async def test_only_what_the_installed_version_may_make_is_leased(client: TransferQueueClient) -> None:
    await put(client, 0, step=0)
    await put(client, 1, step=1)
    await put(client, 2, step=3, low=1)
    assert sorted(m.group for m in (await leased(client, groups=9, installed=1)).lease.groups) == [1, 2]
    waiting = await parked(client.lease("rollout", installed=4))
    await put(client, 3, step=4)
    found = await within(waiting)
    assert found is not None and found.lease.groups == [meta(3, step=4)]


async def test_evaluation_and_training_rows_go_to_their_own_tasks(client: TransferQueueClient) -> None:
    await put(client, 0, purpose="eval")
    await put(client, 1)
    await generate(client)
    assert [m.group for m in (await leased(client, "train", groups=9)).lease.groups] == [1]
    assert [m.group for m in (await leased(client, "eval", groups=9)).lease.groups] == [0]


async def test_a_step_streams_its_groups_as_they_become_complete_and_ends(client: TransferQueueClient) -> None:
    await put(client, 0, 1, step=0)
    await put(client, 2, step=1)
    await generate(client)
    seen = []

    async def read() -> None:
        async for found in client.stream("train", 0):
            seen.append(found.lease.groups[0].group)
            if len(seen) == 2:
                await client.end_step("train", 0)

    await within(read())
    assert sorted(seen) == [0, 1]
    assert await within(client.lease("train", step=0)) is None  # later ones too
    assert [m.group for m in (await leased(client, "train", step=1)).lease.groups] == [2]
    waiting = await parked(client.lease("rollout", step=0))  # the end of another task's step is nothing to it
    await client.end_step("rollout", 0)
    assert await within(waiting) is None


async def test_closing_ends_every_stream_for_late_consumers_too(house: House, client: TransferQueueClient) -> None:
    other = await house.connect("other")
    waiting = [await parked(c.lease(task)) for c in (client, other) for task in ("rollout", "train")]
    await within(client.close("rollout"))
    assert [await within(waiting[i]) for i in (0, 2)] == [None, None]
    assert not waiting[1].done() and not waiting[3].done()
    await within(other.close())
    assert [await within(waiting[i]) for i in (1, 3)] == [None, None]
    late = await house.connect("late")
    assert [await within(late.lease(task)) for task in ("rollout", "train", "eval")] == [None] * 3


async def test_a_stream_that_is_left_early_takes_no_further_group(client: TransferQueueClient) -> None:
    await put(client, 0)
    await generate(client)
    stream = client.stream("train", 0)
    assert (await within(anext(stream))).lease.groups[0].group == 0
    await stream.aclose()  # type: ignore[attr-defined]
    await asyncio.sleep(SHORT)
    await put(client, 1)
    await generate(client)
    assert (await leased(client, "train")).lease.groups[0].group == 1


async def test_a_request_can_be_withdrawn(client: TransferQueueClient) -> None:
    waiting, other_task = await parked(client.lease("rollout")), await parked(client.lease("train"))
    await client.withdraw("rollout")
    assert await within(waiting) is None and not other_task.done()
    other_task.cancel()


@over("unix-1", "apart-3")
async def test_withdrawing_concerns_nobody_else(house: House, client: TransferQueueClient) -> None:
    other = await house.connect("other")
    waiting = await parked(other.lease("rollout"))
    await client.withdraw("rollout")
    await asyncio.sleep(SHORT)
    assert not waiting.done()
    await put(client, 0)
    assert await within(waiting) is not None


# -- what does not fit is refused where it is made ----------------------------------------------------------------------------

MISFITS: dict[str, tuple[Batch, str]] = {
    "dtype": (Batch(np.array([1]), np.array([0]), {"reward": np.ones(1)}), "row 1, column 'reward': declared float32, written float64"),
    "rank": (Batch(np.array([1]), np.array([0]), {"reward": np.ones((1, 1), np.float32)}), "row 1, column 'reward': declared entries of"),
    "shape": (Batch(np.array([0]), np.array([0]), {"image": np.ones((1, 3, 2), np.uint8)}), "row 0, column 'image': declared entries of"),
    "length": (Batch(np.array([0, 1]), np.array([0]), {"reward": np.ones(1, np.float32)}), "row 1, column 'reward': 1 entries for 2 rows"),
    "of groups": (Batch(np.array([0, 1]), np.array([0]), {"temperature": np.ones(2, np.float32)}), "group .* column 'temperature': 2 entries"),
    "ragged": (Batch(np.array([0]), np.array([0]), {"ids": np.ones(1, np.int64)}), "row 0, column 'ids': declared ragged, written dense"),
    "unknown": (Batch(np.array([0]), np.array([0]), {"idz": np.ones(1)}), "column 'idz' is not declared; declared are .*ids"),
    "twice": (Batch(np.array([1, 1]), np.array([0]), {"reward": np.ones(2, np.float32)}), "row 1 is in the batch twice"),
    "not admitted": (Batch(np.array([9]), np.array([2]), {"reward": np.ones(1, np.float32)}), "group 2 has columns in the batch and is not adm"),
}  # fmt: skip


@over("process-1", "apart-3")
async def test_a_put_that_does_not_fit_is_refused_at_the_client_naming_row_and_column(
    client: TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_unit", lambda number: pytest.fail("something was sent"))
    for batch, message in MISFITS.values():
        with pytest.raises(ValueError, match=message):
            await client.put([meta(0), meta(1)], batch)
    with pytest.raises(ValueError, match="group 1 has 5 rows: at most 4 fit"):
        await client.put([meta(1, size=5)], Batch(np.empty(0, np.int64), np.empty(0, np.int64), {}))
    monkeypatch.undo()
    assert (await client.status())[1][0].rows == 0


async def test_outputs_that_do_not_fit_are_refused_at_the_client_and_the_lease_goes_on(
    client: TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(client, 0)
    lease = (await leased(client)).lease
    with monkeypatch.context() as patched:
        patched.setattr(client, "_unit", lambda number: pytest.fail("something was sent"))
        with pytest.raises(ValueError, match="row 1, column 'reward': declared float32"):
            await client.complete(lease, Batch(np.array([1]), np.array([0]), {"reward": np.ones(1)}))
        with pytest.raises(ValueError, match="row 5 is not one of lease 1 of task 'rollout'"):
            await client.complete(lease, outputs(5))
    assert (await client.complete(lease, outputs(0, 1))).all()


async def test_unknown_tasks_and_columns_are_refused_by_name(client: TransferQueueClient) -> None:
    with pytest.raises(ValueError, match="there is no task 'trian'; there are rollout, train, eval"):
        await client.lease("trian")
    with pytest.raises(ValueError, match="'idz' is not declared"):
        await client.lease("train", columns=["idz"])
    for call in (client.end_step("x", 0), client.close("x"), client.withdraw("x")):
        with pytest.raises(ValueError, match="there is no task 'x'"):
            await call
    await put(client, 0)
    with pytest.raises(LookupError, match="row 1 has no column 'ids'"):
        await client.read({0: np.array([1])}, ["ids"])


# -- written once -------------------------------------------------------------------------------------------------------------


async def test_the_first_writer_of_a_row_wins_and_the_other_is_told(house: House) -> None:
    slow, quick = await house.connect("slow"), await house.connect("quick")
    await put(quick, 0, 1)
    lease = (await leased(slow, groups=2)).lease
    wrong = outputs(0, 1, 5)
    wrong = Batch(wrong.indices, wrong.groups, {**wrong.columns, "reward": np.full(3, -9, np.float32)})
    assert (await within(quick.put([meta(0), meta(1)], outputs(1)))).tolist() == [True]
    assert (await within(quick.put([meta(0), meta(1)], wrong))).tolist() == [True, False, True]
    assert (await within(slow.complete(lease, outputs(*lease.indices)))).tolist() == [row == 4 for row in lease.indices]
    assert (await counts(slow, "rollout")) == {"done": 4}
    train = await leased(slow, "train", groups=2)
    assert dict(zip(train.lease.indices, train.batch.dense("reward").tolist(), strict=True)) == {0: -9, 1: 0.5, 4: 2, 5: -9}


async def test_of_two_that_write_the_same_row_at_once_one_wins(client: TransferQueueClient) -> None:
    await put(client, *range(6))
    rows = [4 * group + i for group in range(6) for i in range(2)]
    metas = [meta(group) for group in range(6)]

    def attempt(value: int) -> Batch:
        return Batch(np.array(rows), np.arange(6), {"ids": outputs(*rows).columns["ids"], "reward": np.full(12, value, np.float32)})

    first, second = await within(asyncio.gather(*(client.put(metas, attempt(value)) for value in (1, 2))))
    assert (first ^ second).all()
    train = await leased(client, "train", groups=6)
    winner = dict(zip(rows, np.where(first, 1, 2).tolist(), strict=True))
    assert train.batch.dense("reward").tolist() == [winner[row] for row in train.lease.indices]


async def test_outputs_are_written_all_or_none(client: TransferQueueClient) -> None:
    await put(client, 0)
    lease = (await leased(client)).lease
    reward = Batch(np.array([1]), np.array([0]), {"reward": np.array([7], np.float32)})
    assert (await client.put([meta(0)], reward)).tolist() == [True]
    assert (await client.complete(lease, outputs(0, 1))).tolist() == [True, False]
    with pytest.raises(LookupError, match="row 1 has no column 'ids'"):  # not even the one that was free
        await client.read({0: np.array([1])}, ["ids"])
    assert await counts(client, "rollout") == {"leased": 1, "done": 1}


class Broken(MemoryStorage):
    """Fails to write as often as it is told to."""

    failures = 0

    async def write(self, metas: Sequence[GroupMeta], batch: Batch) -> None:
        if self.failures:
            self.failures -= 1
            raise ValueError("the disk is full")
        await super().write(metas, batch)


async def test_a_write_that_failed_has_not_happened_and_may_be_repeated(open_house: Open) -> None:
    house = await open_house(storage=lambda number: Broken(), num_units=1, capacity_rows=2)
    client = await house.connect("w")
    broken = house.storages[0]
    assert isinstance(broken, Broken)
    broken.failures = 1
    with pytest.raises(ValueError, match="the disk is full"):
        await put(client, 0)
    assert (await client.status())[1][0].rows == 0 and await counts(client, "rollout") == {}
    await put(client, 0)  # its room has been given back
    lease = (await leased(client)).lease
    broken.failures = 1
    with pytest.raises(ValueError, match="the disk is full"):
        await client.complete(lease, outputs(0, 1))
    assert await counts(client, "rollout") == {"leased": 2}
    assert (await client.complete(lease, outputs(0, 1))).all()
    assert is_outputs(await leased(client, "train"))


async def test_the_same_completion_again_is_told_the_same(client: TransferQueueClient) -> None:
    """Its answer may have been lost."""
    await put(client, 0, 1)
    lease = (await leased(client, groups=2)).lease
    for _ in range(2):
        assert (await client.complete(lease, outputs(1, 4))).tolist() == [True, True]
    assert (await counts(client, "rollout")) == {"leased": 2, "done": 2}
    assert (await status(client, "rollout")).counts["done_total"] == 2


# -- leases -------------------------------------------------------------------------------------------------------------------


async def test_marks_end_the_leases_of_a_task_without_outputs(client: TransferQueueClient) -> None:
    await put(client, 0, 1, 2)
    await generate(client)
    leases = [(await leased(client, "train", groups=2)).lease, (await leased(client, "train")).lease]
    await within(client.complete_marks(leases))
    assert await counts(client, "train") == {"done": 6}
    with pytest.raises(StaleToken, match="is over"):
        await client.complete_marks(leases)


async def test_of_several_leases_all_are_marked_or_none(client: TransferQueueClient) -> None:
    await put(client, 0, 1)
    await generate(client)
    good, lost = [(await leased(client, "train")).lease for _ in range(2)]
    await client.fail(lost, lost.indices, "lost")
    with pytest.raises(StaleToken):
        await client.complete_marks([good, lost])
    assert await counts(client, "train") == {"leased": 2, "ready": 2}


async def test_a_failed_row_comes_again_and_is_dead_for_everybody_in_the_end(client: TransferQueueClient) -> None:
    await put(client, 0)
    first = (await leased(client)).lease
    assert first.attempts == [[0, 0]]
    await client.fail(first, [1], "the reward broke")
    again = (await leased(client)).lease
    assert (again.rows, again.attempts, again.attempt) == ([[1]], [[1]], 1)
    assert (await status(client, "rollout")).dead == {}
    await client.complete(first, outputs(0))
    waiting = await parked(client.lease("train"))
    await client.fail(again, [1], "the reward broke again")
    assert (await status(client, "rollout")).dead == {1: "the reward broke again"}
    found = await within(waiting)  # it does not wait for the dead one
    assert found is not None and found.lease.rows == [[0]]
    assert await counts(client, "rollout") == {"done": 1, "dead": 1} and (await counts(client, "train"))["dead"] == 1
    [kept] = await client.read({0: np.array([1])}, ["dead"])
    assert kept.ragged("dead")[0].tobytes() == b"the reward broke again"
    await client.complete(again, outputs(1))  # too late
    assert await counts(client, "rollout") == {"done": 1, "dead": 1}
    await client.drop([0, 1])
    assert (await status(client, "rollout")).dead == {} and await held_bytes(client) == 0


async def test_filtered_rows_are_out_for_every_task_with_their_reason(client: TransferQueueClient) -> None:
    await put(client, 0, 1, 2)
    lease = (await leased(client)).lease
    await client.filter([lease.indices[0], 4, 9], "too easy")
    assert (await counts(client, "rollout"))["filtered"] == 3 and (await counts(client, "train"))["filtered"] == 3
    assert (await status(client, "rollout")).dead == {}
    stored = await client.complete(lease, outputs(*lease.indices))
    rest = await leased(client, groups=9)
    assert sorted(rest.lease.indices) == sorted({0, 1, 4, 5, 8, 9} - {4, 9, *lease.indices})
    await client.complete(rest.lease, outputs(*rest.lease.indices))
    train = await leased(client, "train", groups=9)
    assert sorted(train.lease.indices) == sorted({0, 1, 4, 5, 8, 9} - {lease.indices[0], 4, 9}) and stored[1]
    [kept] = await client.read({train.lease.units[0]: np.empty(0, np.int64)}, ["filtered"])
    assert len(kept) == 0
    await client.filter([4], "for another reason")  # the first one stays
    await client.drop(lease.indices)
    assert (await counts(client, "train"))["filtered"] == 2


async def test_a_late_failure_is_nothing(open_house: Open) -> None:
    client = await (await open_house(lease_seconds=0.1)).connect("w")
    await put(client, 0)
    old = (await leased(client)).lease
    new = (await leased(client)).lease  # when it has expired
    assert new.rows == [[0, 1]] and new.attempts == [[1, 1]]
    for _ in range(3):
        await client.fail(old, [0, 1], "too late")
    assert (await status(client, "rollout")).dead == {}


async def test_a_stale_token_is_refused_as_such(client: TransferQueueClient) -> None:
    await put(client, 0, 1)
    lease = (await leased(client)).lease
    controller = client._controller("rollout")
    await controller.renew(lease.token)
    with pytest.raises(StaleToken, match="lease 1 of task 'rollout' is over"):
        await controller.renew(Token("rollout", "earlier", lease.token.lease))
    earlier = msgspec.structs.replace(lease, token=Token("rollout", "earlier", lease.token.lease))
    assert (await client.complete(earlier, outputs(*lease.indices))).tolist() == [False, False]
    await client.fail(lease, lease.indices, "given back")
    with pytest.raises(StaleToken):
        await controller.check(lease.token, lease.indices)


async def test_outputs_under_a_lease_that_has_expired_are_not_kept(open_house: Open) -> None:
    house = await open_house(lease_seconds=LEASE_SECONDS)
    slow, quick = await house.connect("slow"), await house.connect("quick")
    await put(quick, 0)
    old = (await leased(slow)).lease
    new = (await leased(quick)).lease
    renewing = asyncio.create_task(quick.renew_held())
    await put(quick, 3)  # with the next news a unit is told which leases are over; until then, the first to write wins
    await asyncio.sleep(SHORT)
    late = Batch(np.array([1]), np.array([0]), outputs(99).columns)
    assert (await slow.complete(old, late)).tolist() == [False]
    for row in (0, 1):
        assert (await quick.complete(new, outputs(row))).tolist() == [True]
    assert (await slow.complete(old, late)).tolist() == [False]
    assert is_outputs(await leased(quick, "train"))
    await quick.drop([0, 1, 12, 13])
    assert (await slow.complete(old, late)).tolist() == [False]
    assert await held_bytes(quick) == 0  # nothing that nobody would ever free
    assert (await status(quick, "rollout")).counts["expired"] == 2
    renewing.cancel()


async def test_held_leases_are_kept_alive_for_as_long_as_they_are_held(open_house: Open) -> None:
    house = await open_house(lease_seconds=LEASE_SECONDS)
    client, other = await house.connect("w"), await house.connect("other")
    await put(client, 0, 1)
    renewing = asyncio.create_task(client.renew_held())
    kept = (await leased(client)).lease
    lost = (await leased(other)).lease
    other._held.clear()  # in one process, too, it renews nothing
    if house.way == "process":
        client._held[kept.token] = set(kept.indices)
    assert (await leased(client)).lease.indices == lost.indices
    await asyncio.sleep(2 * LEASE_SECONDS)
    assert (await client.complete(kept, outputs(*kept.indices))).tolist() == [True, True]
    assert (await status(client, "rollout")).counts["redelivered"] == 2
    assert not renewing.done()
    renewing.cancel()


@over("process-1", "apart-3")
async def test_renewing_goes_on_when_a_lease_was_lost_all_the_same(open_house: Open) -> None:
    client = await (await open_house(lease_seconds=LEASE_SECONDS)).connect("w")
    await put(client, 0, 1)
    lost, kept = (await leased(client)).lease, (await leased(client)).lease
    await client._controller("rollout").fail(lost.token, lost.indices, "behind the client's back")
    renewing = asyncio.create_task(client.renew_held())
    await asyncio.sleep(2 * LEASE_SECONDS)
    assert not renewing.done()
    await client._controller("rollout").check(kept.token, kept.indices)
    renewing.cancel()


async def test_what_a_leaving_worker_held_goes_to_another_at_once(house: House) -> None:
    leaver, stayer = await house.connect("leaver"), await house.connect("stayer")
    await put(stayer, 0)
    held = (await leased(leaver)).lease
    waiting = await parked(stayer.lease("rollout"))
    await house.leave("leaver")
    found = await within(waiting, 1.0)
    assert found is not None and found.lease.rows == [[0, 1]] and found.lease.attempts == [[1, 1]]
    assert (await within(stayer.complete(found.lease, outputs(0)))).tolist() == [True]
    assert (await within(stayer.complete(held, outputs(0, 1)))).tolist() == [False, False]  # the unit has been told meanwhile


# -- rows go ------------------------------------------------------------------------------------------------------------------


async def test_the_row_that_was_dropped_while_it_was_made_is_not_kept(client: TransferQueueClient) -> None:
    await put(client, 0)
    lease = (await leased(client)).lease
    await client.drop([0, 1])
    assert (await client.complete(lease, outputs(1))).tolist() == [False]
    assert await held_bytes(client) == 0


async def test_dropping_frees_everything(client: TransferQueueClient) -> None:
    await put(client, 0, 1, 2)
    await generate(client)
    assert await held_bytes(client) > 0
    await client.drop([])
    await client.drop([0, 1, 4, 5, 8, 9, 77])
    tasks, units = await client.status()
    assert await held_bytes(client) == 0 and sum(unit.rows + unit.room.reserved_rows for unit in units.values()) == 0
    assert await counts(client, "rollout") == {} == await counts(client, "train")
    assert tasks["rollout"].counts["done_total"] == 6


async def test_a_group_of_which_a_row_has_gone_is_whole_with_the_rest(client: TransferQueueClient) -> None:
    await put(client, 0, size=3)
    lease = (await leased(client)).lease
    await client.complete(lease, outputs(0, 2))
    waiting = await parked(client.lease("train"))
    await client.drop([1])
    found = await within(waiting)
    assert found is not None and found.lease.rows == [[0, 2]]


@over("process-1", "process-3", "unix-1", "apart-3")
async def test_a_lease_whose_columns_cannot_be_read_is_not_kept_alive(house: House, client: TransferQueueClient) -> None:
    await put(client, 0)
    for storage in house.storages:
        await storage.drop(np.array([0, 1]), np.array([0]))
    with pytest.raises(Exception, match="prompt|KeyError|group 0"):
        await within(client.lease("rollout"))
    assert client._held == {}
