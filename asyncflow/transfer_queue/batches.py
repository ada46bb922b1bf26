"""Batches in messages, taken apart and put together again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np

from asyncflow.transfer_queue.leases import Lease
from asyncflow.transfer_queue.schema import Schema
from asyncflow.types import Array, Batch, Ragged, Values


class WireBatch(msgspec.Struct, array_like=True):
    """A `Batch` in a message: its arrays travel as raw frames, all that is int64 and short as one.

    `layout` int64: the numbers of rows and of groups, `indices`, `groups`, then for each column the length of its `offsets`, and
    these; a dense column has none. `values`: each column's, end to end.
    """

    layout: np.ndarray
    names: list[str]
    values: list[np.ndarray]

    @classmethod
    def of(cls, batch: Batch) -> WireBatch:
        """The batch as it travels: all numbers in one array, and the values of each column."""
        parts = [np.array([len(batch.indices), len(batch.groups)]), batch.indices, batch.groups]
        values = []
        for column in batch.columns.values():
            offsets = column.offsets if isinstance(column, Ragged) else _NO_OFFSETS
            parts += [np.array([len(offsets)]), offsets]
            values.append(column.values if isinstance(column, Ragged) else column)
        return cls(np.concatenate(parts), list(batch.columns), values)

    def column(self, name: str) -> Array:
        """Values of a column, end to end."""
        return self.values[self.names.index(name)]

    def batch(self) -> Batch:
        """Raises `ValueError` when the layout is not one."""
        rest = self.layout
        if rest.dtype != np.int64 or rest.ndim != 1 or len(rest) < 2 or len(self.names) != len(self.values):
            raise ValueError("a batch without a layout")
        num_rows, num_groups = rest[:2].tolist()
        indices, rest = _cut(rest[2:], num_rows)
        groups, rest = _cut(rest, num_groups)
        columns: dict[str, Values] = {}
        for name, values in zip(self.names, self.values, strict=True):
            length, rest = _cut(rest, 1)
            offsets, rest = _cut(rest, int(length[0]))
            columns[name] = Ragged(values, offsets) if len(offsets) else values
        if len(rest) or len(columns) < len(self.names):
            raise ValueError("a batch whose layout is longer than its columns, or that has a column twice")
        return Batch(indices, groups, columns)


_NO_OFFSETS = np.empty(0, np.int64)


def _cut(layout: Array, length: int) -> tuple[Array, Array]:
    if not 0 <= length <= len(layout):
        raise ValueError("a batch whose layout is shorter than it says")
    return layout[:length], layout[length:]


def take(schema: Schema, batch: Batch, rows: Array, groups: Array) -> Batch:
    """The rows and the groups at these positions (int64), copied; the batch itself when that is all of it, in order."""
    if _is_all(rows, len(batch.indices)) and _is_all(groups, len(batch.groups)):
        return batch
    columns = {name: taken(v, rows if schema.column(name).per == "row" else groups) for name, v in batch.columns.items()}
    return Batch(batch.indices[rows], batch.groups[groups], columns)


def units_of(schema: Schema, lease: Lease, rows: Array) -> Array:
    """int64 [n]: the unit of each row. Raises `ValueError` naming a row whose group is not the lease's."""
    unit = {meta.group: at for meta, at in zip(lease.groups, lease.units, strict=True)}
    groups = (rows >> schema.group_bits).tolist()
    for row, group in zip(rows.tolist(), groups, strict=True):
        if group not in unit:
            raise ValueError(f"row {row} is not one of lease {lease.token.lease} of task {lease.token.task!r}")
    return np.array([unit[group] for group in groups], np.int64)


async def read_lease(schema: Schema, lease: Lease, columns: Sequence[str], read: Callable[[int, Array], Awaitable[Batch]]) -> Batch:
    """The columns of a lease's rows, in its order; `read` asks a unit. Raises `LookupError` when a row has not got one."""
    rows = np.array(lease.indices, np.int64)
    groups = np.array([meta.group for meta in lease.groups], np.int64)
    if not columns:
        return Batch(rows, groups, {})
    if len(set(lease.units)) == 1:
        parts = [await read(lease.units[0], rows)]
    else:
        unit_of = units_of(schema, lease, rows)
        parts = await asyncio.gather(*(read(number, rows[unit_of == number]) for number in np.unique(unit_of).tolist()))
    return concatenate(schema, parts, rows, groups)


def concatenate(schema: Schema, batches: Sequence[Batch], rows: Array, groups: Array) -> Batch:
    """Batches with the same columns end to end, then put in the order of `rows` and `groups` (int64, every one is there once)."""
    if len(batches) > 1:
        columns = {name: _join([batch.columns[name] for batch in batches]) for name in batches[0].columns}
        joined = Batch(np.concatenate([b.indices for b in batches]), np.concatenate([b.groups for b in batches]), columns)
    else:
        joined = batches[0]
    if np.array_equal(joined.indices, rows) and np.array_equal(joined.groups, groups):
        return joined
    return take(schema, joined, _positions(joined.indices, rows), _positions(joined.groups, groups))


def _is_all(positions: Array, count: int) -> bool:
    return len(positions) == count and bool((positions == np.arange(count)).all())


def _positions(there: Array, wanted: Array) -> Array:
    order = np.argsort(there, kind="stable")
    return order[np.searchsorted(there, wanted, sorter=order)]


def taken(values: Values, positions: Array) -> Values:
    """The entries at these positions, copied."""
    return values.take(positions) if isinstance(values, Ragged) else values[positions]


def _join(parts: list[Values]) -> Values:
    ragged = [part for part in parts if isinstance(part, Ragged)]
    if not ragged:
        return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])
    offsets = np.zeros(sum(len(part) for part in ragged) + 1, np.int64)
    np.cumsum(np.concatenate([part.lengths for part in ragged]), out=offsets[1:])
    return Ragged(np.concatenate([part.values for part in ragged]), offsets)
