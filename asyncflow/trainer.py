"""The same run from Python, step by step.

with Trainer.from_config("recipes/quickstart.yaml", "run.steps=5") as trainer:
    while (metrics := trainer.step()) is not None:
        print(metrics["reward/mean"])
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from asyncflow.config import Config, load, parse
from asyncflow.run.driver import Driver
from asyncflow.run.job import Job, Listener
from asyncflow.types import RunError

T = TypeVar("T")


class Trainer:
    """A run driven step by step. Its event loop lives in a thread of its own; every method blocks until it is done."""

    def __init__(self, config: Config, listener: Listener | None = None, *, resume: bool = False) -> None:
        """With `resume` the run goes on from its newest whole checkpoint, or begins if there is none."""
        self.config = config
        self._listener, self._resume = listener, resume
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="asyncflow", daemon=True)
        self._job: Job | None = None
        self._steps_done = 0

    @classmethod
    def from_config(cls, config: str | Path | Mapping[str, Any], *overrides: str, resume: bool = False) -> Trainer:
        """Make a trainer from a YAML file with `key.path=value` overrides, or from nested mappings. Raises `UserError`."""
        return cls(parse(config) if isinstance(config, Mapping) else load(Path(config), overrides), resume=resume)

    def start(self) -> None:
        """Check everything and start the workers. Raises `UserError` before anything is started."""
        if self._job is not None:
            raise RunError("this trainer has been started already")
        self._thread.start()
        self._job = self._call(self._make_job())
        self._call(self._job.start())
        self._steps_done = self._job.first

    def step(self) -> Mapping[str, float] | None:
        """Train one step and return its metrics; None when `run.steps` are done. Starts the run if it is not running.

        Raises `RunError` when the run cannot go on; call `stop` then, to have the model and the report written.
        """
        if self._job is None:
            self.start()
        if self._steps_done == self.config.run.steps:
            return None
        self._call(self._one_step(self._steps_done))
        self._steps_done += 1
        return self._started.rows[self._steps_done - 1]

    def push_prompts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Train on these rows (the columns that make the prompt, and those that the reward reads) before the data set's.

        They enter with the next step that is not admitted yet: prompts are admitted as far ahead as the schedule generates.
        Raises `UserError` for a row that lacks a column or is too long.
        """
        self._call(self._push(rows))

    def weight_sync_notify(self, timeout_seconds: float = 60.0) -> int:
        """Have every rollout worker serve the weights of the last committed step now; returns their version (AF, section 5).

        Workers get new weights by themselves, when the schedule lets them: this is for who drives a run from outside. They change
        all at once, in `sub_step` too, where they otherwise do it in turn; but no row is made by a version that its step may not
        have, so that under a schedule that is ahead with generating they first finish what only the older version may make. Returns
        when all serve it. Raises `RunError` naming the workers that do not in time: the call stands, and they change when they can.
        """
        return self._call(self._weights_arrived(timeout_seconds))

    def scale_rollout(self, num_workers: int, grace_seconds: float = 60.0) -> str:
        """Let rollout workers join or leave, as `asyncflow cluster scale` does. Returns what is begun, in words.

        `grace_seconds`: how long those that leave may take to end what they hold. Raises `UserError` for a number that the run
        cannot have.
        """
        return self._call(self._scale(num_workers, grace_seconds))

    def stop(self) -> None:
        """Stop the workers and write the model, the trace and the report. Nothing if the run is not running."""
        if self._job is not None:
            self._call(self._job.stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._job = None

    def __enter__(self) -> Trainer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def _started(self) -> Job:
        if self._job is None:
            raise RunError("this trainer is not running: call start first")
        return self._job

    def _driver(self) -> Driver:
        """The driver of a run that goes on. Raises `RunError`."""
        if (driver := self._started.driver) is None:
            raise RunError("this run has stopped")
        return driver

    async def _make_job(self) -> Job:
        return Job(self.config, self._listener, resume=self._resume)

    async def _push(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._started.push(rows)

    async def _scale(self, num_workers: int, grace_seconds: float) -> str:
        self._driver()
        return await self._started.scaling.scale("rollout", num_workers, grace_seconds)

    async def _one_step(self, step: int) -> None:
        job = self._started
        self._driver().ledger.allow(step + 1, self.config.run.steps)
        if not await job.until(lambda: step in job.rows):
            raise RunError(f"the run was interrupted in step {step}")

    async def _weights_arrived(self, timeout_seconds: float) -> int:
        driver = self._driver()
        version, versions = driver.ledger.ledger.committed, driver.versions
        versions.call_for(version)
        try:
            await asyncio.wait_for(versions.all_serve(version), timeout_seconds)
        except TimeoutError as error:
            serving, why = versions.serving, []
            for name in versions.workers.working:
                if name in versions.stale:
                    why.append(f"{name} could not get it ({versions.stale[name]})")
                elif serving.get(name, -1) < version:
                    why.append(f"{name} serves {serving[name]}" if name in serving else f"{name} is not there")
            told = "; ".join(why) or "it is not published yet"
            raise RunError(f"version {version} is not served by all within {timeout_seconds:g} s: {told}") from error
        return version

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            work.close()
            raise RunError("this trainer is not running: call start first")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
