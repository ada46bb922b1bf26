"""Every worker as a coroutine of the driver's own event loop: one process to set a breakpoint in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncflow.cluster.base import WorkerSpec
from asyncflow.registry import load
from asyncflow.transport import client_name


class InlineCluster:
    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, workers: Sequence[WorkerSpec]) -> None:
        for spec in workers:
            self._tasks[spec.name] = asyncio.create_task(self._run(spec), name=spec.name)

    async def wait(self, on_death: Callable[[str, str, bool], None]) -> None:
        """As the contract says; a worker that fails here is a fault to be looked at, and is not started again."""
        for task in asyncio.as_completed(self._tasks.values()):
            await task

    async def stop(self, grace_seconds: float) -> list[str]:
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=grace_seconds)
        late = [name for name, task in self._tasks.items() if not task.done()]
        for name in late:
            self._tasks[name].cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        return late

    def pids(self) -> dict[str, int]:
        return {}

    async def _run(self, spec: WorkerSpec) -> None:
        client_name.set(spec.name)  # requests that do not cross a socket carry the worker's name too
        await load("worker", spec.entry)(spec.name, self._run_dir)
