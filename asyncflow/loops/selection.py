"""Selection of the groups that a step trains, where they are those whose rewards vary.

    candidates, scored --> verdict --> ledger --+--> member: the column that tasks behind this one wait for
                                                +--> degenerate, or surplus: dropped

consumes: whole groups with their rewards
waits for: such groups
is unblocked by: the workers that score

A group whose rewards are all equal teaches nothing that compares them: it is degenerate. Of the others it is their numbers that say
which are members (`ledger/candidates.py`). A lease is held until that is certain.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from asyncflow.control.ledger import Decided, LedgerService
from asyncflow.loops.samples import MEMBER_COLUMN, SELECT_TASK
from asyncflow.transfer_queue.client import Leased, TransferQueueClient
from asyncflow.types import Array, Batch, Values


def is_varied(rewards: Array) -> bool:
    """Whether not all of a group's rewards (float32 [R]) are the same."""
    return bool((rewards != rewards[0]).any())


class Selection:
    """The task `select` of a run. `start` runs a coroutine in the background."""

    def __init__(
        self, queue: TransferQueueClient, ledger: LedgerService, start: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._queue, self._ledger, self._start = queue, ledger, start
        self._held: dict[int, Leased] = {}  # by group, of those that are undecided

    async def run(self) -> None:
        """Lease scored groups, and report to the ledger whether their rewards vary, until the run stops."""
        async for leased in self._queue.stream(SELECT_TASK):
            group = leased.lease.groups[0].group
            if self._ledger.ledger.is_member(group):  # its lease had expired before it was told so
                self._start(self._mark_member(leased))
                continue
            self._held[group] = leased
            self._ledger.decide(group, is_varied=is_varied(leased.batch.dense("reward")))

    def decided(self, decided: Decided) -> None:
        """Act on the ledger's decisions: complete members, drop the rest."""
        for group in decided.members:
            self._start(self._mark_member(self._held.pop(group)))
        for group in (*decided.degenerate, *decided.surplus):
            self._held.pop(group, None)
        if decided.left:
            self._start(self._queue.drop(decided.left))

    async def _mark_member(self, leased: Leased) -> None:
        batch = leased.batch
        columns: dict[str, Values] = {MEMBER_COLUMN.name: np.ones(len(batch), np.uint8)}
        await self._queue.complete(leased.lease, Batch(batch.indices, batch.groups, columns))
