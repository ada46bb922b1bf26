"""A cluster in one process, under virtual time: workers that are slow, stand still, and die on a plan.

    worker (a `Process` of clock.py) --SimulatedPeer--> Wire: the driver's services          on a VirtualLoop
                                          late, in order, and gone with its worker

consumes: worker specs, a plan of faults
waits for: virtual time
is unblocked by: the loop, which jumps to whatever comes next

A worker is killed as by `kill -9`: not one more line of it runs. The driver hears of it as a server does: the requests under way
are cancelled, and `on_disconnect` is told who has gone. Left out: messages that are lost (the transport's to survive).
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from asyncflow.cluster.base import WorkerDied, WorkerSpec
from asyncflow.cluster.clock import Process, VirtualLoop, current_process
from asyncflow.transport import ConnectionLost, RemoteError, client_key, client_name
from asyncflow.types import CROSSING

Main = Callable[[str, "SimulatedPeer"], Coroutine[Any, Any, None]]
Reply = Callable[[str, str, str, tuple[Any, ...], Any], None]


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, in virtual seconds from the start. `slow`: by worker, how many times as long everything takes."""

    slow: Mapping[str, float] = field(default_factory=dict)
    deaths: tuple[tuple[float, str], ...] = ()
    stalls: tuple[tuple[float, str, float], ...] = ()
    """(when, who, for how long)."""
    late_rewards: float = 0.0
    """Share of rewards that take fifty times as long."""
    broken_fetches: Mapping[str, float] = field(default_factory=dict)
    """By worker, the share of fetches whose weights do not arrive whole."""

    @classmethod
    def drawn(cls, seed: int, workers: Sequence[str], begin_seconds: float, end_seconds: float) -> Faults:
        """A plan by seed: one worker in four is slow, and every other run has deaths, stalls, late rewards, broken fetches.

        The first worker is never slow, never dies and always has its weights, so that somebody is left.
        """
        rng, mortals = random.Random(f"{seed}/faults"), workers[1:]

        def times(most: int) -> list[float]:
            return sorted(rng.uniform(begin_seconds, end_seconds) for _ in range(rng.choice((0, rng.randint(1, most)))))

        return cls(
            slow={worker: rng.uniform(1.5, 8.0) for worker in mortals if rng.random() < 0.25},
            deaths=tuple((time, rng.choice(mortals)) for time in times(4) if mortals),
            stalls=tuple((time, rng.choice(workers), rng.uniform(0, end_seconds / 2)) for time in times(3)),
            late_rewards=rng.choice((0.0, 0.02)),
            broken_fetches=dict.fromkeys(mortals, 0.1) if rng.random() < 0.5 else {},
        )


class Wire:
    """Stands for `transport.Server`. A message takes up to twice `latency_seconds`; those of one client keep their order."""

    def __init__(
        self,
        loop: VirtualLoop,
        services: Mapping[str, object],
        on_disconnect: Callable[[str], None],
        *,
        rng: random.Random,
        latency_seconds: float = 1e-4,
        on_reply: Reply = lambda worker, service, method, arguments, result: None,
    ) -> None:
        """`on_reply(worker, service, method, arguments, result)` is told of every request that was served."""
        self.loop, self.services, self.on_disconnect, self.on_reply = loop, services, on_disconnect, on_reply
        self.peers: list[SimulatedPeer] = []
        self.numbers = itertools.count(1)
        self.context = contextvars.copy_context()
        self._rng, self._latency_seconds = rng, latency_seconds

    async def start(self, address: object) -> str:
        """There is no door to be opened: whoever has the wire may connect."""
        return str(address)

    async def close(self) -> None:
        """Hang up on everybody: handlers under way are cancelled."""
        for peer in list(self.peers):
            peer.hang_up()

    def delay(self) -> float:
        return 2 * self._latency_seconds * self._rng.random()


class SimulatedPeer:
    """Stands for `transport.Peer`, with both ends of its connection. Made by the worker's process. Arguments are not copied."""

    def __init__(self, wire: Wire, name: str) -> None:
        self._wire, self.name = wire, name
        self._key = f"{name}@{next(wire.numbers)}"
        self._why_lost = ""
        self._is_served = True
        self._here, self._there = contextvars.copy_context(), wire.context.copy()
        self._there.run(client_key.set, self._key)
        self._there.run(client_name.set, name)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._running: dict[int, asyncio.Future[Any]] = {}
        self._up_at = self._down_at = 0.0  # when the last message of each direction arrives
        wire.peers.append(self)
        current_process().on_death.append(partial(self._up, self.hang_up))

    @property
    def is_lost(self) -> bool:
        """See `Peer`."""
        return bool(self._why_lost)

    async def call(self, interface: type, service: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """See `Peer`: one request and its answer, or what it raised."""
        if self._why_lost:
            raise ConnectionLost(self._why_lost)
        number = next(self._wire.numbers)
        answer = self._pending[number] = self._wire.loop.create_future()
        self._up(self._serve, number, service, method, arguments)
        try:
            return await answer
        except asyncio.CancelledError:
            self._up(self._cancel, number)
            raise
        finally:
            del self._pending[number]

    async def close(self) -> None:
        """See `Peer`."""
        self._lose("closed on this side")
        self._up(self.hang_up)

    # -- the server's end ---------------------------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """The client is gone, or is to go."""
        if not self._is_served:
            return
        self._is_served = False
        self._wire.peers.remove(self)
        running, self._running = self._running, {}
        for future in running.values():
            future.cancel()
        self._wire.on_disconnect(self._key)
        self._down(self._lose, "the server has closed")

    def _serve(self, number: int, service: str, method: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_served:
            return
        try:
            if service not in self._wire.services:
                raise LookupError(f"no service {service!r}")
            result = getattr(self._wire.services[service], method)(*arguments)
        except Exception as error:  # the answer to the caller, who raises it
            self._down(self._answer, number, _crossing(service, method, error), None)
            return
        if not isinstance(result, asyncio.Future):
            result = self._wire.loop.create_task(result, name=f"{self._key}>{service}.{method}")
        self._running[number] = result
        result.add_done_callback(partial(self._done, number, service, method, arguments))

    def _done(self, number: int, service: str, method: str, arguments: tuple[Any, ...], future: asyncio.Future[Any]) -> None:
        if self._running.pop(number, None) is not future:  # nobody asks any more
            if not future.cancelled():
                future.exception()
        elif future.cancelled():
            self._down(self._answer, number, RemoteError(f"{service}.{method} was cancelled by its service"), None)
        elif (error := future.exception()) is not None:
            self._down(self._answer, number, _crossing(service, method, error), None)
        else:
            self._wire.on_reply(self.name, service, method, arguments, future.result())
            self._down(self._answer, number, None, future.result())

    def _cancel(self, number: int) -> None:
        if (future := self._running.pop(number, None)) is not None:
            future.cancel()

    # -- the client's end ---------------------------------------------------------------------------------------------------

    def _answer(self, number: int, error: Exception | None, result: Any) -> None:
        answer = self._pending.get(number)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    def _lose(self, why: str) -> None:
        if self._why_lost:
            return
        self._why_lost = f"lost the driver: {why}"
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(ConnectionLost(self._why_lost))

    def _up(self, deliver: Callable[..., None], *arguments: Any) -> None:
        self._up_at = max(self._up_at + 1e-9, self._wire.loop.now + self._wire.delay())  # a heap does not keep the order of equals
        self._wire.loop.call_at(self._up_at, deliver, *arguments, context=self._there)

    def _down(self, deliver: Callable[..., None], *arguments: Any) -> None:
        self._down_at = max(self._down_at + 1e-9, self._wire.loop.now + self._wire.delay())
        self._wire.loop.call_at(self._down_at, deliver, *arguments, context=self._here)


def _crossing(service: str, method: str, error: BaseException) -> Exception:
    """As the transport tells it: by the name of an exception that both ends know."""
    name = next((base.__name__ for base in type(error).__mro__ if base.__name__ in CROSSING), None)
    if name is not None:
        return CROSSING[name](str(error))
    return RemoteError(f"{service}.{method} failed: {type(error).__name__}: {error}")


@dataclass(slots=True)
class _Worker:
    spec: WorkerSpec
    process: Process
    main: asyncio.Task[None]


class SimulatedCluster:
    """`Cluster` of processes that are not. One that dies is started again after `restart_seconds`, twice as long each time.

    `late` and `failures`: who was killed at the end, and who ended with what error, before it or in it.
    """

    def __init__(self, wire: Wire, mains: Mapping[str, Main], faults: Faults, *, restart_seconds: float = 0.5) -> None:
        """`mains`: by a spec's entry, what runs in its place."""
        self.num_deaths = self.num_stalls = 0
        self.late: list[str] = []
        self.failures: list[str] = []
        self._on_death: Callable[[str, str, bool], None] = lambda name, why, is_given_up: None
        self._wire, self._mains, self._faults, self._restart_seconds = wire, mains, faults, restart_seconds
        self._workers: dict[str, _Worker] = {}
        self._lives: dict[str, int] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._is_stopping = False
        self._over: asyncio.Future[None] = wire.loop.create_future()

    async def start(self, workers: Sequence[WorkerSpec]) -> None:
        """See `Cluster`."""
        loop = self._wire.loop
        for spec in workers:
            self._begin(spec)
        self._timers += [loop.call_at(when, self._kill, worker) for when, worker in self._faults.deaths]
        self._timers += [loop.call_at(when, self._pause, worker, seconds) for when, worker, seconds in self._faults.stalls]

    async def wait(self, on_death: Callable[[str, str, bool], None]) -> None:
        """See `Cluster`."""
        self._on_death = on_death
        await asyncio.shield(self._over)

    async def stop(self, grace_seconds: float) -> list[str]:
        """See `Cluster`. Whoever stands still goes on, and nobody dies or is started any more."""
        self._is_stopping = True
        for timer in self._timers:
            timer.cancel()
        for worker in self._workers.values():
            if worker.process.is_paused:
                worker.process.resume()
        mains = {worker.main: name for name, worker in self._workers.items() if worker.process.is_alive}
        if mains:
            await asyncio.wait(mains, timeout=grace_seconds)
        self.late = [name for main, name in mains.items() if not main.done()]
        for name in self.late:
            self._workers[name].process.kill()
        if self._over.done():
            self._over.exception()  # taken, if it came too late to be why the run ended
        return self.late

    def pids(self) -> dict[str, int]:
        """See `Cluster`: there are no processes."""
        return {}

    def _begin(self, spec: WorkerSpec) -> None:
        process = Process(self._wire.loop, spec.name)
        peer = process.run(SimulatedPeer, self._wire, spec.name)
        main = process.start(self._mains[spec.entry](spec.name, peer), name=spec.name)
        self._workers[spec.name] = _Worker(spec, process, main)
        self._lives[spec.name] = self._lives.get(spec.name, 0) + 1
        main.add_done_callback(partial(self._ended, spec.name), context=self._wire.context)

    def _ended(self, name: str, main: asyncio.Task[None]) -> None:
        error = None if main.cancelled() else main.exception()
        if error is not None:
            while isinstance(error, BaseExceptionGroup):  # loops run in task groups: the first failure is the cause of the others
                error = error.exceptions[0]
            self.failures.append(f"worker {name} ended with {type(error).__name__}: {error}")
        if self._over.done():
            return
        if error is not None:
            self._over.set_exception(WorkerDied(self.failures[-1]))
        elif all(worker.main.done() for worker in self._workers.values()):
            self._over.set_result(None)

    def _kill(self, name: str) -> None:
        worker = self._workers[name]
        if not worker.process.is_alive or worker.main.done():
            return
        self.num_deaths += 1
        worker.process.kill()
        restarts = self._lives[name] - 1
        if restarts == worker.spec.max_restarts:
            self._on_death(name, "was killed once too often, and is given up", True)
            return
        pause = self._restart_seconds * 2**restarts
        self._on_death(name, f"was killed; it is started again in {pause:g} s", False)
        self._timers.append(self._wire.loop.call_later(pause, self._begin, worker.spec))

    def _pause(self, name: str, seconds: float) -> None:
        process = self._workers[name].process
        if process.is_alive and not process.is_paused:
            self.num_stalls += 1
            process.pause()
            self._timers.append(self._wire.loop.call_later(seconds, self._resume, process))

    def _resume(self, process: Process) -> None:
        if process.is_paused:
            process.resume()
