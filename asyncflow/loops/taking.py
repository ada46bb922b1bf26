"""Taking of the groups that are trained: a loop of the driver, one for each task that trains a model.

    queue --lease--> take --offer--> ledger --next_round--> the rank that trains them
    queue <--mark, drop--- take <---committed--- ledger

consumes: complete groups of one step after another
waits for: ranks that ask for a round; such groups; the commit of the step
is unblocked by: the ranks; the tasks before training; the end of the run

The driver holds the leases, until the step is committed; ranks get what they are to train by the ledger's rounds. So a round is one
message, and the ledger alone says which rank trains what.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable

from asyncflow.control.ledger import LedgerService
from asyncflow.control.schedule import Schedule
from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.controller import Handed
from asyncflow.transfer_queue.leases import Lease, Want
from asyncflow.transport import client_name

HOLDER = "driver"
"""Name under which the leases are held."""


class Taking:
    """Leases of a task that trains a model. `num_tokens`: tokens of a group, by which those of a round are chosen."""

    def __init__(
        self, task: str, queue: TransferQueueClient, ledger: LedgerService, schedule: Schedule, num_tokens: Callable[[Handed], int]
    ) -> None:
        self._task, self._queue, self._ledger, self._schedule, self._num_tokens = task, queue, ledger, schedule, num_tokens
        self._put_aside: dict[int, Handed] = {}  # complete groups of later steps, where those may come first

    async def run(self) -> None:
        """Take the groups of each step until it is committed, then mark them as trained, and drop them when no other task that
        trains needs them. Until the run stops."""
        client_name.set(HOLDER)
        for step in itertools.count(self._ledger.ledger.committed_by(self._task)):
            leases: dict[int, Lease] = {}  # by group; of one that was delivered again, the last one
            taking = asyncio.ensure_future(self._take(step, leases))
            closed = asyncio.ensure_future(self._ledger.closed(step, self._task))
            try:
                await asyncio.wait([taking, closed], return_when=asyncio.FIRST_COMPLETED)
                if taking.done():
                    taking.result()  # the queue is closed, or something has gone wrong
                if not await closed:
                    return
            finally:
                for future in (taking, closed):
                    future.cancel()
            # Of a lease that has expired, the rows are marked by the worker that has them now, or end with the drop.
            await self._queue.mark(list(leases.values()))
            if self._task == self._ledger.ledger.tasks.policy:
                await self._ledger.released(step)
                await self._queue.drop([row for lease in leases.values() for row in lease.indices])

    async def _take(self, step: int, leases: dict[int, Lease]) -> None:
        async for handed in self._groups(step):
            leases[handed.lease.groups[0].group] = handed.lease
            self._ledger.offer(step, self._task, handed, self._num_tokens(handed))

    async def _groups(self, step: int) -> AsyncIterator[Handed]:
        """The complete groups of a step, as they come. Where groups of later steps may come first, the ledger says which."""
        is_strict, task = self._schedule.membership == "strict", self._task
        await self._ledger.may_take(step, task)
        for group in [*self._put_aside]:
            if self._ledger.claim(step, group):
                yield self._put_aside.pop(group)
        want, columns = Want(groups=1, partition=step if is_strict else None), list(self._queue.schema.task(task).reads)
        while True:
            await self._ledger.may_take(step, task)
            if (handed := await self._queue.leases.ask(task, want, columns)) is None:
                return  # the queue is closed
            self._queue.leases.hold(handed.lease)
            group = handed.lease.groups[0].group
            if not is_strict:
                self._put_aside[group] = handed  # in the place of an expired lease, if it was delivered again
                if not self._ledger.claim(step, group):
                    continue
                del self._put_aside[group]
            yield handed
