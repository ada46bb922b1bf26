"""Attempt of a run: its driver, its workers and what watches them, from the start of all of them to their end.

    start --> doors, loops, workers --running.until(event)--> stop:    with grace, and nobody follows
                                                          '-> abandon: at once, since another attempt follows

consumes: the ends of loops and workers
waits for: the commit of a step whose updates have begun; workers then have `run.stop_grace_seconds` to end by themselves
is unblocked by: these, or the deadline
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from asyncflow.cluster.base import Cluster, WorkerSpec
from asyncflow.cluster.torchrun import launch_of
from asyncflow.run.driver import Driver
from asyncflow.run.running import Running
from asyncflow.run.services.scaling import Scaling
from asyncflow.run.state.run_folder import RunFolder
from asyncflow.run.watch import Watch
from asyncflow.run_dir import KEY_FILE, control_socket
from asyncflow.telemetry.situation import IN_ORDER
from asyncflow.transport import Server
from asyncflow.types import UserError, first_error


class Attempt:
    """Attempt of a run. A run makes another one when a worker has died that is not started again by itself."""

    def __init__(
        self,
        driver: Driver,
        server: Server,
        cluster: Cluster,
        fleet: Sequence[WorkerSpec],
        folder: RunFolder,
        watch: Watch,
        interrupted: asyncio.Event,
    ) -> None:
        """`fleet`: the workers that it starts with. `interrupted`: set when the run is to end early."""
        self.driver, self.cluster, self.watch = driver, cluster, watch
        self._config, self._server, self._fleet, self._folder = driver.config, server, fleet, folder
        self._interrupted = interrupted
        self.running = Running(driver, cluster, interrupted, driver.log)
        start = driver.background.start
        self.scaling = Scaling(self._config, driver.versions, cluster, driver.devices, start=start, log=driver.log)
        driver.on_disconnected = self._look_after
        driver.serve("status", watch)
        driver.serve("scaling", self.scaling)

    async def start(self, steps: int) -> bool:
        """Start the loops, then the workers, so that prompts are there when the first worker is. The first `steps` steps may be
        trained at once. False: interrupted before all workers were started.
        """
        driver = self.driver
        await driver.transfer_queue.open()
        await self._open_doors()
        driver.ledger.allow(steps, steps)
        self.running.begin([*driver.loops(), self.watch.run()])
        if not await self.running.start(self._fleet):
            return False
        driver.progress()  # it has not stood still, however long there was no room for them
        self.scaling.begin()
        self.running.begin([self.watch.guard()])
        return True

    async def stop(self, is_hasty: Callable[[], bool]) -> None:
        """Stop loops, then workers. `is_hasty()` is asked in between: have workers no time for a checkpoint or a long load?"""
        await self._stop_loops()
        grace = self._grace_seconds(is_hasty=is_hasty())
        await self.running.stop(grace, partial(self._settle, grace))
        await self._close_doors()

    async def abandon(self) -> bool:
        """End loops and workers at once, but for the workers that stay for the attempt that follows. Returns whether any do."""
        await self.driver.saves.settle()
        may_stay = {spec.name for spec in self._fleet if spec.may_stay}
        do_stay = await self.running.abandon(partial(self._settle, 0.0), may_stay)
        await self._stop_loops()
        await self._close_doors()
        return do_stay

    async def close(self) -> None:
        """Release what the driver has, after `stop` or `abandon`."""
        await self.driver.saves.close()
        await self.driver.close()

    async def report_cause(self) -> None:
        """Write into the last situation on the disk why the run ends. So does the log, with what waited for what, where that is not
        in order: it has failed, or somebody has interrupted it while nothing moved."""
        failure = self.running.failure
        error = first_error(failure) if isinstance(failure, BaseExceptionGroup) else failure
        why = str(error) or repr(error) if error is not None else "it was interrupted" if self._interrupted.is_set() else IN_ORDER
        words = await self.watch.ended(why)
        is_stuck = self._interrupted.is_set() and self.watch.has_stood
        if words and words not in why and (is_stuck or (error is not None and not isinstance(error, UserError))):
            self.driver.log(f"at the end: {words}")

    async def _open_doors(self) -> None:
        """The private socket; for other machines another one, which is written into the job's file."""
        run_dir, listen = self._config.run_dir, self._config.queue.listen
        await self._server.start(control_socket(run_dir))
        if listen is not None:
            door = await self._server.start(listen)
            self.driver.log(f"the queue listens at {door}, with {run_dir / KEY_FILE}")
            self._folder.write_job(msgspec.structs.replace(self._folder.job, door=door))

    def _look_after(self, worker: str) -> None:
        """Look after a worker whose connection has ended. Its process ends as well, or connects again; one that hangs is killed,
        which is a death as any other."""
        if (pid := self.cluster.pids().get(worker)) is not None and not self.driver.ledger.is_stopping:
            patience = self._config.queue.lease_seconds
            asyncio.get_running_loop().call_later(patience, self._kill_if_it_hangs, worker, pid)

    def _kill_if_it_hangs(self, worker: str, pid: int) -> None:
        driver, patience = self.driver, self._config.queue.lease_seconds
        is_over = driver.ledger.is_stopping or driver.ledger.ledger.committed >= self._config.run.steps
        if is_over or worker in driver.hub.states or self.cluster.pids().get(worker) != pid:
            return
        driver.log(
            f"worker {worker} (process {pid}) has not been connected for {patience:g} s (queue.lease_seconds), and does not end: "
            f"it is killed"
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    async def _stop_loops(self) -> None:
        """Tell all loops that it is over. A step whose updates have begun is made to its end."""
        await self.driver.stop()
        await self.running.finish_step(self._config.run.stop_grace_seconds)
        await self.scaling.stop()

    async def _close_doors(self) -> None:
        await self._server.close()
        control_socket(self._config.run_dir).unlink(missing_ok=True)

    async def _settle(self, grace: float) -> None:
        """Wait for others that need storage units, when the cluster's workers have ended."""
        if launch_of(os.environ) and not await self.driver.hub.have_left("trainer/", grace):
            self.driver.log(f"the trainers that torchrun has started did not end within {grace:g} s")
        await self.driver.settle()

    def _grace_seconds(self, *, is_hasty: bool) -> float:
        """Seconds that workers may take to end. Without haste they may write a checkpoint, if some steps are in none, or read the
        one that they resume from, so that they can save its model."""
        driver, checkpoint = self.driver, self._config.checkpoint
        grace = self._config.run.stop_grace_seconds
        is_to_be_written = checkpoint.keep and driver.saves.settled < driver.ledger.ledger.committed
        is_to_be_read = not driver.has_begun
        is_hasty = is_hasty or self.running.failure is not None
        return max(grace, checkpoint.stop_grace_seconds) if (is_to_be_written or is_to_be_read) and not is_hasty else grace
