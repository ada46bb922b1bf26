"""A task's controller: its table, the requests that are parked until they can be served, and the clock.

consumes: news from the units it follows; lease, fail and renew requests
waits for: nothing; a request that cannot be served is parked, and the next lease deadline is a timer
is unblocked by: news, failures, expiries, each of which has the sampler look at the parked requests again

It keeps nothing that the units do not have but leases, and these may be lost: one that is restarted follows the units anew.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from asyncflow.transfer_queue.batches import WireBatch, read_lease
from asyncflow.transfer_queue.leases import DeadRow, Lease, StaleToken, Token, Want
from asyncflow.transfer_queue.notices import Superseded
from asyncflow.transfer_queue.sampler.checks import check_lease, make_sampler
from asyncflow.transfer_queue.schema import Schema
from asyncflow.transfer_queue.table import Table
from asyncflow.transfer_queue.unit_subscription import UnitSubscription
from asyncflow.transport import client_key, client_name, remote
from asyncflow.types import UserError


class TaskStatus(msgspec.Struct):
    """A task's rows by state (see `Table.counts`), and what is asked of it. `dead`: errors by row. `lost`: rows that went with a
    storage unit's process, since the controller began."""

    counts: dict[str, int]
    oldest_ready_seconds: float
    parked: int
    holders: dict[str, int]
    dead: dict[int, str]
    lost: list[int]


class Handed(msgspec.Struct):
    """A lease, and columns of its rows, or not."""

    lease: Lease
    batch: WireBatch | None


@dataclass(slots=True)
class _Parked:
    """A request waiting to be served."""

    worker: str
    want: Want
    answer: asyncio.Future[Lease | None]
    key: int
    since: float


@dataclass(frozen=True, slots=True)
class TaskEvents:
    """Events of a task, for the ledger; all are called in the controller's loop."""

    on_done: Callable[[list[int]], None] = lambda rows: None
    """Rows that have the task's outputs."""
    on_dead: Callable[[list[DeadRow]], None] = lambda rows: None
    """Rows that have failed for good."""
    on_lost: Callable[[int, list[int]], None] = lambda unit, rows: None
    """Rows whose outputs a unit has lost: they are done again."""
    on_leased: Callable[[Lease, Want], None] = lambda lease, want: None
    on_change: Callable[[], None] = lambda: None
    """Requests have been looked at again."""


class Controller:
    """Controller of one task: its table of rows, its leases, and the requests that wait for rows.

    A row that was done is told again if its unit dies in the middle of dropping it: it is there once more, done as it was.
    """

    def __init__(
        self,
        task: str,
        schema: Schema,
        events: TaskEvents | None = None,
        *,
        term: int = 0,
    ) -> None:
        """`term`: of two controllers of one task, the one with the later term serves it (`Directory.term`)."""
        events = events or TaskEvents()
        self.spec, self._schema = schema.task(task), schema
        self.table = Table(self.spec, schema, f"{term:08d}-{uuid.uuid4().hex[:12]}")
        self._sampler = make_sampler(self.spec)
        self.subscription = UnitSubscription(self.table, schema, self._on_news, events.on_lost)
        self._events = events
        self._parked: list[_Parked] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = self._is_replaced = False

    # -- what clients ask ---------------------------------------------------------------------------------------------------

    @remote
    async def lease(self, want: Want, columns: list[str], key: int) -> Handed | None:
        """Rows that are wanted, as soon as there are some, with these columns of them if their units are in this process.

        None: the partition has ended or the task is closed, and nothing more is ready; or the worker has withdrawn its request.
        Raises `ValueError` for a request that can never be served. `key`: the worker's own name for the request, by which it can
        be withdrawn.
        """
        if not want.groups and not want.rows and not want.tokens:
            raise ValueError("a lease is wanted for a number of groups, of rows, or of tokens")
        self._sampler.check(self.spec, want)
        if self._is_replaced:
            raise Superseded(f"task {self.spec.name!r}: another controller has taken it over")
        if self._is_closed:
            return None
        answer: asyncio.Future[Lease | None] = asyncio.get_running_loop().create_future()
        self._parked.append(_Parked(_asker(), want, answer, key, _now()))
        try:
            self._serve()
            lease = await answer
            return None if lease is None else Handed(lease, await self._columns_here(lease, columns))
        except BaseException:  # its asker has gone, or is told of a failure: nobody is to hold what it was given
            answer.cancel()
            if not answer.cancelled() and answer.exception() is None and (lease := answer.result()) is not None:
                self._give_back(lease.token)
            raise

    async def _columns_here(self, lease: Lease, columns: list[str]) -> WireBatch | None:
        units = self.subscription.here
        if not columns or not units.keys() >= set(lease.units):
            return None
        try:
            reading = read_lease(self._schema, lease, columns, lambda number, rows: units[number].columns(rows, columns))
            return WireBatch.of(await reading)
        except LookupError:  # some of it has been dropped in this moment: the asker finds out what is left
            return None

    @remote
    async def withdraw(self, key: int | None) -> None:
        """Answer the calling worker's parked requests with None (it is about to change what it may generate), or those of a key
        (the worker that asked there has gone)."""
        worker = _asker()
        for request in self._parked:
            if request.worker == worker and key in (None, request.key) and not request.answer.done():
                request.answer.set_result(None)
        self._prune()

    @remote
    async def check(self, leases: list[tuple[Token, list[int]]]) -> None:
        """Raises `StaleToken` unless all the leases are alive and hold these rows."""
        for token, rows in leases:
            self.table.check(token, rows)

    @remote
    async def fail(self, token: Token, rows: list[int], error: str, is_final: bool = False) -> list[int]:
        """Give rows back after a failure. Returns those that have failed `max_failures` times, all if it `is_final`: they are
        marked dead.

        Raises `StaleToken`.
        """
        dead = self.table.fail(token, rows, error, _now(), is_final=is_final)
        if dead:
            self._events.on_dead(dead)
        self._serve()
        if dead:
            await self.subscription.bury(dead)
        return [letter.row for letter in dead]

    @remote
    async def give_back(self, token: Token) -> None:
        """End a lease: its rows are delivered again, after what is ready by then, and it counts as no failure."""
        self._give_back(token)

    @remote
    async def renew(self, tokens: list[Token]) -> list[Token]:
        """Put the leases' deadlines off by `lease_seconds`. Returns those that are over.

        In one message: a worker that holds thousands would not get round in time.
        """
        now, over = _now(), list[Token]()
        for token in tokens:
            try:
                self.table.leases.renew(token, now)
            except StaleToken:
                over.append(token)
        return over

    @remote
    async def status(self) -> TaskStatus:
        """State of the task, for `asyncflow status` and for metrics."""
        self._prune()
        table = self.table
        oldest = table.ready.waiting_seconds(_now())
        return TaskStatus(table.counts(), oldest, len(self._parked), self.holders(), dict(table.dead), self.subscription.lost)

    def holders(self) -> dict[str, int]:
        """Rows held by each worker that holds any, by its name."""
        held = Counter[str]()
        for worker, rows in self.table.leases.holders().items():
            held[worker.rpartition("@")[0] or worker] += rows
        return dict(held)

    def askers(self) -> list[tuple[str, float]]:
        """Workers that ask for rows and have none yet, by name, and since when."""
        parked = (request for request in self._parked if not request.answer.done())
        return [(request.worker.rpartition("@")[0] or request.worker, request.since) for request in parked]

    def abandon(self, worker: str) -> None:
        """Forget a client that has gone (its `client_key`): all that it held is delivered again."""
        self.subscription.end_leases(self.table.abandon(worker))
        self._serve()

    def narrow(self, group: int, lowest_version: int) -> None:
        """Let no version below this one generate the group from now on. Nothing if the group is unknown."""
        self.table.narrow(group, lowest_version)

    def close(self) -> None:
        """Stop the clock, and answer every request, now and later, with None, whatever is ready."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.subscription.close()
        for request in self._parked:
            if not request.answer.done():
                request.answer.set_result(None)

    def replace(self) -> None:
        """Another controller serves the task: every request, now and later, raises `Superseded`; the worker that asked looks for
        that one."""
        self._is_replaced = True
        for request in self._parked:
            if not request.answer.done():
                request.answer.set_exception(Superseded(f"task {self.spec.name!r}: another controller has taken it over"))
        self.close()

    # -- inside -------------------------------------------------------------------------------------------------------------

    def _on_news(self, done: list[int]) -> None:
        if done:
            self._events.on_done(done)
        if self._parked:
            self._serve()

    def _serve(self) -> None:
        now = _now()
        self.subscription.end_leases(self.table.expire(now))
        self._prune()
        if self._parked:
            wants = [(request.worker, request.want) for request in self._parked]
            for i, pick in self._sampler.assign(self.table, wants):
                lease = self.table.hand_out(wants[i][0], now, pick)
                try:
                    check_lease(self.spec, lease, wants[i][1])
                except UserError as error:  # told to the asker, whatever has had the sampler choose now
                    self._parked[i].answer.set_exception(error)
                    self.subscription.end_leases(self.table.give_back(lease.token))
                    continue
                self._parked[i].answer.set_result(lease)
                self._events.on_leased(lease, wants[i][1])
            for request in self._parked:
                if not request.answer.done() and self.table.has_nothing_left(request.want):
                    request.answer.set_result(None)
            self._prune()
        self._set_timer()
        self._events.on_change()

    def _give_back(self, token: Token) -> None:
        self.subscription.end_leases(self.table.give_back(token))
        self._serve()

    def _prune(self) -> None:
        if any(request.answer.done() for request in self._parked):
            self._parked = [request for request in self._parked if not request.answer.done()]

    def _set_timer(self) -> None:
        deadline = self.table.leases.next_deadline
        if self._timer is not None:
            if deadline is not None and self._timer.when() <= deadline:
                return  # it rings early enough, looks, and is set again
            self._timer.cancel()
            self._timer = None
        if deadline is not None and not self.table.is_closed:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._serve()


def _asker() -> str:
    return client_key.get() or client_name.get()


def _now() -> float:
    return asyncio.get_running_loop().time()
