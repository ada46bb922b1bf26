"""Status of a live run, and the watchdog that ends one in which nothing moves.

consumes: ledger, versions, the workers' reports
waits for: `run.stall_timeout_seconds` without anything that moves
is unblocked by: the clock
"""

from __future__ import annotations

import asyncio

import msgspec

from asyncflow.run.driver import Driver
from asyncflow.run.standstill import Standstill
from asyncflow.telemetry.why import sentence
from asyncflow.transport import remote
from asyncflow.types import RunError


class Status(msgspec.Struct, frozen=True):
    """The answer to `asyncflow status`: what each worker does, what waits for what, and what each storage unit holds."""

    run: str
    committed: int
    steps: int
    idle_seconds: float
    workers: list[str]
    waits: list[str]
    queue: dict[str, dict[str, int]]
    stored: list[str]


class Watch:
    """Watchdog of a run, and its service `status`."""

    def __init__(self, driver: Driver, standstill: Standstill) -> None:
        self._driver, self._standstill = driver, standstill

    @remote
    async def status(self) -> Status:
        """Status: which worker does what, and what waits for what."""
        driver, now = self._driver, asyncio.get_running_loop().time()
        workers, serving = [], {name: version for versions in driver.all_versions for name, version in versions.serving.items()}
        for name, state in sorted(driver.hub.states.items()):
            what = f"{state.task}{f' for {state.cause}' if state.cause else ''} since {now - state.since:.1f} s"
            leaves = ", to leave" if name in driver.versions.workers.leaving else ""
            version = serving.get(name, "-")
            workers.append(f"{name} (process {state.pid}): {what}, {state.rss_bytes / 1e6:.0f} MB, version {version}{leaves}")
        waits = driver.ledger.ledger.missing()
        tasks, units = await driver.queue.status()
        for name, task in tasks.items():
            waits += [f"{worker} holds {rows} rows of task {name}" for worker, rows in task.holders.items()]
        queue = {name: task.counts for name, task in tasks.items()}
        stored = [f"unit/{number}: {unit.rows} rows, {unit.stored_bytes / 1e6:.1f} MB" for number, unit in sorted(units.items())]
        run, idle = driver.config.run, now - driver.last_progress
        return Status(run.name, driver.ledger.ledger.committed, run.steps, idle, workers, waits, queue, stored)

    async def run(self) -> None:
        """Watch for ever. Raises `RunError`, which says what waits for what, when nothing has moved for too long."""
        driver, loop = self._driver, asyncio.get_running_loop()
        limit = driver.config.run.stall_timeout_seconds
        while True:
            await asyncio.sleep(max(0.05, driver.last_progress + limit - loop.time()))
            if driver.ledger.is_held or driver.waits_outside:
                driver.progress()  # a user by hand, or a worker from outside, may take any time
            elif loop.time() - driver.last_progress >= limit:
                status, lease = await self.status(), driver.config.queue.lease_seconds
                late = (
                    f". What a worker that hangs holds is others' after queue.lease_seconds ({lease:g}): take less than {limit:g}"
                )
                raise RunError(
                    f"nothing has moved for {limit:g} s (run.stall_timeout_seconds): {sentence(self._standstill.situation())}. "
                    f"Workers: {'; '.join(status.workers) or 'none yet'}. Waited for: {'; '.join(status.waits) or 'nothing'}"
                    f"{late if lease >= limit else ''}"
                )
