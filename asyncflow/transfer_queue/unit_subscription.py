"""A task's controller and the storage units: what they tell its table, and what they are told of its leases and its dead rows.

consumes: news from the units
waits for: the next news, from each unit by itself
is unblocked by: news; a unit that is back after its death
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import numpy as np

from asyncflow.transfer_queue.leases import DeadRow
from asyncflow.transfer_queue.notices import News, Notice
from asyncflow.transfer_queue.schema import DEAD, Schema
from asyncflow.transfer_queue.table import Table
from asyncflow.transfer_queue.unit import StorageUnit
from asyncflow.transport import ConnectionLost
from asyncflow.types import Array, RunError

log = logging.getLogger(__name__)

RETRY_SECONDS = (0.05, 1.0)
NO_ROWS = np.empty(0, np.int64)


class UnitSubscription:
    """`on_news(rows that are done now)` and `on_lost(unit, rows)` tell the controller. `here`: the units of this process; `lost`:
    rows that went with a unit's process."""

    def __init__(
        self, table: Table, schema: Schema, on_news: Callable[[list[int]], None], on_lost: Callable[[int, list[int]], None]
    ) -> None:
        self.here: dict[int, StorageUnit] = {}
        self.lost: list[int] = []
        self._table, self._schema = table, schema
        self._on_news, self._on_lost = on_news, on_lost
        self._units: dict[int, StorageUnit] = {}
        self._ended_leases: dict[int, list[int]] = {}  # unit of another process -> leases that it has not been told of
        self._caught_up: dict[int, asyncio.Event] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def follow(self, number: int, unit: StorageUnit) -> None:
        """Take the notices of a unit, acknowledging each by asking for more. Resumes when the unit is back after a death. Runs
        until it is cancelled.

        Raises `Superseded` when another controller has taken this task over.
        """
        self._units[number] = unit
        caught_up = self._caught_up.setdefault(number, asyncio.Event())
        task, incarnation = self._table.spec.name, self._table.incarnation
        if isinstance(unit, StorageUnit):  # of this process: by calls
            self.here[number] = unit
            listening = unit.listen(task, incarnation, partial(self.take, number, is_new_epoch=False))
            caught_up.set()
            await listening
            return
        epoch, last, pause = "", 0, RETRY_SECONDS[0]
        ended = self._ended_leases.setdefault(number, [])
        while True:
            reported = ended.copy()
            try:
                news = await unit.follow(task, incarnation, epoch, last, reported)
            except ConnectionLost:
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_SECONDS[1])
                continue
            pause = RETRY_SECONDS[0]
            del ended[: len(reported)]
            is_new_epoch = epoch not in ("", news.epoch)
            self.take(number, news, is_new_epoch=is_new_epoch)
            if is_new_epoch and (self._table.ended_partitions or self._table.is_closed):
                self._start(self._remind(unit))
            epoch, last = news.epoch, news.last
            caught_up.set()

    async def caught_up(self, number: int) -> None:
        """Wait until the unit's rows are known here."""
        await self._caught_up.setdefault(number, asyncio.Event()).wait()

    def end_leases(self, leases: list[int]) -> None:
        """Have the units refuse completions under these."""
        if leases:
            for ended in self._ended_leases.values():
                ended.extend(leases)
            for unit in self.here.values():
                unit.refuse(self._table.spec.name, leases)

    async def bury(self, dead: list[DeadRow]) -> None:
        """Mark rows dead in the units that have them. Goes on if its caller goes: the other tasks have to hear of it."""
        rows, errors = np.array([letter.row for letter in dead], np.int64), [letter.error for letter in dead]
        marking = [self._start(self._mark_dead(unit, rows, errors)) for unit in self._units.values()]
        await asyncio.shield(asyncio.gather(*marking))

    def close(self) -> None:
        """Cancel the work in the background."""
        for task in self._background:
            task.cancel()

    # -- what they tell -----------------------------------------------------------------------------------------------------

    def take(self, unit: int, news: News, *, is_new_epoch: bool) -> None:
        """Take news into the table."""
        if news.is_full:
            self._forget_what_is_gone(unit, news, is_new_epoch)
        done: list[int] = []
        for notice in news.notices:
            done += self._apply(unit, notice)
        self._on_news(done)

    def _apply(self, unit: int, notice: Notice) -> list[int]:
        """Returns the rows that are done now."""
        table = self._table
        if notice.task:
            if notice.task == table.spec.name and notice.ended_partition is not None:
                table.end_partition(notice.ended_partition)
            table.is_closed |= notice.task == table.spec.name and notice.is_closed
            return []
        rows = np.frombuffer(notice.rows, np.int64)
        if notice.is_drop:
            table.drop(rows)
            return []
        table.admit(notice.metas, unit)
        tokens = np.frombuffer(notice.tokens, np.int32) if notice.tokens else None
        return table.notify(rows, notice.mask, tokens, asyncio.get_running_loop().time()) if len(rows) else []

    def _forget_what_is_gone(self, unit: int, news: News, is_new_epoch: bool) -> None:
        """Remove rows that a unit does not list when it lists everything: they were dropped, or lost when its process died."""
        written = [(np.frombuffer(n.rows, np.int64), n.mask) for n in news.notices if n.rows and not n.is_drop]
        known = self._table.rows_of(unit)
        is_gone = ~np.isin(known, np.concatenate([NO_ROWS, *(rows for rows, _ in written)]))
        if is_new_epoch:  # a group may be there again, put once more, without columns that its rows had: it begins anew
            again = np.concatenate([NO_ROWS, *(self._table.beyond(rows, mask) for rows, mask in written)])
            is_gone |= np.isin(known >> self._schema.group_bits, again >> self._schema.group_bits)
        self._table.drop(known[is_gone])
        lost = known[is_gone & ~self._are_dropped(known, news)]
        if is_new_epoch and len(lost):
            where = f"task {self._table.spec.name!r}: storage unit {unit} has lost {len(lost)} rows with its process"
            log.error("%s: %s", where, _ranges(lost))
            self.lost += lost.tolist()
            self._on_lost(unit, lost.tolist())

    def _are_dropped(self, rows: Array, news: News) -> Array:
        """bool [n]: which of the rows were asked to go, says a unit that may have died before it could say so."""
        drops = [notice for notice in news.notices if notice.is_drop]
        dropped = np.frombuffer(b"".join(notice.rows for notice in drops), np.int64)
        groups = np.frombuffer(b"".join(notice.gone for notice in drops), np.int64)
        return np.isin(rows, dropped) | np.isin(rows >> self._schema.group_bits, groups)

    # -- what they are told -------------------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _remind(self, unit: StorageUnit) -> None:
        """A unit that lost its memory has lost this durable state, too, and the next controller is to find it there."""
        with contextlib.suppress(ConnectionLost):  # then it is started once more
            for partition in sorted(self._table.ended_partitions):
                await unit.end_partition(self._table.spec.name, partition)
            if self._table.is_closed:
                await unit.close_task(self._table.spec.name)

    async def _mark_dead(self, unit: StorageUnit, rows: Array, errors: list[str]) -> None:
        pause = RETRY_SECONDS[0]
        while True:
            try:
                return await unit.end(rows, DEAD, errors)
            except RunError as error:
                log.warning("task %r: rows %s cannot be marked dead yet: %s", self._table.spec.name, rows.tolist(), error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS[1])


def _ranges(rows: Array) -> str:
    """Numbers as ranges: `0-7, 12`."""
    firsts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)
    ends = [*(firsts[1:] - 1), len(rows) - 1]
    runs = zip(rows[firsts].tolist(), rows[ends].tolist(), strict=True)
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
