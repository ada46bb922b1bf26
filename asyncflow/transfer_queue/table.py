"""The state of one task over rows and columns: a pure state machine. No I/O, no clock (time is an argument), no asyncio.

    waiting --all read columns are there--> ready --lease--> leased --outputs are there--> done
                                              ^                |  \\--k-th failure--> dead (with its error)
                                              +--expiry, failure+        (dropped rows are forgotten)

Rows are handed out by group. A task that reads whole groups gets a group only when every live row of it is ready; any other
task gets whichever rows of a group are ready. Ready groups wait in one queue per (step, purpose, interval), lowest step first
and training before evaluation, so a request looks at a handful of queue heads however many rows there are.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import msgspec

from asyncflow.types import GroupMeta, RunError, crosses


class State(IntEnum):
    WAITING = 0
    READY = 1
    LEASED = 2
    DONE = 3


class TaskSpec(msgspec.Struct, frozen=True):
    """A task: the columns that it reads and writes. A task that writes none writes the mark `done/<name>` instead.

    `purpose` limits it to groups admitted for `train` or `eval`; empty takes both.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    whole_groups: bool = True
    purpose: str = ""
    lease_seconds: float = 120.0
    max_failures: int = 3

    @property
    def outputs(self) -> tuple[str, ...]:
        """The columns whose presence means that the task is done for a row."""
        return self.writes or (f"done/{self.name}",)


class Token(msgspec.Struct, frozen=True, array_like=True):
    """Names a lease, and the incarnation of the controller that gave it."""

    task: str
    incarnation: str
    lease: int


class Lease(msgspec.Struct, frozen=True):
    """Rows handed out together: `groups` and, for each of them, its row indices."""

    token: Token
    groups: list[GroupMeta]
    rows: list[list[int]]
    attempt: int = 0

    @property
    def indices(self) -> list[int]:
        return [row for rows in self.rows for row in rows]


class DeadRow(msgspec.Struct, frozen=True):
    """A row given up, and why."""

    group: int
    row: int
    error: str


@crosses
class StaleToken(RunError):
    """The lease is over, or was given by an earlier incarnation of the controller."""


QueueKey = tuple[int, bool, int, int]  # step, is evaluation, interval low, interval high


@dataclass(slots=True)
class _Row:
    state: State = State.WAITING
    columns: set[str] = field(default_factory=set)
    failures: int = 0
    attempt: int = 0


@dataclass(slots=True)
class _Group:
    meta: GroupMeta
    rows: dict[int, _Row]
    is_queued: bool = False

    @property
    def key(self) -> QueueKey:
        return self.meta.step, self.meta.purpose != "train", self.meta.interval.low, self.meta.interval.high


@dataclass(slots=True)
class _Held:
    worker: str
    rows: dict[int, int]  # row -> its group


class Table:
    """See the module's head."""

    def __init__(self, spec: TaskSpec, incarnation: str, group_bits: int) -> None:
        self.spec = spec
        self.incarnation = incarnation
        self._group_bits = group_bits
        self._groups: dict[int, _Group] = {}
        self._queues: dict[QueueKey, deque[int]] = {}
        self._leases: dict[int, _Held] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._expiry: dict[int, float] = {}
        self._next_lease = 0
        self.ended_steps: set[int] = set()
        self.is_closed = False
        self.num_redelivered = 0
        self.num_done = 0

    # -- what there is ------------------------------------------------------------------------------------------------------

    def admit(self, metas: Iterable[GroupMeta]) -> None:
        """New groups. Those of another purpose, and those known already, are passed over."""
        for meta in metas:
            if meta.group not in self._groups and self.spec.purpose in ("", meta.purpose):
                first = meta.group << self._group_bits
                self._groups[meta.group] = _Group(meta, {first + sample: _Row() for sample in range(meta.size)})

    def notify(self, rows: Iterable[int], columns: Sequence[str]) -> list[int]:
        """These rows now have these columns. Returns the rows that this makes done. Repeating a notice changes nothing."""
        done, touched = [], dict[int, _Group]()
        for index in rows:
            group = self._groups.get(index >> self._group_bits)
            row = group.rows.get(index) if group is not None else None
            if group is None or row is None or row.state is State.DONE:
                continue
            row.columns.update(columns)
            if row.columns.issuperset(self.spec.outputs):
                row.state = State.DONE
                self.num_done += 1
                done.append(index)
            elif row.state is State.WAITING and row.columns.issuperset(self.spec.reads):
                row.state = State.READY
            touched[group.meta.group] = group
        for group in touched.values():
            self._queue_if_ready(group)
        return done

    def drop(self, rows: Iterable[int]) -> None:
        """Forget rows: they are no longer part of their groups, for this task. Unknown ones are passed over."""
        for index in rows:
            group = self._groups.get(index >> self._group_bits)
            if group is None or group.rows.pop(index, None) is None:
                continue
            if not group.rows:
                del self._groups[group.meta.group]
            else:
                self._queue_if_ready(group)

    # -- handing out --------------------------------------------------------------------------------------------------------

    def lease(self, worker: str, now: float, *, groups: int, installed: int | None = None, step: int | None = None) -> Lease | None:
        """Up to `groups` groups: of `step` alone if given, and only of those that `installed` may generate if given."""
        taken: list[_Group] = []
        for key in sorted(self._queues):
            of_step, _, low, high = key
            if (step is not None and of_step != step) or (installed is not None and not low <= installed <= high):
                continue
            while len(taken) < groups and (group := self._pop(key)) is not None:
                taken.append(group)
            if len(taken) == groups:
                break
        return self._hand_out(worker, now, taken) if taken else None

    def renew(self, token: Token, now: float) -> None:
        """Put the lease's deadline off. Raises `StaleToken`."""
        self._held(token)
        self._set_deadline(token.lease, now)

    def fail(self, token: Token, rows: Iterable[int], error: str) -> list[DeadRow]:
        """Give rows of a lease back after a failure. Returns those that have now failed too often. Raises `StaleToken`."""
        held, dead = self._held(token), []
        for index in rows:
            group_number = held.rows.pop(index, None)
            if group_number is None:
                continue
            group = self._groups.get(group_number)
            row = group.rows.get(index) if group is not None else None
            if group is None or row is None or row.state is not State.LEASED:
                continue
            row.failures += 1
            if row.failures >= self.spec.max_failures:
                dead.append(DeadRow(group_number, index, error))
                self.drop([index])
            else:
                self._give_back(group, row)
        self._forget_if_empty(token.lease)
        return dead

    def check(self, token: Token, rows: Iterable[int]) -> None:
        """That the lease is alive and holds these rows, none of them done or dropped meanwhile. Raises `StaleToken`."""
        held = self._held(token)
        for index in rows:
            group = self._groups.get(held.rows.get(index, -1))
            row = group.rows.get(index) if group is not None else None
            if row is None or row.state is not State.LEASED:
                raise StaleToken(f"lease {token.lease} of task {token.task!r} does not hold row {index}")

    def settle(self, token: Token, rows: Iterable[int]) -> None:
        """The rows of a lease that are done or given up need it no longer."""
        held = self._leases.get(token.lease) if token.incarnation == self.incarnation else None
        if held is not None:
            for row in rows:
                held.rows.pop(row, None)
            self._forget_if_empty(token.lease)

    def expire(self, now: float) -> int:
        """Deliver again what is held beyond its deadline; silence is no failure. Returns how many rows."""
        count = 0
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, lease = heapq.heappop(self._deadlines)
            if self._expiry.get(lease) == deadline:
                count += self._release(lease)
        return count

    def abandon(self, worker: str) -> int:
        """Deliver again all that a worker holds (it has gone). Returns how many rows."""
        return sum(self._release(lease) for lease, held in list(self._leases.items()) if held.worker == worker)

    # -- looking ------------------------------------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def counts(self) -> dict[str, int]:
        """Rows by state, and `redelivered`."""
        states = [row.state for group in self._groups.values() for row in group.rows.values()]
        return {state.name.lower(): states.count(state) for state in State} | {"redelivered": self.num_redelivered}

    def holders(self) -> dict[str, int]:
        """Rows held by each worker."""
        held: dict[str, int] = {}
        for lease in self._leases.values():
            held[lease.worker] = held.get(lease.worker, 0) + len(lease.rows)
        return held

    # -- inside -------------------------------------------------------------------------------------------------------------

    def _queue_if_ready(self, group: _Group, *, first: bool = False) -> None:
        if group.is_queued or not group.rows:
            return
        states = [row.state for row in group.rows.values()]
        live = [state for state in states if state is not State.DONE]
        ready = bool(live) and all(s is State.READY for s in live) if self.spec.whole_groups else State.READY in live
        if ready:
            group.is_queued = True
            queue = self._queues.setdefault(group.key, deque())
            (queue.appendleft if first else queue.append)(group.meta.group)

    def _pop(self, key: QueueKey) -> _Group | None:
        queue = self._queues.get(key, deque())
        while queue:
            group = self._groups.get(queue.popleft())
            if not queue:
                del self._queues[key]
            if group is None:
                continue  # dropped while it waited
            group.is_queued = False
            if any(row.state is State.READY for row in group.rows.values()):
                return group
        return None

    def _hand_out(self, worker: str, now: float, groups: list[_Group]) -> Lease:
        self._next_lease += 1
        held = _Held(worker, {})
        rows: list[list[int]] = []
        attempt = 0
        for group in groups:
            ready = [index for index, row in group.rows.items() if row.state is State.READY]
            for index in ready:
                group.rows[index].state = State.LEASED
                attempt = max(attempt, group.rows[index].attempt)
                held.rows[index] = group.meta.group
            rows.append(ready)
        self._leases[self._next_lease] = held
        self._set_deadline(self._next_lease, now)
        token = Token(self.spec.name, self.incarnation, self._next_lease)
        return Lease(token, [g.meta for g in groups], rows, attempt)

    def _held(self, token: Token) -> _Held:
        held = self._leases.get(token.lease) if token.incarnation == self.incarnation else None
        if held is None:
            raise StaleToken(f"lease {token.lease} of task {token.task!r} is over")
        return held

    def _set_deadline(self, lease: int, now: float) -> None:
        deadline = now + self.spec.lease_seconds
        self._expiry[lease] = deadline
        heapq.heappush(self._deadlines, (deadline, lease))

    def _give_back(self, group: _Group, row: _Row) -> None:
        row.state = State.READY
        row.attempt += 1
        self.num_redelivered += 1
        self._queue_if_ready(group, first=True)

    def _release(self, lease: int) -> int:
        held = self._leases.pop(lease)
        del self._expiry[lease]
        count = 0
        for index, group_number in held.rows.items():
            group = self._groups.get(group_number)
            row = group.rows.get(index) if group is not None else None
            if group is not None and row is not None and row.state is State.LEASED:
                self._give_back(group, row)
                count += 1
        return count

    def _forget_if_empty(self, lease: int) -> None:
        held = self._leases.get(lease)
        if held is not None and not held.rows:
            del self._leases[lease], self._expiry[lease]
