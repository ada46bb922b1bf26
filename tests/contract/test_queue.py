"""One suite over every way to the queue: in one process, over a socket, each part served apart, over TLS; one unit or three."""

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
from asyncflow.transfer_queue.leases import StaleToken, Token
from asyncflow.transfer_queue.node import serve_controller, serve_unit
from asyncflow.transfer_queue.notices import News, Superseded
from asyncflow.transfer_queue.queue import TransferQueue
from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.transfer_queue.storage.base import Storage
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.transfer_queue.storage.redis import RedisStorage
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
        self.address, self.num_doors = "", 0
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
    return Batch(np.array(rows, np.int64), np.array(groups), columns)


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
    await put(client, 4, step=2)
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


async def test_a_stream_of_every_step_until_one_has_ended(client: TransferQueueClient) -> None:
    """What is fetched ahead when the step ends comes still, and is its taker's; what is ready besides stays where it is."""
    await put(client, 0, step=0)
    await put(client, 1, 2, 3, step=1)
    await generate(client)
    taken: list[int] = []
    async for found in client.stream("train", until=0):
        taken.append(found.lease.groups[0].group)
        if len(taken) == 1:
            await until(lambda: all_held(client, 4))  # the next one has been fetched
            await client.end_step("train", 0)
    assert taken[0] == 0 and len(taken) == 2 and (await counts(client, "train"))["ready"] == 4
    assert await within(client.lease("train", until=0)) is None
    left = [(await leased(client, "train", step=1)).lease.groups[0].group for _ in range(2)]
    assert sorted([*taken, *left]) == [0, 1, 2, 3]


async def all_held(client: TransferQueueClient, num_rows: int) -> bool:
    return (await counts(client, "train")).get("leased", 0) == num_rows


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


async def test_what_is_ready_when_a_step_or_a_task_ends_is_still_handed_out(client: TransferQueueClient) -> None:
    await put(client, 0, 1)
    await put(client, 2, step=1)
    await client.end_step("rollout", 0)
    seen = [found.lease.groups[0].group async for found in client.stream("rollout", 0)]
    assert sorted(seen) == [0, 1]
    await client.close("rollout")
    assert [m.group for m in (await leased(client, groups=9)).lease.groups] == [2]
    assert await within(client.lease("rollout")) is None


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


def of(rows: list[int], groups: list[int], **columns: Values) -> Batch:
    return Batch(np.array(rows, np.int64), np.array(groups), columns)


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


MISFITS = {
    "dtype": (of([1], [0], reward=np.ones(1)), r"row 1, column 'reward': declared float32, written float64"),
    "rank": (of([1], [0], reward=floats(1, 1)), r"row 1, column 'reward': declared entries of shape \(\)"),
    "shape": (of([0], [0], image=np.ones((1, 3, 2), np.uint8)), r"row 0, column 'image': declared entries of shape \(2, 3\)"),
    "length": (of([0, 1], [0], reward=floats(1)), r"row 1, column 'reward': 1 entries for 2 rows"),
    "of groups": (of([0, 1], [0], temperature=floats(2)), r"group .* column 'temperature': 2 entries for 1 groups"),
    "ragged": (of([0], [0], ids=np.ones(1, np.int64)), r"row 0, column 'ids': declared ragged, written dense"),
    "unknown": (of([0], [0], idz=np.ones(1)), r"column 'idz' is not declared; declared are .*ids"),
    "twice": (of([1, 1], [0], reward=floats(2)), r"row 1 is in the batch twice"),
    "strange": (of([9], [1], reward=floats(1)), r"the batch has rows of group 2, which is not one of its groups"),
    "not admitted": (of([9], [2], reward=floats(1)), r"row 9 is none: group 2 is not put with it"),
    "a group not admitted": (of([], [2], temperature=floats(1)), r"group 2 has columns in the batch and is not admitted with it"),
}


@over("process-1", "apart-3")
async def test_a_put_that_does_not_fit_is_refused_at_the_client_naming_row_and_column(
    client: TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_unit", lambda number: pytest.fail("something was sent"))
    for batch, message in MISFITS.values():
        with pytest.raises(ValueError, match=message):
            await client.put([meta(0), meta(1)], batch)
    with pytest.raises(ValueError, match="group 1 has 5 rows"):
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


async def test_a_dropped_group_does_not_come_again(house: House, client: TransferQueueClient) -> None:
    """A put of it may be the repetition of one whose answer was lost."""
    await put(client, 0, 1)
    await client.drop([0, 1, 4])
    await put(client, 0, 1)
    assert (await client.put([meta(0)], outputs(0, 1))).tolist() == [False, False]
    assert (await client.put([meta(1)], outputs(4, 5))).tolist() == [False, True]
    assert sorted((await leased(client, "train")).lease.indices) == [5]
    await client.drop([5])
    assert await held_bytes(client) == 0


async def test_a_group_of_which_a_row_has_gone_is_whole_with_the_rest(client: TransferQueueClient) -> None:
    await put(client, 0, size=3)
    lease = (await leased(client)).lease
    await client.complete(lease, outputs(0, 2))
    waiting = await parked(client.lease("train"))
    await client.drop([1])
    found = await within(waiting)
    assert found is not None and found.lease.rows == [[0, 2]]


@over("process-1", "process-3", "unix-1", "apart-3")
async def test_a_lease_whose_columns_cannot_be_read_is_passed_over_and_not_kept_alive(
    house: House, client: TransferQueueClient
) -> None:
    await put(client, 0)
    for storage in house.storages:  # as if the unit had been another one meanwhile
        await storage.drop(np.array([0, 1]), np.array([0]))
    waiting = await parked(client.lease("rollout"))
    assert client._held == {}
    await put(client, 3)
    found = await within(waiting)
    assert found is not None and found.lease.rows == [[12, 13]] and list(client._held) == [found.lease.token]


async def test_a_controller_whose_books_refuse_a_row_ends_the_queue_instead_of_going_on(tmp_path: Path) -> None:
    def broken(rows: list[int]) -> None:
        raise KeyError(f"the books do not know row {rows[0]}")

    queue = TransferQueue(schema(), [MemoryStorage()], callbacks={"rollout": {"on_done": broken}}, notify_timeout_seconds=0.1)
    await queue.open()
    running, client = asyncio.create_task(queue.run()), queue.client()
    await put(client, 0)
    await client.complete((await leased(client)).lease, outputs(1))
    with pytest.raises(ExceptionGroup) as ended:
        await within(running)
    assert "do not know row 1" in str(ended.value.exceptions[0])
    await queue.close()


# -- room ---------------------------------------------------------------------------------------------------------------------

ROOMY = over("process-1", "unix-1", "apart-tls-1")


async def room(client: TransferQueueClient) -> Any:
    return (await within(client.status()))[1][0].room


@ROOMY
async def test_admission_waits_for_rows_to_go_first_come_first_served(open_house: Open) -> None:
    house = await open_house(capacity_rows=4)
    client = await house.connect("w")
    await put(client, 0, 1)
    large = await parked(put(client, 2, size=3))
    small = await parked(put(client, 3, size=1))
    assert ((await room(client)).waiting, (await room(client)).reserved_rows) == (2, 4)
    lease = (await leased(client, groups=9)).lease
    assert (await within(client.complete(lease, outputs(*lease.indices)), 1.0)).all()  # a completion never waits
    await client.drop([0, 1])
    await asyncio.sleep(SHORT)
    assert not large.done() and not small.done()  # the small one would fit, and does not overtake
    await client.drop([4])
    await within(large)
    await asyncio.sleep(SHORT)
    assert not small.done()
    await client.drop([5])
    await within(small)
    found = await room(client)
    assert (found.waiting, found.reserved_rows) == (0, 4) and found.waited_seconds >= found.longest_wait_seconds > 2 * SHORT


@ROOMY
async def test_admission_reserves_the_bytes_that_its_rows_come_with_and_may_grow_to(open_house: Open) -> None:
    house = await open_house(capacity_bytes=1000)
    client = await house.connect("w")
    await put(client, 0, row_bytes=400)  # 2 x 400, and a prompt of 8 bytes
    assert (await room(client)).reserved_bytes == 808
    waiting = await parked(put(client, 1, row_bytes=92))  # 2 x 92, and 16
    lease = (await leased(client)).lease
    await within(client.complete(lease, outputs(0, 1)), 1.0)
    assert (await room(client)).reserved_bytes == 808 and not waiting.done()
    await client.drop([0])
    await within(waiting)
    assert (await room(client)).reserved_bytes == 404 + 200
    await client.drop([1, 4, 5])
    assert (await room(client)).reserved_bytes == 0


@ROOMY
async def test_more_than_ever_fits_is_refused_with_the_arithmetic(open_house: Open) -> None:
    client = await (await open_house(capacity_rows=4, capacity_bytes=1000)).connect("w")
    with pytest.raises(ValueError, match=r"admission of 6 rows cannot fit into a storage unit of 4 rows; .*queue\.capacity_rows"):
        await put(client, 0, 1, 2)
    with pytest.raises(ValueError, match=r"admission of 1208 bytes cannot fit into a storage unit of 1000 bytes; .*capacity_bytes"):
        await put(client, 0, row_bytes=600)
    assert (await room(client)).reserved_rows == 0


@ROOMY
async def test_who_gives_up_waiting_for_room_makes_way(open_house: Open) -> None:
    client = await (await open_house(capacity_rows=4)).connect("w")
    await put(client, 0)
    gives_up = await parked(put(client, 1, 2))
    waiting = await parked(put(client, 3))
    gives_up.cancel()
    await within(waiting)
    await until(lambda: _is_settled(client))
    assert (await client.status())[1][0].rows == 4


async def _is_settled(client: TransferQueueClient) -> bool:
    found = await room(client)
    return (found.reserved_rows, found.waiting) == (4, 0)


# -- metrics ------------------------------------------------------------------------------------------------------------------


@over("process-1", "units-1", "apart-tls-1")
async def test_the_metrics_are_prometheus_text_with_the_right_numbers(open_house: Open) -> None:
    house = await open_house(capacity_rows=8)
    client = await house.connect("w")
    await put(client, 0, 1, 2, 3, row_bytes=100)
    lease = (await leased(client, groups=3)).lease
    await client.complete(lease, outputs(*lease.rows[0], lease.rows[1][0]))
    await client.fail(lease, [lease.rows[1][1]], "broken")
    again = await leased(client, rows=1)
    await client.fail(again.lease, again.lease.indices, "broken")
    await client.filter([lease.rows[2][1]], "too easy")
    parked_lease, parked_put = await parked(client.lease("eval")), await parked(put(client, 4))
    await client.drop([lease.rows[0][0]])
    text = await within(house.queue.metrics())
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type in ("gauge", "counter")
        for sample in family.samples:
            labels = (sample.labels[label] for label in ("task", "unit", "state") if label in sample.labels)
            found[(sample.name.removeprefix("asyncflow_queue_"), *labels)] = sample.value
    states = ("waiting", "ready", "leased", "done", "dead", "filtered")
    assert [found["rows", "rollout", state] for state in states] == [0, 2, 1, 2, 1, 1]
    assert [found["rows", "train", state] for state in states] == [3, 2, 0, 0, 1, 1]
    totals = ("done_total", "dead_total", "filtered_total", "redelivered_total")
    assert [found[total, "rollout"] for total in totals] == [3, 1, 1, 1]
    assert (found["parked_requests", "eval"], found["parked_requests", "train"]) == (1, 0)
    assert 0 < found["oldest_ready_seconds", "rollout"] < 5
    assert (found["unit_rows_held", "0"], found["unit_reserved_rows", "0"], found["unit_admissions_waiting", "0"]) == (7, 7, 1)
    assert found["unit_held_bytes", "0"] == (await held_bytes(client))
    assert found["unit_reserved_bytes", "0"] == 7 * (100 + 10)  # 80 bytes of prompts on 8 rows
    parked_lease.cancel()
    await client.drop([lease.rows[0][1]])
    await within(parked_put)
    waited = (await room(client)).waited_seconds
    assert f'asyncflow_queue_unit_admission_wait_seconds_total{{unit="0"}} {waited}' in await house.queue.metrics()


# -- units and controllers come and go ----------------------------------------------------------------------------------------


@over("process-1", "unix-1")
async def test_a_unit_joins_a_live_queue_old_rows_stay_and_new_ones_go_to_both(house: House, client: TransferQueueClient) -> None:
    await put(client, 0, 1)
    old = (await leased(client)).lease
    assert await house.queue.add_unit(MemoryStorage()) == 1
    house.server.services.update(house.queue.services)
    await within(client.wait_for_units(2))
    await put(client, 2, 3)
    assert {number: unit.rows for number, unit in (await client.status())[1].items()} == {0: 6, 1: 2}
    assert (await client.complete(old, outputs(*old.indices))).all()
    found = await leased(client, groups=9)
    assert dict(zip([m.group for m in found.lease.groups], found.lease.units, strict=True)) == {1: 0, 2: 0, 3: 1}
    assert prompts_in(found) == {group: prompt_of(group) for group in (1, 2, 3)}
    await client.complete(found.lease, outputs(*found.lease.indices))
    assert is_outputs(await leased(client, "train", groups=9))


@over("units-1", "apart-1", "apart-tls-1")
async def test_a_unit_of_another_process_joins_a_live_queue(house: House, client: TransferQueueClient) -> None:
    await put(client, 0, 1)
    await house.start_unit(1, MemoryStorage())
    await within(client.wait_for_units(2))
    await put(client, 2, 3)
    await generate(client)
    assert is_outputs(await leased(client, "train", groups=9))
    assert {number: unit.rows for number, unit in (await client.status())[1].items()} == {0: 6, 1: 2}


class Gate:
    """A unit as a controller sees it that can be kept from asking for more."""

    def __init__(self, unit: StorageUnit) -> None:
        self._unit, self.is_open, self.news = unit, asyncio.Event(), list[News]()
        self.is_open.set()

    async def follow(self, *arguments: Any) -> News:
        await self.is_open.wait()
        news = await self._unit.follow(*arguments)
        self.news.append(news)
        return news


@contextlib.asynccontextmanager
async def with_a_gate(notify_timeout_seconds: float) -> AsyncIterator[tuple[TransferQueueClient, Controller, Gate]]:
    """A queue in this process whose controller of `train` follows its unit through a gate."""
    queue = TransferQueue(schema(), [MemoryStorage()], tasks=["rollout", "eval"], notify_timeout_seconds=notify_timeout_seconds)
    train, gate = Controller("train", queue.schema, turn=1), Gate(queue.units[0])
    queue._serve("controller/train", train)
    async with queue.running():
        following = asyncio.create_task(train.follow(0, gate))  # type: ignore[arg-type]
        await train.caught_up(0)
        yield queue.client(), train, gate
        following.cancel()


async def test_a_silent_controller_is_marked_away_holds_nobody_up_and_is_told_what_it_missed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with with_a_gate(0.15) as (client, train, gate):
        gate.is_open.clear()
        began = asyncio.get_running_loop().time()
        with caplog.at_level(logging.WARNING):
            await put(client, 0)
        assert (
            0.1 < asyncio.get_running_loop().time() - began < 2
            and "task 'train' has not taken a notice within 0.15 s" in caplog.text
        )
        assert (await client.status())[1][0].away == ["train"]
        began = asyncio.get_running_loop().time()
        await put(client, 1, 2)  # nobody waits for it any more
        await generate(client)
        await client.drop([0, 1])
        await client.end_step("train", 7)
        assert asyncio.get_running_loop().time() - began < 0.1
        assert train.table.counts()["ready"] == 0
        gate.is_open.set()
        assert sorted((await leased(client, "train", groups=9)).lease.indices) == [4, 5, 8, 9]
        await until(lambda: _ended(train, 7))
        assert (await client.status())[1][0].away == [] and [news.is_full for news in gate.news][1:] == [False] * (
            len(gate.news) - 1
        )
        assert "the controller of task 'train' is back" in caplog.text
        gate.is_open.clear()
        waiting = await parked(put(client, 3))  # it is waited for again
        gate.is_open.set()
        await within(waiting)


async def _ended(controller: Controller, step: int) -> bool:
    return step in controller.table.ended_steps


async def test_a_controller_that_has_missed_more_than_is_kept_is_told_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_module, "NOTICES_KEPT", 4)
    async with with_a_gate(0.05) as (client, train, gate):
        await put(client, 0, 1)
        gate.is_open.clear()
        for group in range(2, 9):
            await put(client, group)
        await generate(client)
        await client.drop([0, 1, 8])
        await client.filter([12], "so")
        gate.is_open.set()
        train_rows = sorted((await leased(client, "train", groups=99)).lease.indices)
        assert train_rows == sorted({4 * group + i for group in range(9) for i in range(2)} - {0, 1, 8, 12})
        assert [news.is_full for news in gate.news].count(True) == 2  # at first, and now
        assert train.table.state_of(0) is None and train.table.state_of(8) is None
        await client.end_step("train", 0)
        assert await within(client.lease("train", step=0)) is None


@over("apart-1", "apart-tls-1")
async def test_a_restarted_controller_has_its_table_again_and_clients_go_on(house: House, client: TransferQueueClient) -> None:
    await put(client, 0, 1, 2, 3)
    lease = (await leased(client, groups=3)).lease
    await client.complete(lease, outputs(0, 1, 4, 5))
    await client.filter([13], "so")
    await client.end_step("rollout", 5)
    await client.end_step("train", 6)
    old = (await leased(client, "train")).lease
    await house.stop("controller/rollout")
    await house.stop("controller/train")
    waiting = await parked(client.lease("train", groups=2))
    await house.start_controller("rollout")
    await house.start_controller("train")
    found = await within(waiting)
    assert found is not None and sorted(found.lease.indices) == [0, 1, 4, 5]  # what was leased comes again
    assert found.lease.token.incarnation != old.token.incarnation
    assert await counts(client, "rollout") == {"ready": 3, "done": 4, "filtered": 1}
    assert (await within(client.complete(lease, outputs(8)))).tolist() == [False]
    with pytest.raises(StaleToken):
        await client.complete_marks([old])
    assert await within(client.lease("rollout", step=5)) is None and await within(client.lease("train", step=6)) is None
    again = await leased(client, groups=9)
    assert (await client.complete(again.lease, outputs(*again.lease.indices))).all()
    await client.complete_marks([found.lease])
    await client.close("train")
    await house.stop("controller/train")
    await house.start_controller("train")
    rest = await leased(client, "train", groups=9)  # what is ready is still handed out
    assert sorted(rest.lease.indices) == [8, 9, 12]
    assert await within(client.lease("train")) is None
    assert (await counts(client, "train"))["done"] == 4


@over("apart-1", "apart-tls-1")
async def test_a_superseded_controller_stops_and_clients_follow_the_new_one(house: House, client: TransferQueueClient) -> None:
    await put(client, 0)
    old = (await leased(client)).lease
    first = house.serving.pop("controller/rollout")
    await house._joined(
        "controller/rollout",
        serve_controller(house.address, "rollout", house._door("another"), credentials=house.credentials),
    )
    with pytest.raises(Superseded, match="task 'rollout': another controller has taken it over"):
        await within(first)
    new = await leased(client)
    assert new.lease.rows == old.rows and new.lease.token.incarnation != old.token.incarnation
    assert (await client.complete(old, outputs(0, 1))).tolist() == [False, False]
    assert (await client.complete(new.lease, outputs(0, 1))).all()


@over("units-3")
async def test_a_unit_restarted_over_memory_has_exactly_its_rows_named_as_lost(open_house: Open) -> None:
    lost: dict[str, list[tuple[int, list[int]]]] = {"rollout": [], "train": []}
    house = await open_house(
        callbacks={task: {"on_lost": lambda unit, rows, told=told: told.append((unit, rows))} for task, told in lost.items()}
    )
    client = await house.connect("w")
    await put(client, *range(6))
    await generate(client)
    await client.drop([5])
    held = (await leased(client, "train", groups=6)).lease
    await client.end_step("train", 3)
    await house.stop("unit/1")
    during = await parked(put(client, 7))
    await house.start_unit(1, MemoryStorage())
    await within(during)
    await until(lambda: _told(lost))
    assert lost == {"rollout": [(1, [4, 16, 17])], "train": [(1, [4, 16, 17])]}
    assert await counts(client, "rollout") == {"done": 8, "ready": 2} and (await counts(client, "train"))["leased"] == 8
    await put(client, 1, 4)  # made again
    await generate(client)
    again = await leased(client, "train", groups=9)
    assert sorted(again.lease.indices) == [4, 5, 16, 17, 28, 29] and is_outputs(again)
    with pytest.raises(StaleToken):
        await client.complete_marks([held])  # it held rows that are lost
    assert await counts(client, "train") == {"leased": 14}


async def _told(lost: dict[str, list[tuple[int, list[int]]]]) -> bool:
    return all(lost.values())


@over("units-1", "apart-3")
async def test_a_unit_restarted_over_redis_has_lost_nothing(open_house: Open, redis_storage: Callable[[int], Storage]) -> None:
    house = await open_house(storage=redis_storage)
    client = await house.connect("w")
    await put(client, 0, 1)
    lease = (await leased(client, rows=4, at_least=4)).lease
    await put(client, 2, 3)
    await client.complete(lease, outputs(lease.rows[0][0], *lease.rows[1]))
    await client.filter([12], "so")
    await client.drop([lease.rows[1][0]])
    await client.end_step("train", 3)
    await client.close("eval")
    assert await counts(client, "rollout") == {"ready": 3, "leased": 1, "done": 2, "filtered": 1}
    read = await leased(client, "train", groups=9)
    for number in range(house.num_units):
        await house.stop(f"unit/{number}")
    waiting = await parked(client.complete(lease, outputs(lease.rows[0][1])))
    for number in range(house.num_units):
        await house.start_unit(number, redis_storage(number))
    assert (await within(waiting)).tolist() == [True]
    assert same((await client.fetch(read.lease, ["prompt", *OUTPUTS])).batch, read.batch)  # type: ignore[union-attr]
    await client.complete_marks([read.lease])
    assert await counts(client, "rollout") == {"ready": 3, "done": 3, "filtered": 1}
    assert await within(client.lease("train", step=3)) is None and await within(client.lease("eval")) is None
    if house.way.startswith("apart"):
        await house.stop("controller/rollout")
        await house.start_controller("rollout")
        assert await counts(client, "rollout") == {"ready": 3, "done": 3, "filtered": 1}  # what was dropped stays away


# -- snapshots ----------------------------------------------------------------------------------------------------------------

SNAPSHOTS = over("process-1", "process-3", "units-1", "apart-3", "apart-tls-1")


async def contents(client: TransferQueueClient) -> dict[int, dict[str, bytes]]:
    """Every column of every row, mark, and state."""
    found: dict[int, dict[str, bytes]] = {}
    units = sorted((await client.status())[1])
    for row in range(4 * 40):
        for unit in units:
            for column in client.schema.columns:
                try:
                    [batch] = await client.read({unit: np.array([row])}, [column.name])
                except LookupError:
                    continue
                values = batch.columns[column.name]
                found.setdefault(row, {})[column.name] = (values[0] if isinstance(values, Ragged) else values[:1]).tobytes()
    return found


async def filled(client: TransferQueueClient) -> None:
    """Rows in all states, with columns of all kinds, and ends of steps and streams."""
    await client.put([meta(group, size=4, step=1) for group in (8, 9, 10)], everything([8, 9, 10]))
    await put(client, 0, 1, 2, 3, size=3)
    lease = (await leased(client, groups=3)).lease
    for rows in lease.rows:
        await client.complete(lease, outputs(*rows[:2]))
    await client.fail(lease, [lease.rows[0][2]], "again")
    await client.fail((await leased(client, rows=1)).lease, [lease.rows[0][2]], "dead of it")
    await client.filter([lease.rows[1][2]], "too easy")
    await client.complete_marks([(await leased(client, "train", step=1)).lease])
    await leased(client, "train", step=1)
    await leased(client, rows=1)
    await client.drop([lease.rows[2][0]])
    await client.end_step("train", 5)
    await client.end_step("rollout", 6)
    await client.close("eval")


@SNAPSHOTS
@pytest.mark.parametrize("num_units", [1, 2, 3])
async def test_a_snapshot_restored_into_any_number_of_units_is_the_queue_as_it_was(
    open_house: Open, tmp_path: Path, num_units: int
) -> None:
    house = await open_house(snapshot_dir=tmp_path / "snapshots")
    client = await house.connect("w")
    await filled(client)
    before, states = await contents(client), {task: await counts(client, task) for task in ("rollout", "train")}
    assert states["train"]["leased"] and states["rollout"]["leased"] and states["rollout"]["filtered"] and states["rollout"]["dead"]
    manifest = await within(house.queue.snapshot("s"))
    assert sum(file.rows for file in manifest.files) == 23 and len(manifest.files) == house.num_units
    await put(client, 30)  # later than the snapshot
    restored = TransferQueue(schema(), [MemoryStorage() for _ in range(num_units)], snapshot_dir=tmp_path / "snapshots")
    async with restored.running():
        assert await restored.restore("s") == 23
        other = restored.client()
        await until(lambda: _has_rows(other, 23))
        assert await contents(other) == before
        for task, old in states.items():  # what was leased is ready again
            old["ready"] = old.get("ready", 0) + old.pop("leased")
            assert await counts(other, task) == old
        assert [await within(other.lease(task, step=step)) for task, step in (("train", 5), ("rollout", 6))] == [None, None]
        assert await within(other.lease("eval")) is None
        rest = await leased(other, groups=99)
        assert (await other.complete(rest.lease, outputs(*rest.lease.indices))).all()
        train = await leased(other, "train", groups=99, step=0)
        assert is_outputs(train) and sorted(prompts_in(train).items()) == [(group, prompt_of(group)) for group in range(4)]
        rows = np.array(sorted(before))
        await other.drop(rows)
        assert await held_bytes(other) == 0 and sum(unit.rows for unit in (await other.status())[1].values()) == 0


async def _has_rows(client: TransferQueueClient, count: int) -> bool:
    return [sum((await counts(client, task)).values()) for task in ("rollout", "train")] == [count, count]


class Slow(MemoryStorage):
    """Reads wait until they may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_read = asyncio.Event()
        self.may_read.set()

    async def read(self, indices: np.ndarray, columns: Sequence[str]) -> Batch:
        await self.may_read.wait()
        return await super().read(indices, columns)


@over("process-1", "units-1")
async def test_what_is_dropped_and_put_during_a_snapshot_neither_spoils_nor_stops_it(open_house: Open, tmp_path: Path) -> None:
    house = await open_house(storage=lambda number: Slow(), snapshot_dir=tmp_path)
    client = await house.connect("w")
    await put(client, 0, 1)
    await generate(client)
    before, slow = await contents(client), house.storages[0]
    assert isinstance(slow, Slow)
    slow.may_read.clear()
    writing = await parked(house.queue.snapshot("s"))
    await within(client.drop([0, 1, 4]), 1.0)
    await put(client, 2)
    assert sorted((await leased(client, columns=[])).lease.indices) == [8, 9] and not writing.done()
    slow.may_read.set()
    assert (await within(writing)).files[0].rows == 4
    assert sorted(await contents(client)) == [5, 8, 9]
    await client.drop([5, 8, 9])
    assert await held_bytes(client) == 0
    restored = TransferQueue(schema(), [MemoryStorage()], snapshot_dir=tmp_path)
    async with restored.running():
        assert await restored.restore("s") == 4
        assert await contents(restored.client()) == before


@alone
async def test_a_snapshot_is_hardly_larger_than_what_is_in_it(open_house: Open, tmp_path: Path) -> None:
    house = await open_house(snapshot_dir=tmp_path)
    client = await house.connect("w")
    for group in range(64):
        ids = Ragged.from_arrays([np.full(510, group)] * 4, "int64")
        rows = np.arange(4) + 4 * group
        batch = Batch(rows, np.array([group]), {"ids": ids, "prompt": Ragged.from_arrays([np.arange(8)], "int64")})
        await client.put([meta(group, size=4)], batch)
    payload = await held_bytes(client)
    assert payload >= 1 << 20
    [file] = (await house.queue.snapshot("s")).files
    assert (tmp_path / file.name).stat().st_size == file.bytes < 1.05 * payload


async def restores(folder: Path, name: str = "s") -> int:
    queue = TransferQueue(schema(), [MemoryStorage()], snapshot_dir=folder)
    async with queue.running():
        return await queue.restore(name)


@alone
async def test_what_is_no_whole_snapshot_is_refused_by_name(open_house: Open, tmp_path: Path) -> None:
    house = await open_house(snapshot_dir=tmp_path)
    client = await house.connect("w")
    await client.put([meta(group, size=4) for group in (0, 1)], everything([0, 1]))
    await house.queue.snapshot("s")
    [manifest], [file] = tmp_path.glob("s.json"), tmp_path.glob("s.*.unit-0")
    assert sorted(path for path in tmp_path.iterdir() if path.suffix != ".sock") == sorted([manifest, file])
    whole = file.read_bytes()
    frames = [at for at in range(len(whole)) if whole[at : at + 4] == b"AFP\x01"]
    assert len(frames) >= 2
    damaged = {
        "cut short": whole[:-9],
        "cut at a frame": whole[: frames[-1]],
        "without frames": whole[: frames[0]],
        "a flipped bit": whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:],
        **{f"byte {at}": whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, frames[0], 37)},
        "empty": b"",
        "another file": b"PK\x03\x04" + whole[4:],
        "longer": whole + bytes(64),
    }
    for what, content in damaged.items():
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"s\.\w+\.unit-0"):
            pytest.fail(f"{what}: {await restores(tmp_path)} rows")
    file.rename(file.with_name(file.name + ".partial"))
    with pytest.raises(ValueError, match=r"s\.\w+\.unit-0"):
        await restores(tmp_path)
    file.write_bytes(whole)
    assert await restores(tmp_path) == 8
    manifest.rename(tmp_path / "s.json.partial")
    with pytest.raises(ValueError, match="there is no snapshot 's'"):
        await restores(tmp_path)


@alone
async def test_a_snapshot_that_fails_leaves_the_one_before(
    open_house: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = await open_house(snapshot_dir=tmp_path)
    client = await house.connect("w")
    await put(client, 0)
    await house.queue.snapshot("s")
    await put(client, 1)

    async def broken(*arguments: Any) -> Batch:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(house.storages[0], "read", broken)
        with pytest.raises(OSError, match="no space left"):
            await house.queue.snapshot("s")
    assert await restores(tmp_path) == 2
    await house.queue.snapshot("s")
    assert await restores(tmp_path) == 4


@alone
async def test_a_snapshot_of_a_queue_with_other_columns_is_refused(open_house: Open, tmp_path: Path) -> None:
    house = await open_house(snapshot_dir=tmp_path)
    await put(await house.connect("w"), 0)
    await house.queue.snapshot("s")
    other = Schema((*COLUMNS, Column("more", "int8")), schema().tasks, BITS)
    queue = TransferQueue(other, [MemoryStorage()], snapshot_dir=tmp_path)
    async with queue.running():
        with pytest.raises(ValueError, match=r"s\.\w+\.unit-0 was written by a queue with other columns"):
            await queue.restore("s")


@over("process-1", "apart-tls-1")
async def test_a_snapshot_goes_nowhere_but_into_its_directory(open_house: Open, tmp_path: Path) -> None:
    house = await open_house(snapshot_dir=tmp_path / "snapshots")
    client = await house.connect("w")
    await put(client, 0)
    before = sorted(tmp_path.rglob("*"))
    for name in ("../s", "/tmp/s", "a/b", "..", ".", "", ".hidden", "a\0b", "a\\b", "a b"):
        for call in (house.queue.snapshot, house.queue.restore, client._unit(0).snapshot, client._unit(0).restore):
            with pytest.raises(ValueError, match="is no name for a snapshot"):
                await call(name)
    assert sorted(path for path in tmp_path.rglob("*") if path.name != "snapshots") == before
    await house.queue.snapshot("s-1.a_b")


@alone
async def test_without_a_directory_there_are_no_snapshots(house: House) -> None:
    with pytest.raises(ValueError, match=r"there is no snapshot directory; give one \(snapshot_dir\)"):
        await house.queue.snapshot("s")
    with pytest.raises(ValueError, match=r"no snapshot directory"):
        await house.queue.restore("s")
