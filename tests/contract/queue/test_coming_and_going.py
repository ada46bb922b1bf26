"""Units and controllers come and go."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from asyncflow.transfer_queue import unit as unit_module
from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.controller import Controller, TaskEvents
from asyncflow.transfer_queue.leases import StaleToken, Want
from asyncflow.transfer_queue.node import serve_controller
from asyncflow.transfer_queue.notices import News, Superseded
from asyncflow.transfer_queue.queue import TransferQueue
from asyncflow.transfer_queue.storage.base import Storage
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.transfer_queue.unit import StorageUnit, UnitOptions
from tests.contract.queue.house import (
    OUTPUTS,
    House,
    Open,
    counts,
    generate,
    is_outputs,
    leased,
    outputs,
    over,
    parked,
    prompt_of,
    prompts_in,
    put,
    same,
    schema,
    until,
    within,
)


@over("units-1", "apart-1", "apart-tls-1")
async def test_a_unit_joins_a_live_queue_old_rows_stay_and_new_ones_go_to_both(house: House, client: TransferQueueClient) -> None:
    await put(client, 0, 1)
    old = (await leased(client)).lease
    await house.start_unit(1, MemoryStorage())
    await within(client.wait_for_units(2))
    await put(client, 2, 3)
    assert {number: unit.rows for number, unit in (await client.status())[1].items()} == {0: 6, 1: 2}
    assert (await client.complete(old, outputs(*old.indices))).all()
    found = await leased(client, groups=9)
    assert dict(zip([m.group for m in found.lease.groups], found.lease.units, strict=True)) == {1: 0, 2: 0, 3: 1}
    assert prompts_in(found) == {group: prompt_of(group) for group in (1, 2, 3)}
    await client.complete(found.lease, outputs(*found.lease.indices))
    assert is_outputs(await leased(client, "train", groups=9))


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
    queue = TransferQueue(
        schema(),
        [MemoryStorage()],
        tasks=["rollout", "eval"],
        unit_options=UnitOptions(notify_timeout_seconds=notify_timeout_seconds),
    )
    train, gate = Controller("train", queue.schema, term=1), Gate(queue.units[0])
    queue._serve("controller/train", train)
    async with queue.running():
        following = asyncio.create_task(train.subscription.follow(0, gate))  # type: ignore[arg-type]
        await train.subscription.caught_up(0)
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
        await client.end_partition("train", 7)
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
    return step in controller.table.ended_partitions


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
        await client.end_partition("train", 0)
        assert await within(client.lease("train", Want(partition=0))) is None


@over("apart-1", "apart-tls-1")
async def test_a_restarted_controller_has_its_table_again_and_clients_go_on(house: House, client: TransferQueueClient) -> None:
    await put(client, 0, 1, 2, 3)
    lease = (await leased(client, groups=3)).lease
    await client.complete(lease, outputs(0, 1, 4, 5))
    await client.filter([13], "so")
    await client.end_partition("rollout", 5)
    await client.end_partition("train", 6)
    old = (await leased(client, "train")).lease
    await house.stop("controller/rollout")
    await house.stop("controller/train")
    waiting = await parked(client.lease("train", Want(groups=2)))
    await house.start_controller("rollout")
    await house.start_controller("train")
    found = await within(waiting)
    assert found is not None and sorted(found.lease.indices) == [0, 1, 4, 5]  # what was leased comes again
    assert found.lease.token.incarnation != old.token.incarnation
    assert await counts(client, "rollout") == {"ready": 3, "done": 4, "filtered": 1}
    assert (await within(client.complete(lease, outputs(8)))).tolist() == [False]
    with pytest.raises(StaleToken):
        await client.complete_marks([old])
    assert await within(client.lease("rollout", Want(partition=5))) is None
    assert await within(client.lease("train", Want(partition=6))) is None
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
        events={task: TaskEvents(on_lost=lambda unit, rows, told=told: told.append((unit, rows))) for task, told in lost.items()}
    )
    client = await house.connect("w")
    await put(client, *range(6))
    await generate(client)
    await client.drop([5])
    held = (await leased(client, "train", groups=6)).lease
    await client.end_partition("train", 3)
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
    await client.end_partition("train", 3)
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

    async def is_told() -> bool:  # a writer does not wait for a controller that has not found the new process yet
        return await counts(client, "rollout") == {"ready": 3, "done": 3, "filtered": 1}

    await until(is_told)
    assert await within(client.lease("train", Want(partition=3))) is None and await within(client.lease("eval")) is None
    if house.way.startswith("apart"):
        await house.stop("controller/rollout")
        await house.start_controller("rollout")
        assert await counts(client, "rollout") == {"ready": 3, "done": 3, "filtered": 1}  # what was dropped stays away
