"""The queues of one task's ready groups, and the kinds of groups that have them. Pure.

A kind is (priority, partition, interval low, interval high, topic): what requests tell groups apart by, and, in this order, what
goes first. A group whose interval is narrowed later keeps its priority.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from asyncflow.types import Interval

CHUNK = 1024
CHUNK_SECONDS = 0.1  # groups that became ready within it may share a timestamp

KindKey = tuple[int, int, int, int, str]  # priority, partition, interval low, interval high, topic


class _QueueChunk:
    """Groups of a queue in order; those before `head` have been taken. `since`: when the first of them became ready."""

    __slots__ = ("groups", "head", "since")

    def __init__(self, groups: Iterable[int], since: float) -> None:
        self.groups = array("q", groups)
        self.head = 0
        self.since = since


class Kind:
    """The groups of one key, and the queue of the ready ones among them.

    An entry of the queue counts if its group's `queued` flag is set: a group chosen out of turn leaves its entry behind, to be
    passed over. `num_entries` counts entries, `num_queued` groups whose flag is set, `num_available` the ready rows in these.
    """

    __slots__ = ("chunks", "interval", "key", "num_available", "num_entries", "num_groups", "num_queued", "number")

    def __init__(self, number: int, key: KindKey) -> None:
        self.number, self.key, self.interval = number, key, Interval(key[2], key[3])
        self.chunks: deque[_QueueChunk] = deque()
        self.num_groups = self.num_entries = self.num_queued = self.num_available = 0

    def push(self, groups: Sequence[int] | array[int], now: float, is_first: bool) -> None:
        """Append groups to the queue, or put them first."""
        self.num_entries += len(groups)
        if is_first:  # no earlier time may be behind a later one: the head tells how long anything has waited
            self.chunks.appendleft(_QueueChunk(groups, min(now, self.chunks[0].since) if self.chunks else now))
            return
        last = self.chunks[-1] if self.chunks else None
        if last is not None and now - last.since <= CHUNK_SECONDS and len(last.groups) < CHUNK:
            last.groups.extend(groups)
        else:
            self.chunks.append(_QueueChunk(groups, now))

    def entries(self) -> Iterator[int]:
        """Groups in the queue, in order."""
        for chunk in self.chunks:
            yield from chunk.groups[chunk.head :] if chunk.head else chunk.groups

    def head(self) -> int:
        """First group of the queue."""
        chunk = self.chunks[0]
        return chunk.groups[chunk.head]

    @property
    def since(self) -> float:
        """Time at which the first group of the queue became ready."""
        return self.chunks[0].since

    def pop(self) -> None:
        """Remove the first group."""
        chunk = self.chunks[0]
        chunk.head += 1
        self.num_entries -= 1
        if chunk.head == len(chunk.groups):
            self.chunks.popleft()


class ReadyQueues:
    """Queues of ready groups, one for each kind; those that are not empty are in order. `is_queued(kind, group)`: whether an entry
    of a queue still counts."""

    def __init__(self, is_queued: Callable[[Kind, int], bool]) -> None:
        self.kinds: dict[int, Kind] = {}
        self._kind_of: dict[KindKey, Kind] = {}
        self._active: list[KindKey] = []  # sorted: the keys of kinds that have ready groups
        self._is_queued = is_queued
        self._num_made = 0

    def kind(self, key: KindKey) -> Kind:
        """Queue of a kind, which is made if it is new."""
        kind = self._kind_of.get(key)
        if kind is None:
            self._num_made += 1
            kind = self._kind_of[key] = self.kinds[self._num_made] = Kind(self._num_made, key)
        return kind

    def forget(self, kind: Kind, num_groups: int) -> None:
        """Forget groups of this kind that are gone, and the kind with its last one."""
        kind.num_groups -= num_groups
        if not kind.num_groups:
            del self.kinds[kind.number], self._kind_of[kind.key]

    def queue(self, kind: Kind, groups: Sequence[int] | array[int], now: float, is_first: bool) -> None:
        """Queue groups of a kind."""
        if not kind.num_queued:
            insort(self._active, kind.key)
        kind.num_queued += len(groups)
        kind.push(groups, now, is_first)

    def unqueue(self, kind: Kind, num_groups: int) -> None:
        """Note that so many entries of a kind do not count any more."""
        kind.num_queued -= num_groups
        if not kind.num_queued:
            kind.chunks.clear()
            kind.num_entries = 0
            del self._active[bisect_left(self._active, kind.key)]
        elif kind.num_entries > 2 * kind.num_queued + CHUNK:
            kept = dict.fromkeys(group for group in kind.entries() if self._is_queued(kind, group))
            kind.chunks = deque([_QueueChunk(kept, kind.since)])
            kind.num_entries = len(kept)

    def matching(self, partition: int | None, installed: int | None) -> Iterator[Kind]:
        """Kinds with ready groups, first things first. The kind just yielded may lose its last one meanwhile, others may not."""
        i = 0
        while i < len(self._active):
            key = self._active[i]
            if (partition is None or key[1] == partition) and (installed is None or key[2] <= installed <= key[3]):
                yield self._kind_of[key]
            if i < len(self._active) and self._active[i] is key:
                i += 1
