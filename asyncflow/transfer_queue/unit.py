"""A storage unit: stores what is put, tells the controllers, and only then answers the writer.

consumes: put, complete, mark, end, read, drop and follow requests
waits for: room, at admission alone; its storage; the controllers in session, at most `notify_timeout_seconds`
is unblocked by: drops; the storage; the controllers' next `follow`, or that deadline

The units are the truth, and controllers an index over them: whatever a controller has to know again after a restart is here.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from asyncflow.transfer_queue.batches import WireBatch
from asyncflow.transfer_queue.capacity import Capacity, CapacityState
from asyncflow.transfer_queue.durable_state import forget_oldest
from asyncflow.transfer_queue.leases import Token
from asyncflow.transfer_queue.notices import News, Notice, NoticeLog
from asyncflow.transfer_queue.schema import DEAD, FILTERED, Schema
from asyncflow.transfer_queue.snapshot import SnapshotFile, snapshot_path
from asyncflow.transfer_queue.storage.base import QueueOwner, Storage
from asyncflow.transfer_queue.unit_store import UnitStore
from asyncflow.transport import remote
from asyncflow.types import Batch, GroupMeta, Ragged

NOTICES_KEPT = 4096


class UnitStatus(msgspec.Struct):
    """`away`: the tasks whose controllers are silent."""

    rows: int
    stored_bytes: int
    away: list[str]
    capacity: CapacityState


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOptions:
    """Options of a unit. `snapshot_dir`: where snapshots are written; without it there are none."""

    notify_timeout_seconds: float = 5.0
    capacity_rows: int | None = None
    capacity_bytes: int | None = None
    snapshot_dir: Path | None = None


AS_USUAL = UnitOptions()


class StorageUnit:
    """Storage unit over one storage backend. `open` first, `close` at the end."""

    def __init__(self, storage: Storage, schema: Schema, options: UnitOptions = AS_USUAL) -> None:
        self.schema = schema
        capacity = Capacity(options.capacity_rows, options.capacity_bytes)
        self.unit_store = UnitStore(storage, schema, capacity, lambda notice: self._log.post(notice))
        self._log = NoticeLog(uuid.uuid4().hex[:12], options.notify_timeout_seconds, NOTICES_KEPT, self.unit_store.everything)
        self._ended_leases: dict[str, dict[int, None]] = {}  # task -> leases that are over, oldest first
        self._snapshot_dir = options.snapshot_dir
        self._interest = {t.name: schema.mask((*t.reads, *t.outputs, DEAD, FILTERED)) for t in schema.tasks}

    async def open(self, owner: QueueOwner | None = None) -> None:
        """Open the storage and take up what has outlived an earlier process of the owner's."""
        await self.unit_store.open(owner)

    async def close(self) -> None:
        """End all writes and close the storage."""
        self._log.close()
        await self.unit_store.close()

    # -- what clients ask ---------------------------------------------------------------------------------------------------

    @remote
    async def put(self, metas: list[GroupMeta], batch: WireBatch, row_bytes: int) -> np.ndarray:
        """Admit groups, and store columns of theirs or of rows already there.

        Waits for room for the new groups: each of their rows reserves `row_bytes` besides what it comes with. Returns
        bool [n]: False for a row that is not there, or that has one of the columns already; it keeps what it has. Raises
        `ValueError` naming what does not fit.
        """
        columns = batch.batch()
        self.schema.check_metas(metas)
        self.schema.check(columns)
        new = await self.unit_store.admit(metas, columns, row_bytes)
        return await self.unit_store.store(columns, new)

    @remote
    async def complete(self, token: Token, batch: WireBatch) -> np.ndarray:
        """Store a task's outputs for rows of a lease, and so acknowledge it.

        Returns bool [n]: False for a row whose outputs are not kept, because the lease is over, another one was first, or the row
        has been dropped.
        """
        columns = batch.batch()
        self.schema.check(columns)
        self.schema.check_outputs(token.task, columns)
        writers = [token] * len(columns)
        if self._is_over(token):
            return self.unit_store.written_by(columns.indices, writers)
        return await self.unit_store.store(columns, [], writers)

    @remote
    async def mark(self, leases: list[tuple[Token, list[int]]]) -> np.ndarray:
        """Acknowledge rows of any number of leases of a task without outputs, in one change.

        Returns bool [n], lease by lease: False as for `complete`. Raises `ValueError` when they are not all of one task, that task
        has outputs, or two that last have a row in common.
        """
        tasks = sorted({token.task for token, _ in leases})
        if len(tasks) != 1:
            raise ValueError(f"leases of one task are marked together, not of {', '.join(tasks) or 'none'}")
        writers = [token for token, rows in leases for _ in rows]
        rows = np.array([row for _, rows in leases for row in rows], np.int64)
        lasts = np.array([not self._is_over(token) for token, rows in leases for _ in rows], bool)
        marks = {f"done/{tasks[0]}": np.ones(lasts.sum(), np.uint8)}
        batch = Batch(rows[lasts], np.unique(rows[lasts] >> self.schema.group_bits), marks)
        self.schema.check_outputs(tasks[0], batch)
        self.schema.check(batch)
        stored = await self.unit_store.store(batch, [], list(itertools.compress(writers, lasts)))
        marked = self.unit_store.written_by(rows, writers)
        marked[lasts] = stored
        return marked

    def _is_over(self, token: Token) -> bool:
        """Whether completions under the lease are refused."""
        incarnation = self._log.incarnation(token.task)
        return incarnation not in (None, token.incarnation) or token.lease in self._ended_leases.get(token.task, ())

    @remote
    async def end(self, rows: np.ndarray, mark: str, reasons: list[str]) -> None:
        """Mark rows `dead` or `filtered`, for all tasks, each with its reason."""
        if mark not in (DEAD, FILTERED):
            raise ValueError(f"a row ends as {DEAD!r} or {FILTERED!r}, not as {mark!r}")
        texts = Ragged.from_arrays([np.frombuffer(reason.encode(), np.uint8) for reason in reasons], "uint8")
        batch = Batch(rows, np.unique(rows >> self.schema.group_bits), {mark: texts})
        self.schema.check(batch)
        await self.unit_store.store(batch, [])

    @remote
    async def read(self, indices: np.ndarray, columns: list[str]) -> WireBatch:
        """The columns of rows, in the order asked. Raises `LookupError` naming the first row and column not there."""
        return WireBatch.of(await self.columns(indices, columns))

    async def columns(self, indices: np.ndarray, columns: Sequence[str]) -> Batch:
        """`read`, within this process. Large arrays may be read-only views of what is stored."""
        if missing := self.unit_store.index.first_without(indices, self.schema.mask(columns)):
            row, lacking = missing
            name = next(c for c in columns if self.schema.mask([c]) & lacking)
            raise LookupError(f"row {row} has no column {name!r}")
        return await self.unit_store.storage.read(indices, columns)

    @remote
    async def present(self, rows: np.ndarray) -> np.ndarray:
        """Rows, of these, that are there."""
        return self.unit_store.index.present(rows)

    @remote
    async def drop(self, rows: np.ndarray) -> None:
        """Free rows, here and in all controllers. Unknown ones are passed over."""
        await self.unit_store.drop(rows)

    @remote
    async def end_partition(self, task: str, partition: int) -> None:
        """End a partition for a task: no more rows of it will come."""
        await self.unit_store.end(Notice(task=task, ended_partition=partition))

    @remote
    async def close_task(self, task: str) -> None:
        """The end of a task's stream, for all its consumers, now and later."""
        await self.unit_store.end(Notice(task=task, is_closed=True))

    @remote
    async def status(self) -> UnitStatus:
        """State of the unit, for `asyncflow status` and for metrics."""
        unit_store, now = self.unit_store, asyncio.get_running_loop().time()
        return UnitStatus(unit_store.index.num_rows, unit_store.storage.nbytes, self._log.away(), unit_store.capacity.state(now))

    # -- what controllers ask -----------------------------------------------------------------------------------------------

    @remote
    def follow(self, task: str, incarnation: str, epoch: str, acked: int, ended_leases: list[int]) -> Awaitable[News]:
        """See `NoticeLog.follow`. `ended_leases`: completions under these are refused from now on."""
        is_another = self._log.incarnation(task) not in (None, incarnation)
        news = self._log.follow(task, incarnation, self._interest[self.schema.task(task).name], epoch, acked)
        if is_another:
            self._ended_leases.pop(task, None)  # its predecessor's leases are refused by their incarnation
        self.refuse(task, ended_leases)
        return news

    def listen(self, task: str, incarnation: str, take: Callable[[News], None]) -> asyncio.Future[News]:
        """See `NoticeLog.listen`: for a controller in this process."""
        listening = self._log.listen(task, incarnation, self._interest[self.schema.task(task).name], take)
        self._ended_leases.pop(task, None)
        return listening

    def refuse(self, task: str, leases: Sequence[int]) -> None:
        """Refuse completions under these leases from now on."""
        if leases:
            ended = self._ended_leases.setdefault(task, {})
            ended.update(dict.fromkeys(leases))
            forget_oldest(ended)

    # -- its end ------------------------------------------------------------------------------------------------------------

    @remote
    async def remove(self) -> None:
        """Remove all that the queue's owner has stored: the queue is at its end, and nobody wants it any more."""
        await self.unit_store.remove()

    # -- snapshots ----------------------------------------------------------------------------------------------------------

    @remote
    async def snapshot(self, name: str) -> SnapshotFile:
        """Write all rows to `name` in the snapshot directory: whole or not at all, and kept when the machine stops."""
        return await self.unit_store.snapshot(self._snapshot_path(name))

    @remote
    async def restore(self, name: str) -> int:
        """Take up the rows of a snapshot. Returns how many there are. Raises `ValueError` when the file is damaged."""
        return await self.unit_store.restore(self._snapshot_path(name))

    @remote
    async def forget_snapshot(self, name: str) -> None:
        """Remove a file of `snapshot`, if it is this unit's."""
        self._snapshot_path(name).unlink(missing_ok=True)

    def _snapshot_path(self, name: str) -> Path:
        return snapshot_path(self._snapshot_dir, name)
