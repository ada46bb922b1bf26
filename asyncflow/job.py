"""A run's life: prepare, start, until it is done, stop, finish.

    prepared --start--> driver's services, workers, loops --done | interrupted | failed--> stop --> model, trace, report

consumes: the ends of loops and workers, the watchdog's verdict, the user's interrupt
waits for: the first of these; workers then have `run.stop_grace_seconds` to end by themselves
is unblocked by: whatever comes first
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncflow.build.driver import Driver
from asyncflow.build.fleet import threads, trainers, training
from asyncflow.build.prepare import Prepared, prepare, tasks_before_training, tokenize
from asyncflow.build.record import Told
from asyncflow.build.resume import Resumed, check_fits, cut_back, data_hash, holds_results, metrics_of, read_driver
from asyncflow.build.saving import checkpoints_of
from asyncflow.build.workers import JobFile, copy_tokenizer
from asyncflow.cluster import CLUSTERS
from asyncflow.cluster.base import Cluster, WorkerSpec
from asyncflow.cluster.torchrun import launch_of
from asyncflow.config import Config, dump
from asyncflow.data.datasets import check_columns, template_columns
from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.registry import load
from asyncflow.run_dir import CONFIG_FILE, JOB_FILE, KEY_FILE, RunDir, control_socket, replace, sweep_shared_memory
from asyncflow.telemetry.certificate import Certificate, read_certificate
from asyncflow.telemetry.report import write_report
from asyncflow.telemetry.trace import write_trace
from asyncflow.transport import ConnectionLost, Peer, Server, remote
from asyncflow.types import RunError, UserError
from asyncflow.weight_sync.base import Manifest
from asyncflow.workflows.evaluation import Row
from asyncflow.workflows.signal import Signal


class Listener:
    """What a run tells whoever watches it; the command line draws it. All methods may be left as they are."""

    def says(self, text: str) -> None:
        """Something worth a line."""

    def group(self, step: int) -> None:
        """One more group of the step has been trained."""

    def step(self, step: int, row: Mapping[str, float]) -> None:
        """A step is committed; its metrics."""

    def evaluation(self, row: Row) -> None:
        """An evaluation is finished; its figures."""


class Status(msgspec.Struct, frozen=True):
    """The answer to `asyncflow status`: who does what, and what waits for what."""

    run: str
    committed: int
    steps: int
    idle_seconds: float
    workers: list[str]
    waits: list[str]
    queue: dict[str, dict[str, int]]


class Job:
    """One run. `evaluate_only` starts no trainer, and ends after one evaluation of the model as it is.

    With `resume` it goes on from its newest whole checkpoint, or begins if it never has.
    """

    def __init__(
        self, config: Config, listener: Listener | None = None, *, evaluate_only: bool = False, resume: bool = False
    ) -> None:
        self.config = config
        self.listener = listener or Listener()
        self.rows: dict[int, Mapping[str, float]] = {}
        self.evaluations: list[Row] = []
        self.certificate: Certificate | None = None  # at the end
        self.ended_by: int | None = None  # the signal that has interrupted it
        self._evaluate_only, self._resume = evaluate_only, resume
        self._interrupted = asyncio.Event()
        self._has_failed = False
        self._changed = Signal()
        self._loops: list[asyncio.Task[Any]] = []
        self._folder = RunDir(config.run_dir)
        self._weights_dir: Path | None = None
        self._model_before: int | None = None  # what was there when the run started
        self._model_version: int | None = None  # of what this life has saved
        self.driver: Driver | None = None

    async def start(self) -> None:
        """Check everything, then start the workers and the loops. Raises `UserError` before anything is started.

        Nothing is started, and there is no `driver`, where the run that is to go on is finished already.
        """
        config = self.config
        scratch = Path(tempfile.mkdtemp(prefix="asyncflow-"))
        try:
            await self._check_not_live()
            resumed = await self._last_checkpoint()
            if resumed is None:
                self._check_free()
            prepared = await self._prepare(scratch, resumed)
            if resumed is None:
                prepared = self._begin_anew(prepared, scratch)
            else:
                check_fits(config, resumed.state, await asyncio.to_thread(data_hash, prepared.prompts))
                if resumed.state.version == config.run.steps == self._folder.model_version:
                    return self._tell_of_the_end(prepared, resumed)
                await self._go_back(resumed)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        self._prepared = prepared
        sweep_shared_memory()
        self._weights_dir = self._folder.make_weights_dir()
        self._model_before = self._folder.model_id()
        self.job_file = self._make_job_file(prepared, resumed)
        replace(config.run_dir / JOB_FILE, msgspec.json.encode(self.job_file))
        listener = self.listener
        told = Told(listener.group, self._on_step, self._on_evaluation, listener.says)
        driver = Driver(config, prepared, told, resumed)
        driver.saves.on_settled = self._changed.notify
        self._server, self._cluster = self._place(driver, self._weights_dir)
        self.driver = driver
        await driver.transfer_queue.open()
        await self._server.start(control_socket(config.run_dir))
        if config.queue.listen is not None:
            listener.says(f"the queue listens at {await self._server.start(config.queue.listen)}, with {config.run_dir / KEY_FILE}")
        await self._cluster.start(self._workers())
        self._loops = [asyncio.create_task(loop) for loop in [*driver.loops(), self._watch(), self._begun(driver)]]

    async def until(self, condition: Callable[[], bool]) -> bool:
        """Wait until the condition holds, looking again after every step and evaluation. False: interrupted.

        Raises what has gone wrong: a worker that died, a loop that failed, a run that stands still.
        """
        reached = asyncio.ensure_future(self._changed.until(condition))
        interrupted = asyncio.ensure_future(self._interrupted.wait())
        assert self.driver is not None
        workers = asyncio.ensure_future(self._cluster.wait(self.driver.died))
        try:
            waiting: set[asyncio.Future[Any]] = {reached, interrupted, workers, self.driver.failure, *self._loops}
            while not reached.done() and not interrupted.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if workers in done and not reached.done():
                    raise RunError("every worker has ended, but the run has not")
            return reached.done()
        except BaseException:
            self._has_failed = True
            raise
        finally:
            for future in (reached, interrupted, workers):
                future.cancel()

    async def run(self) -> bool:
        """Start, run to the end, stop. False: interrupted before the end. Raises `UserError` and `RunError`."""
        try:
            await self.start()
            if self.driver is None:
                return True
            steps = 0 if self._evaluate_only else self.config.run.steps
            self.driver.ledger.allow(steps, steps)
            return await self.until(self._is_done)
        finally:
            await self.stop()

    def interrupt(self, by: int | None = None) -> None:
        """End the run early, by a signal perhaps: a checkpoint, the model as of the last commit and the report are written."""
        self.ended_by = by
        self._interrupted.set()

    async def stop(self) -> None:
        """Stop the loops and the workers, and write what is left: the model, the trace, the report."""
        try:
            if self.driver is not None:
                await self._stop(self.driver)
        finally:
            self.driver = None
            if self._weights_dir is not None:
                shutil.rmtree(self._weights_dir, ignore_errors=True)
                self._weights_dir = None

    async def _stop(self, driver: Driver) -> None:
        grace = self._grace_seconds(driver)
        await driver.stop()
        for name in await self._cluster.stop(grace):
            self.listener.says(f"worker {name} did not end within {grace:g} s and was killed")
        if launch_of(os.environ) and not await driver.hub.have_left("trainer/", grace):
            self.listener.says(f"the trainers that torchrun has started did not end within {grace:g} s")
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self._server.close()
        control_socket(self.config.run_dir).unlink(missing_ok=True)
        if not self._evaluate_only:
            self._rescue_model(driver.board.newest)
        await driver.saves.close()
        await driver.close()
        if not self._evaluate_only:
            self.certificate = driver.record.certificate()
            self.certificate.write(self.config.run_dir)
        self._write_report()
        if self._model_version is not None:  # last: it says that the run has ended in order
            self._folder.note_model(self._model_version)

    def push(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Train on these rows next. Raises `UserError` for one that lacks a column or is too long, `RunError` at the end."""
        if self.driver is None:
            raise RunError("this run is over: it trains on no more prompts")
        new, prepared = [dict(row) for row in rows], self._prepared
        check_columns(new, template_columns(self.config.data.prompt_template), "the pushed prompts")
        prompts = tokenize(self.config, CheckpointTokenizer(prepared.model), new)
        for number, prompt in enumerate(prompts, 1):
            if len(prompt.ids) + self.config.rollout.max_new_tokens > prepared.max_context:
                raise UserError(
                    f"row {number} of the pushed prompts has {len(prompt.ids)} tokens: with {self.config.rollout.max_new_tokens} "
                    f"new ones more than the run's context of {prepared.max_context}; set model.max_context_tokens"
                )
        self.driver.source.push(prompts)
        self.driver.saves.pushed()

    def held(self) -> dict[str, int]:
        """Rows in the hands of each rollout worker that has any: what would be lost with it."""
        assert self.driver is not None
        return self.driver.transfer_queue.controllers["rollout"].holders()

    def kill(self, worker: str) -> None:
        """End a worker's process by SIGKILL, to see what becomes of the run. Raises `RunError` for one that has none."""
        pids = self._cluster.pids()
        if worker not in pids:
            raise RunError(f"worker {worker} has no process of its own that could be killed")
        os.kill(pids[worker], signal.SIGKILL)

    @remote
    async def status(self) -> Status:
        """Who does what, and what waits for what."""
        driver = self.driver
        assert driver is not None
        now = asyncio.get_running_loop().time()
        workers = [
            f"{state.worker} (process {state.pid}): {state.task}{f' for {state.cause}' if state.cause else ''} since "
            f"{now - state.since:.1f} s, {state.rss_bytes / 1e6:.0f} MB, version {driver.board.serving.get(state.worker, '-')}"
            for _, state in sorted(driver.hub.states.items())
        ]
        waits = driver.ledger.ledger.missing()
        tasks, _ = await driver.queue.status()
        for name, task in tasks.items():
            waits += [f"{worker} holds {rows} rows of task {name}" for worker, rows in task.holders.items()]
        queue = {name: task.counts for name, task in tasks.items()}
        idle = now - driver.last_progress
        return Status(self.config.run.name, driver.ledger.ledger.committed, self.config.run.steps, idle, workers, waits, queue)

    # -- where it runs: a simulation has its own --------------------------------------------------------------------------------

    async def _prepare(self, scratch: Path, resumed: Resumed | None) -> Prepared:
        """The run's inputs, checked."""
        made = self._folder.initial_model if resumed is not None else None
        return await prepare(self.config, scratch, evaluate_only=self._evaluate_only, made=made)

    def _place(self, driver: Driver, weights_dir: Path) -> tuple[Server, Cluster]:
        """What serves the workers, and what runs them."""
        cluster = load("cluster", CLUSTERS[self.config.cluster])(self.config.run_dir)
        return driver.server(self, weights_dir / "queue"), cluster

    # -- the run directory --------------------------------------------------------------------------------------------------

    async def _check_not_live(self) -> None:
        run_dir = self.config.run_dir
        if control_socket(run_dir).exists():
            with contextlib.suppress(ConnectionLost):  # the socket of a run that was killed
                await (await Peer.connect(control_socket(run_dir), "check", timeout_seconds=1.0)).close()
                raise UserError(f"a run is live in {run_dir}: wait for its end, interrupt it, or give this one another run.name")

    async def _last_checkpoint(self) -> Resumed | None:
        """What the run is to go on from; None if it is to begin. Raises `RunError` where all that there is is damaged."""
        if not self._resume:
            return None
        self._folder.restore_model()
        checkpoints = checkpoints_of(self.config)
        version = await asyncio.to_thread(checkpoints.newest, self.listener.says)
        if version is not None:
            return await asyncio.to_thread(read_driver, checkpoints.path(version), checkpoints.added(version))
        if checkpoints.versions():
            raise RunError(f"none of the checkpoints in {self._folder.checkpoints} is whole: begin anew by run.overwrite=true")
        return None

    def _check_free(self) -> None:
        """That the run may begin in its folder. Raises `UserError`."""
        folder, may_overwrite = self._folder, self.config.run.overwrite
        if self._resume and not may_overwrite and holds_results(folder.path):
            raise UserError(
                f"{folder.checkpoints} has no checkpoint to go on from, but {folder.path} holds the model or the metrics of an "
                f"earlier run: begin anew and remove them by run.overwrite=true, or give this run another run.name"
            )
        folder.check(may_overwrite=may_overwrite or (self._resume and folder.is_run()))
        if self._resume:
            self.listener.says(f"there is no checkpoint in {folder.checkpoints}: the run begins at its start")

    def _begin_anew(self, prepared: Prepared, scratch: Path) -> Prepared:
        """Make the run's folder; a model made in `scratch` moves into it."""
        self._folder.claim(dump(self.config))
        if prepared.model.is_relative_to(scratch):
            model = Path(shutil.move(prepared.model, self._folder.initial_model))
            return Prepared(model, prepared.prompts, prepared.held_out, prepared.max_context)
        return prepared

    def _tell_of_the_end(self, prepared: Prepared, resumed: Resumed) -> None:
        """The run is finished, with its model: nothing is to be done."""
        run_dir, steps = self.config.run_dir, self.config.run.steps
        self.listener.says(
            f"this run is finished already: all of its {steps} steps are done, and {self._folder.model} is its model; raise "
            f"run.steps to go on"
        )
        self.rows = {row.pop("step"): row for row in metrics_of(run_dir)}
        self.certificate = read_certificate(run_dir)
        self.job_file = self._make_job_file(prepared, resumed)

    def _make_job_file(self, prepared: Prepared, resumed: Resumed | None) -> JobFile:
        job = JobFile(str(prepared.model.resolve()), prepared.max_context, str(self._weights_dir or ""), launch_of(os.environ))
        if resumed is not None:
            job = msgspec.structs.replace(job, first=resumed.state.version, checkpoint=str(resumed.folder.resolve()))
        return job

    async def _go_back(self, resumed: Resumed) -> None:
        """Let the run's folder be as it was when the checkpoint was written."""
        version, run_dir = resumed.state.version, self.config.run_dir
        self.listener.says(f"going on from {resumed.folder}: {version} of {self.config.run.steps} steps are done")
        checkpoints = checkpoints_of(self.config)
        await asyncio.to_thread(checkpoints.forget_after, version)
        await asyncio.to_thread(checkpoints.sweep)
        now = asyncio.get_running_loop().time()
        rows = await asyncio.to_thread(cut_back, run_dir, resumed, now)
        self.rows = {row.pop("step"): row for row in rows}
        (run_dir / KEY_FILE).unlink(missing_ok=True)
        replace(run_dir / CONFIG_FILE, dump(self.config).encode())

    def _rescue_model(self, published: Manifest | None) -> None:
        """If the trainer could not save in time: the last version that it published is a safetensors file with the same names.

        A model of an earlier life stays where there is none that could take its place.
        """
        self._folder.restore_model()
        if self._folder.model_id() != self._model_before:  # saved in this life
            assert self.driver is not None
            self._model_version = self.driver.ledger.ledger.committed
            return
        if published is None:
            is_there = self._model_before is not None
            left = f"{self._folder.model} stays as it was" if is_there else "there is no model to save"
            self.listener.says(f"no step was committed, so {left}")
            return
        if self._folder.model_version == published.version:
            return
        with self._folder.saving_model() as folder:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            shutil.copyfile(published.address, folder / "model.safetensors")
            shutil.copyfile(self._prepared.model / "config.json", folder / "config.json")
            copy_tokenizer(self._prepared.model, folder)
        self._model_version = published.version
        self.listener.says(f"the trainer could not save in time: {self._folder.model} holds the last published weights")

    def _write_report(self) -> None:
        write_trace(self.config.run_dir)
        write_report(self.config.run_dir)

    # -- inside -------------------------------------------------------------------------------------------------------------

    def _workers(self) -> list[WorkerSpec]:
        rollout, tasks = self.config.rollout, tasks_before_training(self.config)
        mains = "asyncflow.build.workers"
        specs = [
            WorkerSpec(f"rollout/{i}", f"{mains}:rollout_worker", threads(rollout.num_threads), rollout.max_restarts)
            for i in range(rollout.num_workers)
        ]
        if "reward" in tasks:
            specs.append(WorkerSpec("reward", f"{mains}:reward_worker", threads(1)))
        if not self._evaluate_only:
            if not launch_of(os.environ):  # else they are there already
                assert self._weights_dir is not None
                specs += trainers(self.config, f"{mains}:train_worker", self._weights_dir)
            if "reference" in tasks:
                specs.append(WorkerSpec("reference", f"{mains}:reference_worker", training(self.config)))
        return specs

    def _is_done(self) -> bool:
        steps = 0 if self._evaluate_only else self.config.run.steps
        held_out = self.driver.held_out if self.driver is not None else None
        evaluated = held_out is None or not held_out.is_due(steps) or any(row["step"] == steps for row in self.evaluations)
        saved = steps == 0 or not self.config.checkpoint.keep or (self.driver is not None and self.driver.saves.settled >= steps)
        has_begun = self.driver is None or self.driver.has_begun  # else a trainer that is still loading could save no model
        return len(self.rows) >= steps and evaluated and saved and has_begun

    def _grace_seconds(self, driver: Driver) -> float:
        """How long workers may take to end: who is not in a hurry lets them write a checkpoint, if steps are not in one, or read
        the one that they go on from, so that they can save its model."""
        grace, checkpoint = self.config.run.stop_grace_seconds, self.config.checkpoint
        is_to_be_written = checkpoint.keep and not self._evaluate_only and driver.saves.settled < driver.ledger.ledger.committed
        is_to_be_read = not driver.has_begun
        is_hasty = self._has_failed or self.ended_by == signal.SIGINT
        return max(grace, checkpoint.stop_grace_seconds) if (is_to_be_written or is_to_be_read) and not is_hasty else grace

    def _on_step(self, step: int, row: Mapping[str, float]) -> None:
        self.rows[step] = row
        self.listener.step(step, row)
        self._changed.notify()

    def _on_evaluation(self, row: Row) -> None:
        self.evaluations.append(row)
        self.listener.evaluation(row)
        self._changed.notify()

    async def _begun(self, driver: Driver) -> None:
        """A run that is done but for its trainer's load may end after it."""
        await driver.begun()
        self._changed.notify()

    async def _watch(self) -> None:
        """A run in which nothing moves says who waits for what, and ends."""
        assert self.driver is not None
        limit, loop = self.config.run.stall_timeout_seconds, asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.05, self.driver.last_progress + limit - loop.time()))
            if self.driver.ledger.is_held:
                self.driver.progress()  # who drives the run by hand may take his time
            elif loop.time() - self.driver.last_progress >= limit:
                status = await self.status()
                raise RunError(
                    f"nothing has moved for {limit:g} s (run.stall_timeout_seconds). "
                    f"Workers: {'; '.join(status.workers) or 'none yet'}. Waited for: {'; '.join(status.waits) or 'nothing'}"
                )


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
