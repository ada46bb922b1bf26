"""One suite over every storage: what is read is what was written, in any order asked, and what is dropped is given back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncflow.registry import build
from asyncflow.transfer_queue import STORAGES
from asyncflow.transfer_queue.schema import Schema
from asyncflow.transfer_queue.storage.base import QueueOwner, Storage
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.transfer_queue.storage.servers.key_value import KeyValueStorage
from asyncflow.transfer_queue.storage.servers.redis import RUN_SECONDS, RedisKeyValue
from asyncflow.types import Batch, Column, GroupMeta, Interval, Ragged, Values
from tests.depth import few

BITS = 3
SIZE = 8
FAR = 1 << 47  # a group whose rows are around 2 ** 50
COLUMNS = (
    Column("prompt", "int64", ragged=True, per="group"),
    Column("temperature", "float32", per="group"),
    Column("ids", "int64", ragged=True),
    Column("logprobs", "float32", ragged=True, shape=(2,)),
    Column("reward", "float32"),
    Column("image", "uint8", shape=(2, 3)),
    Column("flag", "bool"),
)
SCHEMA = Schema(COLUMNS, (), BITS)
SPECS = {column.name: column for column in COLUMNS}
ROW_COLUMNS = [column.name for column in COLUMNS if column.per == "row"]
Open = Callable[..., Any]
examples = itertools.count()
prefixes = (f"test-{number}" for number in itertools.count())


@pytest_asyncio.fixture(params=sorted(STORAGES))
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Open]:
    """Opens a storage of each kind: one of its own, or with `prefix` what another one has left."""
    kind = request.param
    options: dict[str, Any] = {}
    if kind == "redis":
        options = {"url": request.getfixturevalue("redis_url"), "timeout_seconds": 10.0}
    if kind == "mooncake":
        options = {"master": request.getfixturevalue("mooncake_master"), "segment_bytes": 128 << 20, "buffer_bytes": 64 << 20}
    made: list[Storage] = []

    async def open_(prefix: str | None = None, owner: QueueOwner | None = None) -> Storage:
        if kind == "mooncake" and made:  # takes two seconds to close, and recovers nothing
            return made[0]
        named = {} if kind == "memory" else {"prefix": prefix or next(prefixes)}
        storage: Storage = build("queue storage", kind, options | named | {"unit": 3}, STORAGES)
        await storage.open(SCHEMA, owner)
        made.append(storage)
        return storage

    yield open_
    await asyncio.gather(*(storage.close() for storage in made))


@pytest_asyncio.fixture
async def storage(opened: Open) -> Storage:
    found: Storage = await opened()
    return found


def array(*numbers: Any, dtype: str = "int64") -> np.ndarray:
    return np.array(numbers, dtype)


def ragged(*arrays: Any, dtype: str = "int64") -> Ragged:
    return Ragged.from_arrays([np.array(a, dtype) for a in arrays], dtype)


def batch(rows: Sequence[int] | np.ndarray, **columns: Values) -> Batch:
    indices = np.array(rows, np.int64)
    return Batch(indices, array(*dict.fromkeys((indices >> BITS).tolist())), columns)


def meta(group: int, size: int = SIZE) -> GroupMeta:
    return GroupMeta(group, size, 5, Interval(3, 4))


def admitted(*groups: int) -> tuple[list[GroupMeta], Batch]:
    """What a put writes: all rows of the groups, with group columns alone."""
    rows = [(group << BITS) + sample for group in groups for sample in range(SIZE)]
    prompts = ragged(*([group] * (1 + group % 5) for group in groups))
    return [meta(group) for group in groups], batch(rows, prompt=prompts, temperature=array(*groups, dtype="float32"))


def entries(values: Values) -> list[np.ndarray]:
    return [np.asarray(entry) for entry in values]


def same(found: Values, wanted: Sequence[np.ndarray], column: Column) -> None:
    """Shape, dtype and every bit."""
    assert isinstance(found, Ragged) == column.ragged
    if isinstance(found, Ragged):
        assert found.offsets.dtype == np.int64 and found.offsets[0] == 0 and found.offsets[-1] == len(found.values)
    raw = found.values if isinstance(found, Ragged) else found
    assert raw.dtype == column.dtype and raw.shape[1:] == column.shape
    assert [entry.tobytes() for entry in entries(found)] == [np.asarray(entry).tobytes() for entry in wanted]


def made(column: Column, seed: int, length: int) -> np.ndarray:
    """An entry of a column: random bits."""
    rng = np.random.default_rng(seed)
    shape = (length, *column.shape) if column.ragged else column.shape
    if column.dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(column.dtype).itemsize), column.dtype).reshape(shape)


def column_of(column: Column, some: Sequence[np.ndarray]) -> Values:
    if not column.ragged:
        return np.array(some, column.dtype).reshape(len(some), *column.shape)
    return Ragged.from_arrays(some, column.dtype)


async def test_dense_and_ragged_columns_come_back_in_the_order_asked(storage: Storage) -> None:
    await storage.write(*admitted(0, 1))
    rewards, ids = array(0.5, float("nan"), -0.0, dtype="float32"), ragged([1, 2], [], [-(2**60)])
    await storage.write((), batch([12, 0, 13], ids=ids, reward=rewards))
    found = await storage.read(array(13, 0, 12), ["reward", "ids"])
    assert list(found.columns) == ["reward", "ids"]
    assert found.indices.tolist() == [13, 0, 12] and found.groups.tolist() == [1, 0]
    assert found.dense("reward").tobytes() == rewards[[2, 1, 0]].tobytes() and found.dense("reward").dtype == np.float32
    assert [entry.tolist() for entry in found.ragged("ids")] == [[-(2**60)], [], [1, 2]]
    assert found.ragged("ids").values.dtype == np.int64 and found.ragged("ids").offsets.tolist() == [0, 1, 1, 3]


async def test_group_columns_are_read_once_for_each_group_in_the_order_of_its_first_row(storage: Storage) -> None:
    await storage.write(*admitted(2, 7, 4))
    found = await storage.read(array(35, 18, 33, 16, 57), ["prompt", "temperature"])
    assert found.groups.tolist() == [4, 2, 7]
    assert [entry.tolist() for entry in found.ragged("prompt")] == [[4] * 5, [2] * 3, [7] * 3]
    assert found.dense("temperature").tolist() == [4.0, 2.0, 7.0]


@pytest.mark.parametrize("first", [0, FAR])
async def test_a_large_write_is_read_in_order_and_out_of_order(storage: Storage, first: int) -> None:
    """Far rows, two pages, trailing shapes, empty entries; single rows, runs, everything."""
    groups = range(first + 400, first + 656)
    await storage.write(*admitted(*groups))
    rows = np.arange(groups[0] << BITS, (groups[-1] + 1) << BITS)
    data = {n: [made(SPECS[n], 7 * i, i % 40) for i in range(len(rows))] for n in ("ids", "logprobs", "image", "flag")}
    await storage.write((), batch(rows, **{name: column_of(SPECS[name], some) for name, some in data.items()}))
    rng = np.random.default_rng(0)
    shuffled = rng.permutation(len(rows))
    for where in (np.arange(len(rows)), np.arange(700, 708), np.arange(5, 6), shuffled, np.arange(0, len(rows), 9), shuffled[:8]):
        found = await storage.read(rows[where], list(data))
        for name, some in data.items():
            same(found.columns[name], [some[i] for i in where], SPECS[name])


async def test_many_small_writes_are_read_together(storage: Storage) -> None:
    groups = range(FAR, FAR + 40)
    await storage.write(*admitted(*groups))
    rows = np.arange(groups[0] << BITS, (groups[-1] + 1) << BITS)
    order = np.random.default_rng(1).permutation(len(rows))
    data = {name: [made(SPECS[name], i, 3 * i) for i in range(len(rows))] for name in ROW_COLUMNS}  # 1.5 MiB: several segments
    for some in np.split(order, [*range(1, 200), 202, 205, 209, 230, 300]):  # most of one row
        part = {name: column_of(SPECS[name], [data[name][i] for i in some]) for name in ROW_COLUMNS}
        await storage.write((), batch(rows[some], **part))
    for where in (np.arange(len(rows)), order, np.random.default_rng(2).permutation(len(rows)), np.arange(100, 108)):
        found = await storage.read(rows[where], ROW_COLUMNS)
        for name, some in data.items():
            same(found.columns[name], [some[i] for i in where], SPECS[name])


async def test_nothing_written_is_shared_with_a_caller_who_can_still_change_it(storage: Storage) -> None:
    """A writeable array is copied, however large; a read-only one may be kept."""
    await storage.write(*admitted(0, 1))
    for first, length in ((0, 2), (8, 100_000)):
        ids, rows = ragged(range(length), [7]), array(first, first + 1)
        await storage.write((), Batch(rows, array(first >> BITS), {"ids": ids}))
        wanted = [np.arange(length), array(7)]
        ids.values[:] = 9
        ids.offsets[1:] = 0
        asked = rows.copy()
        rows[:] = 77
        same((await storage.read(asked, ["ids"])).columns["ids"], wanted, SPECS["ids"])


@pytest.mark.parametrize("length", [3, 100_000])
async def test_read_only_arrays_are_taken_and_what_is_read_cannot_change_what_is_stored(storage: Storage, length: int) -> None:
    await storage.write(*admitted(0))
    ids, rows = ragged(range(length), range(length)), array(0, 1)
    for frozen in (ids.values, ids.offsets, rows):
        frozen.flags.writeable = False
    await storage.write((), Batch(rows, array(0), {"ids": ids}))
    for _ in range(2):
        found = (await storage.read(array(0, 1), ["ids"])).ragged("ids")
        same(found, [np.arange(length)] * 2, SPECS["ids"])
        if found.values.flags.writeable:
            found.values[:] = 0
        found.offsets[:] = 0


async def test_what_was_read_stays_when_its_rows_are_dropped_and_others_come(storage: Storage) -> None:
    await storage.write(*admitted(0, 1))
    await storage.write((), batch(range(8), ids=ragged(*[[i] * 20_000 for i in range(8)])))
    found = (await storage.read(np.arange(8), ["ids"])).ragged("ids")
    await storage.drop(np.arange(7), array())
    await storage.write((), batch(range(8, 16), ids=ragged(*[[9] * 20_000] * 8)))
    same(found, [np.full(20_000, i) for i in range(8)], SPECS["ids"])
    same((await storage.read(array(7), ["ids"])).columns["ids"], [np.full(20_000, 7)], SPECS["ids"])


async def test_bytes_are_counted_and_given_back_with_rows_and_groups(storage: Storage) -> None:
    await storage.write(*admitted(0, 1))
    of_groups = storage.nbytes
    assert of_groups == 8 + 4 + 2 * 8 + 4
    await storage.write((), batch([0, 1, 8], ids=ragged([1, 2], [3], [4, 5, 6]), reward=array(1, 2, 3, dtype="float32")))
    assert storage.nbytes == of_groups + 6 * 8 + 3 * 4
    await storage.drop(array(0), array())
    assert storage.nbytes == of_groups + 4 * 8 + 2 * 4
    same((await storage.read(array(1), ["prompt"])).columns["prompt"], [array(0)], SPECS["prompt"])
    await storage.drop(array(1, 2, 3, 4, 5, 6, 7), array(0))
    assert storage.nbytes == 2 * 8 + 4 + 3 * 8 + 4
    await storage.drop(np.arange(8, 16), array(1))
    assert storage.nbytes == 0


async def test_half_of_what_is_kept_is_wanted_when_rows_go_and_their_neighbours_stay(storage: Storage) -> None:
    """Rows of 64 KiB written together; all but one of each group are dropped, one by one."""
    await storage.write(*admitted(*range(8)))
    await storage.write((), batch(range(64), ids=ragged(*[[i] * 8192 for i in range(64)])))
    for i in range(7):
        await storage.drop(np.arange(i, 64, 8), array())
    assert storage.nbytes < 8 * 65536 + 1024
    assert await kept_bytes(storage) < 2.2 * storage.nbytes
    same(
        (await storage.read(np.arange(7, 64, 8), ["ids"])).columns["ids"], [np.full(8192, i) for i in range(7, 64, 8)], SPECS["ids"]
    )
    await storage.drop(np.arange(7, 64, 8), np.arange(8))
    assert storage.nbytes == 0 and await kept_bytes(storage) == 0


async def kept_bytes(storage: Storage) -> int:
    """What the backend holds of this storage's: a memory storage's own count, or the values themselves."""
    if isinstance(storage, MemoryStorage):
        return storage.held_bytes
    assert isinstance(storage, KeyValueStorage)
    store = storage._store
    if not storage.is_durable:  # cannot be listed
        return storage.nbytes
    keys = [key async for key in store.keys(storage._prefix)]
    return sum(len(value or b"") for value in await store.get_many(keys))


async def test_a_group_is_dropped_whole_after_its_rows_went_one_by_one(storage: Storage) -> None:
    await storage.write(*admitted(0))
    await storage.write((), batch(range(8), ids=ragged(*[[i] * 3 for i in range(8)]), reward=np.arange(8, dtype=np.float32)))
    for row in range(8):
        rest = np.arange(row, 8)
        found = await storage.read(rest, ["ids", "prompt"])
        same(found.columns["ids"], [np.full(3, i) for i in rest], SPECS["ids"])
        same(found.columns["prompt"], [array(0)], SPECS["prompt"])
        await storage.drop(array(row), array(0) if row == 7 else array())
    assert storage.nbytes == 0


async def test_overlapping_calls_do_not_disturb_each_other(storage: Storage) -> None:
    """Reads of rows whose neighbours are dropped (and are therefore moved), and writes to the same groups, all at once."""
    await storage.write(*admitted(*range(8)))
    await storage.write((), batch(range(64), ids=ragged(*[[i] * 50 for i in range(64)])))

    async def read(row: int) -> None:
        for _ in range(4):
            same((await storage.read(array(row), ["ids"])).columns["ids"], [np.full(50, row)], SPECS["ids"])
            await asyncio.sleep(0)

    drops = [storage.drop(array(8 * g + i), array()) for g in range(8) for i in range(7)]
    writes = [storage.write((), batch([8 * g + 7], reward=array(g, dtype="float32"))) for g in range(8)]
    await asyncio.gather(*(read(8 * g + 7) for g in range(8)), *drops, *writes)
    found = await storage.read(np.arange(7, 64, 8), ["ids", "reward"])
    same(found.columns["ids"], [np.full(50, i) for i in range(7, 64, 8)], SPECS["ids"])
    assert found.dense("reward").tolist() == list(range(8))


async def test_durable_state_is_kept_and_replaced(storage: Storage) -> None:
    assert await storage.kept("epoch") is None
    for value in (b"1", b"", bytes(range(256)) * 4096):
        await storage.keep("epoch", value)
        assert await storage.kept("epoch") == value
    assert await storage.kept("other") is None and storage.nbytes == 0


async def test_what_is_durable_is_there_after_a_restart_and_nothing_else(opened: Open) -> None:
    prefix = next(prefixes)
    storage = await opened(prefix)
    await storage.write(*admitted(0, 1, FAR))
    await storage.write((), batch([0, 1, FAR << BITS], ids=ragged([1], [2, 3], []), reward=array(1, 2, 3, dtype="float32")))
    await storage.write((), batch([1], flag=array(True, dtype="bool")))
    await storage.drop(array(0, 2, *range(8, 16)), array(1))
    await storage.keep("epoch", b"7")
    nbytes = storage.nbytes
    again = await opened(prefix)
    found = [stored async for stored in again.recover()]
    if not again.is_durable:
        assert found == []
        return
    rows = {row: frozenset(stored.columns) for stored in found for row in stored.rows.tolist()}
    both, base = frozenset(("prompt", "temperature")), FAR << BITS
    assert rows == {
        **dict.fromkeys((3, 4, 5, 6, 7, *range(base + 1, base + 8)), both),
        1: both | {"ids", "reward", "flag"},
        base: both | {"ids", "reward"},
    }
    for stored in found:
        assert sorted(m.group for m in stored.metas) == sorted(set((stored.rows >> BITS).tolist()))
        assert all(m == meta(m.group) for m in stored.metas)
    assert again.nbytes == nbytes and await again.kept("epoch") == b"7"
    same((await again.read(array(base, 1), ["ids"])).columns["ids"], [array(), array(2, 3)], SPECS["ids"])
    await again.write((), batch([3], ids=ragged([5])))
    await again.drop(array(1, 3, 4, 5, 6, 7), array(0))
    third = await opened(prefix)
    left = {row for stored in [stored async for stored in third.recover()] for row in stored.rows.tolist()}
    assert left == set(range(base, base + 8))


async def test_an_attempt_of_a_run_finds_what_it_has_stored_itself_and_leaves_nothing(opened: Open) -> None:
    prefix, first, second = next(prefixes), QueueOwner("run", "first"), QueueOwner("run", "second")
    storage = await opened(prefix, first)
    await storage.write(*admitted(0))
    await storage.keep("epoch", b"7")
    again = await opened(prefix, first)
    assert [len(stored.rows) async for stored in again.recover()] == [SIZE] * again.is_durable
    if again.is_durable:
        of_another = await opened(prefix, second)
        assert [stored async for stored in of_another.recover()] == [] and await of_another.kept("epoch") is None
        assert await kept_bytes(again) == 0
        await of_another.write(*admitted(0))
        assert await kept_bytes(of_another) > 0
        await of_another.remove()
        assert await kept_bytes(of_another) == 0


async def test_what_a_run_leaves_in_redis_expires_and_a_queue_of_no_run_stays(redis_url: str) -> None:
    found = {}
    for owner in (None, QueueOwner("run", "first")):
        store = RedisKeyValue(redis_url, 10.0)
        storage = KeyValueStorage(store, next(prefixes))
        await storage.open(SCHEMA, owner)
        await storage.write(*admitted(0))
        [key] = [key async for key in store.keys(storage._prefix)]
        found[owner] = await store._client.ttl(key)
        await storage.remove()
        await storage.close()
    without, of_run = found.values()
    assert without == -1 and 0.9 * RUN_SECONDS < of_run <= RUN_SECONDS


Step = tuple[str, int, int, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "write", "drop", "drop", "read", "drop group", "reopen"]),
        st.integers(0, 3),
        st.integers(1, (1 << SIZE) - 1),
        st.integers(1, (1 << len(ROW_COLUMNS)) - 1),
        st.sampled_from([0, 1, 3, 60, 9_000]),
    ),
    min_size=8,
    max_size=50,
)


@settings(
    max_examples=few(10, 50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(steps=STEPS)
async def test_any_order_of_writes_and_drops_is_that_of_a_dictionary(opened: Open, steps: list[Step]) -> None:
    prefix = next(prefixes)
    storage = await opened(prefix)
    first, before = FAR + 100 * next(examples), storage.nbytes
    held: dict[tuple[int, str], np.ndarray] = {}
    live: dict[int, set[int]] = {}
    ever: set[int] = set()
    for seed, (what, at, row_mask, column_mask, length) in enumerate(steps):
        group = first + 7 * at
        rows = [(group << BITS) + i for i in range(SIZE) if row_mask >> i & 1]
        names = [name for i, name in enumerate(ROW_COLUMNS) if column_mask >> i & 1]
        if group not in ever:
            ever.add(group)
            live[group] = set(range(group << BITS, (group << BITS) + SIZE))
            metas, put = admitted(group)
            await storage.write(metas, put)
            held |= {(group, name): entries(values)[0] for name, values in put.columns.items()}
        if what == "write" and group in live:
            rows = [row for row in rows if row in live[group] and not any((row, name) in held for name in names)]
            data = {name: [made(SPECS[name], seed + i, length + i) for i in range(len(rows))] for name in names}
            if rows:
                await storage.write((), batch(rows, **{name: column_of(SPECS[name], some) for name, some in data.items()}))
            held |= {(row, name): entry for name, some in data.items() for row, entry in zip(rows, some, strict=True)}
        elif what in ("drop", "drop group") and group in live:
            gone = live[group] if what == "drop group" else live[group] & set(rows)
            live[group] = live[group] - gone
            groups = [] if live[group] else [group]
            await storage.drop(np.array(sorted(gone), np.int64), np.array(groups, np.int64))
            held = {key: entry for key, entry in held.items() if key[0] not in gone and key[0] not in groups}
            if groups:
                del live[group]
        elif what == "reopen" and storage.is_durable:
            storage = await opened(prefix)
            found = {row: set(some.columns) async for some in storage.recover() for row in some.rows.tolist()}
            assert found == {
                row: {name for key, name in held if key in (row, group)} for group, rows_left in live.items() for row in rows_left
            }
        assert storage.nbytes == before + sum(entry.nbytes for entry in held.values())
        if what == "read" or seed == len(steps) - 1:
            for name, column in SPECS.items():
                keys = [key for key, of in held if of == name]
                keys.sort(key=lambda key: hash((key, length)))
                asked = keys if column.per == "row" else [min(live[key]) for key in keys]
                if keys:
                    found_now = await storage.read(np.array(asked, np.int64), [name])
                    same(found_now.columns[name], [held[key, name] for key in keys], column)
