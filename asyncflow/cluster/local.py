"""One process per worker on this machine.

A worker holds the reading end of a control pipe: when the driver closes it, or dies in whatever way, the worker ends. Its output
goes to `logs/<worker>.log` in the run directory, and the end of it becomes its last words.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncflow.cluster.base import WorkerDied, WorkerSpec, restart_pause
from asyncflow.types import UserError

USER_ERROR_STATUS = 2
LAST_WORDS_BYTES = 4096


@dataclass(slots=True)
class _Child:
    spec: WorkerSpec
    process: asyncio.subprocess.Process
    log: Path
    num_restarts: int = 0


class LocalCluster:
    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._children: list[_Child] = []
        self._watching: list[asyncio.Task[None]] = []

    async def start(self, workers: Sequence[WorkerSpec]) -> None:
        (self._run_dir / "logs").mkdir(exist_ok=True)
        for spec in workers:
            log = self._run_dir / "logs" / f"{spec.name.replace('/', '-')}.log"
            self._children.append(_Child(spec, await self._spawn(spec, log), log))

    async def _spawn(self, spec: WorkerSpec, log: Path) -> asyncio.subprocess.Process:
        with log.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "asyncflow.cluster.child",
                spec.entry,
                spec.name,
                str(self._run_dir),
                stdin=asyncio.subprocess.PIPE,  # the control pipe
                stdout=output,
                stderr=output,
                env={**os.environ, **spec.environment},
                start_new_session=True,  # a Ctrl-C in the terminal is the driver's to handle
            )

    async def wait(self, on_death: Callable[[str, str, bool], None]) -> None:
        if not self._watching:  # they go on until the cluster is stopped, whether somebody waits or not
            self._watching = [asyncio.create_task(self._watch(child, on_death)) for child in self._children]
        ended, _ = await asyncio.wait(self._watching, return_when=asyncio.FIRST_EXCEPTION)
        for watch in ended:
            watch.result()

    async def _watch(self, child: _Child, on_death: Callable[[str, str, bool], None]) -> None:
        """Until the worker has ended well, or for the last time."""
        while await child.process.wait():
            why, limit = self._why(child), child.spec.max_restarts
            if not limit:
                raise WorkerDied(f"worker {child.spec.name} {why}")
            if child.num_restarts == limit:
                on_death(child.spec.name, f"{why}; it has been started again {limit} times, and is given up", True)
                return
            pause = restart_pause(child.num_restarts)
            on_death(child.spec.name, f"{why}; it is started again in {pause:g} s", False)
            await asyncio.sleep(pause)
            child.num_restarts += 1
            child.process = await self._spawn(child.spec, child.log)

    async def stop(self, grace_seconds: float) -> list[str]:
        for watch in self._watching:  # nobody is started any more
            watch.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        waits = [asyncio.ensure_future(child.process.wait()) for child in self._children]
        if waits:
            await asyncio.wait(waits, timeout=grace_seconds)
        late = [child for child in self._children if child.process.returncode is None]
        for child in late:
            child.process.kill()
        for child in self._children:
            await child.process.wait()
            if child.process.stdin is not None:
                child.process.stdin.close()
        return [child.spec.name for child in late]

    def pids(self) -> dict[str, int]:
        return {child.spec.name: child.process.pid for child in self._children if child.process.returncode is None}

    def _why(self, child: _Child) -> str:
        """How a worker has ended. Raises `UserError` with its last words where the mistake was the user's."""
        status = child.process.returncode or 0
        with child.log.open("rb") as log:
            log.seek(max(0, child.log.stat().st_size - LAST_WORDS_BYTES))
            words = log.read().decode(errors="replace").strip().splitlines()
        last = words[-1] if words else "nothing"
        if status == USER_ERROR_STATUS:
            raise UserError(last)
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"(process {child.process.pid}) {how}; its last words: {last} (more in {child.log})"
