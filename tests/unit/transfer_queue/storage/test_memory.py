"""The memory storage: what it keeps as it is, what it copies, and what it gives back."""

from __future__ import annotations

import subprocess
import sys
import weakref

import numpy as np
import pytest

from asyncflow.transfer_queue.schema import Schema
from asyncflow.transfer_queue.storage import segments
from asyncflow.transfer_queue.storage.memory import MemoryStorage, groups_of
from asyncflow.types import Array, Batch, Column, Ragged
from tests.patience import patience

SCHEMA = Schema((Column("ids", "int64", ragged=True), Column("flag", "uint8"), Column("tag", "uint8", ragged=True)), (), 3)
NONE = np.empty(0, np.int64)


async def opened() -> MemoryStorage:
    storage = MemoryStorage()
    await storage.open(SCHEMA)
    return storage


def rows_of(first: int, num_rows: int, length: int, is_frozen: bool = True) -> Batch:
    rows = np.arange(first, first + num_rows)
    values = np.repeat(rows, length)
    values.flags.writeable = not is_frozen
    return Batch(rows, np.unique(rows >> 3), {"ids": Ragged(values, np.arange(0, (num_rows + 1) * length, length))})


def ids(batch: Batch) -> Array:
    return batch.ragged("ids").values


async def test_large_read_only_values_are_kept_and_handed_out_without_a_copy() -> None:
    storage = await opened()
    batch = rows_of(0, 16, 4096)
    await storage.write((), batch)
    part = await storage.read(np.arange(4, 12), ["ids"])
    assert np.shares_memory(ids(part), ids(batch)) and not ids(part).flags.writeable
    assert part.ragged("ids").offsets.tolist() == list(range(0, 9 * 4096, 4096))


async def test_a_small_read_keeps_nothing_alive() -> None:
    storage = await opened()
    batch = rows_of(0, 16, 4096)
    await storage.write((), batch)
    part = await storage.read(np.arange(1), ["ids"])
    assert not np.shares_memory(ids(part), ids(batch))


async def test_a_small_part_of_something_large_is_copied() -> None:
    whole = np.zeros(1 << 20, np.int64)
    whole.flags.writeable = False
    storage = await opened()
    for first, source in ((0, whole), (1, np.frombuffer(bytes(8 << 20), np.int64))):
        part = source[: 16 << 10]
        await storage.write((), Batch(np.array([first]), np.array([0]), {"ids": Ragged(part, np.array([0, len(part)]))}))
        assert not np.shares_memory(ids(await storage.read(np.array([first]), ["ids"])), part)


async def test_a_segment_is_let_go_when_its_rows_are() -> None:
    storage = await opened()
    batch = rows_of(0, 16, 4096)
    alive = weakref.ref(ids(batch))
    await storage.write((), batch)
    del batch
    await storage.drop(np.arange(12), NONE)
    assert alive() is None and storage.nbytes == 4 * 8 * 4096  # what is left, a large run, has been copied out
    assert ids(await storage.read(np.arange(12, 16), ["ids"])).tolist() == np.repeat(np.arange(12, 16), 4096).tolist()


async def test_small_writes_share_segments_and_leave_them_one_by_one() -> None:
    storage = await opened()
    for row in range(4096):
        await storage.write((), rows_of(row, 1, 100))
    column = storage._columns["ids"]
    assert 3 << 20 < storage.nbytes < 4 << 20 and len(column._segments) < 16
    assert storage.held_bytes < 1.3 * storage.nbytes
    keep = np.arange(0, 4096, 16)
    await storage.drop(np.setdiff1d(np.arange(4096), keep), NONE)
    assert storage.held_bytes < 3 * storage.nbytes + segments.OPEN_BYTES
    assert ids(await storage.read(keep, ["ids"])).tolist() == np.repeat(keep, 100).tolist()
    await storage.drop(keep, NONE)
    assert storage.held_bytes == 0


async def test_a_view_of_the_open_segment_cannot_be_written_to_and_stays_as_it_grows() -> None:
    storage = await opened()
    for row in range(16):
        await storage.write((), rows_of(row, 1, 1000))
    found = ids(await storage.read(np.arange(16), ["ids"]))
    assert not found.flags.writeable
    for row in range(16, 64):
        await storage.write((), rows_of(row, 1, 1000))
    assert found.tolist() == np.repeat(np.arange(16), 1000).tolist()


async def test_a_segment_that_has_lost_its_rows_while_open_is_let_go_when_it_is_full() -> None:
    storage = await opened()
    for row in range(2000):
        await storage.write((), rows_of(row, 1, 1000))
        if row % 100:  # every hundredth stays
            await storage.drop(np.array([row]), NONE)
    assert storage.nbytes == 20 * 8000 and storage.held_bytes < 20 * 8000 + 2 * segments.OPEN_BYTES


@pytest.mark.parametrize("length", [2, 200, 4096])
async def test_the_ends_of_two_segments_are_no_neighbours(length: int) -> None:
    """Row 2 of one segment ends at the very position at which row 3 of the other begins."""
    storage = await opened()
    for first in (0, 1 << 16):
        await storage.write((), rows_of(first, 8192, length if length < 4096 else 64))
    asked = np.array([2, (1 << 16) + 3, 4, (1 << 16) + 5])
    assert np.unique(ids(await storage.read(asked, ["ids"]))).tolist() == sorted(asked.tolist())


async def test_entries_without_values_are_given_back_too() -> None:
    storage = await opened()
    count = 100_000
    rows = np.arange(count)
    await storage.write(
        (), Batch(rows, np.unique(rows >> 3), {"tag": Ragged(np.empty(0, np.uint8), np.zeros(count + 1, np.int64))})
    )
    assert storage.nbytes == 0
    await storage.drop(rows[100:], NONE)
    assert storage.held_bytes < 100_000
    assert (await storage.read(rows[:100], ["tag"])).ragged("tag").offsets.tolist() == [0] * 101


async def test_rows_that_go_twice_or_never_came_are_passed_over() -> None:
    storage = await opened()
    await storage.write((), rows_of(0, 4, 2))
    await storage.drop(np.array([1, 1, 2, 99, 1 << 50]), np.array([5, 5]))
    await storage.drop(np.array([1]), NONE)
    assert storage.nbytes == 2 * 16
    with pytest.raises(LookupError, match="row 1 is not there"):
        await storage.read(np.array([0, 1]), ["ids"])


async def test_a_write_that_fails_leaves_nothing() -> None:
    """Of one row and of many: the second column finds no memory."""

    def fails(*_: object) -> None:
        raise MemoryError

    for rows in (np.array([3]), np.arange(8)):
        storage = await opened()
        broken = type("Broken", (segments.ColumnSegments,), {"add_one": fails, "_placed": fails})
        storage._columns["flag"] = broken(SCHEMA.column("flag"))
        values = Ragged(np.zeros(len(rows), np.int64), np.arange(len(rows) + 1))
        with pytest.raises(MemoryError):
            await storage.write((), Batch(rows, np.array([0]), {"ids": values, "flag": np.zeros(len(rows), np.uint8)}))
        assert storage.nbytes == 0 and storage.held_bytes == 0
        await storage.write((), Batch(rows, np.array([0]), {"ids": values}))
        assert storage.nbytes == 8 * len(rows)


def test_groups_come_in_the_order_of_their_first_row() -> None:
    assert groups_of(np.array([8, 9, 16, 17, 80]), 3).tolist() == [1, 2, 10]
    assert groups_of(np.array([80, 9, 16, 8, 81]), 3).tolist() == [10, 1, 2]
    assert groups_of(NONE, 3).tolist() == []


DROP_255_OF_256 = """
import asyncio
import numpy as np
from asyncflow.transfer_queue.schema import Schema
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.types import Batch, Column, Ragged

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

async def main():
    storage = MemoryStorage()
    await storage.open(Schema((Column("ids", "float32", ragged=True),), (), 3))
    before = resident()
    values = np.ones(256 << 18, np.float32)
    values.flags.writeable = False
    await storage.write((), Batch(np.arange(256), np.arange(32), {"ids": Ragged(values, np.arange(0, 257 << 18, 1 << 18))}))
    del values
    full = resident() - before
    await storage.drop(np.delete(np.arange(256), 100), np.empty(0, np.int64))
    print(full, resident() - before, storage.nbytes, storage.held_bytes)

asyncio.run(main())
"""


def test_dropping_255_of_256_rows_of_a_mebibyte_gives_their_memory_back_to_the_system() -> None:
    ran = subprocess.run([sys.executable, "-c", DROP_255_OF_256], capture_output=True, text=True, check=True, timeout=patience(60))
    full, left, nbytes, held = map(int, ran.stdout.split())
    assert full > 250 << 20 and left < 0.1 * full
    assert nbytes == 1 << 20 and held < 2 << 20


def test_rows_go_from_two_segments_when_moving_what_stays_of_one_fills_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays of the first goes to the open one, which has no room for it: that one is closed, and what stays of it is moved,
    while it still has rows that go."""
    monkeypatch.setattr(segments, "OPEN_BYTES", 64 * 8)
    column = segments.ColumnSegments(Column("number", "int64"))

    def keys(first: int, end: int) -> segments.Keys:
        return segments.Keys(np.arange(first, end))

    for first, end in ((0, 64), (64, 124)):
        column.add(keys(first, end), np.arange(first, end))
    assert len(column._segments) == 2 and column._open is column._segments[1]
    column.remove(keys(64, 104))  # most of the open one, which is left as it is
    column.remove(segments.Keys(np.concatenate((np.arange(20, 64), np.arange(104, 109)))))
    left = np.concatenate((np.arange(20), np.arange(109, 124)))
    assert np.array_equal(column.read(segments.Keys(left)), left) and column.nbytes == 8 * len(left)
    assert sum(segment.live for segment in column._segments.values()) == len(left)
    column.remove(segments.Keys(left))
    assert column.nbytes == column.held_bytes == 0
