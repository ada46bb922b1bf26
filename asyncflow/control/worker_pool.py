"""Workers of a pool (rollout, evaluator) in a run: those that work, those that are not started again, those that are to leave.

resize(3): rollout/0 rollout/1 rollout/2       resize(1): rollout/0, and the other two leave
admit():   rollout/outside-0, a guest: a process that the run has not started, which comes and goes by itself
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, islice
from typing import Final

_GUEST: Final = "outside-"


def is_guest(worker: str) -> bool:
    """Whether a worker is a guest, which computes elsewhere, by its name."""
    return worker.rpartition("/")[2].startswith(_GUEST)


class WorkerPool:
    """Names, in the order in which they joined. The name of one that has left is free for another."""

    def __init__(self, size: int, pool: str = "rollout") -> None:
        self.pool = pool
        self.members = [f"{pool}/{i}" for i in range(size)]
        self.failed: set[str] = set()  # those of them that have died for the last time
        self.leaving: set[str] = set()  # members no longer, but not gone yet
        self.guests: list[str] = []

    @property
    def working(self) -> list[str]:
        """The members that serve, or will again, and then the guests."""
        return [*self._own, *self.guests]

    @property
    def _own(self) -> list[str]:
        return [name for name in self.members if name not in self.failed]

    def place(self, name: str) -> int:
        """Number of working members and guests before this one."""
        if name in self.guests:
            return len(self._own) + self.guests.index(name)
        earlier = self.members[: self.members.index(name)] if name in self.members else self.members
        return sum(other not in self.failed for other in earlier)

    def admit(self) -> str:
        """Name of a new guest."""
        taken = {*self.guests, *self.leaving}
        name = next(name for i in count() if (name := f"{self.pool}/{_GUEST}{i}") not in taken)
        self.guests.append(name)
        return name

    def dismiss(self, guest: str) -> None:
        """Forget a guest that has gone."""
        self.guests.remove(guest)

    def resize(self, size: int) -> tuple[list[str], list[str]]:
        """Have so many members that work. Returns those to start, and those that are to leave: the ones that came last, and all
        that failed for good."""
        working = self._own
        going = [name for name in self.members if name in self.failed or name in working[size:]]
        self.leaving |= set(going)
        free = (name for i in count() if (name := f"{self.pool}/{i}") not in self.leaving and name not in working)
        coming = list(islice(free, max(0, size - len(working))))
        self.members, self.failed = working[:size] + coming, set()
        return coming, going

    def never_came(self, names: Sequence[str]) -> None:
        """Remove members that could not be started."""
        self.members = [name for name in self.members if name not in names]

    def left(self, name: str) -> None:
        """Forget a member that was to leave and has left: its name is free."""
        self.leaving.discard(name)
