"""Columns as torch tensors, and back. Imports torch.

n = a column's entries: the rows of a batch, or its groups for a column that is stored per group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from asyncflow.types import Array, Batch, Column, Ragged, Values


class Jagged(NamedTuple):
    """Entries of unequal lengths, end to end: `values` [total, ...], `offsets` int64 [n + 1], first 0, last `total`."""

    values: Tensor
    offsets: Tensor

    @property
    def lengths(self) -> Tensor:
        """Lengths of the entries, int64 [n]."""
        return self.offsets.diff()

    def entries(self) -> tuple[Tensor, ...]:
        """The n entries [length, ...], as views."""
        return torch.split(self.values, self.lengths.tolist())

    def nested(self) -> Tensor:
        """Column as one nested tensor of layout `torch.jagged`."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets)


class Padded(NamedTuple):
    """Entries of unequal lengths: `values` [n, L, ...], of whose L only the first `lengths` (int64 [n]) count."""

    values: Tensor
    lengths: Tensor


TensorColumn = Tensor | Jagged | Padded
"""A dense column [n, ...], or a ragged one."""

WritableColumn = TensorColumn | Ragged | Array | Sequence[object]
"""Values that can be written as a column: also numpy arrays, nested tensors, and sequences with an array or list for each entry."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Pad ragged columns to the batch's greatest length, rounded up to a multiple; by column, with what if not with 0."""

    multiple: int
    values: Mapping[str, float] = field(default_factory=dict)

    def apply(self, columns: Mapping[str, TensorColumn]) -> dict[str, TensorColumn]:
        """Columns with ragged ones padded."""
        return {n: self._pad(c, self.values.get(n, 0)) if isinstance(c, Jagged) else c for n, c in columns.items()}

    def _pad(self, column: Jagged, value: float) -> Padded:
        lengths = column.lengths
        longest = int(lengths.max()) if len(lengths) else 0
        size = (len(lengths), -(-longest // self.multiple) * self.multiple, *column.values.shape[1:])
        padded = column.values.new_full(size, value)
        padded[torch.arange(size[1], device=lengths.device) < lengths[:, None]] = column.values
        return Padded(padded, lengths)


def to_tensors(batch: Batch) -> dict[str, TensorColumn]:
    """Tensors over the memory of a batch's arrays, without a copy."""
    return {
        name: Jagged(torch.from_numpy(c.values), torch.from_numpy(c.offsets)) if isinstance(c, Ragged) else torch.from_numpy(c)
        for name, c in batch.columns.items()
    }


def to_device(column: TensorColumn, device: torch.device) -> TensorColumn:
    """Column on another device."""
    if isinstance(column, Tensor):
        return column.to(device)
    return type(column)(*(tensor.to(device) for tensor in column))


def to_values(column: Column, given: WritableColumn) -> Values:
    """Values of a column as the queue takes them, from arrays, tensors or numbers. Numbers get the column's dtype; arrays and
    tensors keep their own.

    Raises `ValueError` naming the column when they do not fit.
    """
    try:
        if isinstance(given, Tensor) and given.is_nested:
            given = Jagged(given.values(), cast(Any, given).offsets())
        if isinstance(given, Padded):
            mask = torch.arange(given.values.shape[1], device=given.lengths.device) < given.lengths[:, None]
            return _ragged(_array(given.values[mask]), _array(given.lengths))
        if isinstance(given, Jagged):
            return Ragged(_array(given.values), _array(given.offsets))
        if isinstance(given, Ragged | Tensor | Array):
            return given if isinstance(given, Ragged) else _array(given)
        entries = [_array(e) if isinstance(e, Tensor | Array) else np.asarray(e, column.dtype) for e in given]
        if not column.ragged:
            return np.stack(entries) if entries else np.empty((0, *column.shape), column.dtype)
        values = np.concatenate(entries) if entries else np.empty((0, *column.shape), column.dtype)
        return _ragged(values, np.array([len(e) for e in entries], np.int64))
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {column.name!r} cannot be written: {error}") from error


def _ragged(values: Array, lengths: Array) -> Ragged:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Ragged(values, offsets)


def _array(given: Tensor | Array) -> Array:
    array = given.detach().cpu().numpy() if isinstance(given, Tensor) else given
    return np.ascontiguousarray(array) if array.ndim else array
