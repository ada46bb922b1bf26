"""Columns in this process's memory: the fastest storage, gone with the process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence

import numpy as np

from asyncflow.transfer_queue.schema import Schema
from asyncflow.transfer_queue.storage.base import QueueOwner, Stored
from asyncflow.transfer_queue.storage.segments import ColumnSegments, Keys
from asyncflow.types import Array, Batch, GroupMeta


def groups_of(rows: Array, group_bits: int) -> Array:
    """int64: the groups of rows, each once, in the order of first appearance."""
    groups = rows >> group_bits
    steps = groups[1:] - groups[:-1]
    if bool((steps >= 0).all()):  # so equal ones are neighbours
        return groups[np.concatenate(([True], steps > 0))] if len(groups) else groups
    _, first = np.unique(groups, return_index=True)
    return groups[np.sort(first)]


class MemoryStorage:
    """See `segments.py`. Nothing is awaited, so calls never overlap."""

    is_durable = False
    is_immediate = True

    def __init__(self, unit: int = 0) -> None:
        """`unit`, which every storage is told, makes no difference to this one."""
        self._group_bits = 0
        self._columns: dict[str, ColumnSegments] = {}
        self._kept: dict[str, bytes] = {}

    async def open(self, schema: Schema, owner: QueueOwner | None = None) -> None:
        """See `Storage.open`."""
        self._group_bits = schema.group_bits
        self._columns = {column.name: ColumnSegments(column) for column in schema.columns}

    async def write(self, metas: Sequence[GroupMeta], batch: Batch) -> None:
        """See `Storage.write`."""
        indices, groups = batch.indices, batch.groups
        try:
            if len(indices) == 1 and len(groups) == 1:
                row, group = int(indices[0]), int(groups[0])
                for name, values in batch.columns.items():
                    column = self._columns[name]
                    column.add_one(row if column.per == "row" else group, values)
                return
            keys = {"row": Keys(indices), "group": Keys(groups)}
            for name, values in batch.columns.items():
                column = self._columns[name]
                column.add(keys[column.per], values)
        except BaseException:  # out of memory, most likely: all of a batch or nothing
            self._remove(indices, groups, batch.columns)
            raise

    async def read(self, indices: Array, columns: Sequence[str]) -> Batch:
        """Values of these rows; see `Storage.read`. Values of 64 KiB and more may come as read-only views of what is stored."""
        rows, groups = Keys(indices), groups_of(indices, self._group_bits)
        of_groups = Keys(groups) if any(self._columns[name].per == "group" for name in columns) else None
        found = {}
        for name in columns:
            column = self._columns[name]
            found[name] = column.read(rows if column.per == "row" or of_groups is None else of_groups)
        return Batch(indices, groups, found)

    async def drop(self, rows: Array, groups: Array) -> None:
        """See `Storage.drop`."""
        self._remove(np.unique(rows), np.unique(groups), self._columns)

    async def recover(self) -> AsyncIterator[Stored]:
        """See `Storage.recover`."""
        for nothing in list[Stored]():
            yield nothing

    async def keep(self, name: str, value: bytes) -> None:
        """See `Storage.keep`."""
        self._kept[name] = value

    async def kept(self, name: str) -> bytes | None:
        """See `Storage.kept`."""
        return self._kept.get(name)

    @property
    def nbytes(self) -> int:
        """See `Storage.nbytes`."""
        return sum(column.nbytes for column in self._columns.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of memory kept for values and for finding them: what it has above `nbytes` is overhead and waste."""
        return sum(column.held_bytes for column in self._columns.values())

    async def remove(self) -> None:
        """See `Storage.remove`: it goes with `close`."""

    async def close(self) -> None:
        """See `Storage.close`."""
        self._columns.clear()
        self._kept.clear()

    def _remove(self, rows: Array, groups: Array, names: Iterable[str]) -> None:
        keys = {"row": Keys(rows), "group": Keys(groups)}
        for name in names:
            if (column := self._columns.get(name)) is not None:
                column.remove(keys[column.per])
