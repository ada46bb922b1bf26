"""A run that a service hosts: not begun, under way, or over. Every call of the API is a method here.

consumes: calls of clients
waits for: the run
is unblocked by: the run, or its end
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from asyncflow.config import Config
from asyncflow.run.job import Listener
from asyncflow.run.status import Status
from asyncflow.run.stepwise import StepwiseRun
from asyncflow.types import RunError


class HostedRun:
    """The one run of a service. `over` is set when it has been stopped, by a client or because it failed."""

    def __init__(self, config: Config, listener: Listener | None = None, *, resume: bool = False) -> None:
        self.config = config
        self.over = asyncio.Event()
        self._listener, self._resume = listener, resume
        self._run: StepwiseRun | None = None
        self._turn = asyncio.Lock()  # of what changes the run as a whole

    async def start(self) -> int:
        """Check everything and start the workers, unless that is done. Returns the step that the run begins with."""
        async with self._turn:
            if self._run is None:
                run = StepwiseRun(self.config, self._listener, resume=self._resume)
                try:
                    await run.start()
                except BaseException:
                    await run.stop()
                    raise
                self._run = run
            return self._run.steps_done

    async def step(self) -> Mapping[str, float] | None:
        """Train one step; see `Trainer.step`."""
        async with self._turn:
            return await self.run.step()

    async def put_prompts_data(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Train on these rows before those of the data set; see `Trainer.push_prompts`."""
        await self.run.push_prompts(rows)

    async def weight_sync_notify(self, timeout_seconds: float) -> int:
        """See `Trainer.weight_sync_notify`."""
        return await self.run.weight_sync_notify(timeout_seconds)

    async def scale_rollout(self, num_workers: int, grace_seconds: float) -> str:
        """See `Trainer.scale_rollout`."""
        return await self.run.scale_rollout(num_workers, grace_seconds)

    async def status(self) -> Status | None:
        """State of the run; None before it has begun, and when it is over."""
        run = self._run
        if run is None or run.job.driver is None:
            return None
        return await run.job.watch.status()

    async def metrics(self) -> str:
        """The queue's metrics in Prometheus' text form; none where there is no run."""
        run = self._run
        return "" if run is None or run.job.driver is None else await run.job.driver.transfer_queue.metrics()

    async def stop(self) -> None:
        """Stop the run, if it is under way; model, trace and report are written."""
        async with self._turn:
            if self._run is not None:
                await self._run.stop()
            self.over.set()

    @property
    def run(self) -> StepwiseRun:
        """The run, once it has begun. Raises `RunError`."""
        if self._run is None:
            raise RunError("this run has not begun: call init_engines first")
        return self._run
