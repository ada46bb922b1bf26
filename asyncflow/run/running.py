"""Workers of a run and the driver's loops, while they run.

consumes: events that somebody waits for
waits for: that event, beside the workers' ends, the driver's loops, the error that ends the run, and an interrupt
is unblocked by: whichever of them comes first
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any

from asyncflow.cluster.base import Cluster, Settle, WorkerSpec
from asyncflow.run.driver import Driver
from asyncflow.types import RunError
from asyncflow.waits import WORKERS_START, waiting


class Running:
    """Workers of a run and the driver's loops. Every wait also watches these: one that fails ends the wait.

    `failure`: what has ended the run before what it waited for (`until`) came: an error, or an interrupt that ends it at once.
    """

    def __init__(self, driver: Driver, cluster: Cluster, interrupted: asyncio.Event, log: Callable[[str], None]) -> None:
        self.failure: BaseException | None = None
        self._driver, self._cluster, self._interrupted, self._log = driver, cluster, interrupted, log
        self._loops: list[asyncio.Task[None]] = []

    async def start(self, fleet: Sequence[WorkerSpec]) -> bool:
        """Start the workers. False: interrupted before they were all started, for which a cluster may have to wait. Raises what has
        gone wrong meanwhile; a worker's death is left to the wait that follows."""
        starting = asyncio.ensure_future(self._cluster.start(fleet))
        try:
            with waiting(WORKERS_START, workers=len(fleet)):
                return await self._reached(starting)
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)

    def begin(self, loops: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Start more of the driver's loops."""
        self._loops += [asyncio.create_task(loop) for loop in loops]

    async def until(self, event: Coroutine[Any, Any, None]) -> bool:
        """Wait for something. False: interrupted. Raises what has gone wrong."""
        return await self._reached(asyncio.ensure_future(event), self._over())

    async def _reached(self, event: asyncio.Future[None], over: asyncio.Future[None] | None = None) -> bool:
        """Wait as `until` does. `over`: done when every worker has ended, where they have been started."""
        interrupted = asyncio.ensure_future(self._interrupted.wait())
        ours: set[asyncio.Future[Any]] = {event, interrupted} if over is None else {event, interrupted, over}
        try:
            failure = self._driver.background.failure
            waiting: set[asyncio.Future[Any]] = {*ours, failure, *self._loops}
            while not event.done() and not interrupted.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda each: each is not failure):  # first: a worker's death may follow from it
                    task.result()
                if over in done and not event.done():
                    raise RunError("every worker has ended, but the run has not")
            return event.done()
        except asyncio.CancelledError as error:
            if self._interrupted.is_set():  # a second interrupt, which ends the run at once; else one who waits has had enough
                self.failure = error
            raise
        except BaseException as error:
            self.failure = error
            raise
        finally:
            for future in ours:
                future.cancel()

    async def finish_step(self, grace_seconds: float) -> None:
        """A step whose updates have begun is made to its end, for as long as something moves: half of them is no state that a run
        could end with. What the workers are given to end in begins after its commit. Says so after `grace_seconds`. One whose
        update would come from outside has none yet, and gets none."""
        ledger = self._driver.ledger
        if self.failure is not None or not ledger.is_finishing:
            return
        finished = asyncio.ensure_future(ledger.finished())
        over, stranded = self._over(), asyncio.ensure_future(self._driver.desk.stranded())
        ends: list[asyncio.Future[Any]] = [finished, over, stranded]
        waiting: set[asyncio.Future[Any]] = {*ends, self._driver.background.failure, *self._loops}  # one is the watchdog
        seconds: float | None = grace_seconds
        try:
            while not any(end.done() for end in ends):
                done, waiting = await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if not done:
                    self._log("the step whose updates have begun is made to its end: interrupt again to end at once")
                    seconds = None
        except asyncio.CancelledError:
            await self._cluster.stop(0.0)
            raise
        except Exception as error:  # whatever it is, the run is to stop
            self._log(f"the step whose updates had begun was not made to its end: {error}")
        finally:
            for future in ends:
                future.cancel()

    async def stop(self, grace_seconds: float, settle: Settle) -> None:
        """Stop the workers, then the loops. `settle`: see `Cluster.stop`. In the wake of a run's failure the code of others
        fails, too, which is not told."""
        for name, end in (await self._cluster.stop(grace_seconds, settle)).items():
            if self.failure is None or not end.has_failed:
                self._log(f"worker {name} {end.how}")
        await self._end_loops()

    async def abandon(self, settle: Settle, may_stay: Collection[str]) -> bool:
        """End the loops and the background tasks, then the workers, at once: no evaluation is written that lacks what a worker had
        yet to report. Of the workers those stay that may and can. Returns whether any do."""
        await self._end_loops()
        await self._driver.background.abandon()
        await self._cluster.stop(0.0, settle, may_stay)
        if not may_stay:
            return False
        staying = await self._driver.hand_over(may_stay)
        await self._cluster.stop(0.0, keep=staying)
        return bool(staying)

    async def _end_loops(self) -> None:
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)

    def _over(self) -> asyncio.Future[None]:
        """Future that is done when every worker has ended."""
        health = self._driver.health
        return asyncio.ensure_future(self._cluster.wait(health.died, health.continues_without))
