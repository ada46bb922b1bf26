"""Rows go: dropped, filtered, forgotten."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.controller import TaskEvents
from asyncflow.transfer_queue.leases import Want
from asyncflow.transfer_queue.queue import TransferQueue
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.transfer_queue.unit import UnitOptions
from tests.builders import meta
from tests.contract.queue.house import (
    House,
    counts,
    generate,
    leased,
    outputs,
    over,
    parked,
    put,
    schema,
    stored_bytes,
    within,
)


async def test_the_row_that_was_dropped_while_it_was_made_is_not_kept(client: TransferQueueClient) -> None:
    await put(client, 0)
    lease = (await leased(client)).lease
    await client.drop([0, 1])
    assert (await client.complete(lease, outputs(1))).tolist() == [False]
    assert await stored_bytes(client) == 0


async def test_dropping_frees_everything(client: TransferQueueClient) -> None:
    await put(client, 0, 1, 2)
    await generate(client)
    assert await stored_bytes(client) > 0
    await client.drop([])
    await client.drop([0, 1, 4, 5, 8, 9, 77])
    tasks, units = await client.status()
    assert await stored_bytes(client) == 0 and sum(unit.rows + unit.capacity.reserved_rows for unit in units.values()) == 0
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
    assert await stored_bytes(client) == 0


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
    assert client.leases.held == {}
    await put(client, 3)
    found = await within(waiting)
    assert found is not None and found.lease.rows == [[12, 13]] and list(client.leases.held) == [found.lease.token]


@over("process-3", "apart-3")
async def test_of_a_lease_what_lies_on_other_units_is_delivered(house: House, client: TransferQueueClient) -> None:
    await put(client, 0, 1, 2)
    await house.storages[0].drop(np.array([0, 1]), np.array([0]))  # as if the unit had been another one meanwhile
    found = await within(client.lease("rollout", Want(groups=3)))
    assert found is not None and sorted(found.lease.rows) == [[4, 5], [8, 9]] and [*found.batch.indices] == found.lease.indices
    await client.complete(found.lease, outputs(*found.lease.indices))
    assert client.leases.held == {}


async def test_a_controller_whose_ledger_refuses_a_row_ends_the_queue_instead_of_going_on(tmp_path: Path) -> None:
    def broken(rows: list[int]) -> None:
        raise KeyError(f"the ledger does not know row {rows[0]}")

    queue = TransferQueue(
        schema(),
        [MemoryStorage()],
        events={"rollout": TaskEvents(on_done=broken)},
        unit_options=UnitOptions(notify_timeout_seconds=0.1),
    )
    await queue.open()
    running, client = asyncio.create_task(queue.run()), queue.client()
    await put(client, 0)
    await client.complete((await leased(client)).lease, outputs(1))
    with pytest.raises(ExceptionGroup) as ended:
        await within(running)
    assert "does not know row 1" in str(ended.value.exceptions[0])
    await queue.close()
