"""Admission waits for room, first come, first served."""

from __future__ import annotations

import asyncio

import pytest

from asyncflow.transfer_queue.capacity import Capacity, CapacityState


def state_of(capacity: Capacity) -> CapacityState:
    return capacity.state(asyncio.get_running_loop().time())


async def waits(capacity: Capacity, rows: int, num_bytes: int = 0) -> asyncio.Task[None]:
    task = asyncio.create_task(capacity.reserve(rows, num_bytes))
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_without_limits_nobody_waits() -> None:
    capacity = Capacity(None, None)
    await asyncio.wait_for(capacity.reserve(1 << 40, 1 << 60), 1)
    assert (state_of(capacity).reserved_rows, state_of(capacity).reserved_bytes) == (1 << 40, 1 << 60)


@pytest.mark.parametrize(("capacity", "first", "second"), [((10, None), (6, 0), (5, 0)), ((None, 10), (1, 6), (1, 5))])
async def test_what_does_not_fit_waits_until_it_does(
    capacity: tuple[int | None, int | None], first: tuple[int, int], second: tuple[int, int]
) -> None:
    capacity = Capacity(*capacity)
    await capacity.reserve(*first)
    waiting = await waits(capacity, *second)
    assert state_of(capacity).waiting == 1
    capacity.release(0, 0)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    capacity.release(1, 1)
    await asyncio.wait_for(waiting, 1)
    state = state_of(capacity)
    assert (state.reserved_rows, state.reserved_bytes) == (first[0] + second[0] - 1, first[1] + second[1] - 1)
    assert state.waiting == 0 and 0.01 <= state.longest_wait_seconds <= state.waited_seconds


async def test_exactly_full_is_not_too_full() -> None:
    capacity = Capacity(4, 100)
    await asyncio.wait_for(capacity.reserve(4, 100), 1)


async def test_a_small_one_does_not_overtake_a_large_one() -> None:
    capacity = Capacity(10, None)
    await capacity.reserve(8, 0)
    large = await waits(capacity, 6)
    small = await waits(capacity, 1)
    capacity.release(1, 0)
    await asyncio.sleep(0)
    assert not large.done() and not small.done()
    capacity.release(3, 0)
    await asyncio.wait_for(large, 1)
    assert not small.done()
    capacity.release(1, 0)
    await asyncio.wait_for(small, 1)


async def test_one_that_fits_while_others_wait_goes_to_the_end() -> None:
    capacity = Capacity(10, None)
    await capacity.reserve(8, 0)
    large, late = await waits(capacity, 6), await waits(capacity, 2)
    capacity.release(8, 0)
    await asyncio.wait_for(asyncio.gather(large, late), 1)
    assert state_of(capacity).reserved_rows == 8


async def test_who_gives_up_makes_way_and_holds_nothing() -> None:
    capacity = Capacity(10, None)
    await capacity.reserve(8, 0)
    large, small = await waits(capacity, 6), await waits(capacity, 1)
    large.cancel()
    await asyncio.wait_for(small, 1)
    with pytest.raises(asyncio.CancelledError):
        await large
    assert state_of(capacity).reserved_rows == 9 and state_of(capacity).waiting == 0


async def test_who_gives_up_in_the_moment_in_which_its_turn_comes_gives_its_room_back() -> None:
    capacity = Capacity(10, None)
    await capacity.reserve(8, 0)
    large, small = await waits(capacity, 6), await waits(capacity, 6)
    capacity.release(4, 0)
    large.cancel()
    await asyncio.wait_for(small, 1)
    assert state_of(capacity).reserved_rows == 10


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
    capacity = Capacity(4, 100)
    with pytest.raises(ValueError, match=message):
        await capacity.reserve(rows, num_bytes)
    assert state_of(capacity).reserved_rows == 0


async def test_what_is_there_already_counts_even_if_it_does_not_fit() -> None:
    capacity = Capacity(4, None)
    capacity.take(6, 0)
    waiting = await waits(capacity, 1)
    capacity.release(2, 0)
    await asyncio.sleep(0)
    assert not waiting.done()
    capacity.release(1, 0)
    await asyncio.wait_for(waiting, 1)
