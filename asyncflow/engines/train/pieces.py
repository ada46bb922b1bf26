"""Pieces of a computation that need not wait for each other: the thread that adds them computes them, or an idle one.

    a pass, an update --add--> pieces --+--> the thread itself
                             end: all   +--> a helper without a pass (helpers.py)

What a piece computes, and where it adds it, is settled when it is added. So no bit depends on which thread takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torch import Tensor

R = TypeVar("R")
T = TypeVar("T")


class Beside:
    """Call that was left to others: to nobody."""

    def take(self, seconds: float) -> Tensor | None:
        """Result, if there is one within so many seconds, or nobody has begun; None: it is not used any more."""
        return None


class Pieces:
    """Pieces that are computed at once, by the thread that adds them."""

    def cut(self, items: Sequence[T]) -> Iterable[list[T]]:
        """Items, in the parts that pieces are made of: all together, where nobody else takes any."""
        return [[*items]] if items else []

    def parts(self, num_rows: int, work: int) -> list[slice]:
        """Parts of so many rows that are computed each by itself, the first one by the caller: all together, where nobody takes
        any. `work`: multiplications of all."""
        return [slice(0, num_rows)]

    def beside(self, call: Callable[[], Tensor]) -> Beside:
        """Leave a call to others. The caller makes it itself if nobody else has, so it may change nothing."""
        return Beside()

    def add(self, piece: Callable[[], object]) -> None:
        """Compute a piece, now or later. What it reads may not change until `end`."""
        piece()

    def over(self, function: Callable[[list[T]], R], items: Sequence[T]) -> list[R]:
        """Results of a function that is called with parts of the items, as pieces, in any order."""
        results: list[R] = []
        for part in self.cut(items):
            self.add(lambda own=part: results.append(function(own)))  # type: ignore[misc]
        self.end()
        return results

    def end(self) -> None:
        """Wait until all pieces that were added are computed. Raises the first error of one."""


AT_ONCE = Pieces()
