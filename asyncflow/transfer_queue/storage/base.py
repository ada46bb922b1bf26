"""The storage contract: columns by row or by group, written once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from asyncflow.types import Array, Batch, Column


class Storage(Protocol):
    """Where a unit keeps its columns."""

    def declare(self, columns: Iterable[Column]) -> None:
        """The columns there are, once, before anything is written."""
        ...

    def write(self, batch: Batch) -> Array:
        """Store a batch: all its columns for a row, or none. Returns bool [n]: False where a row had one of them already.

        Group columns are stored unless their group has them. Raises `ValueError` naming the row and the column that does not fit.
        """
        ...

    def read(self, indices: Array, columns: Sequence[str]) -> Batch:
        """The columns of rows, in the order asked. Raises `LookupError` naming the first row and column not there."""
        ...

    def drop(self, indices: Array) -> None:
        """Free rows, and a group's columns with its last row. Unknown rows are passed over."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of values held."""
        ...
