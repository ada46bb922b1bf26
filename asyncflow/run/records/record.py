"""Record of a run: its files, its metrics, its certificate.

ledger, versions, controllers, workers' reports --> RunRecord --> eval.jsonl samples.jsonl spans.jsonl certificate.json
                                                      |     --> MetricRows (metric_rows.py) --> metrics.jsonl, trackers
                                                      +-----> a checkpoint (`RecordState`), and back from it
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from asyncflow.control.ledger import Consumed, Decided, StepTotals, Update
from asyncflow.loops.evaluation import EvaluationRow, is_evaluator
from asyncflow.loops.samples import EVALUATION_GROUPS
from asyncflow.loops.score_batching import NO_REWARD, SKIPPED
from asyncflow.run.context import Listener, RunContext
from asyncflow.run.records.metric_rows import MetricRows
from asyncflow.run.records.training_checks import TrainingChecks
from asyncflow.run.services.cores import FreeCores
from asyncflow.run_dir import EVAL_FILE, SAMPLES_FILE, TOKENS_FILE, UNSCORED_FILE, append_whole
from asyncflow.telemetry.certificate import Certificate, Observed
from asyncflow.telemetry.hub import Hub, UnscoredResponse
from asyncflow.telemetry.metrics import GroupFigures, StepMetrics, StepTimes
from asyncflow.telemetry.tokens import TrainedTokens
from asyncflow.telemetry.trace import SPANS_FILE, SpanLog
from asyncflow.transfer_queue.leases import DeadRow

MAX_UNSCORED_KEPT: Final = 200
"""Responses that could not be scored, in the run's file, of one attempt."""


class RecordState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a record that a checkpoint holds: figures of the committed steps, in all attempts of the run. `resumed_at`: the
    steps at which it was resumed; `made_again_at`: those of them where rows had been begun, or may have been, that are made
    again."""

    max_staleness: int = 0
    max_spans: int = 0
    overlapped_steps: list[int] = []
    rows_dead: int = 0
    episode_timeouts: int = 0
    skipped_updates: int = 0
    skipped_in_a_row: int = 0
    critic_skipped_in_a_row: int = 0
    rows_redelivered: int = 0
    reward_failures: dict[str, int] = {}
    why_not_deterministic: str = ""
    has_logged_unshared: bool = msgspec.field(default=False, name="has_said_unshared")  # its name in the files of earlier runs
    resumed_at: list[int] = []
    made_again_at: list[int] = []


class RunRecord:
    """Record of a run."""

    def __init__(
        self,
        context: RunContext,
        listener: Listener,
        *,
        num_devices: Callable[[float, float], float],
        cores: FreeCores,
        before: RecordState,
    ) -> None:
        """Open the run's files. `num_devices`: between two moments, on average. `before`: of the attempts before this one."""
        self._context, self._config, self._listener = context, context.config, listener
        self._ledger, self._schedule, self._progress = context.ledger.ledger, context.schedule, context.progress
        self._now, run_dir = context.clock, context.config.run_dir
        callbacks = self._keep_sample, self._keep_tokens, self._keep_unscored, context.progress
        self.hub = Hub(SpanLog(run_dir / SPANS_FILE), *callbacks)
        self._unscored_path, self._num_unscored = run_dir / UNSCORED_FILE, 0
        self._samples = (run_dir / SAMPLES_FILE).open("ab", buffering=0)
        self._tokens = (run_dir / TOKENS_FILE).open("ab", buffering=0)
        self._evaluating = asyncio.Lock()
        self._evaluations = (run_dir / EVAL_FILE).open("ab", buffering=0)
        self._metrics: dict[int, StepMetrics] = {}
        self._critic_metrics: dict[int, StepMetrics] = {}
        self._committed: dict[int, tuple[StepMetrics, StepTimes]] = {}  # by the policy, and perhaps not by the critic
        self._opened: dict[int, float] = {}  # by step, when it was first, until it is committed
        self._installed: dict[int, float] = {}  # by version, of those that may still generate a step
        self._started: float | None = None  # of the step under way: the first admission, or the last commit
        self._before = before
        self._observed = Observed(
            before.max_staleness,
            before.max_spans,
            set(before.overlapped_steps),
            before.rows_dead,
            before.skipped_updates,
            before.episode_timeouts,
        )
        self._dead_committed = before.rows_dead
        self._redelivered = before.rows_redelivered
        in_a_row = (before.skipped_in_a_row, before.critic_skipped_in_a_row)
        self._checks = TrainingChecks(
            context,
            skipped_in_a_row=dict(zip(self._ledger.tasks.trained, in_a_row, strict=False)),
            has_logged_unshared=before.has_logged_unshared,
            reward_failures=self._reward_failures,
        )
        self.rows = MetricRows(
            context,
            self.hub,
            self._checks,
            listener,
            num_devices=num_devices,
            cores=cores,
            num_resumes=len(before.resumed_at),
        )

    def state(self) -> RecordState:
        """State as of the last commit, for a checkpoint."""
        observed = self._observed
        return RecordState(
            max_staleness=observed.max_staleness,
            max_spans=observed.max_spans,
            overlapped_steps=sorted(step for step in observed.overlapped_steps if step < self._ledger.committed),
            rows_dead=self._dead_committed,
            episode_timeouts=observed.episode_timeouts,
            skipped_updates=observed.skipped_updates,
            skipped_in_a_row=self._checks.skipped_in_a_row[self._ledger.tasks.policy],
            critic_skipped_in_a_row=self.critic_skipped_in_a_row,
            rows_redelivered=self._redelivered,
            reward_failures=dict(self._reward_failures()),
            why_not_deterministic=self._why_not_deterministic(),
            has_logged_unshared=self._checks.has_logged_unshared,
            resumed_at=self._before.resumed_at,
            made_again_at=self._before.made_again_at if self._why_not_deterministic() else [],  # or they are the same again
        )

    @property
    def critic_skipped_in_a_row(self) -> int:
        """The critic's updates that were skipped since it last made one. It may commit a step after the policy has."""
        return sum(self._checks.skipped_in_a_row[task] for task in self._ledger.tasks.trained[1:])

    @property
    def is_deterministic(self) -> bool:
        """Whether every rollout engine so far makes a lost response again exactly."""
        return not self._why_not_deterministic()

    def certificate(self) -> Certificate:
        """Certificate of the run so far; complete once every worker has made its last report."""
        return self._observed.certificate(
            schedule=self._config.schedule.name,
            promised_staleness=self._schedule.max_staleness,
            steps=self._ledger.committed,
            planned_steps=self._config.run.steps,
            rows_redelivered=self._rows_redelivered(),
            reward_failures=self._reward_failures(),
            why_not_deterministic=self._why_not_deterministic(),
            resumed_at=self._before.resumed_at,
            made_again_at=self._before.made_again_at,
        )

    def close(self) -> None:
        """Close the files."""
        self.rows.close()
        self._samples.close()
        self._tokens.close()
        self._evaluations.close()
        self.hub.log.close()

    # -- callbacks ---------------------------------------------------------------------------------------------------------

    def opened(self, step: int) -> None:
        """Record that a step's groups are admitted."""
        self._note(self._opened, step)
        if self._started is None:
            self._started = self._opened[step]

    def installed(self, version: int) -> None:
        """Record that a rollout worker serves a version."""
        self._note(self._installed, version)

    async def evaluated(self, row: EvaluationRow) -> None:
        """Record an evaluation's figures, once every worker has sent its samples: a resumed run makes neither again."""
        async with self._evaluating:
            await self.hub.settle(self._now())
            append_whole(self._evaluations, json.dumps(row).encode() + b"\n")
        self._listener.evaluation(row)

    def rows_died(self, dead: Sequence[DeadRow]) -> None:
        """Count rows that have failed for good. Those of evaluations are of no step."""
        self._observed.rows_dead += len(dead)
        for letter in dead:
            step = self._ledger.step_of(letter.group) if letter.group < EVALUATION_GROUPS else None
            if step is None or not letter.error.startswith((NO_REWARD, SKIPPED)):
                continue
            metrics = self._metrics.setdefault(step, StepMetrics())
            if letter.error.startswith(SKIPPED):
                metrics.count_rows(skipped=1)
            else:
                metrics.count_rows(unscored=1)
                self._checks.not_scored(step, 1, letter.error)

    def decided(self, step: int, decided: Decided) -> None:
        """Count the candidates of a step that were not trained, once its members are known."""
        self._progress()
        if decided.is_settled:
            metrics = self._metrics.setdefault(step, StepMetrics())
            metrics.count_rows(degenerate=decided.num_degenerate_rows, surplus=decided.num_surplus_rows)

    def consumed(self, task: str, step: int, update: int, group: Consumed, figures: GroupFigures) -> None:
        """Record a group whose gradient has been added."""
        self._progress()
        self._checks.consumed(task, step, update, group.rows)
        if task != self._ledger.tasks.policy:
            self._critic_metrics.setdefault(step, StepMetrics()).add_losses(figures, is_finite=group.is_finite)
            return
        is_overlapped = not self._ledger.is_done("rollout", step)
        self._observed.group(step, staleness=figures.staleness, num_spans=figures.num_spans, is_overlapped=is_overlapped)
        metrics = self._metrics.setdefault(step, StepMetrics())
        metrics.add_losses(figures, is_finite=group.is_finite)
        if update >= self._context.shape.mini_batches:  # an epoch after the first, of the same rows
            return
        metrics.add_group(figures)
        self._add_parts(step, metrics, len(group.rows), figures.reward_parts)
        metrics.count_rows(empty=len(group.empty_rows), zero_advantage=figures.left_out)
        self._checks.look_at_group(group, figures)
        self._listener.group(step)

    def committed(self, task: str, of_updates: Sequence[StepTotals], updates: Sequence[Update]) -> None:
        """Record that a step is final for one of the models. Its row of metrics is begun when it is for all of them."""
        self._progress()
        totals, is_policy = of_updates[-1], task == self._ledger.tasks.policy
        metrics = (self._metrics if is_policy else self._critic_metrics).setdefault(totals.step, StepMetrics())
        for update in updates:
            metrics.add_update(**msgspec.structs.asdict(update))
        if is_policy:
            self._observed.skipped_updates += sum(update.is_skipped for update in updates)
            self._observed.episode_timeouts += metrics.num_timed_out
            redelivered = self._rows_redelivered()
            metrics.count_rows(dead=totals.dead, redelivered=redelivered - self._redelivered)
            self._redelivered = redelivered
            self._dead_committed += totals.dead
            committed = self._now()
            started, self._started = committed if self._started is None else self._started, committed
            times = StepTimes(started=started, committed=committed, could_generate=self._could_generate(totals.step))
            self._committed[totals.step] = self._metrics.pop(totals.step), times
        if not self._ledger.is_open(totals.step) and totals.step in self._committed:
            of_policy, times = self._committed.pop(totals.step)
            of_critic = self._critic_metrics.pop(totals.step, None)
            self._context.background.start(self.rows.finish(totals.step, of_policy, of_critic, times))
        self._checks.committed(task, of_updates, updates)

    # -- inside -------------------------------------------------------------------------------------------------------------

    def _add_parts(self, step: int, metrics: StepMetrics, num_rows: int, parts: np.ndarray) -> None:
        """Add each scorer's rewards to the metrics, where they are kept, and count rows for which no scorer gave any."""
        names = self._config.reward.names
        if not num_rows or len(parts) != num_rows * len(names):
            return
        parts = parts.reshape(num_rows, len(names))
        if len(names) > 1:
            metrics.add_reward_parts(dict(zip(names, parts.T, strict=True)))
        if num_failed := int(np.isnan(parts).all(axis=1).sum()):
            metrics.count_rows(unscored=num_failed)
            self._checks.not_scored(step, num_failed)

    def _keep_sample(self, sample: Mapping[str, Any]) -> None:
        if "reward_parts" in sample:
            sample = {**sample, "reward_parts": dict(zip(self._config.reward.names, sample["reward_parts"], strict=False))}
        append_whole(self._samples, json.dumps(sample, ensure_ascii=False).encode() + b"\n")

    def _keep_tokens(self, row: TrainedTokens) -> None:
        append_whole(self._tokens, msgspec.json.encode(row) + b"\n")

    def _keep_unscored(self, response: UnscoredResponse) -> None:
        """Keep a response that could not be scored, and say so of the first one of each kind."""
        self._num_unscored += 1
        if self._num_unscored <= MAX_UNSCORED_KEPT:
            with self._unscored_path.open("ab", buffering=0) as file:
                append_whole(file, msgspec.json.encode(response) + b"\n")
        self._checks.look_at_failure(response, self._unscored_path, sum(state.num_scored for state in self.hub.states.values()))

    def _rows_redelivered(self) -> int:
        """Rows that were delivered again, in all attempts, without those of tasks that only evaluations have: the figure is about
        training."""
        tables = [controller.table for controller in self._context.transfer_queue.controllers.values()]
        now = sum(table.num_redelivered for table in tables if table.spec.topic != "eval")
        return self._before.rows_redelivered + now

    def _reward_failures(self) -> Counter[str]:
        workers = [*self.hub.states.values(), *self.hub.past]
        return sum((Counter(worker.reward_failures) for worker in workers), Counter(self._before.reward_failures))

    def _why_not_deterministic(self) -> str:
        workers = [*self.hub.states.values(), *self.hub.past]
        made = [worker.why_not_deterministic for worker in workers if not is_evaluator(worker.worker)]
        whys = [self._before.why_not_deterministic, *made]
        return next((why for why in whys if why), "")

    def _note(self, moments: dict[int, float], number: int) -> None:
        self._progress()
        moments.setdefault(number, self._now())

    def _could_generate(self, step: int) -> float | None:
        """Moment from which the committed step could be generated: a group was admitted, and a worker had weights for it."""
        interval, opened = self._schedule.interval(step), self._opened.pop(step, None)
        self._installed = {version: moment for version, moment in self._installed.items() if version >= interval.low}
        installed = [moment for version, moment in self._installed.items() if version <= interval.high]
        return max(opened, min(installed)) if opened is not None and installed else None
