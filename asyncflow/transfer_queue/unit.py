"""A storage unit: stores what is put, tells the controllers, and only then answers the writer.

consumes: put, complete, read and drop requests
waits for: the controllers' acknowledgement of a notice, at most `notify_timeout_seconds`
is unblocked by: their answers, or that deadline
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from asyncflow.transfer_queue.controller import Controller
from asyncflow.transfer_queue.storage.base import Storage
from asyncflow.transfer_queue.table import StaleToken, Token
from asyncflow.transport import remote
from asyncflow.types import Array, Batch, Column, GroupMeta, Ragged

log = logging.getLogger(__name__)


class WireColumn(msgspec.Struct, array_like=True):
    """A column in a message; `offsets` where it is ragged."""

    name: str
    values: np.ndarray
    offsets: np.ndarray | None = None


class WireBatch(msgspec.Struct, array_like=True):
    """A `Batch` in a message: its arrays travel as raw frames."""

    indices: np.ndarray
    groups: np.ndarray
    columns: list[WireColumn]

    @classmethod
    def of(cls, batch: Batch) -> WireBatch:
        columns = [
            WireColumn(name, v.values, v.offsets) if isinstance(v, Ragged) else WireColumn(name, v)
            for name, v in batch.columns.items()
        ]
        return cls(batch.indices, batch.groups, columns)

    def batch(self) -> Batch:
        columns = {c.name: c.values if c.offsets is None else Ragged(c.values, c.offsets) for c in self.columns}
        return Batch(self.indices, self.groups, columns)


class StorageUnit:
    """One unit over one storage backend."""

    def __init__(
        self,
        storage: Storage,
        columns: Iterable[Column],
        controllers: Mapping[str, Controller],
        *,
        notify_timeout_seconds: float = 5.0,
    ) -> None:
        self.storage = storage
        self._controllers = dict(controllers)
        self._notify_timeout_seconds = notify_timeout_seconds
        marks = [Column(f"done/{name}", "uint8") for name in controllers]
        storage.declare([*columns, *marks])

    @remote
    async def put(self, batch: WireBatch, metas: list[GroupMeta]) -> None:
        """Admit groups (`metas`) with the columns that they come with."""
        self.storage.write(batch.batch())
        await self._notify(metas, batch.indices.tolist(), [c.name for c in batch.columns], None)

    @remote
    async def complete(self, token: Token, batch: WireBatch) -> np.ndarray:
        """Store a task's outputs and acknowledge its lease.

        Returns bool [n]: False where another lease was first. A lease that is over, or no longer holds all of the rows, stores
        nothing: its rows are somebody else's, or have been dropped and would never be freed.
        """
        try:
            await self._controllers[token.task].check(token, batch.indices.tolist())
        except StaleToken:
            return np.zeros(len(batch.indices), bool)
        stored = self.storage.write(batch.batch())
        await self._notify([], batch.indices.tolist(), [c.name for c in batch.columns], token)
        return stored

    @remote
    async def read(self, indices: np.ndarray, columns: list[str]) -> WireBatch:
        """The columns of rows. Raises `LookupError` naming what is not there."""
        return WireBatch.of(self.storage.read(indices, columns))

    @remote
    async def drop(self, indices: np.ndarray) -> None:
        """Free rows."""
        self.storage.drop(indices)

    async def _notify(self, metas: Sequence[GroupMeta], rows: list[int], columns: list[str], token: Token | None) -> None:
        notices = {
            asyncio.ensure_future(controller.notify(list(metas), rows, columns, token)): name
            for name, controller in self._controllers.items()
        }
        taken, late = await asyncio.wait(notices, timeout=self._notify_timeout_seconds)
        for notice in taken:
            notice.result()  # raises what the controller has raised
        for notice in late:
            log.error("controller %r has not taken a notice within %s s", notices[notice], self._notify_timeout_seconds)


def rows_of(groups: Iterable[GroupMeta], group_bits: int) -> Array:
    """int64: the rows of groups, in order."""
    return np.array([(m.group << group_bits) + sample for m in groups for sample in range(m.size)], np.int64)
