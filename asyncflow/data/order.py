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
        self.position, self.items = position, items
        self.pushed: list[T] = []
        self._seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, np.int64)

    def push(self, items: Sequence[T]) -> None:
        """Take these before going on with the order."""
        self.pushed = [*self.pushed, *items]

    def put_back(self, items: Sequence[T]) -> None:
        """Take these again, before anything else."""
        self.pushed = [*items, *self.pushed]

    def take(self, count: int) -> list[T]:
        """The next `count` items."""
        taken, self.pushed = self.pushed[:count], self.pushed[count:]
        while len(taken) < count:
            epoch, offset = divmod(self.position, len(self.items))
            if epoch != self._epoch:
                self._epoch = epoch
                self._permutation = np.random.default_rng([self._seed, epoch]).permutation(len(self.items))
            taken.append(self.items[int(self._permutation[offset])])
            self.position += 1
        return taken
