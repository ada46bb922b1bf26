"""Batches in messages, taken apart and put together again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from asyncflow.transfer_queue.schema import Schema
from asyncflow.types import Array, Batch, Ragged, Values


class WireColumn(msgspec.Struct, array_like=True):
    """A column in a message; `offsets` where it is ragged."""

    name: str
    values: np.ndarray
    offsets: np.ndarray | None = None


class WireBatch(msgspec.Struct, array_like=True):
    """A `Batch` in a message: its arrays travel as raw frames."""

    indices: np.ndarray
    groups: np.ndarray
    columns: list[WireColumn]

    @classmethod
    def of(cls, batch: Batch) -> WireBatch:
        columns = [
            WireColumn(name, v.values, v.offsets) if isinstance(v, Ragged) else WireColumn(name, v)
            for name, v in batch.columns.items()
        ]
        return cls(batch.indices, batch.groups, columns)

    def batch(self) -> Batch:
        columns = {c.name: c.values if c.offsets is None else Ragged(c.values, c.offsets) for c in self.columns}
        return Batch(self.indices, self.groups, columns)


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
