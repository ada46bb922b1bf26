"""Work of a trainer: the complete groups of a step, made ready ahead of the computation, and accounted for behind it.

consumes: complete groups of one step
waits for: such groups; with several data-parallel groups, until each of them has one, or nothing is left to wait for
is unblocked by: producers; the ledger, which gives out rounds; the end of the step

    queue --take--> ready to train --offer--> ledger --round-> engine --account--> ledger
                    (some groups ahead)                        (all ranks alike)

Nothing here computes for long: the engine finds its next round prepared when it has ended one. Where a step has several updates, or
an algorithm waits for the whole batch, all of the step's groups are made ready as they come, by each rank about as many, and kept
until the last update that needs them; their leases are held until the commit in any case.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from asyncflow.algorithms.base import ModelObjective
from asyncflow.control.ledger import LedgerService, StepTotals
from asyncflow.control.schedule import Schedule
from asyncflow.control.signal import Signal
from asyncflow.engines.base import MicroBatch, MicroBatchResult
from asyncflow.loops.context import LoopContext
from asyncflow.loops.samples import check_interval, consumed, figures_of, left_out, micro_batches, scored_group
from asyncflow.telemetry.fingerprints import StepLog
from asyncflow.transfer_queue.client import Leased, TransferQueueClient
from asyncflow.transfer_queue.leases import Want
from asyncflow.types import Advantages, RunError


@dataclass(frozen=True, slots=True)
class Work:
    """A group, ready to be trained. Its micro-batches are not there yet where its advantages wait for the whole batch."""

    leased: Leased
    advantages: Advantages
    micro_batches: list[MicroBatch]


@dataclass(frozen=True, slots=True)
class Round:
    """Groups that one rank trains at the same time as the other ranks; none where only the others have groups left.

    `micro_batches`: those to compute, in order: all, or, with `skips`, those that have advantages. Of an update's first round one
    is computed in any case: the engine then has a gradient, of zeros perhaps, and an update to make, as it would without
    skipping.
    """

    works: list[Work]
    skips: bool
    micro_batches: list[MicroBatch]

    @staticmethod
    def of(works: list[Work], *, skips: bool, is_first: bool) -> Round:
        """Round of these groups."""
        pieces = [piece for work in works for piece in work.micro_batches]
        if skips:
            pieces = [piece for piece in pieces if piece.has_advantages] or (pieces[:1] if is_first else [])
        return Round(works, skips, pieces)

    def results(self, of_engine: Sequence[MicroBatchResult]) -> list[list[MicroBatchResult]]:
        """Results by group, from those of the micro-batches that were computed. A micro-batch that could have been skipped is
        reported as if it had been, so that no figure depends on which group came first.

        Raises `RunError` if that one had a loss: then the algorithm has said what is not so.
        """
        made = {id(piece): result for piece, result in zip(self.micro_batches, of_engine, strict=True)}
        for piece, result in zip(self.micro_batches, of_engine, strict=True) if self.skips else ():
            if not piece.has_advantages and result.is_finite and result.loss_sum != 0:
                raise RunError(
                    f"rows {piece.indices.tolist()} have no advantages and a loss of {result.loss_sum:.3g}, so leaving such rows "
                    f"out changes what is learnt: set train.skip_zero_advantages=false, and is_zero_without_advantages=False in "
                    f"the algorithm"
                )
        return [
            [left_out(piece) if self.skips and not piece.has_advantages else made[id(piece)] for piece in work.micro_batches]
            for work in self.works
        ]


class Rounds:
    """Rounds of one step of one rank, by update. A context, within which groups are taken; at its end all are accounted for."""

    def __init__(
        self,
        context: LoopContext,
        objective: ModelObjective,
        rank: int,
        step: int,
        put_aside: dict[int, Leased],
        task: str = "train",
    ) -> None:
        """`put_aside`: complete groups of later steps, where those may come first."""
        self._queue, self._ledger, self._schedule = context.queue, context.ledger, context.schedule
        self._shape, self._spans, self._objective = (shape := context.shape), context.spans, objective
        self.task, self.step, self.num_updates = task, step, shape.num_updates
        self._rank, self._put_aside = rank, put_aside
        self._skips = shape.skips_zero_advantages and objective.is_zero_without_advantages
        self._keeps_all = objective.waits_for_batch or shape.num_updates > 1
        self._sums: list[float] | None = None  # of the step's statistic
        self._update = 0
        self._held: dict[int, Leased] = {}  # by group: leases are held until the commit
        self._ready: dict[int, Work] = {}
        self._changed = Signal()
        self._beside = asyncio.TaskGroup()

    async def __aenter__(self) -> Rounds:
        await self._beside.__aenter__()
        self._taking = self._beside.create_task(self._take())
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._taking.cancel()
        await self._beside.__aexit__(*error)

    async def of(self, update: int) -> AsyncIterator[Round]:
        """Rounds of one of the step's updates. The next round is asked for while this one is computed."""
        self._update, of_update = update, (self.task, update)
        asking = self._beside.create_task(self._ledger.round_of_rank(self.step, self._rank, 0, *of_update))
        for number in itertools.count(1):
            if (groups := await asking) is None:
                return
            if self._objective.waits_for_batch and self._sums is None:
                self._sums = await self._ledger.statistics(self.step, self.task)
                if self._sums is None:
                    return
            asking = self._beside.create_task(self._ledger.round_of_rank(self.step, self._rank, number, *of_update))
            works = [self._work(group) for group in groups]
            current = Round.of(works, skips=self._skips, is_first=number == 1)
            self._changed.notify()
            yield current

    def trained(self, current: Round, results: list[MicroBatchResult], fingerprints: StepLog) -> None:
        """Report the figures of a round whose gradients have been added to the ledger and the fingerprints."""
        for work, of_work in zip(current.works, current.results(results), strict=True):
            fingerprints.group(work.leased.batch, of_work)
            if self._update:  # the weights are not the version's any more: what differs now is no mismatch of the engines
                of_work = [replace(result, metrics=_without_mismatch(result.metrics)) for result in of_work]
            group, figures = (
                consumed(work.leased.batch, of_work),
                figures_of(self.step, work.leased.batch, work.micro_batches, of_work),
            )
            self._beside.create_task(self._ledger.consume(self.step, group, figures, self.task, self._update))

    @contextmanager
    def computing(self, current: Round) -> Iterator[None]:
        """Show the round in the lane; where it has several groups, record a span for each of them as well."""
        began, groups = self._spans.clock(), [work.leased.lease.groups[0].group for work in current.works]
        rows = [len(work.leased.batch) for work in current.works]
        tokens = sum(piece.logical_tokens for piece in current.micro_batches)
        of_one, of_step = {"group": groups[0]} if len(groups) == 1 else {}, {"step": self.step, "version": self.step}
        name = "forward_backward" if self.task == "train" else self.task
        with self._spans.busy(name, **of_step, rows=sum(rows), tokens=tokens, **of_one):
            yield
        for group, of_group in zip(groups, rows, strict=True) if not of_one else ():
            self._spans.beside("train_group", began, **of_step, group=group, rows=of_group)

    async def totals(self, update: int) -> StepTotals | None:
        """Totals of one of the step's updates, when all of it is trained; None: the run is stopping."""
        return await self._ledger.totals(self.step, self.task, update)

    def updating(self) -> AbstractContextManager[None]:
        """The lane shows the optimiser's step."""
        name = "optim_step" if self.task == "train" else f"{self.task}_optim_step"
        return self._spans.busy(name, step=self.step, version=self.step)

    async def acknowledge(self) -> None:
        """The step is final: what was taken of it is done."""
        # Of a lease that has expired, the rows are marked by whoever has them now, or end with the drop.
        await self._queue.mark([leased.lease for leased in self._held.values()])

    async def drop(self) -> None:
        """Drop the step's rows from the queue: no task needs them any more."""
        await self._queue.drop([row for leased in self._held.values() for row in leased.lease.indices])

    def _work(self, group: int) -> Work:
        """Take a group of a round out of those that are ready; it stays where a later epoch trains it again."""
        work = self._ready[group] if self._update < self.num_updates - self._shape.mini_batches else self._ready.pop(group)
        if self._sums is not None and not work.micro_batches:
            work = replace(work, micro_batches=self._cut(work, self._objective.normalised(work.advantages, self._sums)))
            if group in self._ready:
                self._ready[group] = work
        return work

    def _cut(self, work: Work, advantages: Advantages) -> list[MicroBatch]:
        return list(micro_batches(self.step, work.leased.batch, advantages, self._shape.rows_per_micro_batch))

    async def _take(self) -> None:
        """Make groups ready to train, ahead of the computation, until all of the step's rounds are over."""
        of_step = members(self._queue, self._ledger, self._schedule, self.step, self._put_aside, self._has_room, self.task)
        async for leased in of_step:
            check_interval(leased, self.step, self._schedule.max_staleness)
            group, batch = leased.lease.groups[0].group, leased.batch
            is_known, self._held[group] = group in self._held, leased
            if is_known:  # its lease had expired: it was delivered again, and its gradient is in the sum already, or will be
                continue
            scored, statistics = scored_group(batch), list[float]()
            work = Work(leased, self._objective.advantages(scored), [])
            if self._objective.waits_for_batch:
                statistics = [float(each) for each in self._objective.statistics(scored, work.advantages)]
            else:
                work.micro_batches.extend(self._cut(work, work.advantages))
            self._ready[group] = work
            if not await self._ledger.offer(self.step, self._rank, group, self._tokens(work), statistics, self.task):
                del self._ready[group]  # as above, but delivered to another rank before; the lease is this one's to end now
                self._changed.notify()

    def _tokens(self, work: Work) -> int:
        """Response tokens that will be computed, by which the groups of a round are chosen to be alike."""
        pieces = work.micro_batches
        if not self._skips or not pieces:  # not cut yet
            return len(work.leased.batch.ragged("response_ids").values)
        return sum(len(piece.response_ids.values) for piece in pieces if piece.has_advantages)

    async def _has_room(self) -> None:
        """Wait until one more group may be made ready. A rank that keeps all that it takes asks the ledger, so that every rank gets
        its part."""
        if not self._keeps_all:
            await self._changed.until(lambda: len(self._ready) < self._shape.groups_ahead)
        elif self._shape.num_ranks > 1:
            await self._ledger.may_take(self.step, self._rank, self._shape.groups_ahead, self.task)


async def members(
    queue: TransferQueueClient,
    ledger: LedgerService,
    schedule: Schedule,
    step: int,
    put_aside: dict[int, Leased],
    room: Callable[[], Awaitable[None]],
    task: str = "train",
) -> AsyncIterator[Leased]:
    """The complete groups of a step, as they come, until the run ends: the ledger's rounds say when the step has no more. Where
    groups of later steps may come first, the ledger says which.

    `room` is waited for before a group is leased. What has been leased is handed on at once: a group that one rank held back would
    be waited for by all.
    """
    if schedule.membership == "strict":
        while (leased := await _lease(queue, room, task, Want(partition=step))) is not None:
            yield leased
        return
    for group in [*put_aside]:
        if await ledger.claim(step, group):
            yield put_aside.pop(group)
    while (leased := await _lease(queue, room, task, Want())) is not None:
        group = leased.lease.groups[0].group
        put_aside[group] = leased  # in the place of an expired lease, if it was delivered again
        if await ledger.claim(step, group):
            yield put_aside.pop(group)


async def _lease(queue: TransferQueueClient, room: Callable[[], Awaitable[None]], task: str, want: Want) -> Leased | None:
    await room()
    return await queue.lease(task, want)


def _without_mismatch(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("mismatch/")}
