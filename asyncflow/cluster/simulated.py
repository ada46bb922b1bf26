"""A cluster in one process, under virtual time: workers that are slow, stand still, and die on a plan.

    worker (a `Process` of clock.py) --SimulatedPeer--> Wire: the driver's services          on a VirtualLoop

consumes: worker specs, a plan of faults
waits for: virtual time
is unblocked by: the loop, which jumps to whatever comes next

A worker is killed as by `kill -9`: not one more line of it runs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncflow.cluster.base import BadEnd, Settle, WorkerDied, WorkerSpec, needs_all, restart_pause
from asyncflow.cluster.clock import Process
from asyncflow.cluster.faults import Faults
from asyncflow.cluster.wire import SimulatedPeer, Wire
from asyncflow.types import first_error

Main = Callable[[str, SimulatedPeer], Coroutine[Any, Any, None]]


@dataclass(slots=True, eq=False)
class _Worker:
    spec: WorkerSpec
    process: Process
    main: asyncio.Task[None]
    gone: asyncio.Future[None]  # it has ended, or was killed
    is_leaving: bool = False

    @property
    def is_running(self) -> bool:
        return self.process.is_alive and not self.main.done()


class SimulatedCluster:
    """Cluster whose processes are simulated.

    `late` and `failures`: workers that were killed at the end, and those that ended with an error, before it or in it.
    """

    def __init__(self, wire: Wire, mains: Mapping[str, Main], faults: Faults) -> None:
        """`mains`: by a spec's entry, what runs in its place."""
        self.num_deaths = self.num_stalls = self.num_cut_short = 0
        self.late: list[str] = []
        self.failures: list[str] = []
        self._on_death: Callable[[str, str, bool], None] = lambda name, why, is_final: None
        self._wire, self._mains, self._faults = wire, mains, faults
        self._workers: dict[str, _Worker] = {}
        self._starts: dict[str, int] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._over: asyncio.Future[None] = wire.loop.create_future()

    async def start(self, workers: Sequence[WorkerSpec]) -> None:
        """See `Cluster`. The plan of faults begins with the first workers; a fault of a worker that is absent is skipped."""
        loop, is_first = self._wire.loop, not self._starts
        for spec in workers:
            self._begin(spec)
        if not is_first:
            return
        begun = loop.time()  # later than the plan's first faults, where the run is resumed
        self._timers += [loop.call_at(when, self._kill, worker) for when, worker in self._faults.deaths if when > begun]
        self._timers += [loop.call_at(t, self._pause, worker, seconds) for t, worker, seconds in self._faults.stalls if t > begun]

    async def wait(self, on_death: Callable[[str, str, bool], None], continues_without: Callable[[str], bool] = needs_all) -> None:
        """See `Cluster`."""
        self._on_death = on_death
        await asyncio.shield(self._over)

    async def end(self, name: str, grace_seconds: float) -> bool:
        """See `Cluster`."""
        worker = self._workers[name]
        worker.is_leaving = True
        if worker.is_running:
            await asyncio.wait([worker.gone], timeout=grace_seconds)
        was_running = worker.is_running
        if was_running:
            self.num_cut_short += 1
            worker.process.kill()
        del self._workers[name], self._starts[name]
        return not was_running

    async def stop(self, grace_seconds: float, settle: Settle | None = None, keep: Collection[str] = ()) -> dict[str, BadEnd]:
        """See `Cluster`. Workers that stand still go on; none dies or is started any more, and none outlives the others."""
        for timer in self._timers:
            timer.cancel()
        for worker in self._workers.values():
            if worker.process.is_paused:
                worker.process.resume()
        running = [worker for worker in self._workers.values() if worker.is_running]
        if running:
            await asyncio.wait([worker.gone for worker in running], timeout=grace_seconds)
        late = [worker for worker in running if worker.is_running]
        self.late = [worker.spec.name for worker in late]
        for worker in late:
            worker.process.kill()
        if self._over.done():
            self._over.exception()  # taken, if it came too late to be why the run ended
        if settle is not None:
            await settle()
        return {worker.spec.name: BadEnd.late(grace_seconds) for worker in late}

    def pids(self) -> dict[str, int]:
        """See `Cluster`: there are no processes."""
        return {}

    def _begin(self, spec: WorkerSpec) -> None:
        process = Process(self._wire.loop, spec.name)
        peer = process.run(SimulatedPeer, self._wire, spec.name)
        main = process.start(self._mains[spec.entry](spec.name, peer), name=spec.name)
        self._workers[spec.name] = worker = _Worker(spec, process, main, self._wire.loop.create_future())
        self._starts[spec.name] = self._starts.get(spec.name, 0) + 1
        main.add_done_callback(partial(self._ended, worker), context=self._wire.context)

    def _ended(self, worker: _Worker, main: asyncio.Task[None]) -> None:
        if not worker.gone.done():
            worker.gone.set_result(None)
        error = None if main.cancelled() else main.exception()
        if error is not None:
            error = first_error(error)
            self.failures.append(f"worker {worker.spec.name} ended with {type(error).__name__}: {error}")
        if self._over.done():
            return
        if error is not None:
            self._over.set_exception(WorkerDied(self.failures[-1], worker.spec.name, has_failed=True))
        elif all(worker.main.done() for worker in self._workers.values()):
            self._over.set_result(None)

    def _kill(self, name: str) -> None:
        worker = self._workers.get(name)
        if worker is None or not worker.is_running:
            return
        self.num_deaths += 1
        worker.process.kill()
        worker.gone.set_result(None)
        restarts = self._starts[name] - 1
        if worker.is_leaving:
            return
        if not worker.spec.max_restarts:
            if not self._over.done():
                self._over.set_exception(WorkerDied(f"worker {name} was killed", name, has_failed=False))
            return
        if restarts == worker.spec.max_restarts:
            self._on_death(name, "was killed once too often, and is not started again", True)
            return
        pause = restart_pause(restarts)
        self._on_death(name, f"was killed; it is started again in {pause:g} s", False)
        self._timers.append(self._wire.loop.call_later(pause, self._begin_again, worker))

    def _begin_again(self, worker: _Worker) -> None:
        if not worker.is_leaving:
            self._begin(worker.spec)

    def _pause(self, name: str, seconds: float) -> None:
        worker = self._workers.get(name)
        if worker is not None and worker.process.is_alive and not worker.process.is_paused:
            self.num_stalls += 1
            worker.process.pause()
            if seconds < math.inf:
                self._timers.append(self._wire.loop.call_later(seconds, self._resume, worker.process))

    def _resume(self, process: Process) -> None:
        if process.is_paused:
            process.resume()
