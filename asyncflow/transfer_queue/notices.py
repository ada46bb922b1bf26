"""Notices from units to controllers, numbered, so that a stored row is never invisible.

A controller follows a unit: it asks for what came after notice n, and by asking acknowledges n. A writer is answered when all
controllers in session have acknowledged its notice. One that is silent for too long is *away*: nobody waits for it any more, and
when it is back it gets what it has missed, from the log, or, if that does not reach back so far or one of the two has been
restarted meanwhile, everything there is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from asyncflow.types import GroupMeta, RunError, crosses

log = logging.getLogger(__name__)

LOG_BYTES = 8 << 20


@crosses
class Superseded(RunError):
    """Another controller has taken the task over."""


class Notice(msgspec.Struct, array_like=True, omit_defaults=True):
    """Notice of a unit: these groups are new; these rows (int64 bytes) have these columns, or, if `is_drop`, are no more.

    `tokens` (int32 bytes, or nothing): what the rows weigh by now. `ended_partition` and `is_closed` concern the task `task`.
    `gone` (int64 bytes): groups of which all rows are no more.
    """

    metas: list[GroupMeta] = []
    rows: bytes = b""
    mask: int = 0
    tokens: bytes = b""
    is_drop: bool = False
    task: str = ""
    ended_partition: int | None = None
    is_closed: bool = False
    gone: bytes = b""


class News(msgspec.Struct, array_like=True):
    """Notices up to number `last` of a unit's `epoch` (one process of it, from start to end). `is_full`: what is not in them is
    not there."""

    epoch: str
    last: int
    is_full: bool
    notices: list[Notice]


@dataclass(slots=True)
class _Waiter:
    """A writer, and how many controllers have not acknowledged its notice yet."""

    future: asyncio.Future[None]
    left: int


@dataclass(slots=True)
class _Follower:
    """A task's controller, as a unit knows it."""

    task: str
    incarnation: str
    interest: int  # the columns that it is told of
    acked: int = 0
    asking: asyncio.Future[News] | None = None
    take: Callable[[News], None] | None = None  # one of this process is told by a call, and does not ask
    waiting: deque[tuple[int, float, _Waiter]] = field(default_factory=deque)  # (notice, since, writer)
    is_away: bool = False


class NoticeLog:
    """The notices of one unit and the controllers that follow it. `snapshot()` makes the notices that tell everything."""

    def __init__(self, epoch: str, timeout_seconds: float, keep: int, snapshot: Callable[[], list[Notice]]) -> None:
        self.epoch = epoch
        self._timeout_seconds, self._snapshot = timeout_seconds, snapshot
        self._log: deque[Notice] = deque()
        self._keep, self._log_bytes = keep, 0
        self._last = 0
        self._followers: dict[str, _Follower] = {}
        self._timer: asyncio.TimerHandle | None = None

    def incarnation(self, task: str) -> str | None:
        """Incarnation of the controller that follows, or followed last."""
        follower = self._followers.get(task)
        return follower.incarnation if follower is not None else None

    def away(self) -> list[str]:
        """Tasks whose controllers are silent."""
        return [follower.task for follower in self._followers.values() if follower.is_away]

    def post(self, notice: Notice) -> asyncio.Future[None]:
        """Number a notice and tell it. The future is done when all controllers in session have acknowledged it."""
        loop = asyncio.get_running_loop()
        self._last += 1
        self._keep_notice(notice)
        waiter = _Waiter(loop.create_future(), 0)
        for follower in self._followers.values():
            if follower.is_away:
                continue
            if follower.take is not None:
                self._call(follower, follower.take, notice)
            elif _concerns(notice, follower):
                waiter.left += 1
                follower.waiting.append((self._last, loop.time(), waiter))
                self._answer(follower)
            elif follower.asking is not None and follower.acked == self._last - 1:
                follower.acked = self._last  # nothing in it for this one
        if not waiter.left:
            waiter.future.set_result(None)
        elif self._timer is None:
            self._timer = loop.call_later(self._timeout_seconds, self._look_for_silent)
        return waiter.future

    def follow(self, task: str, incarnation: str, interest: int, epoch: str, acked: int) -> asyncio.Future[News]:
        """Notices after notice `acked` of `epoch`, as soon as there are some; acknowledges `acked`.

        All rows, when `epoch` is another one, when the log does not reach back so far, or when the controller is a new one. Of two
        incarnations of a task's controller the greater one replaces the other, which gets `Superseded`.
        """
        follower = self._followers.get(task)
        is_known = follower is not None and follower.incarnation == incarnation and epoch == self.epoch
        if follower is None or not is_known:
            follower = self._begin(task, incarnation, interest)
        if follower.is_away:
            log.warning("the controller of task %r is back", task)
            follower.is_away = False
        if follower.asking is not None and not follower.asking.done():
            # It has asked again over a new connection, or this is what it asked over the old one: whichever it reads, it goes on.
            follower.asking.set_result(News(self.epoch, follower.acked, False, []))
        follower.asking = asyncio.get_running_loop().create_future()
        if is_known:
            follower.acked = max(follower.acked, acked)
            self._release(follower, acked)
        if not is_known or acked < self._last - len(self._log):
            news = News(self.epoch, self._last, True, self._snapshot())
            asked, follower.asking = follower.asking, None
            asked.set_result(news)
            return asked
        asked = follower.asking
        self._answer(follower)
        return asked

    def listen(self, task: str, incarnation: str, interest: int, take: Callable[[News], None]) -> asyncio.Future[News]:
        """Follow from within the unit's process: `take` is called with everything, now, and later with each notice, before its
        writer is answered. The future never has a result; it raises `Superseded`, or what `take` has raised."""
        follower = self._begin(task, incarnation, interest)
        follower.take, follower.asking = take, asyncio.get_running_loop().create_future()
        take(News(self.epoch, self._last, True, self._snapshot()))
        return follower.asking

    def _begin(self, task: str, incarnation: str, interest: int) -> _Follower:
        before = self._followers.get(task)
        if before is not None:
            if incarnation < before.incarnation:
                raise Superseded(f"another controller has taken task {task!r} over")
            self._release(before, self._last)
            if before.incarnation != incarnation and before.asking is not None and not before.asking.done():
                before.asking.set_exception(Superseded(f"another controller has taken task {task!r} over"))
        follower = self._followers[task] = _Follower(task, incarnation, interest)
        return follower

    def _call(self, follower: _Follower, take: Callable[[News], None], notice: Notice) -> None:
        if not _concerns(notice, follower):
            return
        try:
            take(News(self.epoch, self._last, False, [notice]))
        except Exception as error:  # the controller's failure, not the writer's: raised where it listens
            follower.is_away = True
            if follower.asking is not None and not follower.asking.done():
                follower.asking.set_exception(error)

    def _keep_notice(self, notice: Notice) -> None:
        """Add a notice to the log, which removes the oldest ones above its limits."""
        self._log.append(notice)
        self._log_bytes += _size(notice)
        while len(self._log) > self._keep or (self._log_bytes > LOG_BYTES and len(self._log) > 1):
            self._log_bytes -= _size(self._log.popleft())

    def _answer(self, follower: _Follower) -> None:
        if follower.asking is None or follower.asking.done():
            return
        missed = self._last - follower.acked
        tail = [self._log[-i] for i in range(missed, 0, -1)] if missed < 64 else list(self._log)[-missed:]
        notices = [notice for notice in tail if _concerns(notice, follower)]
        if not notices:
            follower.acked = self._last
            return
        asked, follower.asking = follower.asking, None
        asked.set_result(News(self.epoch, self._last, False, notices))

    def _release(self, follower: _Follower, last: int) -> None:
        """Let writers of notices up to `last` wait for this controller no longer."""
        while follower.waiting and follower.waiting[0][0] <= last:
            waiter = follower.waiting.popleft()[2]
            waiter.left -= 1
            if not waiter.left and not waiter.future.done():
                waiter.future.set_result(None)

    def _look_for_silent(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer, now = None, loop.time()
        for follower in self._followers.values():
            if follower.waiting and follower.waiting[0][1] + self._timeout_seconds <= now + 1e-3:
                log.warning("the controller of task %r has not taken a notice within %s s", follower.task, self._timeout_seconds)
                follower.is_away = True
                self._release(follower, self._last)
        since = min((f.waiting[0][1] for f in self._followers.values() if f.waiting), default=None)
        if since is not None:
            self._timer = loop.call_at(since + self._timeout_seconds, self._look_for_silent)

    def close(self) -> None:
        """Let all writers and controllers go."""
        if self._timer is not None:
            self._timer.cancel()
        for follower in self._followers.values():
            self._release(follower, self._last)
            follower.is_away = True
            if follower.asking is not None:
                follower.asking.cancel()


def _size(notice: Notice) -> int:
    return len(notice.rows) + len(notice.tokens) + 256 * (1 + len(notice.metas))


def _concerns(notice: Notice, follower: _Follower) -> bool:
    if notice.task:
        return notice.task == follower.task
    return bool(notice.mask & follower.interest or notice.metas or notice.is_drop)
