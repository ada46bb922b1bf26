"""Cores that sleeping engines compute on: work takes longer while others compute on the same ones.

    alone        rollout |--- 10 ms of work ---|
    beside       rollout |--- 10 ms of work, 1.4 times as long ---|        Contention(cores=2, slowdown={"rollout": 0.4})
                 trainer |----------------- work ---------------------|

Computation goes on at a rate that changes when other work begins or ends. Without contention each piece of work takes its seconds.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

ROLLOUT, TRAIN, CRITIC, REFERENCE = "rollout", "train", "critic", "reference"
"""Pools, by which contention knows what computes."""


class Contention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Slowdown of workers that share the cores of one machine, each with one thread that computes.

    `slowdown`: by pool, how much longer its work takes while all cores compute, as a fraction of what it takes alone: caches and
    memory bandwidth are shared, and the driver and the reward processes need time of their own. With fewer busy cores it is less,
    in proportion. Where more workers compute than there are cores, they take turns as well.
    """

    cores: int
    slowdown: Mapping[str, float] = {}

    def among(self, pool: str, busy: Sequence[str]) -> float:
        """Times as long as alone that work of this pool takes, while workers of these pools compute, itself included."""
        num_busy = len(busy)
        share = (min(num_busy, self.cores) - 1) / (self.cores - 1) if self.cores > 1 else 0.0
        return (1.0 + self.slowdown.get(pool, 0.0) * share) * max(1.0, num_busy / self.cores)


@dataclass(frozen=True, slots=True)
class SharedDevices:
    """Slowdown of workers that share devices: each device is given to those that compute on it in turns, in equal parts.

    `devices`: of each worker, by its name, which is its pool. One with several devices goes on as fast as on the slowest of them.
    """

    devices: Mapping[str, frozenset[str]]

    def among(self, pool: str, busy: Sequence[str]) -> float:
        """Times as long as alone that this worker's work takes, while these compute, itself included."""
        own = self.devices.get(pool, frozenset())
        return float(max((sum(device in self.devices.get(each, ()) for each in busy) for device in own), default=1))


@dataclass(slots=True, eq=False)
class Computation:
    """Computation under way. `seconds` are those that it takes alone; `rate`: of them, how many are done in a second."""

    pool: str
    seconds: float
    then: Callable[[], object]
    loop: asyncio.AbstractEventLoop
    since: float
    rate: float
    before: float = field(init=False, default=0.0)  # seconds of the work that were done until `since`
    context: contextvars.Context = field(init=False, default_factory=contextvars.copy_context)
    timer: asyncio.TimerHandle | None = field(init=False, default=None)

    def done(self) -> float:
        """Seconds of the work that are done."""
        return self.before + (self.loop.time() - self.since) * self.rate

    def until(self, seconds: float) -> float:
        """Seconds on the clock, at the present rate, until so many seconds of the work are done."""
        return self.since + (seconds - self.before) / self.rate - self.loop.time()

    def go_on(self, rate: float) -> None:
        """Go on at another rate."""
        self.before, self.since, self.rate = self.done(), self.loop.time(), rate
        self.call_when_done()

    def call_when_done(self) -> None:
        """(Re)start the timer. It belongs to the task that has begun the work, whichever changes its rate."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self.loop.call_later(max(0.0, self.until(self.seconds)), self.then, context=self.context)


class Cores:
    """Cores of one machine, with the work under way on them. Belongs to one event loop."""

    def __init__(self, contention: Contention | SharedDevices | None = None) -> None:
        self._contention = contention
        self._work: list[Computation] = []

    def begin(self, pool: str, seconds: float, then: Callable[[], object]) -> Computation:
        """Begin work that takes so many seconds alone; `then` is called when it is done. `end` must be called."""
        loop = asyncio.get_running_loop()
        work = Computation(pool, seconds, then, loop, loop.time(), 1.0)
        if self._contention is None:
            work.call_when_done()
        else:
            self._work.append(work)
            self._change_rates(self._contention, work)
        return work

    async def end(self, work: Computation, seconds: float) -> None:
        """Go on until `seconds` of the work are done, which may be sooner or later than was said at its beginning; then end it."""
        remaining = max(0.0, work.until(seconds)) if self._contention is None else max(0.0, seconds - work.done())
        self._remove(work)
        await self.compute(work.pool, remaining)

    async def compute(self, pool: str, seconds: float) -> None:
        """Computation that takes so many seconds alone, from its beginning to its end."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        done = asyncio.get_running_loop().create_future()
        work = self.begin(pool, seconds, partial(_settle, done))
        try:
            await done
        finally:
            self._remove(work)

    def _remove(self, work: Computation) -> None:
        if work.timer is not None:
            work.timer.cancel()
        if self._contention is not None and work in self._work:  # else its worker stood still when it was over
            self._work.remove(work)
            self._change_rates(self._contention)

    def _change_rates(self, contention: Contention | SharedDevices, begun: Computation | None = None) -> None:
        """Give all work the rate that it has now. That of a killed worker is ended by nobody: it is
        over in time."""
        self._work = [work for work in self._work if work is begun or work.until(work.seconds) > -1.0]
        busy = [work.pool for work in self._work]
        for work in self._work:
            rate = 1.0 / contention.among(work.pool, busy)
            if rate != work.rate or work is begun:
                work.go_on(rate)


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
