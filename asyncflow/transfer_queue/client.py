"""The transfer queue as a loop sees it.

put(metas, batch)              admit groups with the columns that they come with; waits for room, and for nothing else
lease(task, want)              rows, whole groups or a token budget, with the columns that the task reads; waits for some
complete(lease, outputs)       outputs and acknowledgement in one request, all of a lease or part of it
mark(leases)                   the same where a task has no outputs; any number of leases in one request
fail(lease, rows, error)       give rows back; after k failures they are dead, with the error
filter(rows, reason)  drop(rows)  end_partition(task, partition)  close(task)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import msgspec
import numpy as np

from asyncflow.transfer_queue.batches import WireBatch, read_lease, take, units_of
from asyncflow.transfer_queue.client_leases import ClientLeases
from asyncflow.transfer_queue.controller import Controller, TaskStatus
from asyncflow.transfer_queue.directory import Places, remote_directory
from asyncflow.transfer_queue.leases import Lease, StaleToken, Want
from asyncflow.transfer_queue.schema import FILTERED
from asyncflow.transfer_queue.unit import StorageUnit, UnitStatus
from asyncflow.transport import Credentials, Peer
from asyncflow.types import Array, Batch, GroupMeta
from asyncflow.waits import UNIT, waiting

STATUS_SECONDS = 3.0
ANY_GROUP = Want(groups=1)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Leased:
    """A lease and the columns that its task reads; rows and groups in the lease's order."""

    lease: Lease
    batch: Batch


class TransferQueueClient:
    """Puts, leases and completes rows. Data goes straight between the caller and the units; a group lives on one unit."""

    def __init__(self, places: Places) -> None:
        """`places` has to have learnt its description; `connect` does all that."""
        self.schema = places.schema
        self._places = places
        self.leases = ClientLeases(places.schema, self._controller, places.request_keys)
        self._peer: Peer | None = None

    @classmethod
    async def connect(
        cls, address: str, name: str, *, credentials: Credentials | None = None, patience_seconds: float = 60.0
    ) -> Self:
        """Join the queue served at an address (`unix:PATH`, `tls:HOST:PORT`) from outside. Raises `ConnectionLost`."""
        peer = await Peer.connect(address, name, credentials=credentials)
        directory = remote_directory(peer)
        places = Places(directory, name, peer=peer, credentials=credentials, patience_seconds=patience_seconds)
        await places.learn()
        client = cls(places)
        client._peer = peer
        places.watch()
        return client

    async def disconnect(self) -> None:
        """Hang up. Leases held are given back by the controllers."""
        self.leases.close()
        await self._places.close()
        if self._peer is not None:
            await self._peer.close()

    # -- in -----------------------------------------------------------------------------------------------------------------

    async def put(self, metas: Sequence[GroupMeta], batch: Batch, *, row_bytes: int = 0) -> np.ndarray:
        """Admit groups, with columns of theirs and of their rows, and wait for room for them.

        `row_bytes`: what each row's later columns may take; so much is reserved for it, besides what it comes with. Returns bool
        [n]: whether each of `batch.indices` was stored. Raises `ValueError` naming the row and the column that does not fit, before
        anything is sent.
        """
        self.schema.check_metas(metas)
        self.schema.check(batch)
        self.schema.check_rows(metas, batch)
        row_groups = batch.indices >> self.schema.group_bits
        if unknown := set(batch.groups.tolist()).difference(meta.group for meta in metas):
            raise ValueError(f"group {min(unknown)} has columns in the batch and is not admitted with it")
        units = self._places.units
        if len(units) == 1:
            return await self._unit(units[0]).put(list(metas), WireBatch.of(batch), row_bytes)
        stored = np.zeros(len(batch.indices), bool)

        async def put_on(number: int) -> None:
            rows = np.flatnonzero(row_groups % len(units) == number)
            part = take(self.schema, batch, rows, np.flatnonzero(batch.groups % len(units) == number))
            admitted = [meta for meta in metas if meta.group % len(units) == number]
            stored[rows] = await self._unit(units[number]).put(admitted, WireBatch.of(part), row_bytes)

        await asyncio.gather(*(put_on(number) for number in sorted({meta.group % len(units) for meta in metas})))
        return stored

    # -- out ----------------------------------------------------------------------------------------------------------------

    async def lease(self, task: str, want: Want = ANY_GROUP, *, columns: Sequence[str] | None = None) -> Leased | None:
        """Ready rows with the columns that the task reads, or these `columns` alone, or none; waits until there are some.

        At most one group where `want` has no limit. None when the partition has ended or the task is closed, and nothing more is
        ready, or when the request was withdrawn.
        """
        reads = self.schema.task(task).reads if columns is None else tuple(columns)
        self.schema.mask(reads)
        if not want.groups and not want.rows and not want.tokens:
            want = msgspec.structs.replace(want, groups=1)
        leases, withdrawals = self.leases, self.leases.num_withdrawals(task)
        while leases.num_withdrawals(task) == withdrawals and (handed := await leases.ask(task, want, list(reads))) is not None:
            lease = handed.lease
            if handed.batch is not None:
                leased: Leased | None = Leased(lease, handed.batch.batch())
            else:
                try:
                    leased = await self.fetch(lease, reads, is_sure=columns is None)
                except BaseException:  # whatever it is, and if the asker has gone: the rows are somebody else's to have
                    leases.give_back(lease)
                    raise
            if leased is not None:
                leases.hold(leased.lease)  # not sooner: what its asker never sees is not kept alive
                return leased
        return None

    async def fetch(self, lease: Lease, columns: Sequence[str], *, is_sure: bool = False) -> Leased | None:
        """Columns of a lease's rows, also for a client that its holder has told of it.

        Rows dropped meanwhile are left out, of the lease too; None if all were. Raises `LookupError` naming a row and a column that
        it does not have. `is_sure`: the rows had these columns when they were leased, so one that lacks them is of a unit that has
        been started again. That unit's rows are left out then: the controller takes them back when it hears of that, or, once the
        rest is let go, by the expiry.
        """

        async def read(number: int, rows: Array) -> Batch:
            return (await self._unit(number).read(rows, list(columns))).batch()

        while True:
            try:
                return Leased(lease, await read_lease(self.schema, lease, columns, read))
            except LookupError:
                there = await self._still_there(lease)
                if there is not None and there.indices == lease.indices:
                    if not is_sure:
                        raise
                    there = await self._readable(lease, read)
                if there is None:
                    return None
                lease = there

    async def stream(self, task: str, want: Want = ANY_GROUP) -> AsyncIterator[Leased]:
        """Leases as they become ready, in that order, until the partition or the task ends. The next one is fetched while this one
        is worked on."""
        fetching = asyncio.ensure_future(self.lease(task, want))
        try:
            while (leased := await fetching) is not None:
                fetching = asyncio.ensure_future(self.lease(task, want))
                yield leased
        finally:
            if fetching.done() and not fetching.cancelled() and fetching.exception() is None and (left := fetching.result()):
                self.leases.let_go(left.lease, left.lease.indices)
                self.leases.give_back(left.lease)
            fetching.cancel()

    async def read(self, units: Mapping[int, Array], columns: Sequence[str]) -> list[Batch]:
        """Columns of rows (int64, per unit), without a lease. Raises `LookupError` naming the first row and column not there."""
        return [(await self._unit(number).read(rows, list(columns))).batch() for number, rows in units.items()]

    # -- done ---------------------------------------------------------------------------------------------------------------

    async def complete(self, lease: Lease, outputs: Batch) -> np.ndarray:
        """Write a task's outputs for rows of a lease and acknowledge them, in one request for each unit concerned.

        Returns bool [n]: False for a row whose outputs are not kept, because the lease is over or another one was first. Raises
        `ValueError` when the outputs do not fit, or are of rows that are not the lease's.
        """
        self.schema.check(outputs)
        self.schema.check_outputs(lease.token.task, outputs)
        if strangers := set(outputs.indices.tolist()).difference(lease.indices):
            raise ValueError(f"row {min(strangers)} is not one of lease {lease.token.lease} of task {lease.token.task!r}")
        unit_of = units_of(self.schema, lease, outputs.indices)
        stored = np.zeros(len(outputs.indices), bool)
        for number in np.unique(unit_of).tolist():
            rows = np.flatnonzero(unit_of == number)
            part = outputs
            if len(rows) < len(unit_of):
                groups = np.flatnonzero(np.isin(outputs.groups, outputs.indices[rows] >> self.schema.group_bits))
                part = take(self.schema, outputs, rows, groups)
            with waiting(UNIT, unit=number, rows=len(rows)):
                stored[rows] = await self._unit(number).complete(lease.token, WireBatch.of(part))
        self.leases.let_go(lease, outputs.indices.tolist())
        return stored

    async def complete_marks(self, leases: Sequence[Lease]) -> None:
        """Acknowledge leases of a task without outputs: their rows get the mark `done/<task>`.

        Raises `StaleToken`, and acknowledges nothing, when one of them is over. One that ends meanwhile is named likewise, when the
        others have been acknowledged. Raises `ValueError` as `mark` does.
        """
        if not leases:
            return
        task, indices = _task_of(leases), [row for lease in leases for row in lease.indices]
        await self._controller(task).check([(lease.token, lease.indices) for lease in leases])
        if late := [row for row, is_kept in zip(indices, await self.mark(leases), strict=True) if not is_kept]:
            raise StaleToken(f"rows {late} of task {task!r} could not be acknowledged")  # their leases ended between the two

    async def mark(self, leases: Sequence[Lease]) -> np.ndarray:
        """`complete` for leases of a task without outputs, in one request for each unit concerned.

        Returns bool [n], for the rows of the leases in order. Raises `ValueError` when the leases are not all of one task, or that
        has outputs.
        """
        if not leases:
            return np.zeros(0, bool)
        _task_of(leases)  # before anything is sent
        by_unit: dict[int, list[tuple[int, list[int]]]] = {}
        for place, lease in enumerate(leases):
            for unit, rows in zip(lease.units, lease.rows, strict=True):
                by_unit.setdefault(unit, []).append((place, rows))
        is_marked: dict[tuple[int, int], bool] = {}
        for number, held in by_unit.items():
            of_unit = [(leases[place].token, rows) for place, rows in held]
            marked = await self._unit(number).mark(of_unit)
            is_marked.update(zip(((place, row) for place, rows in held for row in rows), marked.tolist(), strict=True))
        for lease in leases:
            self.leases.let_go(lease, lease.indices)
        return np.array([is_marked[place, row] for place, lease in enumerate(leases) for row in lease.indices], bool)

    async def fail(self, lease: Lease, rows: Sequence[int], error: str, *, is_final: bool = False) -> None:
        """Give rows back after a failure; for good, if it `is_final`. Does nothing when the lease is over: its rows have been given
        back already."""
        self.leases.let_go(lease, rows)
        with contextlib.suppress(StaleToken):
            await self._controller(lease.token.task).fail(lease.token, list(rows), error, is_final)

    async def filter(self, rows: Sequence[int] | Array, reason: str) -> None:
        """Take rows out for all tasks: they end as filtered, for this reason, and wait to be dropped."""
        indices = np.unique(np.asarray(rows, np.int64))
        if len(indices):
            reasons = [reason] * len(indices)
            await asyncio.gather(*(self._unit(number).end(indices, FILTERED, reasons) for number in self._places.units))

    async def renew_held(self) -> None:
        """Renew the deadlines of all leases that are held through this client, well before they are reached. Runs until it is
        cancelled."""
        await self.leases.renew_held()

    async def renew(self, lease: Lease) -> None:
        """Put one lease's deadline off, for clients that do not run `renew_held`. Raises `StaleToken`."""
        if await self._controller(lease.token.task).renew([lease.token]):
            raise StaleToken(f"lease {lease.token.lease} of task {lease.token.task!r} is over")

    async def withdraw(self, task: str) -> None:
        """Have this worker's parked requests answered with None."""
        await self.leases.withdraw(task)

    async def drop(self, rows: Sequence[int] | Array) -> None:
        """Free rows, on all units."""
        indices = np.asarray(rows, np.int64)
        if len(indices):
            await asyncio.gather(*(self._unit(number).drop(indices) for number in self._places.units))

    async def end_partition(self, task: str, partition: int) -> None:
        """Tell a task that no more rows of this partition will come: requests for them get what is ready, then None."""
        self.schema.task(task)
        await asyncio.gather(*(self._unit(number).end_partition(task, partition) for number in self._places.units))

    async def close(self, task: str | None = None) -> None:
        """End the stream of one task, or of all: every consumer gets what is ready, then None."""
        for spec in self.schema.tasks if task is None else (self.schema.task(task),):
            await asyncio.gather(*(self._unit(number).close_task(spec.name) for number in self._places.units))

    # -- about it -----------------------------------------------------------------------------------------------------------

    async def status(self) -> tuple[dict[str, TaskStatus], dict[int, UnitStatus]]:
        """The tasks' rows by state, and what each unit holds; without those that do not answer within `STATUS_SECONDS`."""
        tasks, units = [task.name for task in self.schema.tasks], self._places.units
        of_tasks, of_units = await asyncio.gather(
            _all_that_answer([self._controller(name).status for name in tasks]),
            _all_that_answer([self._unit(number).status for number in units]),
        )
        return {tasks[i]: found for i, found in of_tasks.items()}, {units[i]: found for i, found in of_units.items()}

    async def wait_for_units(self, count: int) -> None:
        """Wait until the queue has so many units: rows that are put from then on go to all of them."""
        description = await self._places.learn()
        while len(self._places.units) < count:
            description = await self._places.learn(description.version)

    # -- inside -------------------------------------------------------------------------------------------------------------

    async def _still_there(self, lease: Lease) -> Lease | None:
        """The part of a lease that has not been dropped; the rest is nobody's any more."""
        there = set[int]()
        for unit, rows in lease.by_unit().items():
            there.update((await self._unit(unit).present(np.array(rows, np.int64))).tolist())
        return lease.part(there)

    async def _readable(self, lease: Lease, read: Callable[[int, Array], Awaitable[Batch]]) -> Lease | None:
        """The part of a lease whose units have the columns of all their rows in it."""
        readable = set[int]()
        for unit, rows in lease.by_unit().items():
            with contextlib.suppress(LookupError):
                await read(unit, np.array(rows, np.int64))
                readable.update(rows)
        return lease.part(readable)

    def _controller(self, task: str) -> Controller:
        self.schema.task(task)
        return self._places.get(Controller, f"controller/{task}")

    def _unit(self, number: int) -> StorageUnit:
        return self._places.get(StorageUnit, f"unit/{number}")


async def _all_that_answer(asks: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> dict[int, T]:
    """Answers that come soon, by position."""
    waiting = [asyncio.create_task(ask()) for ask in asks]
    try:
        done, _ = await asyncio.wait(waiting, timeout=STATUS_SECONDS) if waiting else (set(), set())
    finally:
        for one in waiting:
            one.cancel()
    return {i: one.result() for i, one in enumerate(waiting) if one in done and one.exception() is None}


def _task_of(leases: Sequence[Lease]) -> str:
    """The one task of some leases. Raises `ValueError` naming two, if there are."""
    tasks = sorted({lease.token.task for lease in leases})
    if len(tasks) > 1:
        raise ValueError(f"leases of one task are acknowledged together, not of {tasks[0]!r} and {tasks[1]!r}")
    return tasks[0]
