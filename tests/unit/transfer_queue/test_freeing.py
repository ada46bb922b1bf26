"""What is dropped leaves the storage, and nothing else does; when, is decided by writes and snapshots."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncflow.transfer_queue.durable_state import SavedDurableState
from asyncflow.transfer_queue.freeing import Freeing, Writes
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.types import Array, GroupMeta, Interval, RunError
from tests.builders import loop_turns

BITS = 2


def ids(*numbers: int) -> Array:
    return np.array(numbers, np.int64)


class Storage(MemoryStorage):
    """Notes what is dropped; the first `failures` times it does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[tuple[list[int], list[int]]] = []
        self.failures = 0

    async def drop(self, rows: Array, groups: Array) -> None:
        if self.failures:
            self.failures -= 1
            raise RunError("no answer")
        self.dropped.append((rows.tolist(), groups.tolist()))


class House:
    def __init__(self) -> None:
        self.storage, self.writes = Storage(), Writes()
        self.durable_state = SavedDurableState(self.storage)
        self.freeing = Freeing(self.storage, self.durable_state, self.writes, BITS)


async def test_rows_wait_for_a_write_of_their_group_and_for_no_other() -> None:
    house = House()
    other, same = house.writes.begin(ids(7)), house.writes.begin(ids(0, 1))
    house.freeing.add(ids(4, 5), [1])
    freeing = asyncio.create_task(house.freeing.free())
    await loop_turns()
    assert house.storage.dropped == [] and not freeing.done()
    house.writes.end(same, [])
    await loop_turns()
    assert freeing.done() and house.storage.dropped == [([4, 5], [1])]
    house.writes.end(other, [])


async def test_while_it_is_held_off_nothing_is_freed_and_later_all_of_it_is() -> None:
    house = House()
    async with house.freeing.held_off:
        for row in (1, 9):
            house.freeing.add(ids(row), [])
            await house.freeing.free()
        assert house.storage.dropped == []
    await house.freeing.free()
    assert house.storage.dropped == [([1], []), ([9], [])]


async def test_what_the_storage_would_not_free_is_freed_the_next_time() -> None:
    house = House()
    house.durable_state.drop([(1, 4)], [])
    house.freeing.add(ids(4), [])
    house.freeing.add(ids(5, 6, 7), [1])
    house.storage.failures = 1
    with pytest.raises(RunError, match="no answer"):
        await house.freeing.free()
    assert house.durable_state.now.dropped_rows().tolist() == [4]  # should it be found again by another process
    await house.freeing.free()
    assert house.storage.dropped == [([4], []), ([5, 6, 7], [1])] and not len(house.durable_state.now.dropped_rows())
    await house.freeing.free()
    assert len(house.storage.dropped) == 2


async def test_groups_arrive_until_everybody_has_been_told_or_they_could_not_be_written() -> None:
    writes, metas = Writes(), [GroupMeta(number, 2, 0, Interval(0, 0)) for number in range(2)]
    writes.arrive(metas)
    write = writes.begin(ids(0, 1))
    assert writes.are_under_way and writes.are_arriving(metas[:1]) and writes.are_arriving(metas[1:])
    settled = writes.settled
    writes.end(write, metas[1:])
    assert settled.is_set() and not writes.settled.is_set()
    assert not writes.are_under_way and writes.are_arriving(metas) and not writes.are_arriving(metas[1:])
    settled = writes.settled
    writes.arrived([])  # of a write without new groups: nobody waits for that
    assert not settled.is_set()
    writes.arrived(metas[:1])
    assert settled.is_set() and not writes.are_arriving(metas)
