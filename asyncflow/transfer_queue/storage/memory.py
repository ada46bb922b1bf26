"""Columns in this process's memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from asyncflow.types import Array, Batch, Column, Ragged, Values


class MemoryStorage:
    """Every entry is kept as an array of its own, so that dropping a row frees it."""

    def __init__(self, group_bits: int) -> None:
        self._group_bits = group_bits
        self._columns: dict[str, Column] = {}
        self._rows: dict[int, dict[str, Array]] = {}
        self._groups: dict[int, dict[str, Array]] = {}
        self._rows_of_group: dict[int, set[int]] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def declare(self, columns: Iterable[Column]) -> None:
        self._columns.update({column.name: column for column in columns})

    def write(self, batch: Batch) -> Array:
        by_row, by_group = self._split(batch)
        stored = np.ones(len(batch), bool)
        for i, index in enumerate(batch.indices.tolist()):
            row = self._rows.setdefault(index, {})
            if any(name in row for name in by_row):
                stored[i] = False
                continue
            self._put(row, by_row, i)
            self._rows_of_group.setdefault(index >> self._group_bits, set()).add(index)
        for i, number in enumerate(batch.groups.tolist() if by_group else []):
            group = self._groups.setdefault(number, {})
            self._put(group, {name: values for name, values in by_group.items() if name not in group}, i)
        return stored

    def read(self, indices: Array, columns: Sequence[str]) -> Batch:
        rows = indices.tolist()
        groups = list(dict.fromkeys(index >> self._group_bits for index in rows))
        gathered: dict[str, Values] = {}
        for name in columns:
            column = self._declared(name)
            held, keys = (self._rows, rows) if column.per == "row" else (self._groups, groups)
            missing = next((key for key in keys if name not in held.get(key, {})), None)
            if missing is not None:
                raise LookupError(f"{column.per} {missing} has no column {name!r}")
            arrays = [held[key][name] for key in keys]
            gathered[name] = Ragged.from_arrays(arrays, column.dtype) if column.ragged else np.array(arrays, column.dtype)
        return Batch(indices, np.array(groups, np.int64), gathered)

    def drop(self, indices: Array) -> None:
        for index in indices.tolist():
            row = self._rows.pop(index, None)
            if row is None:
                continue
            self._nbytes -= sum(array.nbytes for array in row.values())
            number = index >> self._group_bits
            siblings = self._rows_of_group[number]
            siblings.discard(index)
            if not siblings:
                del self._rows_of_group[number]
                self._nbytes -= sum(array.nbytes for array in self._groups.pop(number, {}).values())

    def _declared(self, name: str) -> Column:
        if name not in self._columns:
            raise ValueError(f"column {name!r} is not declared; declared are {', '.join(sorted(self._columns))}")
        return self._columns[name]

    def _split(self, batch: Batch) -> tuple[dict[str, Values], dict[str, Values]]:
        """The batch's row columns and group columns, each checked against its declaration."""
        by_row: dict[str, Values] = {}
        by_group: dict[str, Values] = {}
        for name, values in batch.columns.items():
            column = self._declared(name)
            keys = batch.indices if column.per == "row" else batch.groups
            where = f"{column.per} {keys[0] if len(keys) else '?'}, column {name!r}"
            if isinstance(values, Ragged) != column.ragged:
                raise ValueError(f"{where}: declared {'ragged' if column.ragged else 'dense'}, written otherwise")
            array = values.values if isinstance(values, Ragged) else values
            if array.dtype.name != column.dtype or array.ndim != 1:
                raise ValueError(f"{where}: declared {column.dtype} [n], written {array.dtype.name} with {array.ndim} dimensions")
            if isinstance(values, Ragged):
                offsets = values.offsets
                if offsets.dtype != np.int64 or offsets.ndim != 1 or not len(offsets):
                    raise ValueError(f"{where}: offsets are to be int64 [n + 1]")
                if offsets[0] != 0 or offsets[-1] != len(array) or (np.diff(offsets) < 0).any():
                    raise ValueError(f"{where}: offsets do not start at 0, rise and end at {len(array)}")
            if len(values) != len(keys):
                raise ValueError(f"{where}: {len(values)} entries for {len(keys)} {column.per}s")
            (by_row if column.per == "row" else by_group)[name] = values
        return by_row, by_group

    def _put(self, entry: dict[str, Array], columns: dict[str, Values], i: int) -> None:
        for name, values in columns.items():
            array = values[i].copy() if isinstance(values, Ragged) else np.asarray(values[i])
            entry[name] = array
            self._nbytes += array.nbytes
