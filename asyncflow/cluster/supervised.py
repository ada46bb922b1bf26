"""Workers in processes of their own, kept alive: what clusters of such share, wherever their processes are.

consumes: worker specs; the ends of processes
waits for: a process to end; the pause before it is started again
is unblocked by: its end, or its being told to leave

A worker's output goes to `logs/<worker>.log` in the run directory, and the end of it becomes its last words.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from asyncflow.cluster.base import BadEnd, Settle, WorkerDied, WorkerSpec, needs_all, restart_pause
from asyncflow.types import UserError

USER_ERROR_STATUS = 2
LAST_WORDS_BYTES = 4096


class Closable(Protocol):
    """An end of a pipe."""

    def close(self) -> None:
        """Close this end: the other one reads its end."""


class WorkerProcess(Protocol):
    """Process of a worker: one of asyncio's, or an object that stands for one elsewhere."""

    @property
    def pid(self) -> int:
        """Process id, where it runs."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit status, minus the signal's number if one ended it. None: it runs."""
        ...

    @property
    def stdin(self) -> Closable | None:
        """The driver's end of its control pipe, if it has one."""
        ...

    async def wait(self) -> int:
        """Wait for its end. Returns the exit status."""
        ...

    def kill(self) -> None:
        """Kill it. Does not wait for its end."""


@dataclass(slots=True, eq=False)
class _Child:
    spec: WorkerSpec
    process: WorkerProcess
    log: Path
    num_restarts: int = 0
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    watch: asyncio.Task[None] | None = None


class SupervisedCluster(ABC):
    """`Cluster` over `_spawn`."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._children: dict[str, _Child] = {}
        self._kept: dict[str, _Child] = {}  # until a worker of this name is started
        self._on_death: Callable[[str, str, bool], None] | None = None
        self._continues_without: Callable[[str], bool] = needs_all
        self._over: asyncio.Future[None] | None = None  # from when somebody has waited

    async def start(self, workers: Sequence[WorkerSpec]) -> None:
        """See `Cluster.start`."""
        (self._run_dir / "logs").mkdir(exist_ok=True)
        for spec in workers:
            log = self._run_dir / "logs" / f"{spec.name.replace('/', '-')}.log"
            kept = self._kept.pop(spec.name, None)
            if kept is not None and kept.process.returncode is None:
                process = kept.process
            else:
                process = await self._spawn(spec, log)
            self._children[spec.name] = child = _Child(spec, process, log)
            if self._over is not None:
                self._watch(child, self._over)

    @abstractmethod
    async def _spawn(self, spec: WorkerSpec, log: Path) -> WorkerProcess:
        """Start a worker's process, whose output goes to the end of the file `log`."""

    async def wait(self, on_death: Callable[[str, str, bool], None], continues_without: Callable[[str], bool] = needs_all) -> None:
        """See `Cluster.wait`."""
        if self._over is None:  # they are watched until the cluster is stopped, whether somebody waits or not
            self._over = asyncio.get_running_loop().create_future()
            self._on_death, self._continues_without = on_death, continues_without
            for child in self._children.values():
                self._watch(child, self._over)
        await asyncio.shield(self._over)

    def _watch(self, child: _Child, over: asyncio.Future[None]) -> None:
        child.watch = asyncio.create_task(self._keep_alive(child))
        child.watch.add_done_callback(partial(self._ended, over))

    async def _keep_alive(self, child: _Child) -> None:
        """Keep a worker running until it has ended well, or for the last time."""
        assert self._on_death is not None
        while await child.process.wait() and not child.leaving.is_set():
            why, limit = self._why(child), child.spec.max_restarts
            if not limit:
                has_failed = (child.process.returncode or 0) > 0
                raise WorkerDied(f"worker {child.spec.name} {why}", child.spec.name, has_failed=has_failed)
            if child.process.returncode == USER_ERROR_STATUS:
                self._on_death(child.spec.name, f"{why}; it would fail again, so it is not started again", True)
                return
            if child.num_restarts == limit:
                self._on_death(child.spec.name, f"{why}; it has been started again {limit} times, and is not started again", True)
                return
            pause = restart_pause(child.num_restarts)
            self._on_death(child.spec.name, f"{why}; it is started again in {pause:g} s", False)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await child.leaving.wait()
            if child.leaving.is_set():
                return
            child.num_restarts += 1
            try:
                child.process = await self._spawn(child.spec, child.log)
            except Exception:
                if child.leaving.is_set():  # nobody misses it
                    return
                raise
            if child.leaving.is_set():  # since it was being started
                child.process.kill()

    def _ended(self, over: asyncio.Future[None], watch: asyncio.Task[None]) -> None:
        error = None if watch.cancelled() else watch.exception()
        if over.done():
            return
        if error is not None:
            over.set_exception(error)
        elif all(
            child.watch is not None and child.watch.done() for child in self._children.values() if not child.spec.outlives_others
        ):
            over.set_result(None)

    async def end(self, name: str, grace_seconds: float) -> bool:
        """See `Cluster.end`."""
        child = self._children[name]
        child.leaving.set()
        is_in_time = await self._end(child, grace_seconds)
        if child.watch is not None and not child.watch.done():  # it may have been about to be started again
            await asyncio.wait([child.watch])
            await self._end(child, 0.0)
        return is_in_time

    async def stop(self, grace_seconds: float, settle: Settle | None = None, keep: Collection[str] = ()) -> dict[str, BadEnd]:
        """See `Cluster.stop`."""
        await _unwatch([child for name, child in self._children.items() if name in keep])
        everybody = self._kept | self._children
        self._kept = {name: child for name, child in everybody.items() if name in keep}
        children = [child for name, child in everybody.items() if name not in keep]
        mortal, lasting = ([child for child in children if child.spec.outlives_others == outlives] for outlives in (False, True))
        running = [child for child in mortal if child.process.returncode is None]
        await _unwatch(mortal)
        try:
            in_time = await asyncio.gather(*(self._end(child, grace_seconds) for child in running))
            await asyncio.gather(*(self._end(child, 0.0) for child in mortal))
            if settle is not None:
                await settle()
        finally:  # until now they are needed, and started again if they die
            await _unwatch(lasting)
            if self._over is not None and self._over.done():
                self._over.exception()  # taken, if it came too late to be why the run ended
            await asyncio.gather(*(self._end(child, 0.0) for child in lasting))
            if keep:  # the workers that are started next are watched anew
                self._children, self._over = {}, None
        return {
            child.spec.name: _bad_end(child) if is_in_time else BadEnd.late(grace_seconds)
            for child, is_in_time in zip(running, in_time, strict=True)
            if child.process.returncode or not is_in_time
        }

    async def _end(self, child: _Child, grace_seconds: float) -> bool:
        """Wait so long, then kill. False: killed."""
        try:
            async with asyncio.timeout(grace_seconds):
                await child.process.wait()
        except TimeoutError:
            if child.process.returncode is None:
                child.process.kill()
            await child.process.wait()
            return False
        finally:
            if child.process.stdin is not None:
                child.process.stdin.close()
        return True

    def pids(self) -> dict[str, int]:
        """See `Cluster.pids`."""
        return {child.spec.name: child.process.pid for child in self._children.values() if child.process.returncode is None}

    def _why(self, child: _Child) -> str:
        """Reason for which a worker has ended. Raises `UserError` with its last words where the mistake was the user's, and the
        run is over with that: the worker would not have come up, or the run cannot do without it."""
        last = _last_words(child)
        is_needed = not child.spec.max_restarts or not self._continues_without(child.spec.name)
        if child.process.returncode == USER_ERROR_STATUS and is_needed:
            raise UserError(last)
        return _how_ended(child, last)


def _bad_end(child: _Child) -> BadEnd:
    return BadEnd(_how_ended(child, _last_words(child)), has_failed=(child.process.returncode or 0) > 0)


def _last_words(child: _Child) -> str:
    words: list[str] = []
    with contextlib.suppress(OSError), child.log.open("rb") as log:  # a run that began anew has removed it
        log.seek(max(0, child.log.stat().st_size - LAST_WORDS_BYTES))
        words = log.read().decode(errors="replace").strip().splitlines()
    return words[-1] if words else "nothing"


def name_of_signal(number: int) -> str:
    """Name of a signal, such as SIGKILL, or its number."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _how_ended(child: _Child, last_words: str) -> str:
    status = child.process.returncode or 0
    if status == USER_ERROR_STATUS:
        return f"(process {child.process.pid}) found a mistake: {last_words} (more in {child.log})"
    how = f"ended with status {status}" if status >= 0 else f"was ended by {name_of_signal(-status)}"
    return f"(process {child.process.pid}) {how}; its last words: {last_words} (more in {child.log})"


async def _unwatch(children: Sequence[_Child]) -> None:
    """Stop starting these workers again."""
    watches = [child.watch for child in children if child.watch is not None]
    for watch in watches:
        watch.cancel()
    await asyncio.gather(*watches, return_exceptions=True)
