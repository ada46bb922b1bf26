"""Admission waits for room, first come, first served."""

from __future__ import annotations

import asyncio

import pytest

from asyncflow.transfer_queue.capacity import Capacity, CapacityState


def state_of(room: Capacity) -> CapacityState:
    return room.state(asyncio.get_running_loop().time())


async def waits(room: Capacity, rows: int, num_bytes: int = 0) -> asyncio.Task[None]:
    task = asyncio.create_task(room.reserve(rows, num_bytes))
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_without_limits_nobody_waits() -> None:
    room = Capacity(None, None)
    await asyncio.wait_for(room.reserve(1 << 40, 1 << 60), 1)
    assert (state_of(room).reserved_rows, state_of(room).reserved_bytes) == (1 << 40, 1 << 60)


@pytest.mark.parametrize(("capacity", "first", "second"), [((10, None), (6, 0), (5, 0)), ((None, 10), (1, 6), (1, 5))])
async def test_what_does_not_fit_waits_until_it_does(
    capacity: tuple[int | None, int | None], first: tuple[int, int], second: tuple[int, int]
) -> None:
    room = Capacity(*capacity)
    await room.reserve(*first)
    waiting = await waits(room, *second)
    assert state_of(room).waiting == 1
    room.release(0, 0)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    room.release(1, 1)
    await asyncio.wait_for(waiting, 1)
    state = state_of(room)
    assert (state.reserved_rows, state.reserved_bytes) == (first[0] + second[0] - 1, first[1] + second[1] - 1)
    assert state.waiting == 0 and 0.01 <= state.longest_wait_seconds <= state.waited_seconds


async def test_exactly_full_is_not_too_full() -> None:
    room = Capacity(4, 100)
    await asyncio.wait_for(room.reserve(4, 100), 1)


async def test_a_small_one_does_not_overtake_a_large_one() -> None:
    room = Capacity(10, None)
    await room.reserve(8, 0)
    large = await waits(room, 6)
    small = await waits(room, 1)
    room.release(1, 0)
    await asyncio.sleep(0)
    assert not large.done() and not small.done()
    room.release(3, 0)
    await asyncio.wait_for(large, 1)
    assert not small.done()
    room.release(1, 0)
    await asyncio.wait_for(small, 1)


async def test_one_that_fits_while_others_wait_goes_to_the_end() -> None:
    room = Capacity(10, None)
    await room.reserve(8, 0)
    large, late = await waits(room, 6), await waits(room, 2)
    room.release(8, 0)
    await asyncio.wait_for(asyncio.gather(large, late), 1)
    assert state_of(room).reserved_rows == 8


async def test_who_gives_up_makes_way_and_holds_nothing() -> None:
    room = Capacity(10, None)
    await room.reserve(8, 0)
    large, small = await waits(room, 6), await waits(room, 1)
    large.cancel()
    await asyncio.wait_for(small, 1)
    with pytest.raises(asyncio.CancelledError):
        await large
    assert state_of(room).reserved_rows == 9 and state_of(room).waiting == 0


async def test_who_gives_up_in_the_moment_in_which_its_turn_comes_gives_its_room_back() -> None:
    room = Capacity(10, None)
    await room.reserve(8, 0)
    large, small = await waits(room, 6), await waits(room, 6)
    room.release(4, 0)
    large.cancel()
    await asyncio.wait_for(small, 1)
    assert state_of(room).reserved_rows == 10


@pytest.mark.parametrize(
    ("rows", "num_bytes", "message"),
    [
        (
            5,
            1,
            r"an admission of 5 rows cannot fit into a storage unit of 4 rows; admit less at once, or raise queue\.capacity_rows",
        ),
        (1, 101, r"an admission of 101 bytes cannot fit into a storage unit of 100 bytes; .* raise queue\.capacity_bytes"),
    ],
)
async def test_what_never_fits_is_refused_with_the_arithmetic(rows: int, num_bytes: int, message: str) -> None:
    room = Capacity(4, 100)
    with pytest.raises(ValueError, match=message):
        await room.reserve(rows, num_bytes)
    assert state_of(room).reserved_rows == 0


async def test_what_is_there_already_counts_even_if_it_does_not_fit() -> None:
    room = Capacity(4, None)
    room.take(6, 0)
    waiting = await waits(room, 1)
    room.release(2, 0)
    await asyncio.sleep(0)
    assert not waiting.done()
    room.release(1, 0)
    await asyncio.wait_for(waiting, 1)
