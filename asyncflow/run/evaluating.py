"""Evaluations of a run: which of them are still to be made, and by which workers; what a checkpoint keeps for them.

    feed, among training's prompts --> rollout workers --rows--+--> HeldOut --figures--> RunRecord: eval.jsonl
    Evaluations, one by one ---------> evaluators -------rows--'

consumes: the versions that are due, their rows as they are scored
waits for: the rows of one evaluation after another
is unblocked by: the workers that generate them
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.control.modes import Periodic
from asyncflow.control.policy_versions import PolicyVersions
from asyncflow.control.worker_pool import WorkerPool
from asyncflow.loops.evaluation import (
    EVALUATORS,
    EvaluationRow,
    Evaluations,
    EvaluationSettings,
    EvaluatorsProgress,
    HeldOut,
    admit_evaluation,
    evaluate,
)
from asyncflow.loops.samples import EVALUATE_TASK, Prompt
from asyncflow.run.context import RunContext
from asyncflow.run.records.record import RunRecord
from asyncflow.run.state.driver_state import Resumed
from asyncflow.run.state.resume import evaluated_versions, left_out_before
from asyncflow.weight_sync.base import Manifest


class Evaluating:
    """Evaluations of one run. `held_out`: which versions, on what; `evaluators`: policy versions of workers that only evaluate."""

    def __init__(self, context: RunContext, record: RunRecord, prompts: Sequence[Prompt], resumed: Resumed | None) -> None:
        """`prompts`: those held out. `resumed`: the checkpoint that this attempt resumes."""
        self._context, self._config, self._versions, self._record = context, context.config, context.versions, record
        self._written = evaluated_versions(context.config.run_dir)
        self._on_demand = set[int]()
        self.held_out = self._make_held_out(prompts, resumed)
        self.evaluators: PolicyVersions | None = None
        self._by_evaluators: Evaluations | None = None
        if size := context.config.eval.num_workers:
            progress = EvaluatorsProgress(context.ledger.ledger, context.transfer_queue.controllers, EVALUATE_TASK)
            pool = WorkerPool(size, EVALUATORS)
            self.evaluators = PolicyVersions(
                Periodic(), progress, context.signal, context.clock, pool, probing=context.versions.probing
            )
            self._by_evaluators = Evaluations(
                context.queue,
                context.ledger,
                self.held_out,
                self.evaluators,
                context.shape,
                context.signal,
                log=context.log,
            )
            context.versions.on_published = self._by_evaluators.published
            context.versions.kept_elsewhere = self._by_evaluators.kept

    @property
    def for_feed(self) -> HeldOut | None:
        """Evaluations whose prompts the feed admits; None where evaluators make them: `run` admits them then."""
        return self.held_out if self._by_evaluators is None else None

    async def run(self) -> None:
        """Make one evaluation after another, until the last one, or the run is stopping."""
        if self._by_evaluators is not None:
            await self._by_evaluators.run()
            return
        queue, ledger = self._context.queue, self._context.ledger
        for version in self.held_out.versions():
            await evaluate(queue, ledger, self.held_out, version)

    async def on_demand(self, version: int) -> None:
        """Have this version evaluated, which is the newest one and is not planned. Nothing where it has been asked for before."""
        if version in self._on_demand:
            return
        self._on_demand.add(version)
        if self._by_evaluators is not None:
            await self._versions.has_published(version)
            if (newest := self._versions.newest) is not None:
                self._by_evaluators.ask(newest)
            return
        queue, ledger = self._context.queue, self._context.ledger
        await admit_evaluation(queue, ledger, self.held_out, version, self._context.shape)
        await evaluate(queue, ledger, self.held_out, version)

    def waiting(self, version: int) -> list[Manifest]:
        """Older weights whose evaluation is not written yet: a run that resumes at `version` needs them."""
        if self._by_evaluators is not None:
            return [each for each in self._by_evaluators.kept() if each.version < version and each.version not in self._written]
        oldest = max(0, version - self._context.schedule.max_staleness)
        planned = {v for v in range(oldest, version) if self.held_out.is_planned(v)}
        return self._versions.kept(planned - self._written)

    def _make_held_out(self, prompts: Sequence[Prompt], resumed: Resumed | None) -> HeldOut:
        """The evaluations, but for those of earlier attempts, and those that nobody can make any more."""
        config, first = self._config, resumed.state.version if resumed is not None else 0
        again = {0, *(resumed.versions if resumed is not None else ())}
        # Rollout workers serve none that is older; evaluators do, if its weights are there.
        oldest = 0 if config.eval.num_workers else first - self._context.schedule.max_staleness
        lost = {v for v in range(first) if v not in again or v < oldest}
        held_out = HeldOut(
            prompts,
            EvaluationSettings(
                last_version=config.run.steps,
                every_steps=config.eval.every_steps,
                samples=config.eval.samples_per_prompt,
                temperature=config.rollout.temperature,
                greedy=config.eval.greedy,
                correct_from=config.eval.correct_from,
                is_behind_training=config.eval.num_workers > 0,
            ),
            on_row=self._evaluated,
            done=self._written | lost,
        )
        left_out = [version for version in sorted(lost - self._written) if held_out.is_planned(version)]
        for version in left_out:
            self._context.log(f"version {version} is left out: its evaluation was not finished, and its weights are gone")
        held_out.leave_out(max(0, len(left_out) - left_out_before(config.run_dir)))  # may have told of some that are due again
        return held_out

    def _evaluated(self, row: EvaluationRow) -> None:
        if self._context.ledger.is_stopping:
            return  # cut short: its figures would be of some prompts only
        self._context.background.start(self._write(row))

    async def _write(self, row: EvaluationRow) -> None:
        await self._record.evaluated(row)
        self._written.add(int(row["step"]))
