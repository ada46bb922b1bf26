"""The order in which a run sees its prompts: seeded, without end, and known from the position alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pushed(Generic[T]):
    """An item that comes once `after` others have been taken. So it has the same place in a run that resumes from before it was
    pushed, and pushes it again."""

    item: T
    after: int


class SeededOrder(Generic[T]):
    """Every epoch is a permutation of the items, a function of (seed, epoch) alone, so a run resumes from its position.

    Items pushed by hand come first, in the order pushed. Without other items they are all there are, and `has` says whether there
    are enough.
    """

    def __init__(self, items: Sequence[T], seed: int, position: int = 0) -> None:
        self.position, self.items = position, items
        self.pushed: deque[Pushed[T]] = deque()
        self.num_pushed = 0  # ever
        self._seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, np.int64)

    @property
    def next_place(self) -> int:
        """How many items are taken before one that is pushed now."""
        return self.position + self.num_pushed

    def push(self, items: Sequence[T], after: int = 0) -> None:
        """Add items that come before the rest of the order, after those pushed earlier. `after`: see `Pushed`."""
        self.pushed.extend(Pushed(item, after) for item in items)
        self.num_pushed += len(items)

    def put_back(self, items: Sequence[T]) -> None:
        """Put items back at the head: they come before all others."""
        self.pushed.extendleft(Pushed(item, 0) for item in reversed(items))

    def has(self, count: int) -> bool:
        """Whether there are so many items at the moment."""
        return bool(self.items) or len(self.pushed) >= count

    def take(self, count: int) -> list[T]:
        """The next `count` items, which there are (`has`)."""
        taken: list[T] = []
        while len(taken) < count:
            if self.pushed and (not self.items or self.pushed[0].after <= self.next_place - len(self.pushed)):
                taken.append(self.pushed.popleft().item)
                continue
            epoch, offset = divmod(self.position, len(self.items))
            if epoch != self._epoch:
                self._epoch = epoch
                self._permutation = np.random.default_rng([self._seed, epoch]).permutation(len(self.items))
            taken.append(self.items[int(self._permutation[offset])])
            self.position += 1
        return taken
