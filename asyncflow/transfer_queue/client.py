"""The transfer queue as a loop sees it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncflow.transfer_queue.controller import Controller
from asyncflow.transfer_queue.table import Lease, StaleToken, TaskSpec, Token
from asyncflow.transfer_queue.unit import StorageUnit, WireBatch, rows_of
from asyncflow.types import Batch, GroupMeta, Ragged, Values


@dataclass(frozen=True, slots=True)
class Leased:
    """A lease and the columns that its task reads."""

    lease: Lease
    batch: Batch


class TransferQueueClient:
    """Puts, leases and completes rows. Reads go from the caller straight to the units; rows are routed to units by group."""

    def __init__(
        self, tasks: Sequence[TaskSpec], controllers: Mapping[str, Controller], units: Sequence[StorageUnit], group_bits: int
    ) -> None:
        self._tasks = {task.name: task for task in tasks}
        self._controllers = dict(controllers)
        self._units = list(units)
        self._group_bits = group_bits
        self._held: dict[Token, set[int]] = {}

    async def put(self, metas: Sequence[GroupMeta], batch: Batch) -> None:
        """Admit groups with the columns that they come with (group columns, one entry per group)."""
        for unit, positions in self._route(batch.groups):
            chosen = [metas[i] for i in positions]
            part = _take_groups(batch, positions, rows_of(chosen, self._group_bits))
            await self._units[unit].put(WireBatch.of(part), chosen)

    async def lease(self, task: str, *, groups: int = 1, installed: int | None = None, step: int | None = None) -> Leased | None:
        """Up to `groups` groups with the columns that the task reads; waits until there is one.

        `installed`: only groups that this policy version may generate. `step`: only groups of this step. None when the step has
        ended, the task is closed, or the request was withdrawn.
        """
        lease = await self._controllers[task].lease(groups, installed, step)
        if lease is None:
            return None
        parts = []
        for unit, positions in self._route(np.array([m.group for m in lease.groups], np.int64)):
            indices = np.array([row for i in positions for row in lease.rows[i]], np.int64)
            parts.append(await self._units[unit].read(indices, list(self._tasks[task].reads)))
        self._held[lease.token] = set(lease.indices)  # not sooner: a lease that its asker never sees is not to be kept alive
        return Leased(lease, _concatenate([part.batch() for part in parts]))

    async def stream(self, task: str, step: int) -> AsyncIterator[Leased]:
        """The groups of a step in the order in which they become ready, the next one fetched while this one is worked on."""
        fetching = asyncio.ensure_future(self.lease(task, step=step))
        try:
            while (leased := await fetching) is not None:
                fetching = asyncio.ensure_future(self.lease(task, step=step))
                yield leased
        finally:
            fetching.cancel()

    async def complete(self, lease: Lease, outputs: Batch) -> np.ndarray:
        """Write a task's outputs for rows of a lease and acknowledge them, in one request.

        Returns bool [n]: False for a row whose outputs are not kept, because the lease is over or another one was first.
        """
        (unit, _), *others = self._route(outputs.indices >> self._group_bits)
        if others:
            raise ValueError("complete takes rows of one unit: complete a lease group by group")
        stored = await self._units[unit].complete(lease.token, WireBatch.of(outputs))
        self._let_go(lease, outputs.indices.tolist())
        return stored

    async def complete_marks(self, leases: Sequence[Lease]) -> None:
        """Acknowledge leases of a task without outputs: its rows get the mark `done/<task>`.

        Raises `StaleToken`, and acknowledges nothing, when one of them is over.
        """
        for lease in leases:
            await self._controllers[lease.token.task].check(lease.token, lease.indices)
        for lease in leases:
            for meta, rows in zip(lease.groups, lease.rows, strict=True):
                marks = {f"done/{lease.token.task}": np.ones(len(rows), np.uint8)}
                await self.complete(lease, Batch(np.array(rows, np.int64), np.array([meta.group], np.int64), marks))

    async def fail(self, lease: Lease, rows: Sequence[int], error: str) -> None:
        """Give rows back after a failure. Does nothing when the lease is over: its rows have been given back already."""
        self._let_go(lease, rows)
        with contextlib.suppress(StaleToken):
            await self._controllers[lease.token.task].fail(lease.token, list(rows), error)

    async def renew_held(self) -> None:
        """For ever: put the deadlines of all leases held through this client off, well before they are reached."""
        while True:
            await asyncio.sleep(min(task.lease_seconds for task in self._tasks.values()) / 3)
            for token in list(self._held):
                try:
                    await self._controllers[token.task].renew(token)
                except StaleToken:  # expired all the same: its rows are somebody else's by now
                    self._held.pop(token, None)

    async def withdraw(self, task: str) -> None:
        """Have this worker's parked requests answered with None."""
        await self._controllers[task].withdraw()

    async def drop(self, rows: Sequence[int] | np.ndarray) -> None:
        """Free rows everywhere."""
        indices = np.asarray(rows, np.int64)
        if len(indices):
            for controller in self._controllers.values():
                await controller.drop(indices.tolist())
            for unit, positions in self._route(indices >> self._group_bits):
                await self._units[unit].drop(indices[positions])

    async def end_step(self, task: str, step: int) -> None:
        """Tell a task that no more rows of this step will come."""
        await self._controllers[task].end_step(step)

    async def close(self, task: str | None = None) -> None:
        """End the stream of one task, or of all."""
        for name, controller in self._controllers.items():
            if task in (None, name):
                await controller.close()

    def _let_go(self, lease: Lease, rows: Sequence[int]) -> None:
        held = self._held.get(lease.token, set())
        held.difference_update(rows)
        if not held:
            self._held.pop(lease.token, None)

    def _route(self, groups: np.ndarray) -> list[tuple[int, list[int]]]:
        """(unit, positions in `groups`) for every unit concerned."""
        units = groups % len(self._units)
        return [(int(unit), np.flatnonzero(units == unit).tolist()) for unit in np.unique(units)]


def _take_groups(batch: Batch, positions: list[int], indices: np.ndarray) -> Batch:
    columns = {
        name: values.take(positions) if isinstance(values, Ragged) else values[positions] for name, values in batch.columns.items()
    }
    return Batch(indices, batch.groups[positions], columns)


def _concatenate(batches: list[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    columns: dict[str, Values] = {}
    for name, values in batches[0].columns.items():
        if isinstance(values, Ragged):
            columns[name] = Ragged.from_arrays([entry for b in batches for entry in b.ragged(name)], values.values.dtype.name)
        else:
            columns[name] = np.concatenate([b.dense(name) for b in batches])
    indices = np.concatenate([b.indices for b in batches])
    return Batch(indices, np.concatenate([b.groups for b in batches]), columns)
