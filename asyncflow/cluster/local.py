"""One process per worker on this machine.

A worker holds the reading end of a control pipe: when the driver closes it, or dies in whatever way, the worker ends. Its output
goes to `logs/<worker>.log` in the run directory, and the end of it becomes its last words.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncflow.cluster.base import WorkerDied, WorkerSpec
from asyncflow.types import UserError

USER_ERROR_STATUS = 2
LAST_WORDS_BYTES = 4096


@dataclass(slots=True)
class _Child:
    spec: WorkerSpec
    process: asyncio.subprocess.Process
    log: Path


class LocalCluster:
    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._children: list[_Child] = []

    async def start(self, workers: Sequence[WorkerSpec]) -> None:
        (self._run_dir / "logs").mkdir(exist_ok=True)
        for spec in workers:
            log = self._run_dir / "logs" / f"{spec.name.replace('/', '-')}.log"
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
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
            self._children.append(_Child(spec, process, log))

    async def wait(self) -> None:
        ends = {asyncio.ensure_future(child.process.wait()): child for child in self._children}
        try:
            for end in asyncio.as_completed(ends):
                await end
                for child in self._children:
                    if child.process.returncode:
                        raise self._death(child)
        finally:
            for end in ends:
                end.cancel()

    async def stop(self, grace_seconds: float) -> list[str]:
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

    def _death(self, child: _Child) -> Exception:
        status = child.process.returncode or 0
        with child.log.open("rb") as log:
            log.seek(max(0, child.log.stat().st_size - LAST_WORDS_BYTES))
            words = log.read().decode(errors="replace").strip().splitlines()
        last = words[-1] if words else "nothing"
        if status == USER_ERROR_STATUS:
            return UserError(last)
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        who = f"worker {child.spec.name} (process {child.process.pid})"
        return WorkerDied(f"{who} {how}; its last words: {last} (more in {child.log})")
