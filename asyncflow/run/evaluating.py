"""A run's evaluations: which of them are still to be made, and by whom; what a checkpoint keeps for them.

    feed, among training's prompts --> rollout workers --rows--+--> HeldOut --figures--> RunRecord: eval.jsonl
    Evaluations, one by one ---------> evaluators -------rows--'

consumes: the versions that are due, their rows as they are scored
waits for: the rows of one evaluation after another
is unblocked by: whoever generates them
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from asyncflow.config import Config
from asyncflow.control.ledger import LedgerService
from asyncflow.control.modes import Periodic
from asyncflow.control.policy_versions import PolicyVersions
from asyncflow.control.schedule import Schedule
from asyncflow.control.signal import Signal
from asyncflow.control.worker_pool import WorkerPool
from asyncflow.loops.evaluation import EVALUATORS, Evaluations, EvaluatorsProgress, HeldOut, Row, evaluate
from asyncflow.loops.samples import EVALUATE_TASK, Prompt
from asyncflow.run.factories import shape_of
from asyncflow.run.record import RunRecord
from asyncflow.run.resume import Resumed, evaluated_versions, left_out_before
from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.controller import Controller
from asyncflow.weight_sync.base import Manifest


class Evaluating:
    """Evaluations of one run. `held_out`: which versions, on what; `evaluators`: policy versions of workers that only evaluate."""

    def __init__(
        self,
        config: Config,
        schedule: Schedule,
        ledger: LedgerService,
        versions: PolicyVersions,
        queue: TransferQueueClient,
        controllers: Mapping[str, Controller],
        record: RunRecord,
        signal: Signal,
        prompts: Sequence[Prompt],
        resumed: Resumed | None,
        *,
        start: Callable[[Coroutine[Any, Any, None]], None],
        says: Callable[[str], None],
    ) -> None:
        """`versions`: the rollout workers', on which the trainer publishes. `prompts`: those held out. `start` runs work beside the
        run."""
        self._config, self._schedule, self._ledger, self._versions = config, schedule, ledger, versions
        self._queue, self._record, self._start, self._says = queue, record, start, says
        self._written = evaluated_versions(config.run_dir)
        self.held_out = self._make_held_out(prompts, resumed)
        self.evaluators: PolicyVersions | None = None
        self._by_evaluators: Evaluations | None = None
        if size := config.eval.num_workers:
            books = EvaluatorsProgress(ledger.ledger, controllers, EVALUATE_TASK)
            self.evaluators = PolicyVersions(
                Periodic(), books, signal, asyncio.get_running_loop().time, WorkerPool(size, EVALUATORS)
            )
            self._by_evaluators = Evaluations(queue, ledger, self.held_out, self.evaluators, shape_of(config), signal, says=says)
            versions.on_published, versions.on_no_room = self._by_evaluators.published, self._by_evaluators.no_room

    @property
    def for_feed(self) -> HeldOut | None:
        """Evaluations whose prompts the feed admits; None where evaluators make them: `run` admits them then."""
        return self.held_out if self._by_evaluators is None else None

    async def run(self) -> None:
        """Make one evaluation after another, until the last one, or the run is stopping."""
        if self._by_evaluators is not None:
            await self._by_evaluators.run()
            return
        for version in self.held_out.versions():
            await evaluate(self._queue, self._ledger, self.held_out, version)

    def waiting(self, version: int) -> list[Manifest]:
        """Older weights whose evaluation is not written yet: a run that resumes at `version` needs them."""
        if self._by_evaluators is not None:
            return [each for each in self._by_evaluators.kept() if each.version < version and each.version not in self._written]
        oldest = max(0, version - self._schedule.max_staleness)
        planned = {v for v in range(oldest, version) if self.held_out.is_planned(v)}
        return self._versions.kept(planned - self._written)

    def _make_held_out(self, prompts: Sequence[Prompt], resumed: Resumed | None) -> HeldOut:
        """The evaluations, but for those of earlier attempts, and those that nobody can make any more."""
        config, first = self._config, resumed.state.version if resumed is not None else 0
        again = {0, *(resumed.versions if resumed is not None else ())}
        # Rollout workers serve none that is older; evaluators do, if its weights are there.
        oldest = 0 if config.eval.num_workers else first - self._schedule.max_staleness
        lost = {v for v in range(first) if v not in again or v < oldest}
        held_out = HeldOut(
            prompts,
            last_version=config.run.steps,
            every_steps=config.eval.every_steps,
            samples=config.eval.samples_per_prompt,
            temperature=config.rollout.temperature,
            greedy=config.eval.greedy,
            correct_from=config.eval.correct_from,
            on_row=self._evaluated,
            done=self._written | lost,
        )
        left_out = [version for version in sorted(lost - self._written) if held_out.is_planned(version)]
        for version in left_out:
            self._says(f"version {version} has not been evaluated to the end, and nobody has its weights any more: it is left out")
        held_out.leave_out(max(0, len(left_out) - left_out_before(config.run_dir)))  # may have told of some that are due again
        return held_out

    def _evaluated(self, row: Row) -> None:
        if self._ledger.is_stopping:
            return  # cut short: its figures would be of some prompts only
        self._start(self._write(row))

    async def _write(self, row: Row) -> None:
        await self._record.evaluated(row)
        self._written.add(int(row["step"]))
