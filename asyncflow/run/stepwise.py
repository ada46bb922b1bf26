"""A run that somebody else drives step by step, in its own event loop: `Trainer` from Python, the service over HTTP.

consumes: calls
waits for: the step that was asked for, the workers' weights; another attempt, where a worker's death has ended this one
is unblocked by: the run, or its end
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from asyncflow.cluster.base import WorkerDied
from asyncflow.config import Config
from asyncflow.run.attempt import Attempt
from asyncflow.run.driver import Driver
from asyncflow.run.job import Job, Listener
from asyncflow.run.state.resume import evaluation_of
from asyncflow.run.state.run_folder import write_published
from asyncflow.run.state.saving import checkpoints_of
from asyncflow.types import RunError, UserError

T = TypeVar("T")


class StepwiseRun:
    """A run whose steps are trained when they are asked for. `steps_done`: how many have been asked for and are committed."""

    def __init__(
        self,
        config: Config,
        listener: Listener | None = None,
        *,
        resume: bool = False,
        journal: Path | None = None,
        between: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """With `resume` the run continues from its newest whole checkpoint, or begins if there is none. `journal`: of a run that is
        served to processes from outside, see `Job`. `between`: entered before an attempt ends that another one follows, and left
        when that has begun."""
        self.config = config
        self.job = Job(config, listener, resume=resume, is_served=journal is not None, journal=journal)
        self.steps_done = 0
        self._resuming, self._between = asyncio.Lock(), between
        self._failure: Exception | None = None  # why no other attempt could be begun
        self._checkpoint = 0  # the newest one that was asked for

    async def start(self) -> None:
        """Check everything and start the workers. Raises `UserError` before anything is started."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.job.stop)
            await self.job.start()
            stack.pop_all()
        self.steps_done = self.job.first

    async def step(self) -> Mapping[str, float] | None:
        """Train one step and return its metrics; None when `run.steps` are done. Raises `RunError` when the run cannot go on."""
        step = self.steps_done
        if step == self.config.run.steps:
            return None
        return await self._on_any_attempt(partial(self._step, step))

    async def _step(self, step: int) -> Mapping[str, float]:
        self.driver.ledger.allow(max(step + 1, self.driver.ledger.limit), self.config.run.steps)
        if not await self.job.until(lambda: step in self.job.rows):
            raise RunError(f"the run was interrupted in step {step}")
        self.steps_done = step + 1
        return self.job.rows[step]

    async def until(self, condition: Callable[[], bool]) -> bool:
        """See `Job.until`."""
        return await self._on_any_attempt(lambda: self.job.until(condition))

    async def _on_any_attempt(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Call, and again on the next attempt if a worker's death has ended this one (`Job.restart_after`), once the steps that
        the caller knows are committed there. Raises `RunError` where none follows."""
        first = attempt = self._attempt
        while True:
            try:
                if attempt is not first:
                    await self.job.until(lambda: self.driver.ledger.ledger.committed >= self.steps_done)
                return await call()
            except WorkerDied as death:
                await self._follow(attempt, death)
                attempt = self._attempt

    async def until_here(self, condition: Callable[[], bool]) -> bool:
        """See `Job.until`, of this attempt alone. Raises `WorkerDied` where it has ended before, once another one is under way."""
        attempt = self._attempt
        try:
            return await self.job.until(condition)
        except WorkerDied as death:
            await self._follow(attempt, death)
            raise

    async def under_way(self) -> None:
        """Wait while another attempt is begun."""
        async with self._resuming:
            pass

    @property
    def is_resuming(self) -> bool:
        """Whether an attempt has ended, and another one is begun."""
        return self._resuming.locked()

    async def _follow(self, attempt: Attempt, death: WorkerDied) -> None:
        """Resume the run after a death that has ended this attempt. Of several calls the first one does; where it cannot, all
        raise its error."""
        async with self._resuming:
            if self._failure is not None:
                raise self._failure
            if self._attempt is attempt:
                try:
                    await self._resume_after(death)
                except Exception as error:
                    self._failure = error
                    raise

    async def _resume_after(self, death: WorkerDied) -> None:
        ledger = self.driver.ledger
        async with self._between():
            try:
                await self.job.restart_after(death)
            except WorkerDied:
                has_any = checkpoints_of(self.config).versions()
                kept = "its newest checkpoint" if has_any else "its beginning: there is no checkpoint"
                raise RunError(f"{death}; the run has ended: begin it again with resume, and it continues from {kept}") from death
            await self.job.start()
            self.driver.ledger.allow(ledger.limit, self.config.run.steps)
            if self._checkpoint > self.driver.saves.newest:  # it may have been under way when the trainer died
                self.driver.ledger.ask_for_checkpoint(self._checkpoint)

    def allow(self, steps: int) -> None:
        """Let so many steps of the run be trained, without a caller that waits for them."""
        self.driver.ledger.allow(min(max(steps, self.steps_done), self.config.run.steps), self.config.run.steps)

    async def checkpoint(self) -> int:
        """Have a checkpoint written with the next step that is committed. See `Trainer.checkpoint`."""
        config = self.config
        if not config.checkpoint.keep:
            raise UserError("checkpoint.keep=0: this run keeps no checkpoints")
        if self.driver.ledger.ledger.committed == config.run.steps:
            raise UserError(
                "all steps of this run are committed, so no checkpoint follows: the one of its end is written by itself"
            )
        self._checkpoint = min(self.driver.ledger.ask_for_checkpoint(), config.run.steps)  # the last step has one in any case
        return self._checkpoint

    async def save(self, folder: Path) -> int:
        """Write the model after the last committed step. See `Trainer.save`."""
        if folder.exists() or folder.is_symlink():
            raise UserError(f"{folder} is there already: name a new folder for the model")
        if not self.driver.ledger.ledger.committed:
            raise UserError(f"no step is committed yet: the model is still the one in {self.job.prepared.model}")
        return await self._on_any_attempt(partial(self._save, folder))

    async def _save(self, folder: Path) -> int:
        driver = self.driver
        version = driver.ledger.ledger.committed
        with self._waiting():
            if not await self.job.until_done(driver.versions.has_published(version)):
                raise RunError(f"the run was interrupted before version {version} was published")
        published = driver.versions.newest
        if published is None or not Path(published.address).is_file():
            raise RunError("the weights are in no file on this machine: call checkpoint(), which the trainer writes")
        await asyncio.to_thread(write_published, folder, published, self.job.prepared.model, self.config)
        return published.version

    async def evaluate(self) -> Mapping[str, float]:
        """Evaluate the model after the last committed step. See `Trainer.evaluate`."""
        if not self.job.prepared.held_out:
            raise UserError("this run has no prompts to be evaluated on: set eval.path")
        return await self._on_any_attempt(self._evaluate)

    async def _evaluate(self) -> Mapping[str, float]:
        job, driver = self.job, self.driver
        version = driver.ledger.ledger.committed

        def figures() -> Mapping[str, float] | None:
            return next((row for row in job.evaluations if row["step"] == version), None)

        if (row := figures() or evaluation_of(self.config.run_dir, version)) is not None:
            return row
        with self._waiting():
            if not driver.evaluating.held_out.is_planned(version):
                driver.background.start(driver.evaluating.on_demand(version))
            if not await job.until(lambda: figures() is not None):
                raise RunError(f"the run was interrupted in the evaluation of version {version}")
        row = figures()
        assert row is not None, "it has just been waited for"
        return row

    async def put_prompts_data(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Train on these rows before those of the data set. See `Trainer.put_prompts_data`."""
        self.job.push(rows)

    async def scale_rollout(self, num_workers: int, grace_seconds: float) -> str:
        """Let rollout workers join or leave. Returns the changes that are begun, in words. See `Trainer.scale_rollout`."""
        return await self._attempt.scaling.scale("rollout", num_workers, grace_seconds)

    async def weight_sync_notify(self, timeout_seconds: float) -> int:
        """Have every rollout worker serve the weights of the last committed step. See `Trainer.weight_sync_notify`."""
        return await self._on_any_attempt(partial(self._notify, timeout_seconds))

    async def _notify(self, timeout_seconds: float) -> int:
        driver = self.driver
        version, versions = driver.ledger.ledger.committed, driver.versions
        versions.call_for(version)
        is_late = False

        async def all_serve() -> None:
            nonlocal is_late
            try:
                await asyncio.wait_for(versions.all_serve(version), timeout_seconds)
            except TimeoutError:
                is_late = True

        if not await self.job.until_done(all_serve()):
            raise RunError(f"the run was interrupted before all served version {version}")
        if not is_late:
            return version
        serving, why = versions.serving, []
        for name in versions.workers.working:
            if name in versions.stale:
                why.append(f"{name} could not get it ({versions.stale[name]})")
            elif serving.get(name, -1) < version:
                why.append(f"{name} serves {serving[name]}" if name in serving else f"{name} is not there")
        reasons = "; ".join(why) or "it is not published yet"
        raise RunError(f"version {version} is not served by all within {timeout_seconds:g} s: {reasons}")

    async def stop(self) -> None:
        """Stop the workers and write the model, the trace and the report."""
        await self.job.stop()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Context in which a run that is held between two steps counts as one that stands still, should nothing move."""
        driver = self.driver
        driver.progress()
        driver.ledger.is_waited_for = True
        try:
            yield
        finally:
            driver.ledger.is_waited_for = False

    @property
    def driver(self) -> Driver:
        """The driver of a run that is under way. Raises `RunError`."""
        return self._attempt.driver

    @property
    def _attempt(self) -> Attempt:
        if self.job.attempt is None:
            raise RunError("this run has stopped")
        return self.job.attempt
