"""Results of what a loader has delivered: outputs, done, failed. All of it in the consumer's thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncflow.transfer_queue.batches import take
from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.leases import Lease, Token
from asyncflow.transfer_queue.loader.prefetch import StreamFeed
from asyncflow.transfer_queue.loader.tensors import WritableColumn, to_values
from asyncflow.types import Array, Batch

log = logging.getLogger(__name__)
RowIndices = Tensor | Array | Sequence[int]


class HeldRows:
    """The rows that were delivered and of which nothing has been said yet, each with its lease. `feed`: while there is one."""

    def __init__(self, task: str) -> None:
        self.task = task
        self.feed: StreamFeed | None = None
        self._lease_of: dict[int, Lease] = {}

    def add(self, rows: Array, lease: Lease) -> None:
        """Add rows of a lease."""
        self._lease_of.update(dict.fromkeys(rows.tolist(), lease))

    def clear(self) -> None:
        """Forget all rows: the queue gives them back when the connection ends."""
        self.feed = None
        self._lease_of.clear()

    def complete(self, indices: RowIndices, outputs: Mapping[str, WritableColumn]) -> Tensor:
        """See `StreamDataLoader.complete`."""
        rows, leases = self._leases_of(indices)
        column = self._connected().schema.column
        return self._write(rows, leases, {name: to_values(column(name), given) for name, given in outputs.items()})

    def done(self, indices: RowIndices) -> Tensor:
        """See `StreamDataLoader.done`."""
        rows, leases = self._leases_of(indices)
        if writes := self._connected().schema.task(self.task).writes:
            raise ValueError(f"task {self.task!r} writes {', '.join(writes)}: its rows are done when they are completed with these")
        return self._write(rows, leases, {f"done/{self.task}": np.ones(len(rows), np.uint8)})

    def acknowledge(self, rows: Array) -> None:
        """Mark the rows of a batch that are neither completed nor failed as done."""
        still = [row for row in rows.tolist() if row in self._lease_of]
        if still and (num_lost := int((~self.done(still)).sum())):
            log.warning(
                "task %r: %d of %d rows not acknowledged: they were dropped, or are delivered again since their lease is over",
                self.task,
                num_lost,
                len(still),
            )

    def fail(self, indices: RowIndices, error: str) -> None:
        """See `StreamDataLoader.fail`."""
        rows, leases = self._leases_of(indices)

        async def fail(client: TransferQueueClient) -> None:
            await asyncio.gather(*(client.fail(lease, rows[at].tolist(), error) for lease, at in _by_lease(leases)))

        self._connected().call(fail, "giving rows back")
        self._let_go(rows)

    def _connected(self) -> StreamFeed:
        assert self.feed is not None, "rows are held, so there is a connection"
        return self.feed

    def _leases_of(self, indices: RowIndices) -> tuple[Array, list[Lease]]:
        """int64 [n] and its leases. Raises `ValueError` where a row is not held."""
        host = indices.cpu().numpy() if isinstance(indices, Tensor) else indices
        rows, leases = np.ascontiguousarray(host, np.int64), []
        for row in rows.tolist():
            if row not in self._lease_of:
                raise ValueError(f"row {row} is not held by this loader: it was acknowledged, or given back when the loop was left")
            leases.append(self._lease_of[row])
        return rows, leases

    def _write(self, rows: Array, leases: Sequence[Lease], columns: Mapping[str, Any]) -> Tensor:
        if not len(rows):
            return torch.zeros(0, dtype=torch.bool)
        schema = self._connected().schema
        groups = rows >> schema.group_bits
        batch = Batch(rows, groups[np.sort(np.unique(groups, return_index=True)[1])], columns)
        schema.check(batch)
        is_kept = np.zeros(len(rows), bool)

        async def complete(client: TransferQueueClient) -> None:
            async def one(lease: Lease, at: Array) -> None:
                part = take(schema, batch, at, np.flatnonzero(np.isin(batch.groups, groups[at])))
                is_kept[at] = await client.complete(lease, part)

            await asyncio.gather(*(one(lease, at) for lease, at in _by_lease(leases)))

        self._connected().call(complete, "writing back")
        self._let_go(rows)
        return torch.from_numpy(is_kept)

    def _let_go(self, rows: Array) -> None:
        for row in rows.tolist():
            self._lease_of.pop(row, None)


def _by_lease(leases: Sequence[Lease]) -> list[tuple[Lease, Array]]:
    """Each lease once, with the positions at which it stands (int64)."""
    positions: dict[Token, tuple[Lease, list[int]]] = {}
    for i, lease in enumerate(leases):
        positions.setdefault(lease.token, (lease, []))[1].append(i)
    return [(lease, np.array(at, np.int64)) for lease, at in positions.values()]
