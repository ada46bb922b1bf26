"""Storage that takes the time of a unit: its requests one after another, each as long as costs say.

consumes: batches, requests for columns
waits for: the requests before, and its own seconds
is unblocked by: their end; the clock
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from asyncflow.engines.costs import Costs
from asyncflow.transfer_queue.schema import Schema
from asyncflow.transfer_queue.storage.base import QueueOwner, Storage, Stored
from asyncflow.types import Array, Batch, GroupMeta, Ragged


class SleepingStorage(Storage):
    """Storage of one unit, over one that takes no time. Dropping rows takes none here either."""

    is_durable = False
    is_immediate = False

    def __init__(self, storage: Storage, costs: Costs, lock: asyncio.Lock) -> None:
        """`lock`: of this unit; units in one process share it."""
        self._storage, self._costs, self._lock = storage, costs, lock

    async def open(self, schema: Schema, owner: QueueOwner | None = None) -> None:
        await self._storage.open(schema, owner)

    async def write(self, metas: Sequence[GroupMeta], batch: Batch) -> None:
        await self._work_on(batch)
        await self._storage.write(metas, batch)

    async def read(self, indices: Array, columns: Sequence[str]) -> Batch:
        found = await self._storage.read(indices, columns)
        await self._work_on(found)
        return found

    async def drop(self, rows: Array, groups: Array) -> None:
        await self._storage.drop(rows, groups)

    def recover(self) -> AsyncIterator[Stored]:
        return self._storage.recover()

    async def keep(self, name: str, value: bytes) -> None:
        await self._storage.keep(name, value)

    async def kept(self, name: str) -> bytes | None:
        return await self._storage.kept(name)

    @property
    def nbytes(self) -> int:
        """See `Storage`."""
        return self._storage.nbytes

    async def remove(self) -> None:
        await self._storage.remove()

    async def close(self) -> None:
        await self._storage.close()

    async def _work_on(self, batch: Batch) -> None:
        columns = batch.columns.values()
        num_bytes = sum(column.values.nbytes if isinstance(column, Ragged) else column.nbytes for column in columns)
        async with self._lock:
            await asyncio.sleep(self._costs.unit(len(batch.indices), num_bytes))
