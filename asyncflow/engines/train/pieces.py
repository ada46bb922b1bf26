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


class SharedCall:
    """Call that others may make. No other thread exists here: its caller makes it itself."""

    def take(self, seconds: float) -> Tensor | None:
        """Wait up to so many seconds for the result of a call that has begun. None: the caller makes it, and a later result is
        not used."""
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

    def share(self, call: Callable[[], Tensor]) -> SharedCall:
        """Offer a call to other threads. It may change nothing: its caller makes it as well if none of them has."""
        return SharedCall()

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
