"""Leases of one task: which worker holds what, until when. Pure. What becomes of their rows is in `table.py`."""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from itertools import takewhile

from asyncflow.transfer_queue.leases import StaleToken, Token
from asyncflow.transfer_queue.schema import TaskSpec


class HeldLease:
    """A lease: the rows handed out (whether one is still held, its page says), and how much is left of them."""

    __slots__ = ("deadline", "num_rows", "num_tokens", "number", "rows", "since", "worker")

    def __init__(self, number: int, worker: str, since: float, deadline: float) -> None:
        self.number, self.worker, self.since, self.deadline = number, worker, since, deadline
        self.rows = array("q")
        self.num_rows = self.num_tokens = 0


class _Load:
    """Rows and tokens that a worker holds."""

    __slots__ = ("leases", "num_rows", "num_tokens")

    def __init__(self) -> None:
        self.leases: set[int] = set()
        self.num_rows = self.num_tokens = 0


class LeaseTable:
    """Open leases, by number, by worker, and by deadline."""

    def __init__(self, spec: TaskSpec, incarnation: str) -> None:
        self.num_expired = 0  # rows
        self._lease_seconds, self._incarnation = spec.lease_seconds, incarnation
        self._held: OrderedDict[int, HeldLease] = OrderedDict()  # by number, in the order of their deadlines
        self._loads: defaultdict[str, _Load] = defaultdict(_Load)
        self._last = 0

    def open(self, worker: str, now: float) -> HeldLease:
        """A new lease, to be filled and added."""
        self._last += 1
        return HeldLease(self._last, worker, now, now + self._lease_seconds)

    def add(self, held: HeldLease) -> None:
        """Add a lease that has rows."""
        self._held[held.number] = held
        load = self._loads[held.worker]
        load.leases.add(held.number)
        load.num_rows += held.num_rows
        load.num_tokens += held.num_tokens

    def leave(self, lease: int, num_rows: int, num_tokens: int) -> None:
        """Rows and tokens less for a lease, and for its worker. What holds nothing any more is forgotten."""
        held = self._held[lease]
        load = self._loads[held.worker]
        held.num_rows -= num_rows
        held.num_tokens -= num_tokens
        load.num_rows -= num_rows
        load.num_tokens -= num_tokens
        if not held.num_rows:
            del self._held[lease]
            load.leases.discard(lease)
            if not load.leases:
                del self._loads[held.worker]

    def renew(self, token: Token, now: float) -> None:
        """Put the lease's deadline off. Raises `StaleToken`."""
        held = self.of(token)
        held.deadline = now + self._lease_seconds
        self._held.move_to_end(token.lease)  # time does not go back

    def expired(self, now: float) -> list[int]:
        """The leases that are over by now, by deadline. They are to be let go."""
        ended = sorted((held.deadline, number) for number, held in takewhile(lambda h: h[1].deadline <= now, self._held.items()))
        self.num_expired += sum(self._held[number].num_rows for _, number in ended)
        return [number for _, number in ended]

    @property
    def next_deadline(self) -> float | None:
        """Time at which the next lease runs out."""
        return next((held.deadline for held in self._held.values()), None)

    def __getitem__(self, lease: int) -> HeldLease:
        return self._held[lease]

    def __contains__(self, token: Token) -> bool:
        return token.incarnation == self._incarnation and token.lease in self._held

    def of(self, token: Token) -> HeldLease:
        """Raises `StaleToken` if it is over."""
        if token not in self:
            raise StaleToken(f"lease {token.lease} of task {token.task!r} is over")
        return self._held[token.lease]

    def of_worker(self, worker: str) -> list[int]:
        """Leases of a worker, sorted."""
        load = self._loads.get(worker)
        return sorted(load.leases) if load is not None else []

    def holders(self) -> dict[str, int]:
        """Rows held by each worker that holds any."""
        return {worker: load.num_rows for worker, load in self._loads.items()}

    def outstanding(self, worker: str) -> tuple[int, int]:
        """The rows that a worker holds, and their tokens."""
        load = self._loads.get(worker)
        return (load.num_rows, load.num_tokens) if load is not None else (0, 0)
