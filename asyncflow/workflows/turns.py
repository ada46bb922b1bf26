"""What a trainer works on next: the complete groups of a step, made ready ahead of the computation, and accounted for behind it.

consumes: complete groups of one step
waits for: such groups; with several data-parallel groups, until each of them has one, or nothing is left to wait for
is unblocked by: producers; the ledger, which gives out turns; the end of the step

    queue --take--> ready to train --offer--> ledger --turn--> engine --account--> ledger
                    (some groups ahead)                        (all ranks alike)

Nothing here computes for long: the engine finds its next turn prepared when it has ended one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from asyncflow.algorithms.base import Algorithm
from asyncflow.engines.base import MicroBatch, MicroBatchResult
from asyncflow.telemetry.fingerprints import FingerprintLog
from asyncflow.telemetry.spans import Recorder
from asyncflow.transfer_queue.client import Leased, TransferQueueClient
from asyncflow.transfer_queue.leases import StaleToken, Want
from asyncflow.workflows.ledger import LedgerService
from asyncflow.workflows.samples import Shape, check_interval, consumed, micro_batches
from asyncflow.workflows.schedule import Schedule
from asyncflow.workflows.signal import Signal


@dataclass(frozen=True, slots=True)
class Work:
    """A group, ready to be trained."""

    leased: Leased
    micro_batches: list[MicroBatch]


@dataclass(frozen=True, slots=True)
class Turn:
    """What one rank trains at the same time as the others: a group or some, or none where only the others have any left."""

    works: list[Work]

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Of all groups, in order."""
        return [piece for work in self.works for piece in work.micro_batches]

    @contextmanager
    def computing(self, spans: Recorder, step: int) -> Iterator[None]:
        """The lane shows the turn; where it has several groups, each is told of as well."""
        began, groups = spans.clock(), [work.leased.lease.groups[0].group for work in self.works]
        rows = [len(work.leased.batch) for work in self.works]
        tokens = sum(piece.logical_tokens for piece in self.micro_batches)
        of_one = {"group": groups[0]} if len(groups) == 1 else {}
        with spans.busy("forward_backward", step=step, version=step, rows=sum(rows), tokens=tokens, **of_one):
            yield
        for group, of_group in zip(groups, rows, strict=True) if not of_one else ():
            spans.beside("train_group", began, step=step, version=step, group=group, rows=of_group)


class Turns:
    """The turns of one step of one rank. A context, within which groups are taken; at its end all are accounted for."""

    def __init__(
        self,
        queue: TransferQueueClient,
        ledger: LedgerService,
        schedule: Schedule,
        algorithm: Algorithm,
        shape: Shape,
        rank: int,
        step: int,
        put_aside: dict[int, Leased],
    ) -> None:
        """`put_aside`: complete groups of later steps, where those may come first."""
        self._queue, self._ledger, self._schedule, self._algorithm, self._shape = queue, ledger, schedule, algorithm, shape
        self._rank, self._step, self._put_aside = rank, step, put_aside
        self._held: dict[int, Leased] = {}  # by group: leases are held until the commit
        self._ready: dict[int, Work] = {}
        self._changed, self._is_over = Signal(), False
        self._beside = asyncio.TaskGroup()

    async def __aenter__(self) -> Turns:
        await self._beside.__aenter__()
        self._beside.create_task(self._take())
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._is_over = True
        self._changed.notify()
        await self._beside.__aexit__(*error)

    async def __aiter__(self) -> AsyncIterator[Turn]:
        """Until the step has no more. The next turn is asked for while this one is computed."""
        asking = self._beside.create_task(self._ledger.turn(self._step, self._rank, 0))
        for number in itertools.count(1):
            if (groups := await asking) is None:
                return
            asking = self._beside.create_task(self._ledger.turn(self._step, self._rank, number))
            turn = Turn([self._ready.pop(group) for group in groups])
            self._changed.notify()
            yield turn

    def trained(self, turn: Turn, results: list[MicroBatchResult], fingerprints: FingerprintLog) -> None:
        """The turn's gradients have been added: its figures, for the books."""
        of = iter(results)
        for work in turn.works:
            of_work = [next(of) for _ in work.micro_batches]
            fingerprints.group(work.leased.batch, of_work)
            figures = consumed(self._step, work.leased.batch, work.micro_batches, of_work)
            self._beside.create_task(self._ledger.consume(self._step, figures))

    async def commit(self) -> None:
        """The step is final: what was taken of it is done, and dropped."""
        leases = [leased.lease for leased in self._held.values()]
        for lease in leases:
            with suppress(StaleToken):  # it has expired: whoever was given the rows again ends them, or the drop does
                await self._queue.complete_marks([lease])
        await self._queue.drop([row for lease in leases for row in lease.indices])

    async def _take(self) -> None:
        """Make groups ready to train, ahead of the computation, until the step has no more."""
        of_step = members(self._queue, self._ledger, self._schedule, self._step, self._put_aside, self._has_room)
        async for leased in of_step:
            check_interval(leased, self._step, self._schedule.max_staleness)
            group, batch = leased.lease.groups[0].group, leased.batch
            is_known, self._held[group] = group in self._held, leased
            if is_known:  # its lease had expired: it was delivered again, and its gradient is in the sum already, or will be
                continue
            advantages = self._algorithm.advantages(batch.dense("reward"))
            pieces = micro_batches(self._step, batch, advantages, self._shape.rows_per_micro_batch)
            self._ready[group] = Work(leased, list(pieces))
            if not await self._ledger.offer(self._step, self._rank, group, len(batch.ragged("response_ids").values)):
                del self._ready[group]  # as above, but delivered to another rank before; the lease is this one's to end now
                self._changed.notify()

    async def _has_room(self) -> None:
        """Wait until one more group may be made ready, or the step is over."""
        await self._changed.until(lambda: self._is_over or len(self._ready) < self._shape.groups_ahead)


async def members(
    queue: TransferQueueClient,
    ledger: LedgerService,
    schedule: Schedule,
    step: int,
    put_aside: dict[int, Leased],
    room: Callable[[], Awaitable[None]],
) -> AsyncIterator[Leased]:
    """The complete groups of a step, as they come; where those of later steps may come first, it is the ledger that says which.

    `room` is waited for before a group is leased. What has been leased is handed on at once: a group that one rank held back would
    be waited for by all.
    """
    if schedule.membership == "strict":
        while (leased := await _lease(queue, room, step=step)) is not None:
            yield leased
        return
    for group in [*put_aside]:
        if await ledger.claim(step, group):
            yield put_aside.pop(group)
    while (leased := await _lease(queue, room, until=step)) is not None:
        group = leased.lease.groups[0].group
        put_aside[group] = leased  # in the place of an expired lease, if it was delivered again
        if await ledger.claim(step, group):
            yield put_aside.pop(group)


async def _lease(queue: TransferQueueClient, room: Callable[[], Awaitable[None]], **wanted: int) -> Leased | None:
    await room()
    return await queue.lease("train", Want(**wanted))
