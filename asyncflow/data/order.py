"""The order in which a run sees its prompts: seeded, without end, and known from the position alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


class SeededOrder(Generic[T]):
    """Every epoch is a permutation of the items, a function of (seed, epoch) alone, so a run resumes from its position.

    Items pushed by hand come first, in the order pushed.
    """

    def __init__(self, items: Sequence[T], seed: int, position: int = 0) -> None:
        self.position = position
        self._items, self._seed = items, seed
        self._pushed: list[T] = []
        self._epoch = -1
        self._permutation = np.empty(0, np.int64)

    def push(self, items: Sequence[T]) -> None:
        """Take these before going on with the order."""
        self._pushed.extend(items)

    def take(self, count: int) -> list[T]:
        """The next `count` items."""
        taken, self._pushed = self._pushed[:count], self._pushed[count:]
        while len(taken) < count:
            epoch, offset = divmod(self.position, len(self._items))
            if epoch != self._epoch:
                self._epoch = epoch
                self._permutation = np.random.default_rng([self._seed, epoch]).permutation(len(self._items))
            taken.append(self._items[int(self._permutation[offset])])
            self.position += 1
        return taken
