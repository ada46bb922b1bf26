"""A run: prepare, start, wait until it is done, stop, finish.

    prepared --start--> Attempt: driver, workers, loops --done | interrupted | failed--> stop --> model, trace, report
        ^                          |
        +---- newest checkpoint ---+ a trainer has died

consumes: the ends of loops and workers, the watchdog's verdict, the user's interrupt
waits for: the first of these; the attempt's end; a pause before the next one
is unblocked by: whatever comes first
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from asyncflow.cluster import CLUSTERS
from asyncflow.cluster.base import Cluster, WorkerDied, WorkerSpec
from asyncflow.cluster.torchrun import launch_of
from asyncflow.config import Config
from asyncflow.control.signal import Signal
from asyncflow.loops.evaluation import EVALUATORS, EvaluationRow
from asyncflow.registry import build
from asyncflow.run.attempt import Attempt
from asyncflow.run.context import Listener as Listener
from asyncflow.run.driver import Driver
from asyncflow.run.factories import shape_of
from asyncflow.run.fleet import workers
from asyncflow.run.in_worker.connection import model_begun_with
from asyncflow.run.models.model_card import push_model
from asyncflow.run.preparation.notes import advice
from asyncflow.run.preparation.prepare import Prepared, prepare
from asyncflow.run.preparation.prompts import left_out_lines
from asyncflow.run.pushed_prompts import PushedPrompts
from asyncflow.run.records.step_rows import StepRows
from asyncflow.run.restarts import Restarts
from asyncflow.run.situations import Situations
from asyncflow.run.state.driver_state import Resumed
from asyncflow.run.state.journal import Journal
from asyncflow.run.state.resume import evaluated_versions
from asyncflow.run.state.run_folder import RunFolder
from asyncflow.run.watch import Watch
from asyncflow.run.worker_start import import_ahead
from asyncflow.run_dir import JOB_FILE, RunDir, make_shared_dir, remove_shared_dir
from asyncflow.telemetry.accuracy import Responses
from asyncflow.telemetry.certificate import Certificate
from asyncflow.telemetry.report import write_report
from asyncflow.telemetry.trace import write_trace
from asyncflow.transport import Server
from asyncflow.types import RunError
from asyncflow.waits import OUTCOME, OpenWaits


class Job(Listener):
    """Run, from its start to its report. `evaluate_only` starts no trainer, and ends after one evaluation of the model as it is.

    With `resume` it continues from its newest whole checkpoint, or begins if there is none. `prepared`: its inputs, once it has
    been started.
    """

    def __init__(
        self,
        config: Config,
        listener: Listener | None = None,
        *,
        evaluate_only: bool = False,
        resume: bool = False,
        is_served: bool = False,
        journal: Path | None = None,
    ) -> None:
        """`is_served`: processes from outside may put prompts, generate and train for it. `journal`: folder of the files of all
        that they were told is safe (`journal.py`)."""
        self.config = config
        self.listener = listener or Listener()
        self.rows = StepRows(config.run_dir)
        self.evaluations: list[EvaluationRow] = []
        self.responses: Mapping[str, Sequence[Responses]] = {}  # of the last evaluation, by kind
        self.certificate: Certificate | None = None  # at the end
        self.ended_by: int | None = None  # the signal that has interrupted it
        self.attempt: Attempt | None = None
        self._staying: Cluster | None = None  # its workers stay for the next attempt
        self._evaluate_only, self._resume, self._is_served = evaluate_only, resume, is_served
        self.journal = Journal(journal, shape_of(config).group_bits) if journal is not None else None
        self._folder = RunFolder(config, self.listener.log, resume=resume)
        self._restarts, self._pushed = Restarts(config.train.max_restarts), PushedPrompts(config, self.journal)
        self._has_trained = False  # this attempt, a group
        self._interrupted = asyncio.Event()
        self._changed = Signal()

    async def start(self, steps: int = 0) -> None:
        """Check everything, then start the driver's loops and the workers. Raises `UserError` before anything is started.

        The first `steps` steps may be trained at once. The loops begin first, so that prompts are there when the first worker is.
        Nothing is started, and there is no `driver`, where the run that is to be resumed is finished already. Raises `RunError`
        where the run is interrupted before it is prepared.
        """
        config, listener, folder, waits = self.config, self.listener, self._folder, OpenWaits()
        waits.begin()
        if not self._restarts.num:
            folder.memory = self._memory()
        begun = await self._begin()
        self.rows, self.certificate = folder.rows, folder.certificate
        if begun is None:
            return
        self.prepared, resumed = begun
        prepared = self.prepared
        self._has_trained, there = False, evaluated_versions(config.run_dir)
        self.evaluations = [row for row in self.evaluations if row["step"] in there]  # the others are made again
        num_kept = len(prepared.prompts), len(prepared.held_out)
        for line in [*left_out_lines(config, prepared.num_left_out, num_kept), *prepared.notes, *advice(config)]:
            listener.log(line)
        if self.journal is not None and not self._resume:
            self.journal.clear()
        attempt = self._make_attempt(resumed, waits)
        self.attempt, self._staying = attempt, None
        if await attempt.start(steps):
            attempt.running.begin([self._begun(attempt.driver)])

    async def _begin(self) -> tuple[Prepared, Resumed | None] | None:
        """Inputs of the attempt; None: there is nothing to do. Raises `RunError` if it is interrupted, by a signal that may have
        ended a download first. Later attempts begin in any case: what the one before had in memory is to be kept."""
        if self._restarts.num:
            return await self._folder.begin(self._inputs)
        beginning = asyncio.ensure_future(self._folder.begin(self._inputs))
        interrupted = asyncio.ensure_future(self._interrupted.wait())
        try:
            await asyncio.wait({beginning, interrupted}, return_when=asyncio.FIRST_COMPLETED)
            if self._interrupted.is_set():
                raise RunError("the run was interrupted before it was prepared")
            return await beginning
        finally:
            for task in (beginning, interrupted):
                task.cancel()
            await asyncio.gather(beginning, interrupted, return_exceptions=True)

    async def until(self, condition: Callable[[], bool]) -> bool:
        """Wait until the condition holds, looking again after every step and evaluation. False: interrupted.

        Raises what has gone wrong: a worker that died, a loop that failed, a run that stands still.
        """
        if self._interrupted.is_set():  # perhaps before there were any workers
            return condition()
        assert self.attempt is not None
        return await self.attempt.running.until(self._changed.until(condition, OUTCOME))

    async def until_done(self, work: Coroutine[Any, Any, None]) -> bool:
        """Wait for a coroutine, as `until` does for a condition. False: interrupted."""
        assert self.attempt is not None
        return await self.attempt.running.until(work)

    async def run(self) -> bool:
        """Start, run to the end, stop. False: interrupted before the end. Raises `UserError` and `RunError`.

        When a worker has died that is not started again by itself, another attempt follows (`restart_after`).
        """
        try:
            while True:
                try:
                    await self.start(0 if self._evaluate_only else self.config.run.steps)
                    if self.driver is None:
                        return True
                    is_done = await self.until(self._is_done)
                    break
                except WorkerDied as death:
                    await self.restart_after(death)
                except RunError:
                    if self._interrupted.is_set() and self.attempt is None:
                        return False
                    raise
        finally:
            await self.stop()
        return is_done

    def interrupt(self, by: int | None = None) -> None:
        """End the run early, by a signal perhaps: a checkpoint, the model as of the last commit and the report are written."""
        self.ended_by = by
        self._interrupted.set()

    async def stop(self) -> None:
        """Stop the loops and the workers, and write what is left: the model, the trace, the report. A run that is done sends its
        model to the Hugging Face Hub where `model.push_to_hub` says so."""
        is_done = False
        try:
            if self.attempt is not None:
                is_done = self._is_trained() and self.attempt.running.failure is None and self.ended_by is None
                try:
                    await self.attempt.report_cause()
                finally:
                    await self._stop(self.attempt)
            elif self._staying is not None:  # for an attempt that could not be made
                await self._staying.stop(0.0)
        finally:
            self.attempt = None
            self._folder.remove_weights()
            if self._folder.memory is not None:
                remove_shared_dir(self._folder.memory)
        is_there = RunDir(self.config.run_dir).model_version == self.config.run.steps
        if is_done and is_there and self.config.model.push_to_hub is not None:
            await push_model(self.config, self.rows.since(0), self.evaluations, self.listener.log)

    def _may_restart_after(self, death: WorkerDied) -> bool:
        """Whether another attempt follows a worker's death. Not where the worker would fail again: by an error of its own, before
        anything was trained. Rollout workers, evaluators and storage units have restarts of their own."""
        if death.worker.partition("/")[0] in ("rollout", EVALUATORS, "storage") or self._evaluate_only:
            return False
        would_fail_again = death.has_failed and not self._has_trained
        may_restart = self._restarts.are_left and not self._interrupted.is_set()
        return may_restart and not would_fail_again

    async def restart_after(self, death: WorkerDied) -> None:
        """End this attempt at once, and let `start` make the next one, after a pause that begins with the death.

        When a worker has died that is not started again by itself, a trainer for example, another attempt resumes the run from its
        newest checkpoint, as `--resume` does, up to `train.max_restarts` times without a new step between them; else the death is
        raised. For this there are checkpoints in shared memory.
        """
        attempt = self.attempt
        assert attempt is not None, "a worker has died"
        self._restarts.reached(self.first, attempt.driver.ledger.ledger.committed)
        if not self._may_restart_after(death):
            raise death
        clock, pause = asyncio.get_running_loop().time, self._restarts.pause
        over = clock() + pause
        self.listener.log(f"{death}; the run is resumed from its newest checkpoint in {pause:g} s")
        self._pushed.left(attempt.driver.source)
        self._staying = attempt.cluster if await attempt.abandon() else None
        await attempt.close()
        self.attempt = None
        self._folder.remove_weights()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._interrupted.wait(), max(0.0, over - clock()))
        self._restarts.begin()
        self._resume = True
        self._folder = self._folder.next()

    def _memory(self) -> Path | None:
        """A folder in shared memory for this run's checkpoints, where its workers are on this machine and may be started again."""
        config = self.config
        has_trainers = config.cluster.name == "local" and not launch_of(os.environ) and not self._evaluate_only
        return make_shared_dir() if config.checkpoint.in_memory and config.train.max_restarts and has_trainers else None

    async def _stop(self, attempt: Attempt) -> None:
        """Stop the last attempt, and write what a run leaves at its end."""
        await attempt.stop(lambda: self.ended_by == signal.SIGINT)
        driver = attempt.driver
        if not self._evaluate_only:
            self._save_published_model(driver)
        await attempt.close()
        if not self._evaluate_only:
            self.certificate = driver.record.certificate()
            self.certificate.write(self.config.run_dir)
        self._write_report()
        self._folder.note_end()

    # -- from outside, while it runs ----------------------------------------------------------------------------------------

    @property
    def driver(self) -> Driver | None:
        """Driver of this attempt; None before the run has begun, and when it is over."""
        return self.attempt.driver if self.attempt is not None else None

    @property
    def weights_dir(self) -> Path:
        """Folder of the weights that travel. Raises `RunError` when the run is over."""
        if self._folder.weights_dir is None:
            raise RunError("this run is over")
        return self._folder.weights_dir

    @property
    def first(self) -> int:
        """Step at which this attempt has begun."""
        return self._folder.job.first

    def push(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Train on these rows next. Raises `UserError` for one that lacks a column or is too long, `RunError` at the end."""
        if self.driver is None:
            raise RunError("this run is over: it trains on no more prompts")
        if self._pushed.push(rows, self.prepared, self.driver.source):
            self.driver.saves.pushed()
            self.driver.signal.notify()  # the feed may wait for them

    def held(self) -> dict[str, int]:
        """Rows in the hands of each rollout worker that has any: what would be lost with it."""
        assert self.driver is not None
        return self.driver.transfer_queue.controllers["rollout"].holders()

    def kill(self, worker: str) -> None:
        """End a worker's process by SIGKILL, to see what becomes of the run. Raises `RunError` for one that has none."""
        cluster = self.attempt.cluster if self.attempt is not None else self._staying
        pids = cluster.pids() if cluster is not None else {}
        if worker not in pids:
            raise RunError(f"worker {worker} has no process of its own that could be killed")
        os.kill(pids[worker], signal.SIGKILL)

    _writes_situations = True  # but not in a simulation

    # -- where it runs: a simulation has its own ----------------------------------------------------------------------------

    async def _inputs(self, scratch: Path, resumed: Resumed | None) -> Prepared:
        """The run's inputs: those of this process's attempt before, where there was one and a checkpoint is resumed."""
        if self._restarts.num and resumed is not None:
            return self.prepared
        return await self._prepare(scratch, resumed)

    async def _prepare(self, scratch: Path, resumed: Resumed | None) -> Prepared:
        """The run's inputs, checked."""
        import_ahead(self.config, is_training=not self._evaluate_only)
        has_job_file = resumed is not None and (self.config.run_dir / JOB_FILE).exists()  # a fork may have a model of its own
        begun_with = model_begun_with(self.config.run_dir) if has_job_file else None
        return await prepare(
            self.config,
            scratch,
            evaluate_only=self._evaluate_only,
            begun_with=begun_with,
            is_served=self._is_served,
            log=self.listener.log,
        )

    def _fleet(self, weights_dir: Path) -> list[WorkerSpec]:
        """The workers that it starts with."""
        are_trainers_there = bool(launch_of(os.environ))
        return workers(self.config, weights_dir, is_training=not self._evaluate_only, are_trainers_there=are_trainers_there)

    def _place(self, driver: Driver, weights_dir: Path) -> tuple[Server, Cluster]:
        """Server of the workers, and the cluster that runs them."""
        chosen, cluster = self.config.cluster, self._staying
        if cluster is None:
            made = build("cluster", chosen.name, chosen.options, CLUSTERS, {"run_dir": self.config.run_dir})
            cluster = cast(Cluster, made)
        return driver.server(weights_dir / "queue"), cluster

    def _save_published_model(self, driver: Driver) -> None:
        self._folder.save_published_model(driver.versions.newest, self.prepared.model, driver.ledger.ledger.committed)

    def _write_report(self) -> None:
        write_trace(self.config.run_dir)
        write_report(self.config.run_dir)

    # -- inside -------------------------------------------------------------------------------------------------------------

    def _make_attempt(self, resumed: Resumed | None, waits: OpenWaits) -> Attempt:
        """The driver, and the workers with what watches them. `waits`: the driver's."""
        weights_dir = self._folder.weights_dir
        assert weights_dir is not None
        to_resume = partial(self._pushed.to_resume, self.prepared)
        driver = Driver(self.config, self.prepared, self, to_resume, resumed, self._folder.memory)
        driver.saves.on_settled = self._changed.notify
        server, cluster = self._place(driver, weights_dir)
        fleet = self._fleet(weights_dir)
        names = [spec.name for spec in fleet]
        situations = Situations(driver, waits, names, cluster.pids)
        watch = Watch(driver, situations, self.config.run_dir if self._writes_situations else None)
        return Attempt(driver, server, cluster, fleet, self._folder, watch, self._interrupted)

    def _is_trained(self) -> bool:
        """Whether all steps of the configuration are."""
        return not self._evaluate_only and self.config.run.steps - 1 in self.rows

    def _is_done(self) -> bool:
        steps = 0 if self._evaluate_only else self.config.run.steps
        held_out = self.driver.evaluating.held_out if self.driver is not None else None
        evaluated = held_out is None or not held_out.is_due(steps) or any(row["step"] == steps for row in self.evaluations)
        saved = steps == 0 or not self.config.checkpoint.keep or (self.driver is not None and self.driver.saves.settled >= steps)
        has_begun = self.driver is None or self.driver.has_begun  # else a trainer that is still loading could save no model
        return (not steps or self._is_trained()) and evaluated and saved and has_begun

    # -- from its driver ----------------------------------------------------------------------------------------------------

    def log(self, text: str) -> None:
        """See `Listener`."""
        self.listener.log(text)

    def group(self, step: int) -> None:
        """See `Listener`."""
        self._has_trained = True
        self.listener.group(step)

    def step(self, step: int, row: Mapping[str, float]) -> None:
        """See `Listener`."""
        self.rows[step] = {"step": step, **row}
        self.listener.step(step, row)
        self._changed.notify()

    def evaluation(self, row: EvaluationRow) -> None:
        """See `Listener`."""
        self.evaluations.append(row)
        if self.driver is not None:
            self.responses = self.driver.evaluating.held_out.latest
        self.listener.evaluation(row)
        self._changed.notify()

    async def _begun(self, driver: Driver) -> None:
        """Notify the run when the trainer has loaded: one that is done otherwise may end then."""
        await driver.begun()
        self._changed.notify()


async def run_with_signals(job: Job, work: Coroutine[Any, Any, bool]) -> bool:
    """Run, with SIGINT and SIGTERM ending the run in order. A second one ends it at once."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    seen: list[int] = []

    def handle(number: int) -> None:
        seen.append(number)
        if len(seen) == 1:
            job.interrupt(number)
        else:
            task.cancel()

    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, handle, number)
            stack.callback(loop.remove_signal_handler, number)
        return await task
