"""The controller: requests are parked until the table can serve them, and every way in which they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any

import numpy as np
import pytest

from asyncflow.transfer_queue import controller as controller_module
from asyncflow.transfer_queue.controller import Controller, TaskEvents
from asyncflow.transfer_queue.leases import DeadRow, Lease, StaleToken, Token, Want
from asyncflow.transfer_queue.notices import News, Notice
from asyncflow.transfer_queue.queue import TransferQueue
from asyncflow.transfer_queue.schema import DEAD, Schema, TaskSpec
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.transport import ConnectionLost, client_name
from asyncflow.types import Batch, Column, GroupMeta, RunError, UserError
from tests.builders import loop_turns, meta
from tests.patience import patience

ONE = Want(groups=1)


def schema(**options: Any) -> Schema:
    spec = TaskSpec("t", ("a",), ("out",), **{"whole_groups": False, "lease_seconds": 30.0, "max_failures": 2, **options})
    return Schema((Column("a", "int64"), Column("out", "int64")), (spec, TaskSpec("other", ("out",))), 1)


class Unit:
    """Tells what it is made to tell, and remembers what it was asked."""

    def __init__(self) -> None:
        self.epoch, self.number = "first epoch", 0
        self.asked: list[tuple[str, int, list[int]]] = []
        self.ended: list[tuple[list[int], str, list[str]]] = []
        self._news: asyncio.Queue[News | Exception] = asyncio.Queue()

    async def follow(self, task: str, incarnation: str, epoch: str, acked: int, ended_leases: list[int]) -> News:
        self.asked.append((epoch, acked, ended_leases))
        news = await self._news.get()
        if isinstance(news, Exception):
            raise news
        return news

    async def end(self, rows: np.ndarray, mark: str, reasons: list[str]) -> None:
        self.ended.append((rows.tolist(), mark, reasons))

    async def tell(self, *notices: Notice, is_full: bool = False) -> None:
        self.number += len(notices)
        self._news.put_nowait(News(self.epoch, self.number, is_full, list(notices)))
        await loop_turns()

    async def raises(self, error: Exception) -> None:
        self._news.put_nowait(error)
        await loop_turns()


class Follows:
    """A controller that follows one unit."""

    def __init__(self, **options: Any) -> None:
        names = ("on_done", "on_dead", "on_lost", "on_leased", "on_change")
        events = TaskEvents(**{name: options.pop(name) for name in names if name in options})
        self.schema = schema(**options)
        self.controller, self.unit = Controller("t", self.schema, events), Unit()
        self.table = self.controller.table
        self._following = asyncio.create_task(self.controller.subscription.follow(0, self.unit))  # type: ignore[arg-type]

    def notice(self, rows: list[int], *columns: str, metas: list[GroupMeta] | None = None, **fields: Any) -> Notice:
        return Notice(metas or [], np.array(rows, np.int64).tobytes(), self.schema.mask(columns), **fields)

    async def ready(self, *metas: GroupMeta) -> None:
        await self.unit.tell(self.notice([row for m in metas for row in rows(m.group)], "a", metas=list(metas)))

    async def stop(self) -> None:
        self._following.cancel()
        self.controller.close()
        await asyncio.wait([self._following])


@pytest.fixture
async def follows() -> Any:
    made: list[Follows] = []

    def make(**options: Any) -> Follows:
        made.append(Follows(**options))
        return made[-1]

    yield make
    for each in made:
        await each.stop()


def rows(group: int) -> list[int]:
    return [2 * group, 2 * group + 1]


async def parked(request: Awaitable[Lease | None]) -> asyncio.Task[Lease | None]:
    """A request that is known to wait."""

    async def asked() -> Lease | None:
        return await request

    task = asyncio.create_task(asked())
    await loop_turns()
    assert not task.done()
    return task


def as_worker(name: str, controller: Controller, want: Want = ONE) -> Coroutine[Any, Any, Lease | None]:
    async def asked() -> Lease | None:
        client_name.set(name)
        return await ask(controller, want)

    return asyncio.create_task(asked())  # type: ignore[return-value]


async def ask(controller: Controller, want: Want = ONE, key: int = 0) -> Lease | None:
    handed = await controller.lease(want, [], key)
    return handed.lease if handed is not None else None


async def answer(request: Awaitable[Lease | None]) -> Lease | None:
    return await asyncio.wait_for(request, 1)


async def leased(controller: Controller, want: Want = ONE) -> Lease:
    lease = await answer(ask(controller, want))
    assert lease is not None
    return lease


async def test_a_parked_request_is_answered_by_a_notice(follows: Any) -> None:
    f = follows()
    first, second = await parked(ask(f.controller, ONE)), await parked(ask(f.controller, ONE))
    await f.ready(meta(0))
    lease = await answer(first)
    assert lease is not None and lease.rows == [rows(0)]
    assert not second.done() and (await f.controller.status()).parked == 1
    await f.ready(meta(1))
    assert (await answer(second)).rows == [rows(1)]  # type: ignore[union-attr]


async def test_a_request_for_nothing_is_refused(follows: Any) -> None:
    with pytest.raises(ValueError, match="a number of groups, of rows, or of tokens"):
        await answer(ask(follows().controller, Want()))


async def test_a_parked_request_is_answered_by_the_end_of_its_step_and_of_no_other(follows: Any) -> None:
    f = follows()
    of_step_0, of_step_1, of_any = [await parked(ask(f.controller, Want(groups=1, partition=step))) for step in (0, 1, None)]
    await f.unit.tell(Notice(task="other", ended_partition=0), Notice(task="t", ended_partition=1))
    assert await answer(of_step_1) is None
    assert not of_step_0.done() and not of_any.done()
    assert await answer(ask(f.controller, Want(groups=1, partition=1))) is None
    await f.unit.tell(Notice(task="t", ended_partition=0))
    assert await answer(of_step_0) is None
    f.controller.close()
    assert await answer(of_any) is None


async def test_task_events_tell_of_every_lease_and_of_what_was_wanted(follows: Any) -> None:
    told: list[tuple[list[list[int]], int | None]] = []
    f = follows(on_leased=lambda lease, want: told.append((lease.rows, want.installed)))
    waiting = await parked(ask(f.controller, Want(groups=1, installed=0)))
    assert told == []
    await f.ready(meta(0))
    assert await answer(waiting) is not None and told == [([rows(0)], 0)]
    f.controller.abandon("driver")
    assert told == [([rows(0)], 0)]  # nobody has them again yet
    await leased(f.controller, Want(groups=1))
    assert told[1:] == [([rows(0)], None)]


async def test_task_events_tell_whenever_rows_may_have_changed_hands(follows: Any) -> None:
    ready: list[int] = []
    f = follows(on_change=lambda: ready.append(f.table.counts()["ready"]), lease_seconds=0.1)
    await f.ready(meta(0), meta(1))
    first = await leased(f.controller)
    assert ready[-1] == 2
    await leased(f.controller)
    assert ready[-1] == 0  # told after the lease, not before
    await f.controller.fail(first.token, rows(0), "why")
    assert ready[-1] == 2
    await asyncio.sleep(0.2)
    assert ready[-1] == 4  # expired
    await as_worker("gone", f.controller)  # type: ignore[misc]
    assert ready[-1] == 2
    f.controller.abandon("gone")
    assert ready[-1] == 4


async def test_after_the_end_what_is_ready_is_handed_out_and_then_every_request_is_answered_with_none(follows: Any) -> None:
    f = follows()
    request = await parked(ask(f.controller, ONE))
    await f.unit.tell(Notice(task="other", is_closed=True))
    assert not request.done()
    await f.unit.tell(Notice(task="t", is_closed=True))
    assert await answer(request) is None
    await f.ready(meta(0))
    assert (await leased(f.controller)).rows == [rows(0)]
    assert await answer(ask(f.controller, ONE)) is None


async def test_withdrawing_answers_the_calling_worker_alone(follows: Any) -> None:
    f = follows()
    mine, other = await parked(as_worker("mine", f.controller)), await parked(as_worker("other", f.controller))
    client_name.set("mine")
    await f.controller.withdraw(None)
    assert await answer(mine) is None
    assert not other.done()


async def test_a_request_is_withdrawn_by_its_key_and_others_of_the_same_worker_are_not(follows: Any) -> None:
    f = follows()
    client_name.set("mine")
    first, second = [await parked(ask(f.controller, key=key)) for key in (1, 2)]
    await f.controller.withdraw(2)
    assert await answer(second) is None and not first.done()


async def test_a_failure_serves_who_waits_until_the_row_is_dead_and_marked_so(follows: Any) -> None:
    dead: list[DeadRow] = []
    f = follows(on_dead=dead.extend)
    await f.ready(meta(0))
    lease = await leased(f.controller)
    waiting = await parked(ask(f.controller, ONE))
    assert await f.controller.fail(lease.token, [0], "broken") == []
    again = await answer(waiting)
    assert again is not None and again.rows == [[0]] and again.deliveries == [[1]] and dead == f.unit.ended == []
    assert await f.controller.fail(again.token, [0], "broken for good") == [0]
    assert dead == [DeadRow(0, 0, "broken for good")] and f.unit.ended == [([0], DEAD, ["broken for good"])]
    assert (await f.controller.status()).dead == {0: "broken for good"}
    with pytest.raises(StaleToken):
        await f.controller.fail(again.token, [0], "late")


async def test_a_drop_serves_who_waits_for_the_rest_of_the_group(follows: Any) -> None:
    f = follows(whole_groups=True)
    waiting = await parked(ask(f.controller, ONE))
    await f.unit.tell(f.notice([1], "a", metas=[meta(0)]))
    assert not waiting.done()
    await f.unit.tell(f.notice([0], is_drop=True))
    assert (await answer(waiting)).rows == [[1]]  # type: ignore[union-attr]


async def test_a_lease_that_is_not_renewed_expires_by_itself_and_one_that_is_does_not(follows: Any) -> None:
    f = follows(lease_seconds=0.2)
    await f.ready(meta(0))
    held = await leased(f.controller)
    waiting = await parked(ask(f.controller, ONE))
    for _ in range(4):
        await asyncio.sleep(0.08)
        assert await f.controller.renew([held.token]) == []
    assert not waiting.done()
    again = await answer(waiting)
    assert again is not None and again.rows == [rows(0)] and again.deliveries == [[1, 1]]
    assert await f.controller.renew([held.token]) == [held.token]
    assert f.table.num_redelivered == f.table.leases.num_expired == 2
    for group in (1, 2):
        await f.ready(meta(group))
    assert [ended for _, _, ended in f.unit.asked[-2:]] == [[held.token.lease], []]  # the unit is told, once


async def test_what_a_gone_worker_held_goes_to_who_waits_and_the_units_are_told(follows: Any) -> None:
    f = follows()
    await f.ready(meta(0))
    gone = await answer(as_worker("gone", f.controller))
    waiting = await parked(as_worker("alive", f.controller))
    f.controller.abandon("gone")
    assert (await answer(waiting)).rows == [rows(0)]  # type: ignore[union-attr]
    assert f.table.leases.holders() == {"alive": 2}
    await f.ready(meta(1))
    assert f.unit.asked[-1][2] == [gone.token.lease]  # type: ignore[union-attr]


async def test_a_request_that_is_cancelled_takes_nothing_and_costs_its_worker_nothing(follows: Any) -> None:
    f = follows()
    await f.ready(meta(0))
    held = await answer(as_worker("w", f.controller))
    assert held is not None
    cancelled, other = await parked(as_worker("w", f.controller)), await parked(as_worker("other", f.controller))
    cancelled.cancel()
    await f.ready(meta(1))
    assert (await answer(other)).rows == [rows(1)]  # type: ignore[union-attr]
    assert f.table.leases.holders() == {"w": 2, "other": 2} and f.table.num_redelivered == 0
    await f.controller.check([(held.token, rows(0))])


async def test_task_events_tell_once_of_what_is_done(follows: Any) -> None:
    done: list[int] = []
    f = follows(on_done=done.extend)
    await f.ready(meta(0))
    await leased(f.controller)
    for _ in range(2):
        await f.unit.tell(f.notice([1], "out"))
    assert done == [1] and f.table.leases.holders() == {"driver": 1}


async def test_tokens_of_another_task_or_incarnation_settle_nothing(follows: Any) -> None:
    f = follows()
    await f.ready(meta(0))
    lease = await leased(f.controller)
    earlier = Token("t", "earlier", lease.token.lease)
    assert await f.controller.renew([earlier, lease.token]) == [earlier]
    for call in (f.controller.check([(earlier, [0])]), f.controller.fail(earlier, [0], "x")):
        with pytest.raises(StaleToken, match="is over"):
            await call
    with pytest.raises(StaleToken, match="does not hold row 5"):
        await f.controller.check([(lease.token, [0, 5])])
    await f.controller.check([(lease.token, rows(0))])


async def test_following_acknowledges_by_asking_for_more(follows: Any) -> None:
    f = follows()
    await loop_turns()
    await f.ready(meta(0))
    await f.ready(meta(1))
    assert f.unit.asked == [("", 0, []), ("first epoch", 1, []), ("first epoch", 2, [])]
    await asyncio.wait_for(f.controller.subscription.caught_up(0), 1)


async def test_a_connection_that_is_lost_is_made_again_from_where_it_was_and_tells_the_rest(follows: Any) -> None:
    f = follows()
    await f.ready(meta(0))
    await as_worker("gone", f.controller)  # type: ignore[misc]
    f.controller.abandon("gone")
    await f.unit.raises(ConnectionLost("gone"))
    await asyncio.sleep(0.1)
    assert f.unit.asked[-1] == ("first epoch", 1, [1])  # still to be told of the lease that has ended
    await f.unit.raises(ConnectionLost("gone"))
    await asyncio.sleep(0.15)
    await f.ready(meta(1))
    assert f.unit.asked[-2:] == [("first epoch", 1, [1]), ("first epoch", 2, [])]


async def test_a_unit_that_tells_everything_has_no_other_rows_and_those_of_a_lost_epoch_are_named(follows: Any) -> None:
    lost: list[tuple[int, list[int]]] = []
    f = follows(on_lost=lambda unit, rows: lost.append((unit, rows)))
    await f.ready(meta(0), meta(1), meta(2))
    await f.unit.tell(f.notice([0, 1, 4, 5], "a", metas=[meta(0), meta(2)]), is_full=True)  # 2 and 3 were dropped meanwhile
    assert lost == [] and (await f.controller.status()).counts["ready"] == 4
    f.unit.epoch, f.unit.number = "second epoch", 0
    await f.unit.tell(f.notice([0], is_drop=True), f.notice([1], "a", metas=[meta(0)]), is_full=True)
    assert lost == [(0, [4, 5])]  # 0 was dropped, which its unit could not tell of before it died
    assert (await f.controller.status()).counts["ready"] == 1
    assert f.unit.asked[-1] == ("second epoch", 2, [])


async def test_what_one_unit_does_not_tell_says_nothing_of_the_rows_of_another(follows: Any) -> None:
    lost: list[tuple[int, list[int]]] = []
    f = follows(on_lost=lambda unit, rows: lost.append((unit, rows)))
    other = Unit()
    following = asyncio.create_task(f.controller.subscription.follow(1, other))  # type: ignore[arg-type]
    await f.ready(meta(0))
    await other.tell(f.notice(rows(1), "a", metas=[meta(1)]))
    f.unit.epoch = "second epoch"
    await f.unit.tell(is_full=True)
    assert lost == [(0, rows(0))] and (await leased(f.controller, Want(groups=9))).rows == [rows(1)]
    following.cancel()


class Broken:
    """A unit whose storage does not answer."""

    def refuse(self, task: str, leases: list[int]) -> None: ...

    async def columns(self, rows: np.ndarray, columns: list[str]) -> Batch:
        raise RunError("no answer")


async def test_rows_whose_columns_cannot_be_read_are_held_by_nobody(follows: Any) -> None:
    f = follows()
    f.controller.subscription.here[0] = Broken()
    await f.ready(meta(0))
    with pytest.raises(RunError, match="no answer"):
        await f.controller.lease(ONE, ["a"], 1)
    assert f.controller.holders() == {}


async def test_rows_of_a_lease_that_is_refused_are_held_by_nobody(follows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise UserError("more than was wanted")

    monkeypatch.setattr(controller_module, "check_lease", refuse)
    f = follows()
    await f.ready(meta(0))
    with pytest.raises(UserError, match="more than was wanted"):
        await f.controller.lease(ONE, [], 1)
    assert f.controller.holders() == {}


async def test_a_request_at_which_the_sampler_fails_is_given_nothing_later(follows: Any) -> None:
    f = follows()
    sampler = f.controller._sampler

    class Fails:
        check = sampler.check

        def assign(self, *arguments: object) -> None:
            raise RuntimeError("a bug")

    f.controller._sampler = Fails()
    with pytest.raises(RuntimeError, match="a bug"):
        await f.controller.lease(ONE, [], 1)
    f.controller._sampler = sampler
    await f.ready(meta(0))
    assert f.controller.holders() == {} and f.controller.askers() == []


async def test_rows_handed_out_in_the_moment_in_which_their_asker_goes_are_held_by_nobody(follows: Any) -> None:
    f = follows()
    asking = await parked(as_worker("w", f.controller))
    f.unit._news.put_nowait(News(f.unit.epoch, 1, False, [f.notice(rows(0), "a", metas=[meta(0)])]))
    while not f.controller.holders():
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled() and f.controller.holders() == {}


async def test_a_controller_that_fails_ends_what_its_queue_serves() -> None:
    def fail(rows: list[int]) -> None:
        raise RuntimeError("a bug")

    queue, has_waited = TransferQueue(schema(), [MemoryStorage()], events={"t": TaskEvents(on_done=fail)}), False
    with pytest.raises(ExceptionGroup) as caught:
        async with queue.running():
            columns = {"a": np.zeros(2, np.int64), "out": np.zeros(2, np.int64)}
            await queue.client().put([meta(0)], Batch(np.array(rows(0)), np.array([0]), columns))
            try:
                await asyncio.wait_for(asyncio.Event().wait(), patience(5))
            except TimeoutError:
                has_waited = True
    assert not has_waited and caught.group_contains(RuntimeError, match="a bug")
    assert await asyncio.wait_for(queue.client().lease("other"), patience(5)) is None  # it has been closed
