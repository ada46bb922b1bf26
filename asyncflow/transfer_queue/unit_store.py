"""Rows of a storage unit, and the order in which they change: claimed, written, told; forgotten, told, freed.

A client may go at any moment, the storage may fail or take its time, and other requests come in between: what has begun to
change something goes on to its end, and what is not sure yet is waited for.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from asyncflow.transfer_queue.batches import take
from asyncflow.transfer_queue.capacity import Capacity
from asyncflow.transfer_queue.durable_state import DurableState, SavedDurableState, forget_oldest
from asyncflow.transfer_queue.freeing import Freeing, Writes
from asyncflow.transfer_queue.index import Index
from asyncflow.transfer_queue.leases import Token
from asyncflow.transfer_queue.notices import Notice
from asyncflow.transfer_queue.schema import Schema
from asyncflow.transfer_queue.snapshot import SnapshotFile, read_snapshot, write_snapshot
from asyncflow.transfer_queue.storage.base import QueueOwner, Storage
from asyncflow.types import Array, Batch, GroupMeta, Ragged

T = TypeVar("T")


class UnitStore:
    """Rows in a storage, with their index, their capacity and the durable state. `post` numbers a notice and tells it to the
    controllers."""

    def __init__(
        self, storage: Storage, schema: Schema, capacity: Capacity, post: Callable[[Notice], asyncio.Future[None]]
    ) -> None:
        self.storage, self.schema, self.capacity = storage, schema, capacity
        self.index = Index(schema.group_bits)
        self._post = post
        self.durable_state = SavedDurableState(storage)
        self._writers: dict[tuple[str, int], Token] = {}  # (task, row) -> the lease that completed it, the latest ones
        self._num_drops = 0
        self._writes = Writes()
        self.freeing = Freeing(storage, self.durable_state, self._writes, schema.group_bits)
        self._under_way: set[asyncio.Task[Any]] = set()
        self._token_columns = {c.name: c.per for c in schema.columns if c.counts_tokens}

    async def open(self, owner: QueueOwner | None = None) -> None:
        """Open the storage and take up what has outlived an earlier process of the owner's."""
        await self.storage.open(self.schema, owner)
        async for stored in self.storage.recover():
            self._take_up(stored.metas, stored.rows, stored.columns)
            await self._weigh(stored.rows, stored.columns)
        self._count_found(list(self.index.metas), self.storage.nbytes)
        await self.durable_state.open(owner)
        unfreed = self.index.rows_of(self.durable_state.gone)
        await self._drop(np.union1d(unfreed, self.durable_state.now.dropped_rows()))

    def _count_found(self, groups: Sequence[int], num_bytes: int) -> None:
        """Count recovered or restored rows. Their reservation is not known any more: they take what they hold."""
        num_rows = len(self.index.rows_of(groups))
        each = -(-num_bytes // max(1, num_rows))
        self.capacity.note([group for group in groups if group in self.index.metas], each)
        self.capacity.take(0, each * num_rows)

    async def remove(self) -> None:
        """Remove all that the owner has stored, when all changes have ended."""
        await self._ended()
        await self.storage.remove()

    async def close(self) -> None:
        """Close the storage when all changes have ended."""
        await self._ended()
        await self.storage.close()

    async def _ended(self) -> None:
        if self._under_way:
            await asyncio.wait(self._under_way)

    # -- in -----------------------------------------------------------------------------------------------------------------

    async def admit(self, metas: Sequence[GroupMeta], columns: Batch, row_bytes: int) -> list[GroupMeta]:
        """Wait for room for those of the groups that are new, and admit them. A group that was dropped does not come back."""
        while True:
            while self._writes.are_arriving(metas):  # whether they are there is not sure yet
                await self._writes.settled.wait()
            new = [meta for meta in metas if not self._is_known(meta)]
            if not new:
                return []
            reserved, each = _num_rows(new), row_bytes + _bytes_per_row(new, columns)
            await self.capacity.reserve(reserved, reserved * each)
            if not any(self._is_known(meta) for meta in new):
                break
            self.capacity.release(reserved, reserved * each)  # admitted by another request meanwhile
        new = self._admit(new, each)
        if surplus := reserved - _num_rows(new):  # of a group that is in the request twice
            self.capacity.release(surplus, surplus * each)
        self._writes.arrive(new)
        return new

    async def store(self, batch: Batch, new: list[GroupMeta], writers: Sequence[Token] | None = None) -> Array:
        """Store what is not there yet, all of a row's columns or none, and tell the controllers.

        `writers`: for what a task has completed, the lease of each row. Returns bool [n]: which rows are stored by this, or by an
        earlier request of the same lease.
        """
        stored = await self._to_its_end(self._store(batch, new, writers))
        if writers is not None and not stored.all():  # maybe the same request again, whose answer was lost
            stored |= self.written_by(batch.indices, writers)
        return stored

    def written_by(self, rows: Array, writers: Sequence[Token]) -> Array:
        """bool [n]: rows that their lease has completed, as far as they are remembered."""
        pairs = zip(rows.tolist(), writers, strict=True)
        return np.array([self._writers.get((token.task, row)) == token for row, token in pairs], bool)

    async def _store(self, batch: Batch, new: list[GroupMeta], writers: Sequence[Token] | None) -> Array:
        row_mask, group_mask = self.schema.masks_of(tuple(batch.columns))
        groups = batch.groups.tolist()
        while self._writes.are_under_way and self.index.is_claimed(batch.indices, row_mask, groups, group_mask):
            await self._writes.settled.wait()  # until it is sure whether that is kept
        free = self.index.claim(batch.indices, row_mask) if row_mask else np.zeros(len(batch.indices), bool)
        free_groups = np.array(self.index.claim_groups(groups, group_mask) if group_mask else [False] * len(groups), bool)
        if not new and not free.any() and not free_groups.any():
            return free
        rows, numbers = batch.indices[free], batch.groups[free_groups].tolist()
        is_written, write, num_drops = False, self._writes.begin(batch.groups), self._num_drops
        try:
            await self._write(batch, new, free, free_groups, row_mask, group_mask)
            is_written = True
        finally:
            self.index.settle(rows, row_mask, is_written=is_written)
            self.index.settle_groups(numbers, group_mask, is_written=is_written)
            if not is_written:
                self._take_back(new)
            self._writes.end(write, [] if is_written else new)
        if writers is not None:
            of_free = itertools.compress(writers, free)
            self._writers.update(((token.task, row), token) for row, token in zip(rows.tolist(), of_free, strict=True))
            forget_oldest(self._writers)
        self._count_tokens(batch, rows, free, numbers, free_groups)
        there, admitted, left_out = rows, new, rows[:0]
        if num_drops != self._num_drops:  # something was dropped while this was being written
            there, admitted = self.index.present(rows), [meta for meta in new if meta.group in self.index.metas]
            of_new = self.schema.rows_of(admitted)
            left_out = np.setdiff1d(of_new, self.index.present(of_new))
        posted = self._post_admission(admitted, there, row_mask, self.index.rows_of(numbers), group_mask)
        if len(left_out):  # of these the controllers were told that they went before they were told that they came
            posted.append(self._post(Notice(rows=left_out.tobytes(), is_drop=True)))
        try:
            if len(there) < len(rows):  # dropped while they were being written
                gone = np.setdiff1d(rows, there)
                self.freeing.add(gone, [n for n in np.unique(gone >> self.schema.group_bits).tolist() if n not in self.index.metas])
                await self.freeing.free()
            for answer in posted:
                if not answer.done():
                    await answer
        finally:
            self._writes.arrived(new)
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

    def _count_tokens(self, batch: Batch, rows: Array, free: Array, groups: list[int], free_groups: Array) -> None:
        for name, per in self._token_columns.items():
            values = batch.columns.get(name)
            if not isinstance(values, Ragged):
                continue
            if per == "row":
                self.index.add_tokens(rows, values.lengths[free])
            else:
                for group, length in zip(groups, values.lengths[free_groups].tolist(), strict=True):
                    of_group = self.index.rows_of([group])
                    self.index.add_tokens(of_group, np.full(len(of_group), length, np.int64))

    def _is_known(self, meta: GroupMeta) -> bool:
        """Whether the group is here, or has been."""
        return meta.group in self.index.metas or meta.group in self.durable_state.gone

    def _admit(self, metas: Iterable[GroupMeta], each: int) -> list[GroupMeta]:
        """Into the index, `each` byte reserved for every row. Returns the groups that are new."""
        new = self.index.admit(metas)
        self.capacity.note([meta.group for meta in new], each)
        return new

    def _take_back(self, new: Iterable[GroupMeta]) -> None:
        """Groups that could not be written have not been admitted."""
        for meta in new:
            rows, _ = self.index.drop(self.index.rows_of([meta.group]))
            self.capacity.leave({meta.group: len(rows)}, [meta.group])
            self._post(Notice(rows=rows.tobytes(), is_drop=True))  # a controller that was told everything meanwhile knows it

    # -- out ----------------------------------------------------------------------------------------------------------------

    async def drop(self, rows: Array) -> None:
        """Forget rows, tell of it, and free them; free as well what an earlier request could not."""
        await self._to_its_end(self._drop(rows))

    async def _drop(self, rows: Array) -> None:
        dropped, gone = self.index.drop(np.unique(rows))  # one that is named twice must not count for another one of its group
        posted = None
        if len(dropped):
            self._num_drops += 1
            of_rows, groups = (dropped >> self.schema.group_bits).tolist(), [meta.group for meta in gone]
            self.durable_state.drop(zip(of_rows, dropped.tolist(), strict=True), groups)
            self.freeing.add(dropped, groups)
            self.capacity.leave(Counter(of_rows), groups)
            posted = self._post(Notice(rows=dropped.tobytes(), is_drop=True))
        await self.freeing.free()
        if posted is not None:
            await posted

    # -- durable state ------------------------------------------------------------------------------------------------------

    async def end(self, notice: Notice) -> None:
        """End what a notice says has ended, a partition of a task or all of it: no more rows of it will come."""
        self.durable_state.end(notice)
        await self.durable_state.keep()
        await self._post(notice)

    # -- all of it ----------------------------------------------------------------------------------------------------------

    def everything(self) -> list[Notice]:
        """The notices that tell a controller all there is."""
        notices = [Notice(metas=list(self.index.metas.values()))]
        dropped = self.durable_state.now.dropped_rows()
        notices.append(Notice(rows=dropped.tobytes(), is_drop=True, gone=self.durable_state.now.gone))
        for rows, mask, tokens in self.index.records():
            notices.append(Notice(rows=rows.tobytes(), mask=mask, tokens=tokens.tobytes() if self._token_columns else b""))
        return notices + self.durable_state.now.ends()

    async def snapshot(self, path: Path) -> SnapshotFile:
        """An exact cut in a file. Other requests are served meanwhile; what they drop is freed at the end."""
        try:
            async with self.freeing.held_off:
                return await write_snapshot(path, self.schema, self.index, self.storage, self.durable_state.encoded())
        finally:
            await self._to_its_end(self.freeing.free())

    async def restore(self, path: Path) -> int:
        """Take up the rows of a snapshot's file, besides what is here. Returns how many.

        Raises `ValueError`, and takes up nothing, when it is damaged.
        """
        for _ in read_snapshot(path, self.schema)[1]:  # to its end: it is whole
            pass
        durable_state, frames = read_snapshot(path, self.schema)
        async with self.freeing.held_off:  # by a snapshot that is being written, say
            pass
        await self._to_its_end(self.freeing.free())  # later it would free what comes back now
        count, groups, before = 0, list[int](), self.storage.nbytes
        for metas, batch in frames:
            new = self._admit(metas, 0)
            self.durable_state.come_back(meta.group for meta in new)  # or they would go again when this process is started again
            self.capacity.take(_num_rows(new), 0)
            await self.store(batch, new)
            count += _num_rows(new)
            groups += [meta.group for meta in new]
        self._count_found(groups, self.storage.nbytes - before)
        found = msgspec.msgpack.decode(durable_state, type=DurableState)
        for notice in found.ends():
            self.durable_state.end(notice)
        dropped = self.index.present(found.dropped_rows())
        await self.drop(dropped)
        await self.durable_state.keep()
        for notice in self.durable_state.now.ends():
            await self._post(notice)
        return count - len(dropped)

    # -- inside -------------------------------------------------------------------------------------------------------------

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a change to its end, also when its caller has gone. Over a storage that never waits the change is over before a
        caller can go."""
        if self.storage.is_immediate:
            return await work
        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)

    def _post_admission(
        self, new: list[GroupMeta], rows: Array, row_mask: int, of_groups: Array, group_mask: int
    ) -> list[asyncio.Future[None]]:
        """Publish one notice for the rows' columns and one for their groups', or one for both where they are of the same rows."""
        parts = [(of_groups, group_mask), (rows, row_mask)]
        if np.array_equal(rows, of_groups):
            parts = [(rows, row_mask | group_mask)]
        parts = [part for part in parts if len(part[0])] or [(rows, 0)]
        return [self._post(self._notice(new if i == 0 else [], *part)) for i, part in enumerate(parts)]

    def _notice(self, metas: list[GroupMeta], rows: Array, mask: int) -> Notice:
        tokens = self.index.tokens(rows).tobytes() if self._token_columns else b""
        return Notice(metas, rows.tobytes(), mask, tokens)

    def _take_up(self, metas: Sequence[GroupMeta], rows: Array, columns: Sequence[str]) -> None:
        """Recovered rows: in the index as if they had just been written."""
        self.capacity.take(_num_rows(self._admit(metas, 0)), 0)
        mask = self.schema.mask(columns)
        groups = np.unique(rows >> self.schema.group_bits).tolist()
        self.index.settle_groups(groups, mask & self.schema.group_mask, is_written=True)
        self.index.settle(rows, mask & ~self.schema.group_mask, is_written=True)

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
