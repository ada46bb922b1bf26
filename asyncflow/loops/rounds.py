"""Work of a trainer: the rounds of a step, made ready ahead of the computation, and accounted for behind it.

consumes: rounds of one step, of complete groups
waits for: such rounds
is unblocked by: the ledger, which gives out rounds as groups complete (taking.py), to all ranks alike; the end of the step

    ledger --next_round: groups--> ready to train ---> engine
       ^---next_round: trained groups, and the round after the next one---'

Nothing here computes for long: the engine finds its next round prepared when it has ended one. Where an algorithm waits for the
whole batch, all of the step's groups are read first, as they come. Groups that later updates train again are kept.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from asyncflow.algorithms.base import ModelObjective
from asyncflow.control.ledger import RoundGroup, StepTotals, TrainedGroup
from asyncflow.engines.base import MicroBatch, MicroBatchResult
from asyncflow.loops.context import LoopContext
from asyncflow.loops.training_batches import check_interval, consumed, figures_of, left_out, micro_batches, scored_group
from asyncflow.own_metrics import MetricSums, collecting
from asyncflow.telemetry.fingerprints import StepLog
from asyncflow.transfer_queue.client import Leased
from asyncflow.transfer_queue.controller import Handed
from asyncflow.types import Advantages, RunError


@dataclass(frozen=True, slots=True)
class PreparedGroup:
    """A group, ready to be trained. Its micro-batches are made when it is in a round. `own_metrics`: of `advantages`."""

    leased: Leased
    advantages: Advantages
    micro_batches: list[MicroBatch]
    own_metrics: MetricSums


@dataclass(frozen=True, slots=True)
class Round:
    """Groups that one rank trains at the same time as the other ranks; none where only the others have groups left.

    `micro_batches`: those to compute, in order: all, or, with `skips`, those that have advantages. Of a run's first round one is
    computed in any case (`is_checked`): a loss of it would tell that none may be skipped.
    """

    works: list[PreparedGroup]
    skips: bool
    micro_batches: list[MicroBatch]

    @staticmethod
    def of(works: list[PreparedGroup], *, skips: bool, is_checked: bool) -> Round:
        """Round of these groups."""
        pieces = [piece for work in works for piece in work.micro_batches]
        if skips:
            pieces = [piece for piece in pieces if piece.has_advantages] or (pieces[:1] if is_checked else [])
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
    """Rounds of one step of one rank, by update. A context; at its end all of its messages are answered."""

    def __init__(self, context: LoopContext, objective: ModelObjective, rank: int, step: int, task: str = "train") -> None:
        self._queue, self._ledger, self._max_staleness = context.queue, context.ledger, context.schedule.max_staleness
        self._shape, self._spans, self._objective = (shape := context.shape), context.spans, objective
        self.task, self.step, self.num_updates = task, step, shape.num_updates
        self._rank = rank
        self._skips = shape.skips_zero_advantages and objective.is_zero_without_advantages
        self._sums: list[float] | None = None  # of the step's statistic
        self._update = 0
        self._left_out: MicroBatch | None = None  # the update's first
        self._kept: dict[int, PreparedGroup] = {}  # by group: those that a later round of the step trains
        self._trained: list[TrainedGroup] = []  # that the ledger has not been told of
        self._background = asyncio.TaskGroup()

    async def __aenter__(self) -> Rounds:
        await self._background.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._background.__aexit__(*error)

    async def of(self, update: int) -> AsyncIterator[Round]:
        """Rounds of one of the step's updates. Each is asked for when the one before the last is trained."""
        self._update, self._left_out = update, None
        if self._objective.waits_for_batch and self._sums is None:
            self._sums = await self._ledger.statistics(self.step, self.task, await self._read())
            if self._sums is None:
                return
        asked = deque([self._ask(0), self._ask(1)])
        for number in itertools.count():
            if (works := await asked.popleft()) is None:
                return
            if self._skips and self._left_out is None:
                left_out_of = (piece for work in works for piece in work.micro_batches if not piece.has_advantages)
                self._left_out = next(left_out_of, None)
            yield Round.of(works, skips=self._skips, is_checked=self.step == number == update == 0)
            asked.append(self._ask(number + 2))

    def left_out(self) -> Round:
        """Round of a micro-batch of an update of which all were left out: with it the engine has a gradient, of zeros, and an
        update to make, as it would without skipping. A rank without data has none."""
        return Round([], self._skips, [] if self._left_out is None else [self._left_out])

    def trained(self, current: Round, results: list[MicroBatchResult], fingerprints: StepLog) -> None:
        """Report the figures of a round whose gradients have been added to the ledger and the fingerprints."""
        for work, of_work in zip(current.works, current.results(results), strict=True):
            fingerprints.group(work.leased.batch, of_work, work.advantages)
            if self._update:  # the weights are not the version's any more: what differs now is no mismatch of the engines
                of_work = [replace(result, metrics=_without_mismatch(result.metrics)) for result in of_work]
            figures = figures_of(self.step, work.leased.batch, work.micro_batches, of_work, work.own_metrics)
            self._trained.append(TrainedGroup(consumed(work.leased.batch, of_work), figures))

    @contextmanager
    def computing(self, current: Round) -> Iterator[None]:
        """Show the round in the lane; where it has several groups, record a span for each of them as well. Rows and tokens are
        those that are computed."""
        began, groups = self._spans.clock(), [work.leased.lease.groups[0].group for work in current.works]
        computed = {id(piece) for piece in current.micro_batches}
        pieces = [[piece for piece in work.micro_batches if id(piece) in computed] for work in current.works]
        rows = [sum(len(piece.indices) for piece in of_group) for of_group in pieces]
        tokens = [sum(piece.logical_tokens for piece in of_group) for of_group in pieces]
        num_rows = sum(len(piece.indices) for piece in current.micro_batches)
        num_tokens = sum(piece.logical_tokens for piece in current.micro_batches)
        of_one, of_step = {"group": groups[0]} if len(groups) == 1 else {}, {"step": self.step, "version": self.step}
        name = "forward_backward" if self.task == "train" else self.task
        with self._spans.busy(name, **of_step, rows=num_rows, tokens=num_tokens, **of_one):
            yield
        for group, of_rows, of_tokens in zip(groups, rows, tokens, strict=True) if not of_one else ():
            self._spans.off_lane("train_group", began, **of_step, group=group, rows=of_rows, tokens=of_tokens)

    async def totals(self, update: int) -> StepTotals | None:
        """Totals of one of the step's updates, when all of it is trained; None: the run is stopping."""
        return await self._ledger.totals(self.step, self.task, update)

    def updating(self) -> AbstractContextManager[None]:
        """The lane shows the optimiser's step."""
        name = "optim_step" if self.task == "train" else f"{self.task}_optim_step"
        return self._spans.busy(name, step=self.step, version=self.step)

    def _ask(self, number: int) -> asyncio.Task[list[PreparedGroup] | None]:
        """Tell the ledger what is trained, ask for the round of this number, and make it ready, all in the background."""
        trained, self._trained = self._trained, []
        return self._background.create_task(self._next(number, trained))

    async def _next(self, number: int, trained: list[TrainedGroup]) -> list[PreparedGroup] | None:
        groups = await self._ledger.next_round(self.step, self._rank, number, trained, self.task, self._update)
        return None if groups is None else [await self._work(each) for each in groups]

    async def _work(self, given: RoundGroup) -> PreparedGroup:
        """A group of a round, ready to be trained. It is kept where a later epoch trains it again."""
        if given.handed is not None:
            work = await self._made_ready(given.handed)
        else:
            work = self._kept.pop(given.group)
        if not work.micro_batches:
            advantages = work.advantages
            if self._sums is not None:
                advantages = self._objective.normalised(advantages, self._sums)
            batch, shape = work.leased.batch, self._shape
            pieces = micro_batches(self.step, batch, advantages, shape.rows_per_micro_batch, shape.is_examined)
            work = replace(work, advantages=advantages, micro_batches=list(pieces))
        if self._update < self.num_updates - self._shape.mini_batches:
            self._kept[given.group] = work
        return work

    async def _made_ready(self, handed: Handed) -> PreparedGroup:
        """A group with its advantages."""
        if handed.batch is not None:
            leased: Leased | None = Leased(handed.lease, handed.batch.batch())
        else:
            leased = await self._queue.fetch(handed.lease, self._queue.schema.task(self.task).reads, is_sure=True)
        if leased is None:
            raise RunError(f"the rows of group {handed.lease.groups[0].group} have gone with their storage unit")
        check_interval(leased, self.step, self._max_staleness)
        with collecting() as own_metrics:
            advantages = self._objective.advantages(scored_group(leased.batch))
        return PreparedGroup(leased, advantages, [], own_metrics)

    async def _read(self) -> dict[int, list[float]]:
        """Read all groups of the step that this rank will train, as they come. Returns the statistics of each."""
        found: dict[int, list[float]] = {}
        while (handed := await self._ledger.next_read(self.step, self._rank, len(found), self.task)) is not None:
            group = handed.lease.groups[0].group
            self._kept[group] = work = await self._made_ready(handed)
            scored = scored_group(work.leased.batch)
            found[group] = [float(each) for each in self._objective.statistics(scored, work.advantages)]
        return found


def _without_mismatch(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("mismatch/")}
