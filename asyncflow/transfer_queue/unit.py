"""A storage unit: stores what is put, tells the controllers, and only then answers the writer.

consumes: put, complete, end, read, drop and follow requests
waits for: room, at admission alone; its storage; the controllers in session, at most `notify_timeout_seconds`
is unblocked by: drops; the storage; the controllers' next `follow`, or that deadline

The units are the truth, and controllers an index over them: whatever a controller has to know again after a restart is here.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from asyncflow.transfer_queue.batches import WireBatch, take
from asyncflow.transfer_queue.index import Index
from asyncflow.transfer_queue.notices import News, Notice, NoticeLog
from asyncflow.transfer_queue.room import Room, RoomState
from asyncflow.transfer_queue.schema import DEAD, FILTERED, Schema
from asyncflow.transfer_queue.snapshot import SnapshotFile, read_snapshot, write_snapshot
from asyncflow.transfer_queue.storage.base import Storage
from asyncflow.transfer_queue.table import Token
from asyncflow.transport import remote
from asyncflow.types import Array, Batch, GroupMeta, Ragged

T = TypeVar("T")

NOTICES_KEPT = 4096
TOKENS_REMEMBERED = 65536
FACTS = "facts"


class Facts(msgspec.Struct):
    """What must outlive a process and is no column: per task the steps that have ended, and whether it is closed; the rows that
    have been dropped from groups that are still there."""

    ended_steps: dict[str, list[int]] = {}
    closed: list[str] = []
    dropped: dict[int, list[int]] = {}


class UnitStatus(msgspec.Struct):
    """`away`: the tasks whose controllers are silent."""

    rows: int
    held_bytes: int
    away: list[str]
    room: RoomState


class StorageUnit:
    """One unit over one storage backend. `open` first, `close` at the end."""

    def __init__(
        self,
        storage: Storage,
        schema: Schema,
        *,
        notify_timeout_seconds: float = 5.0,
        capacity_rows: int | None = None,
        capacity_bytes: int | None = None,
        snapshot_dir: Path | None = None,
    ) -> None:
        """`snapshot_dir`: where snapshots are written; without it there are none."""
        self.storage, self.schema = storage, schema
        self._index = Index(schema.group_bits)
        self._room = Room(capacity_rows, capacity_bytes)
        self._row_bytes: dict[int, int] = {}  # group -> what each of its rows has reserved
        self._facts = Facts()
        self._log = NoticeLog(uuid.uuid4().hex[:12], notify_timeout_seconds, NOTICES_KEPT, self._everything)
        self._ended_leases: dict[str, dict[int, None]] = {}  # task -> leases that are over, oldest first
        self._writers: dict[tuple[str, int], Token] = {}  # (task, row) -> the lease that completed it, the latest ones
        self._snapshot_dir = snapshot_dir
        self._snapshotting = asyncio.Lock()  # nothing is freed meanwhile
        self._freeing = asyncio.Lock()
        self._unfreed: list[tuple[Array, Array]] = []  # rows, and whole groups, that are dropped and still in the storage
        self._has_new_facts = False
        self._under_way: set[asyncio.Task] = set()
        self._writes: dict[object, Array] = {}  # under way, with the groups that they concern
        self._gone: dict[int, None] = {}  # groups that have been dropped, the latest ones
        self._arriving: set[int] = set()  # groups that have been admitted and are being written for the first time
        self._settled = asyncio.Event()  # set, and replaced, whenever a write is over
        self._token_columns = {c.name: c.per for c in schema.columns if c.counts_tokens}
        self._interest = {t.name: schema.mask((*t.reads, *t.outputs, DEAD, FILTERED)) for t in schema.tasks}

    async def open(self) -> None:
        """Open the storage and take up what has outlived an earlier process."""
        await self.storage.open(self.schema)
        async for stored in self.storage.recover():
            self._take_up(stored.metas, stored.rows, stored.columns)
            await self._weigh(stored.rows, stored.columns)
        if (facts := await self.storage.kept(FACTS)) is not None:
            self._facts = msgspec.msgpack.decode(facts, type=Facts)
            await self._drop(np.array([row for rows in self._facts.dropped.values() for row in rows], np.int64))

    async def close(self) -> None:
        self._log.close()
        if self._under_way:
            await asyncio.wait(self._under_way)
        await self.storage.close()

    # -- what clients ask ---------------------------------------------------------------------------------------------------

    @remote
    async def put(self, metas: list[GroupMeta], batch: WireBatch, row_bytes: int) -> np.ndarray:
        """Admit groups, and store columns of theirs or of rows already there.

        Waits for room for the new groups: each of their rows reserves `row_bytes` besides what it comes with. A group that has
        been dropped does not come again: this may be a request that was repeated. Returns bool [n]: False for a row that is not
        there, or that has one of the columns already; it keeps what it has. Raises `ValueError` naming what does not fit.
        """
        columns = batch.batch()
        self.schema.check_metas(metas)
        self.schema.check(columns)
        new = await self._admitted(metas, columns, row_bytes)
        return await self._to_its_end(self._store(columns, new))

    @remote
    async def complete(self, token: Token, batch: WireBatch) -> np.ndarray:
        """Store a task's outputs for rows of a lease, and so acknowledge it.

        Returns bool [n]: False for a row whose outputs are not kept, because the lease is over, another one was first, or the row
        has been dropped.
        """
        columns = batch.batch()
        self.schema.check(columns)
        task, rows = token.task, columns.indices.tolist()
        incarnation = self._log.incarnation(task)
        if incarnation in (None, token.incarnation) and token.lease not in self._ended_leases.get(task, ()):
            stored = await self._to_its_end(self._store(columns, [], token))
        else:
            stored = np.zeros(len(rows), bool)
        for i, row in enumerate(rows):
            if self._writers.get((task, row)) == token:  # or the same request again, its answer was lost
                stored[i] = True
        return stored

    @remote
    async def end(self, rows: np.ndarray, mark: str, reasons: list[str]) -> None:
        """Mark rows `dead` or `filtered`, for all tasks, each with its reason."""
        if mark not in (DEAD, FILTERED):
            raise ValueError(f"a row ends as {DEAD!r} or {FILTERED!r}, not as {mark!r}")
        texts = Ragged.from_arrays([np.frombuffer(reason.encode(), np.uint8) for reason in reasons], "uint8")
        batch = Batch(rows, np.unique(rows >> self.schema.group_bits), {mark: texts})
        self.schema.check(batch)
        await self._to_its_end(self._store(batch, []))

    @remote
    async def read(self, indices: np.ndarray, columns: list[str]) -> WireBatch:
        """The columns of rows, in the order asked. Raises `LookupError` naming the first row and column not there."""
        if missing := self._index.first_without(indices, self.schema.mask(columns)):
            row, lacking = missing
            name = next(c for c in columns if self.schema.mask([c]) & lacking)
            raise LookupError(f"row {row} has no column {name!r}")
        return WireBatch.of(await self.storage.read(indices, columns))

    @remote
    async def present(self, rows: np.ndarray) -> np.ndarray:
        """Those of the rows that are there."""
        return self._index.present(rows)

    @remote
    async def drop(self, rows: np.ndarray) -> None:
        """Free rows, here and in all controllers. Unknown ones are passed over."""
        await self._to_its_end(self._drop(rows))

    @remote
    async def end_step(self, task: str, step: int) -> None:
        """No more rows of this step will come for the task."""
        ended = self._facts.ended_steps.setdefault(task, [])
        if step not in ended:
            ended.append(step)
            self._has_new_facts = True
        await self._to_its_end(self._keep_facts())
        await self._log.post(Notice(task=task, ended_step=step))

    @remote
    async def close_task(self, task: str) -> None:
        """The end of a task's stream, for all its consumers, now and later."""
        if task not in self._facts.closed:
            self._facts.closed.append(task)
            self._has_new_facts = True
        await self._to_its_end(self._keep_facts())
        await self._log.post(Notice(task=task, is_closed=True))

    @remote
    async def status(self) -> UnitStatus:
        return UnitStatus(self._index.num_rows, self.storage.nbytes, self._log.away(), self._room.state())

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
        return self._log.listen(task, incarnation, self._interest[self.schema.task(task).name], take)

    def refuse(self, task: str, leases: Sequence[int]) -> None:
        """Refuse completions under these leases from now on."""
        if leases:
            ended = self._ended_leases.setdefault(task, {})
            ended.update(dict.fromkeys(leases))
            while len(ended) > TOKENS_REMEMBERED:
                del ended[next(iter(ended))]

    # -- snapshots ----------------------------------------------------------------------------------------------------------

    @remote
    async def snapshot(self, name: str) -> SnapshotFile:
        """Write all rows to `name` in the snapshot directory: whole or not at all, and kept when the machine stops."""
        path = self._snapshot_path(name)
        try:
            async with self._snapshotting:
                facts = msgspec.msgpack.encode(self._facts)
                return await write_snapshot(path, self.schema, self._index, self.storage, facts)
        finally:
            await self._to_its_end(self._free())

    @remote
    async def restore(self, name: str) -> int:
        """Take up the rows of a snapshot. Returns how many there are. Raises `ValueError` when the file is damaged."""
        facts, frames = read_snapshot(self._snapshot_path(name), self.schema)
        count = 0
        for metas, batch in frames:
            each = _bytes_per_row(metas, batch)
            new = self._admit(metas, each)
            self._room.take(_num_rows(new), _num_rows(new) * each)
            await self._store(batch, new)
            count += _num_rows(new)
        found = msgspec.msgpack.decode(facts, type=Facts)  # besides those of what was here, or was restored from another file
        for task, steps in found.ended_steps.items():
            ended = self._facts.ended_steps.setdefault(task, [])
            ended += [step for step in steps if step not in ended]
        self._facts.closed += [task for task in found.closed if task not in self._facts.closed]
        dropped = [row for rows in found.dropped.values() for row in rows]
        await self.drop(np.array(dropped, np.int64))
        self._has_new_facts = True
        await self._keep_facts()
        for notice in self._told_facts():
            await self._log.post(notice)
        return count - len(dropped)

    def _snapshot_path(self, name: str) -> Path:
        if self._snapshot_dir is None:
            raise ValueError("this unit has no snapshot directory; give it one (queue.snapshot_dir)")
        if not name or not all(c.isalnum() or c in "._-" for c in name) or name.startswith("."):
            raise ValueError(f"{name!r} is no name for a snapshot: letters, digits, '.', '_' and '-'")
        return self._snapshot_dir / name

    # -- inside -------------------------------------------------------------------------------------------------------------

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """What has begun to change something goes on, also when its caller has gone."""
        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)

    async def _drop(self, rows: Array) -> None:
        """Forget rows, tell of it, and free them; free as well what an earlier request could not."""
        dropped, gone = self._index.drop(rows)
        told = None
        if len(dropped):
            groups, counts = np.unique(dropped >> self.schema.group_bits, return_counts=True)
            freed = sum(self._row_bytes.get(g, 0) * n for g, n in zip(groups.tolist(), counts.tolist(), strict=True))
            numbers = {meta.group for meta in gone}
            for row in dropped.tolist():
                group = row >> self.schema.group_bits
                if group not in numbers and row not in self._facts.dropped.get(group, ()):
                    self._facts.dropped.setdefault(group, []).append(row)
                    self._has_new_facts = True
            for group in numbers:
                self._row_bytes.pop(group, None)
            self._gone.update(dict.fromkeys(sorted(numbers)))
            while len(self._gone) > TOKENS_REMEMBERED:
                del self._gone[next(iter(self._gone))]
            self._unfreed.append((dropped, np.array(sorted(numbers), np.int64)))
            self._room.release(len(dropped), freed)
            told = self._log.post(Notice(rows=dropped.tobytes(), is_drop=True))
        await self._free()
        if told is not None:
            await told

    async def _free(self) -> None:
        """Free what has been dropped; while a snapshot is written, which may still read it, leave that to the snapshot's end."""
        async with self._freeing:
            await self._keep_facts()  # first: should this process die in between, they are not to come back
            while self._unfreed and not self._snapshotting.locked():
                rows, groups = self._unfreed[0]
                while any(np.isin(written, rows >> self.schema.group_bits).any() for written in self._writes.values()):
                    await self._settled.wait()  # what came to the storage after its group has gone would stay there
                await self.storage.drop(rows, groups)
                del self._unfreed[0]
                for group in groups.tolist():
                    self._has_new_facts |= self._facts.dropped.pop(group, None) is not None
            await self._keep_facts()

    async def _keep_facts(self) -> None:
        """If they have changed."""
        if self._has_new_facts:
            self._has_new_facts = False
            try:
                await self.storage.keep(FACTS, msgspec.msgpack.encode(self._facts))
            except BaseException:
                self._has_new_facts = True
                raise

    async def _admitted(self, metas: Sequence[GroupMeta], columns: Batch, row_bytes: int) -> list[GroupMeta]:
        """Wait for room for those of the groups that are new, and admit them."""
        while True:
            while self._arriving and any(meta.group in self._arriving for meta in metas):  # whether they are there is not sure yet
                await self._settled.wait()
            new = [meta for meta in metas if meta.group not in self._index.metas and meta.group not in self._gone]
            if not new:
                return []
            reserved, each = _num_rows(new), row_bytes + _bytes_per_row(new, columns)
            await self._room.reserve(reserved, reserved * each)
            if not any(meta.group in self._index.metas or meta.group in self._gone for meta in new):
                break
            self._room.release(reserved, reserved * each)  # admitted by another request meanwhile
        new = self._admit(new, each)
        if surplus := reserved - _num_rows(new):  # of a group that is in the request twice
            self._room.release(surplus, surplus * each)
        self._arriving.update(meta.group for meta in new)
        return new

    def _wake(self) -> None:
        """Have those look again who wait for a write to be over."""
        self._settled.set()
        self._settled = asyncio.Event()

    def _take_back(self, new: Iterable[GroupMeta]) -> None:
        """Groups that could not be written have not been admitted."""
        for meta in new:
            rows, _ = self._index.drop(self._index.rows_of([meta.group]))
            self._room.release(len(rows), len(rows) * self._row_bytes.pop(meta.group, 0))
            self._log.post(Notice(rows=rows.tobytes(), is_drop=True))  # a controller that was told everything meanwhile knows it

    def _admit(self, metas: Iterable[GroupMeta], each: int) -> list[GroupMeta]:
        """Into the index, `each` byte reserved for every row. Returns the groups that are new."""
        new = self._index.admit(metas)
        self._row_bytes.update((meta.group, each) for meta in new)
        return new

    async def _store(self, batch: Batch, new: list[GroupMeta], writer: Token | None = None) -> Array:
        """Store what is not there yet, all of a row's columns or none, and tell the controllers.

        Where somebody else is writing the same just now, wait until it is sure whether that is kept.
        """
        by_row = [name for name in batch.columns if self.schema.column(name).per == "row"]
        row_mask = self.schema.mask(by_row)
        group_mask = self.schema.mask(name for name in batch.columns if name not in by_row)
        groups = batch.groups.tolist()
        while self._writes and self._index.is_claimed(batch.indices, row_mask, groups, group_mask):
            await self._settled.wait()
        free = self._index.claim(batch.indices, row_mask) if row_mask else np.zeros(len(batch.indices), bool)
        free_groups = np.array(self._index.claim_groups(groups, group_mask) if group_mask else [False] * len(groups), bool)
        if not new and not free.any() and not free_groups.any():
            return free
        rows, numbers = batch.indices[free], batch.groups[free_groups].tolist()
        is_written, write = False, object()
        self._writes[write] = batch.groups
        try:
            await self._write(batch, new, free, free_groups, row_mask, group_mask)
            is_written = True
        finally:
            self._index.settle(rows, row_mask, is_written=is_written)
            self._index.settle_groups(numbers, group_mask, is_written=is_written)
            del self._writes[write]
            if not is_written:
                self._take_back(new)
                self._arriving.difference_update(meta.group for meta in new)
            self._wake()
        if writer is not None:
            self._writers.update(((writer.task, row), writer) for row in rows.tolist())
            while len(self._writers) > TOKENS_REMEMBERED:
                del self._writers[next(iter(self._writers))]
        self._count_tokens(batch, rows, free, numbers, free_groups)
        told = self._tell(new, self._index.present(rows), row_mask, self._index.rows_of(numbers), group_mask)
        try:
            await self._sweep(rows)
            for answer in told:
                await answer
        finally:
            if new:
                self._arriving.difference_update(meta.group for meta in new)
                self._wake()
        return free

    async def _write(
        self, batch: Batch, new: list[GroupMeta], free: Array, free_groups: Array, row_mask: int, group_mask: int
    ) -> None:
        """Hand the storage what is free of the batch; a batch whose columns are not wanted for any entry goes without them."""
        if (not row_mask or free.all()) and (not group_mask or free_groups.all()):  # as a rule
            return await self.storage.write(new, batch)
        wanted = {n: v for n, v in batch.columns.items() if (free if self.schema.column(n).per == "row" else free_groups).any()}
        rows = np.flatnonzero(free) if row_mask else np.arange(0)
        groups = np.flatnonzero(free_groups) if group_mask else np.arange(0)
        of_rows = np.flatnonzero(np.isin(batch.groups, batch.indices[rows] >> self.schema.group_bits))
        if len(groups) and not np.isin(of_rows, groups).all():  # the columns of a group are there, those of its rows are not
            alone = {n: v for n, v in wanted.items() if self.schema.column(n).per == "group"}
            await self.storage.write(new, take(self.schema, Batch(batch.indices, batch.groups, alone), np.arange(0), groups))
            wanted, new = {n: v for n, v in wanted.items() if n not in alone}, []
            groups = of_rows
        groups = groups if len(groups) else of_rows
        await self.storage.write(new, take(self.schema, Batch(batch.indices, batch.groups, wanted), rows, groups))

    async def _sweep(self, rows: Array) -> None:
        """Free what has been dropped while it was being written."""
        there = self._index.present(rows)
        if len(there) < len(rows):
            gone = np.setdiff1d(rows, there)
            groups = [g for g in np.unique(gone >> self.schema.group_bits).tolist() if g not in self._index.metas]
            self._unfreed.append((gone, np.array(groups, np.int64)))
            await self._free()

    def _count_tokens(self, batch: Batch, rows: Array, free: Array, groups: list[int], free_groups: Array) -> None:
        for name, per in self._token_columns.items():
            values = batch.columns.get(name)
            if not isinstance(values, Ragged):
                continue
            if per == "row":
                self._index.add_tokens(rows, values.lengths[free])
            else:
                for group, length in zip(groups, values.lengths[free_groups].tolist(), strict=True):
                    of_group = self._index.rows_of([group])
                    self._index.add_tokens(of_group, np.full(len(of_group), length, np.int64))

    def _tell(
        self, new: list[GroupMeta], rows: Array, row_mask: int, of_groups: Array, group_mask: int
    ) -> list[asyncio.Future[None]]:
        """One notice for the rows' columns and one for their groups', or one for both where they are of the same rows."""
        parts = [(of_groups, group_mask), (rows, row_mask)]
        if np.array_equal(rows, of_groups):
            parts = [(rows, row_mask | group_mask)]
        parts = [part for part in parts if len(part[0])] or [(rows, 0)]
        return [self._log.post(self._notice(new if i == 0 else [], *part)) for i, part in enumerate(parts)]

    def _notice(self, metas: list[GroupMeta], rows: Array, mask: int) -> Notice:
        tokens = self._index.tokens(rows).tobytes() if self._token_columns else b""
        return Notice(metas, rows.tobytes(), mask, tokens)

    def _everything(self) -> list[Notice]:
        notices = [Notice(metas=list(self._index.metas.values()))]
        if dropped := [row for rows in self._facts.dropped.values() for row in rows]:
            notices.append(Notice(rows=np.array(dropped, np.int64).tobytes(), is_drop=True))
        for rows, mask, tokens in self._index.records():
            notices.append(Notice(rows=rows.tobytes(), mask=mask, tokens=tokens.tobytes() if self._token_columns else b""))
        return notices + self._told_facts()

    def _told_facts(self) -> list[Notice]:
        ended = [Notice(task=task, ended_step=step) for task, steps in self._facts.ended_steps.items() for step in steps]
        return ended + [Notice(task=task, is_closed=True) for task in self._facts.closed]

    def _take_up(self, metas: Sequence[GroupMeta], rows: Array, columns: Sequence[str]) -> None:
        """Recovered rows: in the index as if they had just been written."""
        self._room.take(_num_rows(self._admit(metas, 0)), 0)
        mask = self.schema.mask(columns)
        groups = np.unique(rows >> self.schema.group_bits).tolist()
        self._index.settle_groups(groups, mask & self.schema.group_mask, is_written=True)
        self._index.settle(rows, mask & ~self.schema.group_mask, is_written=True)

    async def _weigh(self, rows: Array, columns: Sequence[str]) -> None:
        counted = [name for name in self._token_columns if name in columns]
        if counted and len(rows):
            batch = await self.storage.read(rows, counted)
            everything, groups = np.ones(len(rows), bool), batch.groups.tolist()
            self._count_tokens(batch, rows, everything, groups, np.ones(len(groups), bool))


def _num_rows(metas: Iterable[GroupMeta]) -> int:
    return sum(meta.size for meta in metas)


def _bytes_per_row(metas: Sequence[GroupMeta], batch: Batch) -> int:
    rows = _num_rows(metas)
    return -(-sum(values.nbytes for values in batch.columns.values()) // rows) if rows else 0
