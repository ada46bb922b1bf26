"""State of a storage unit, apart from columns, that it must have again after its process has died."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from asyncflow.transfer_queue.notices import Notice
from asyncflow.transfer_queue.storage.base import QueueOwner, Storage
from asyncflow.types import Array, RunError

REMEMBERED = 65536
GONE_KEPT = 2048  # of these, in the durable state: as many as may go while a lost answer is asked for again; and all not freed yet
DURABLE_STATE_KEY = "facts"


class DurableState(msgspec.Struct):
    """Per task the partitions that have ended, and whether it is closed; the rows that have been dropped from groups that are still
    there; the groups that went last (int64), should a put of theirs be repeated, or a controller not have heard that they went, and
    those that are still in the storage.
    `attempt`: of the run whose queue it is."""

    ended_partitions: dict[str, list[int]] = {}
    closed: list[str] = []
    dropped: dict[int, set[int]] = {}
    gone: bytes = b""
    attempt: str = ""

    def dropped_rows(self) -> Array:
        """Rows that are dropped, int64 [n]."""
        return np.array([row for rows in self.dropped.values() for row in rows], np.int64)

    def ends(self) -> list[Notice]:
        """The partitions that have ended, and the closed tasks, as controllers are told of them."""
        partitions = [Notice(task=task, ended_partition=n) for task, ended in self.ended_partitions.items() for n in ended]
        return partitions + [Notice(task=task, is_closed=True) for task in self.closed]


class SavedDurableState:
    """The durable state, and the storage that keeps it: `keep` after every change. `gone`: groups that went, the latest ones."""

    def __init__(self, storage: Storage) -> None:
        self.now = DurableState()
        self.gone: dict[int, None] = {}
        self._storage = storage
        self._unfreed: dict[int, None] = {}  # groups that went, and are in the storage
        self._keeping = asyncio.Lock()  # of two at once the older state might come last
        self._kept = self.encoded()  # in the storage, if it is durable

    async def open(self, owner: QueueOwner | None = None) -> None:
        """Read the state that an earlier process of the owner's has left. Raises `RunError` where the storage has another one's:
        what has gone there would not come again."""
        attempt = self.now.attempt = owner.attempt if owner is not None else ""
        if (kept := await self._storage.kept(DURABLE_STATE_KEY)) is not None:
            self.now, self._kept = msgspec.msgpack.decode(kept, type=DurableState), kept
            if self.now.attempt != attempt:
                raise RunError(
                    f"queue.storage has kept the state of another attempt of this run: {type(self._storage).__name__}.open is to "
                    f"remove what another owner has stored"
                )
            self.gone.update(dict.fromkeys(np.frombuffer(self.now.gone, np.int64).tolist()))

    async def keep(self) -> None:
        """Keep the state, if it has changed and something outlives this process."""
        async with self._keeping:
            if self._storage.is_durable and (encoded := self.encoded()) != self._kept:
                await self._storage.keep(DURABLE_STATE_KEY, encoded)
                self._kept = encoded

    def encoded(self) -> bytes:
        """State as it is stored (MessagePack)."""
        return msgspec.msgpack.encode(self.now)

    def end(self, notice: Notice) -> None:
        """Remember the end of a partition, or of a task."""
        if notice.ended_partition is not None:
            ended = self.now.ended_partitions.setdefault(notice.task, [])
            if notice.ended_partition not in ended:
                ended.append(notice.ended_partition)
        elif notice.task not in self.now.closed:
            self.now.closed.append(notice.task)

    def drop(self, rows_of: Iterable[tuple[int, int]], gone: Iterable[int]) -> None:
        """(group, row) of the rows that have been dropped, and the groups of which nothing is left."""
        going = dict.fromkeys(gone)
        for group, row in rows_of:
            if group not in going:
                self.now.dropped.setdefault(group, set()).add(row)
        self.gone.update(going)
        forget_oldest(self.gone)
        if going and self._storage.is_durable:
            self._unfreed.update(going)
            self._note_gone()

    def freed(self, groups: Iterable[int]) -> None:
        """Note that nothing of these groups is in the storage any more."""
        for group in groups:
            self.now.dropped.pop(group, None)
            self._unfreed.pop(group, None)

    def come_back(self, groups: Iterable[int]) -> None:
        """Note that these groups are there again: a snapshot had them."""
        for group in groups:
            self.gone.pop(group, None)
        if self._storage.is_durable:
            self._note_gone()

    def _note_gone(self) -> None:
        last = dict.fromkeys(list(self.gone)[-GONE_KEPT:])
        older = [group for group in self._unfreed if group not in last]
        self.now.gone = np.array([*older, *last], np.int64).tobytes()


def forget_oldest(remembered: dict[Any, Any]) -> None:
    """Remove the oldest entries above `REMEMBERED`."""
    while len(remembered) > REMEMBERED:
        del remembered[next(iter(remembered))]
