"""What units tell controllers: nothing is missed, nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from asyncflow.cluster.clock import VirtualLoop
from asyncflow.transfer_queue.notices import News, Notice, NoticeLog, Superseded
from asyncflow.types import GroupMeta, Interval

A, B = 1, 2
EVERYTHING = [Notice(mask=99)]


def notice(number: int, mask: int = A | B) -> Notice:
    return Notice(rows=bytes([number]), mask=mask)


class FollowedLog(NoticeLog):
    """A log, and what its controllers have been told. A controller is of interest in column A unless it says something else."""

    def __init__(self, keep: int = 100, timeout_seconds: float = 30.0) -> None:
        super().__init__("e1", timeout_seconds, keep, lambda: EVERYTHING)
        self.asked: dict[str, asyncio.Future[News]] = {}

    def ask(self, task: str, acked: int, *, incarnation: str = "i1", epoch: str = "e1", interest: int = A) -> asyncio.Future[News]:
        self.asked[task] = self.follow(task, incarnation, interest, epoch, acked)
        return self.asked[task]

    def join(self, *tasks: str, **fields: Any) -> None:
        """In session, and asking for more."""
        for task in tasks:
            news = self.ask(task, 0, epoch="", **fields).result()
            assert news.is_full and news.notices == EVERYTHING
            self.ask(task, news.last, **fields)


def told(news: asyncio.Future[News]) -> tuple[int, list[bytes]]:
    assert not news.result().is_full
    return news.result().last, [n.rows for n in news.result().notices]


def in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test of silence, which ends at the same moment however busy the machine is."""

    def run() -> None:
        loop = VirtualLoop()
        loop.run_until_complete(test())
        loop.finish()

    return run


async def test_a_writer_waits_until_every_controller_has_asked_for_more() -> None:
    log = FollowedLog()
    log.join("t", "u")
    answer = log.post(notice(1))
    assert told(log.asked["t"]) == told(log.asked["u"]) == (1, [b"\1"])
    assert not answer.done()
    log.ask("t", 1)
    assert not answer.done()
    log.ask("u", 1)
    assert answer.done() and not log.asked["u"].done()


async def test_without_controllers_nobody_waits() -> None:
    assert FollowedLog().post(notice(1)).done()


async def test_one_that_asks_for_the_same_again_gets_the_same_again_and_acknowledges_nothing() -> None:
    log = FollowedLog()
    log.join("t")
    answer = log.post(notice(1))
    log.post(notice(2))
    assert told(log.ask("t", 0)) == (2, [b"\1", b"\2"])
    assert told(log.ask("t", 0)) == (2, [b"\1", b"\2"]) and not answer.done()
    assert told(log.ask("t", 1)) == (2, [b"\2"]) and answer.done()


async def test_who_asks_over_a_new_connection_leaves_the_old_request() -> None:
    log = FollowedLog()
    log.join("t")
    old = log.asked["t"]
    log.ask("t", 0)
    assert told(old) == (0, [])  # whichever of the two it reads, it goes on
    log.post(notice(1))
    assert told(log.asked["t"]) == (1, [b"\1"])


async def test_what_does_not_concern_a_controller_is_not_told_and_not_waited_for() -> None:
    log = FollowedLog(keep=4)
    log.join("t")
    meta = GroupMeta(0, 1, 0, Interval(0, 0))
    for number in range(6):  # more than are kept
        assert log.post(notice(number, B)).done()
    assert log.post(Notice(task="u", ended_partition=3)).done()
    assert not log.asked["t"].done()
    for concerning in (notice(9, A), Notice(metas=[meta]), Notice(is_drop=True), Notice(task="t", is_closed=True)):
        answer = log.post(concerning)
        news = log.asked["t"].result()
        assert news.notices == [concerning] and not news.is_full and not answer.done()
        log.ask("t", news.last)
        assert answer.done()


async def test_a_new_controller_is_told_everything_once() -> None:
    log = FollowedLog()
    log.post(notice(1))
    first = log.ask("t", 0, epoch="").result()
    assert (first.epoch, first.last, first.is_full, first.notices) == ("e1", 1, True, EVERYTHING)
    assert not log.ask("t", 1).done()


async def test_a_follower_of_another_epoch_is_told_everything_and_holds_up_nobody() -> None:
    log = FollowedLog()
    log.join("t")
    answer = log.post(notice(1))
    assert log.ask("t", 1, epoch="e0").result().is_full
    assert answer.done()  # it has everything
    later = log.post(notice(2))
    assert not later.done()
    assert told(log.ask("t", 1)) == (2, [b"\2"])


@pytest.mark.parametrize(("missed", "is_full"), [(4, False), (5, True)])
async def test_one_that_has_missed_more_than_is_kept_is_told_everything(missed: int, is_full: bool) -> None:
    log = FollowedLog(keep=4)
    log.join("t")
    for number in range(1 + missed):
        log.post(notice(number))
    news = log.ask("t", 1).result()
    assert news.is_full == is_full and news.last == 1 + missed
    assert news.notices == (EVERYTHING if is_full else [notice(number) for number in range(1, 5)])
    assert not log.ask("t", news.last).done()


@in_virtual_time
async def test_the_silent_one_is_away_and_back_when_it_asks() -> None:
    log, loop = FollowedLog(timeout_seconds=30.0), asyncio.get_running_loop()
    log.join("t", "u")
    first = log.post(notice(1))
    log.ask("u", 1)
    await asyncio.sleep(20.0)
    second = log.post(notice(2))
    log.ask("u", 2)
    assert not first.done() and log.away() == []
    await asyncio.gather(first, second)
    assert loop.time() == 30.0  # it is away for the second one, too
    assert log.away() == ["t"]
    third = log.post(notice(3))
    assert not third.done()
    log.ask("u", 3)
    assert third.done()
    back = log.ask("t", 0)
    assert back.done(), "what it has missed is not told"
    assert told(back) == (3, [b"\1", b"\2", b"\3"]) and log.away() == []
    fourth = log.post(notice(4))
    log.ask("u", 4)
    assert not fourth.done()
    log.ask("t", 4)
    assert fourth.done()


@in_virtual_time
async def test_one_that_answers_in_time_is_not_away_however_often_it_is_asked() -> None:
    log = FollowedLog(timeout_seconds=30.0)
    log.join("t")
    for number in range(1, 8):
        log.post(notice(number))
        await asyncio.sleep(29.0)
        log.ask("t", number)
        assert log.away() == []


@in_virtual_time
async def test_the_second_silence_is_noticed_too() -> None:
    log, loop = FollowedLog(timeout_seconds=30.0), asyncio.get_running_loop()
    log.join("t")
    for number in (1, 2):
        await log.post(notice(number))
        assert (loop.time(), log.away()) == (30.0 * number, ["t"])
        assert told(log.ask("t", number - 1)) == (number, [bytes([number])])
        log.ask("t", number)


async def test_a_new_controller_supersedes_the_old_one_for_good() -> None:
    log = FollowedLog()
    log.join("t")
    old, answer = log.asked["t"], log.post(notice(1, B))
    assert log.incarnation("t") == "i1" and log.incarnation("u") is None
    log.join("t", incarnation="i2")
    with pytest.raises(Superseded, match="another controller has taken task 't' over"):
        old.result()
    for epoch in ("e1", "", "e0"):
        with pytest.raises(Superseded):
            log.ask("t", 1, epoch=epoch)
    assert log.incarnation("t") == "i2" and answer.done()
    pending = log.post(notice(2))
    assert told(log.asked["t"]) == (2, [b"\2"]) and not pending.done()
    log.ask("t", 2, incarnation="i2")
    assert pending.done()


async def test_the_writers_that_waited_for_a_superseded_controller_are_let_go() -> None:
    log = FollowedLog()
    log.join("t", "u")
    answer = log.post(notice(1))
    log.ask("u", 1)
    log.ask("t", 0, incarnation="i2", epoch="")
    assert answer.done()  # the new one was told everything there is


async def test_closing_lets_everybody_go() -> None:
    log = FollowedLog(timeout_seconds=0.05)
    log.join("t")
    answer = log.post(notice(1))
    log.ask("t", 0)
    log.ask("t", 1)
    asking, waiting = log.asked["t"], log.post(notice(2))
    log.close()
    assert answer.done() and waiting.done() and (asking.done() or asking.cancelled())


async def test_of_two_controllers_that_start_at_once_the_later_turn_serves_in_whatever_order_they_come() -> None:
    log = FollowedLog()
    log.join("t", incarnation="i2")
    with pytest.raises(Superseded, match="another controller has taken task 't' over"):
        log.ask("t", 0, incarnation="i1", epoch="")
    assert log.incarnation("t") == "i2" and not log.asked["t"].done()
