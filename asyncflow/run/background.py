"""Background work of a run, and the error that ends the run.

consumes: work that nobody waits for, errors
waits for: at the run's end, the work that is still under way
is unblocked by: that work's end
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class BackgroundTasks:
    """Coroutines that run in the background of a run. `failure` gets the first error, theirs or one given to `fail`; the run waits
    for it beside everything else."""

    def __init__(self) -> None:
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under_way: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background. The run waits for it at its end; its failure ends the run."""
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._ended)

    def fail(self, error: BaseException) -> None:
        """End the run, if it has not ended for another reason."""
        if not self.failure.done():
            self.failure.set_exception(error)

    async def settle(self, seconds: float) -> None:
        """Wait for the coroutines that are running, so many seconds at most."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=seconds)

    async def close(self) -> None:
        """Wait for the coroutines that are running. Raises the first error of theirs."""
        await asyncio.gather(*self._under_way)
        if self.failure.done():
            self.failure.exception()  # taken, if it came too late to be why the run ended: else the event loop reports it at exit

    async def abandon(self) -> None:
        """End the coroutines that are running, as they stand."""
        under_way = list(self._under_way)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
