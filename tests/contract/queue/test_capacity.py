"""Room, and who waits for it."""

from __future__ import annotations

import asyncio

import pytest

from asyncflow.transfer_queue.client import TransferQueueClient
from tests.contract.queue.house import (
    SHORT,
    Open,
    leased,
    outputs,
    over,
    parked,
    put,
    room,
    until,
    within,
)

ROOMY = over("process-1", "unix-1", "apart-tls-1")


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
