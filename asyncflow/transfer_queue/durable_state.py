"""State of a storage unit, apart from columns, that it must have again after its process has died."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from asyncflow.transfer_queue.notices import Notice
from asyncflow.transfer_queue.storage.base import Storage
from asyncflow.types import Array

REMEMBERED = 65536
GONE_KEPT = 2048  # of these, in the facts: as many as may go while a lost answer is asked for again
FACTS = "facts"


class DurableState(msgspec.Struct):
    """Per task the partitions that have ended, and whether it is closed; the rows that have been dropped from groups that are still
    there; the groups that went last (int64), should a put of theirs be repeated, or a controller not have heard that they went."""

    ended_partitions: dict[str, list[int]] = {}
    closed: list[str] = []
    dropped: dict[int, set[int]] = {}
    gone: bytes = b""

    @classmethod
    def decoded(cls, encoded: bytes) -> DurableState:
        """State from its encoding."""
        return msgspec.msgpack.decode(encoded, type=cls)

    def dropped_rows(self) -> Array:
        """int64 [n]."""
        return np.array([row for rows in self.dropped.values() for row in rows], np.int64)


class SavedDurableState:
    """The facts, and the storage that keeps them: `keep` after every change. `gone`: groups that went, the latest ones."""

    def __init__(self, storage: Storage) -> None:
        self.now = DurableState()
        self.gone: dict[int, None] = {}
        self._storage = storage
        self._kept = self.encoded()  # in the storage, if it is durable

    async def open(self) -> None:
        """Read the state that an earlier process has left."""
        if (facts := await self._storage.kept(FACTS)) is not None:
            self.now, self._kept = DurableState.decoded(facts), facts
            self.gone.update(dict.fromkeys(np.frombuffer(self.now.gone, np.int64).tolist()))

    async def keep(self) -> None:
        """If they have changed, and something outlives this process."""
        if self._storage.is_durable and (encoded := self.encoded()) != self._kept:
            await self._storage.keep(FACTS, encoded)
            self._kept = encoded

    def encoded(self) -> bytes:
        """State as it is stored (MessagePack)."""
        return msgspec.msgpack.encode(self.now)

    def told(self) -> list[Notice]:
        """State that controllers need, without dropped rows."""
        ended = [
            Notice(task=task, ended_partition=partition)
            for task, partitions in self.now.ended_partitions.items()
            for partition in partitions
        ]
        return ended + [Notice(task=task, is_closed=True) for task in self.now.closed]

    def end_partition(self, task: str, partition: int) -> None:
        """Remember that a partition of a task has ended."""
        ended = self.now.ended_partitions.setdefault(task, [])
        if partition not in ended:
            ended.append(partition)

    def close_task(self, task: str) -> None:
        """Remember that a task is closed."""
        if task not in self.now.closed:
            self.now.closed.append(task)

    def merge(self, others: DurableState) -> None:
        """The ends in them."""
        for task, partitions in others.ended_partitions.items():
            for partition in partitions:
                self.end_partition(task, partition)
        for task in others.closed:
            self.close_task(task)

    def drop(self, rows_of: Iterable[tuple[int, int]], gone: Iterable[int]) -> None:
        """(group, row) of the rows that have been dropped, and the groups of which nothing is left."""
        going = dict.fromkeys(gone)
        for group, row in rows_of:
            if group not in going:
                self.now.dropped.setdefault(group, set()).add(row)
        self.gone.update(going)
        forget_oldest(self.gone)
        if going and self._storage.is_durable:
            self.now.gone = np.array(list(self.gone)[-GONE_KEPT:], np.int64).tobytes()

    def freed(self, groups: Iterable[int]) -> None:
        """Note that nothing of these groups is in the storage any more."""
        for group in groups:
            self.now.dropped.pop(group, None)


def forget_oldest(remembered: dict[Any, Any]) -> None:
    """Remove the oldest entries above `REMEMBERED`."""
    while len(remembered) > REMEMBERED:
        del remembered[next(iter(remembered))]
