"""Order of a unit's writes and deletions in its storage: which of them waits for which.

    Writes     under way; a request that must be sure of what is there waits for one of them to be over
    Freeing    what is dropped and still in the storage; it waits for writes of the same groups, and for a snapshot's end

consumes: what has been dropped
waits for: writes, a snapshot, the storage
is unblocked by: `Writes.end`, `Writes.arrived`; the snapshot's end; the storage
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import numpy as np

from asyncflow.transfer_queue.durable_state import SavedDurableState
from asyncflow.transfer_queue.storage.base import Storage
from asyncflow.types import Array, GroupMeta


class Writes:
    """Writes that are under way, and the groups that come to the storage for the first time. `settled` is set, and replaced, when
    either changes."""

    def __init__(self) -> None:
        self.settled = asyncio.Event()
        self._groups: dict[object, Array] = {}  # by write, what it concerns
        self._arriving: set[int] = set()  # groups that have been admitted, and of which the controllers have not been told

    @property
    def are_under_way(self) -> bool:
        """Whether any write has not ended."""
        return bool(self._groups)

    def concern(self, groups: Array) -> bool:
        """Whether a write under way is of one of these groups (int64 [n])."""
        return any(np.isin(written, groups).any() for written in self._groups.values())

    def begin(self, groups: Array) -> object:
        """Begin a write to these groups (int64 [n]). Returns its key, for `end`."""
        write = object()
        self._groups[write] = groups
        return write

    def end(self, write: object, failed: Iterable[GroupMeta]) -> None:
        """End a write. `failed`: groups that do not arrive after all."""
        del self._groups[write]
        self._arriving.difference_update(meta.group for meta in failed)
        self._wake()

    def are_arriving(self, metas: Iterable[GroupMeta]) -> bool:
        """Whether any of these groups is arriving."""
        return bool(self._arriving) and any(meta.group in self._arriving for meta in metas)

    def arrive(self, metas: Iterable[GroupMeta]) -> None:
        """Take note of groups that have been admitted and are about to be written."""
        self._arriving.update(meta.group for meta in metas)

    def arrived(self, metas: Sequence[GroupMeta]) -> None:
        """Note that groups are stored, and that all controllers know of them."""
        if metas:
            self._arriving.difference_update(meta.group for meta in metas)
            self._wake()

    def _wake(self) -> None:
        self.settled.set()
        self.settled = asyncio.Event()


class Freeing:
    """Rows that are dropped and still in the storage. While `held_off` is locked nothing is freed: a snapshot may still read it."""

    def __init__(self, storage: Storage, durable_state: SavedDurableState, writes: Writes, group_bits: int) -> None:
        self.held_off = asyncio.Lock()
        self._storage, self._durable_state, self._writes, self._group_bits = storage, durable_state, writes, group_bits
        self._left: list[tuple[Array, Array]] = []  # rows, and whole groups
        self._one_at_a_time = asyncio.Lock()

    def add(self, rows: Array, groups: Iterable[int]) -> None:
        """Rows (int64 [n]) that are dropped, and the groups that are with them to the last row."""
        self._left.append((rows, np.array(sorted(groups), np.int64)))

    async def free(self) -> None:
        """Free what has been dropped; while it is held off, leave that to the one that holds it off."""
        async with self._one_at_a_time:
            await self._durable_state.keep()  # first: should this process die in between, they are not to come back
            while self._left and not self.held_off.locked():
                rows, groups = self._left[0]
                while self._writes.concern(rows >> self._group_bits):
                    await self._writes.settled.wait()  # what came to the storage after its group has gone would stay there
                await self._storage.drop(rows, groups)
                del self._left[0]
                self._durable_state.freed(groups.tolist())
            await self._durable_state.keep()
