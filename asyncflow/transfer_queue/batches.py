"""Batches in messages, taken apart and put together again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

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
        parts = [np.array([len(batch.indices), len(batch.groups)]), batch.indices, batch.groups]
        values = []
        for column in batch.columns.values():
            offsets = column.offsets if isinstance(column, Ragged) else _NO_OFFSETS
            parts += [np.array([len(offsets)]), offsets]
            values.append(column.values if isinstance(column, Ragged) else column)
        return cls(np.concatenate(parts), list(batch.columns), values)

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
    columns = {name: _take(v, rows if schema.column(name).per == "row" else groups) for name, v in batch.columns.items()}
    return Batch(batch.indices[rows], batch.groups[groups], columns)


def concatenate(schema: Schema, batches: Sequence[Batch], rows: Array, groups: Array) -> Batch:
    """Batches with the same columns end to end, then put in the order of `rows` and `groups` (int64, every one is there once)."""
    if len(batches) > 1:
        columns = {name: _join([batch.columns[name] for batch in batches]) for name in batches[0].columns}
        joined = Batch(np.concatenate([b.indices for b in batches]), np.concatenate([b.groups for b in batches]), columns)
    else:
        joined = batches[0]
    return take(schema, joined, _positions(joined.indices, rows), _positions(joined.groups, groups))


def _is_all(positions: Array, count: int) -> bool:
    return len(positions) == count and bool((positions == np.arange(count)).all())


def _positions(there: Array, wanted: Array) -> Array:
    order = np.argsort(there, kind="stable")
    return order[np.searchsorted(there, wanted, sorter=order)]


def _take(values: Values, positions: Array) -> Values:
    return values.take(positions) if isinstance(values, Ragged) else values[positions]


def _join(parts: list[Values]) -> Values:
    ragged = [part for part in parts if isinstance(part, Ragged)]
    if not ragged:
        return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])
    offsets = np.zeros(sum(len(part) for part in ragged) + 1, np.int64)
    np.cumsum(np.concatenate([part.lengths for part in ragged]), out=offsets[1:])
    return Ragged(np.concatenate([part.values for part in ragged]), offsets)
