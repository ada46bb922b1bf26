"""The controller: requests are parked until the table can serve them, and every way in which they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from asyncflow.transfer_queue.controller import Controller
from asyncflow.transfer_queue.table import DeadRow, Lease, StaleToken, TaskSpec
from asyncflow.transport import client_name
from asyncflow.types import GroupMeta, Interval

SPEC = TaskSpec("t", ("a",), ("out",), whole_groups=False, lease_seconds=30.0, max_failures=2)


def meta(group: int, step: int = 0) -> GroupMeta:
    return GroupMeta(group, 2, step, Interval(step, step))


def rows(group: int) -> list[int]:
    return [2 * group, 2 * group + 1]


async def ready(controller: Controller, *metas: GroupMeta) -> None:
    await controller.notify(list(metas), [row for m in metas for row in rows(m.group)], ["a"], None)


async def parked(request: Coroutine[Any, Any, Lease | None]) -> asyncio.Task[Lease | None]:
    """A request that is known to wait."""
    task = asyncio.create_task(request)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
    return task


def as_worker(name: str, request: Coroutine[Any, Any, Lease | None]) -> Coroutine[Any, Any, Lease | None]:
    async def asked() -> Lease | None:
        client_name.set(name)
        return await request

    return asked()


async def answer(task: asyncio.Task[Lease | None]) -> Lease | None:
    return await asyncio.wait_for(task, 1)


async def test_a_parked_request_is_answered_by_a_notice() -> None:
    controller = Controller(SPEC, 1)
    first = await parked(controller.lease(1, None, None))
    second = await parked(controller.lease(1, None, None))
    await ready(controller, meta(0))
    lease = await answer(first)
    assert lease is not None and lease.rows == [rows(0)]
    assert not second.done()
    await ready(controller, meta(1))
    assert (await answer(second)).rows == [rows(1)]


async def test_a_parked_request_is_answered_by_the_end_of_its_step_and_of_no_other() -> None:
    controller = Controller(SPEC, 1)
    of_step_0, of_step_1, of_any = [await parked(controller.lease(1, None, step)) for step in (0, 1, None)]
    await controller.end_step(1)
    assert await answer(of_step_1) is None
    assert not of_step_0.done() and not of_any.done()
    assert await asyncio.wait_for(controller.lease(1, None, 1), 1) is None
    await controller.end_step(0)
    assert await answer(of_step_0) is None
    await controller.close()
    assert await answer(of_any) is None


async def test_after_the_end_every_request_is_answered_with_none() -> None:
    controller = Controller(SPEC, 1)
    request = await parked(controller.lease(1, None, None))
    await controller.close()
    assert await answer(request) is None
    await ready(controller, meta(0))
    assert await asyncio.wait_for(controller.lease(1, None, None), 1) is None


async def test_withdrawing_answers_the_calling_worker_alone() -> None:
    controller = Controller(SPEC, 1)
    mine = await parked(as_worker("mine", controller.lease(1, None, None)))
    other = await parked(as_worker("other", controller.lease(1, None, None)))
    client_name.set("mine")
    await controller.withdraw()
    assert await answer(mine) is None
    assert not other.done()
    await controller.close()


async def test_a_failure_serves_who_waits_until_the_row_is_dead() -> None:
    dead: list[DeadRow] = []
    controller = Controller(SPEC, 1, on_dead=dead.extend)
    await ready(controller, meta(0))
    lease = await controller.lease(1, None, None)
    waiting = await parked(controller.lease(1, None, None))
    assert lease is not None
    await controller.fail(lease.token, [0], "broken")
    again = await answer(waiting)
    assert again is not None and again.rows == [[0]] and again.attempt == 1 and dead == []
    await controller.fail(again.token, [0], "broken for good")
    assert dead == [DeadRow(0, 0, "broken for good")]
    with pytest.raises(StaleToken):
        await controller.fail(again.token, [0], "late")


async def test_a_drop_serves_who_waits_for_the_rest_of_the_group() -> None:
    controller = Controller(TaskSpec("train", ("a",)), 1)
    waiting = await parked(controller.lease(1, None, None))
    await controller.notify([meta(0)], [1], ["a"], None)
    assert not waiting.done()
    await controller.drop([0])
    assert (await answer(waiting)).rows == [[1]]


async def test_a_lease_that_is_not_renewed_expires_by_itself_and_one_that_is_does_not() -> None:
    controller = Controller(TaskSpec("t", ("a",), ("out",), lease_seconds=0.2), 1)
    await ready(controller, meta(0))
    held = await controller.lease(1, None, None)
    assert held is not None
    waiting = await parked(controller.lease(1, None, None))
    for _ in range(4):
        await asyncio.sleep(0.08)
        await controller.renew(held.token)
    assert not waiting.done()
    again = await answer(waiting)
    assert again is not None and again.rows == [rows(0)] and again.attempt == 1
    with pytest.raises(StaleToken):
        await controller.renew(held.token)
    assert controller.table.num_redelivered == 2


async def test_what_a_gone_worker_held_goes_to_who_waits() -> None:
    controller = Controller(SPEC, 1)
    await ready(controller, meta(0))
    await as_worker("gone", controller.lease(1, None, None))
    waiting = await parked(as_worker("alive", controller.lease(1, None, None)))
    controller.abandon("gone")
    assert (await answer(waiting)).rows == [rows(0)]
    assert controller.table.holders() == {"alive": 2}


async def test_a_request_that_is_cancelled_takes_nothing_and_costs_its_worker_nothing() -> None:
    controller = Controller(SPEC, 1)
    await ready(controller, meta(0))
    held = await as_worker("w", controller.lease(1, None, None))
    assert held is not None
    cancelled = await parked(as_worker("w", controller.lease(1, None, None)))
    other = await parked(as_worker("other", controller.lease(1, None, None)))
    cancelled.cancel()
    await ready(controller, meta(1))  # before the cancelled task has had a turn
    assert (await answer(other)).rows == [rows(1)]
    assert controller.table.holders() == {"w": 2, "other": 2} and controller.table.num_redelivered == 0
    await controller.check(held.token, rows(0))


async def test_the_books_are_told_once_of_what_is_done() -> None:
    done: list[int] = []
    controller = Controller(SPEC, 1, on_done=done.extend)
    await ready(controller, meta(0))
    lease = await controller.lease(1, None, None)
    assert lease is not None
    for _ in range(2):
        await controller.notify([], [1], ["out"], lease.token)
    assert done == [1]
    assert controller.table.holders() == {"driver": 1}


async def test_a_notice_under_another_tasks_token_settles_nothing() -> None:
    controller = Controller(SPEC, 1)
    await ready(controller, meta(0))
    lease = await controller.lease(1, None, None)
    assert lease is not None
    other = type(lease.token)("other task", lease.token.incarnation, lease.token.lease)
    await controller.notify([], rows(0), ["else"], other)
    await controller.check(lease.token, rows(0))
