"""Every worker as a coroutine of the driver's own event loop: one process to set a breakpoint in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from asyncflow.cluster.base import BadEnd, Settle, WorkerSpec, needs_all
from asyncflow.registry import load
from asyncflow.transport import client_name
from asyncflow.types import first_error


class InlineCluster:
    """Cluster whose workers are tasks of this process, for debugging."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lasting: set[str] = set()  # workers that outlive the others
        self._leaving: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[None] | None = None

    async def start(self, workers: Sequence[WorkerSpec]) -> None:
        """See `Cluster.start`."""
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
        for spec in workers:
            if spec.outlives_others:
                self._lasting.add(spec.name)
            self._tasks[spec.name] = task = asyncio.create_task(self._run(spec), name=spec.name)
            task.add_done_callback(partial(self._ended, self._over))

    async def wait(self, on_death: Callable[[str, str, bool], None], continues_without: Callable[[str], bool] = needs_all) -> None:
        """See `Cluster.wait`. A worker that fails here is not started again: the fault is to be looked at."""
        if self._over is not None:
            await asyncio.shield(self._over)

    async def end(self, name: str, grace_seconds: float) -> bool:
        """See `Cluster.end`."""
        task = self._tasks[name]
        self._leaving.add(task)
        _, late = await asyncio.wait([task], timeout=grace_seconds)
        if late:
            task.cancel()
            await asyncio.wait([task])
        return not late

    async def stop(self, grace_seconds: float, settle: Settle | None = None, keep: Collection[str] = ()) -> dict[str, BadEnd]:
        """See `Cluster.stop`."""
        mortal = {name: task for name, task in self._tasks.items() if name not in self._lasting}
        running = {name: task for name, task in mortal.items() if not task.done()}
        if running:
            await asyncio.wait(running.values(), timeout=grace_seconds)
        late = {name: BadEnd.late(grace_seconds) for name, task in running.items() if not task.done()}
        for name in late:
            running[name].cancel()
        ends = zip(running, await asyncio.gather(*running.values(), return_exceptions=True), strict=True)
        errors = {name: first_error(error) for name, error in ends if isinstance(error, Exception)}
        failed = {name: BadEnd(f"ended with {error!r}", has_failed=True) for name, error in errors.items()}
        try:
            if settle is not None:
                await settle()
        finally:
            for name in self._lasting:
                self._tasks[name].cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._over is not None and self._over.done():
            self._over.exception()  # taken, if it came too late to be why the run ended
        return failed | late

    def pids(self) -> dict[str, int]:
        """See `Cluster.pids`."""
        return {}

    async def _run(self, spec: WorkerSpec) -> None:
        client_name.set(spec.name)  # requests that do not cross a socket carry the worker's name too
        await load("worker", spec.entry)(spec.name, self._run_dir)

    def _ended(self, over: asyncio.Future[None], task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if over.done():
            return
        if error is not None and task not in self._leaving:
            over.set_exception(error)
        elif all(each.done() for name, each in self._tasks.items() if name not in self._lasting):
            over.set_result(None)
