"""Cores of the machine: dealt out to the pools after each step, and, where some workers leave theirs free, lent to others. So are
devices of rollout to the trainer's helpers (`plan.shares.helpers`).

    driver: seconds of each pool in a step     FreeCores --num_threads--> a pool's: follow_threads --use_threads--> its engines
    rows that are leased, versions that are    -->       ----helpers----> trainer, critic: lend --allow--> helpers
    installed, rounds under way                                                                   (train/helpers.py)

consumes: the helpers that may take passes, or the number of threads to compute with
waits for: another number
is unblocked by: a worker that takes a row, has stored its last one, or installs weights; a round that a trainer or critic is given,
and its last commit; the end of a step, and of the run

A pool whose number of threads is `auto` has a part of the cores by what it has computed in the step before. A rollout worker's
cores, or its device, are free while it holds no row and installs no weights; the trainer's and the critic's while they have no
round and no update to compute; those of references, values and reward models while they hold no row, and none is ready for them
(for helpers alone: numbers of threads leave them theirs). The driver is the first to know of each, so nothing is polled or guessed.
What is given out is never more than there are cores, but for the first thread of each worker, and for values that install weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from asyncflow.config import Config
from asyncflow.control.signal import Signal
from asyncflow.control.worker_pool import is_guest
from asyncflow.devices import CPU, kind_of
from asyncflow.loops.evaluation import EVALUATORS
from asyncflow.run.device_shares import device_of, devices_each, is_on_cores, workers_with_devices
from asyncflow.run.helper_devices import (
    ON_ONE_MACHINE,
    generating_device,
    helper_devices,
    num_critic_helpers,
    num_on_cores,
)
from asyncflow.telemetry.idle import HELPER_TASK, computing_seconds
from asyncflow.telemetry.spans import Recorder, Span
from asyncflow.threads import num_cores
from asyncflow.transport import remote
from asyncflow.waits import FREE_CORES

if TYPE_CHECKING:
    from asyncflow.engines.sleeping.train import SleepingPasses
    from asyncflow.engines.train.helpers import Helpers
    from asyncflow.transfer_queue.controller import Controller


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers of a task on this machine's cores: how many compute, with how many threads each in any case, and whether they are
    dealt more. `key`: of the configuration, that says so."""

    workers: int
    least: int
    is_dealt: bool
    key: str


def pools_of(config: Config) -> dict[str, Pool]:
    """Pools of a run, by the first part of their workers' names. Evaluators are among those of rollout."""
    rollout, has_bits = config.rollout, config.train.accumulate == "exact"

    def pool(workers: int, threads: int | Literal["auto"], device: str, key: str, *, changes_bits: bool = False) -> Pool:
        is_dealt = threads == "auto" and config.cluster.name in ON_ONE_MACHINE and kind_of(device) == CPU
        return Pool(workers, 1 if threads == "auto" else threads, is_dealt and (changes_bits or not has_bits), key)

    generating = (rollout.num_workers + config.eval.num_workers) * devices_each(config)
    pools = {"rollout": pool(generating, rollout.num_threads, rollout.device, "rollout.num_threads", changes_bits=True)}
    for task, names in workers_with_devices(config).items():
        threads, key = config.train.num_threads, "train.num_threads"
        if task == "reward" and config.reward.model is not None:
            threads, key = config.reward.model.num_threads, "reward.model.num_threads"
        pools["trainer" if task == "train" else task] = pool(len(names), threads, device_of(config, task), key)
    return pools


class FreeCores:
    """Service of the driver. `generating()`: the workers that generate or install weights now; `is_training()`: whether the trainer
    has passes, or an update, to compute; `beside()`: how many workers of other pools compute, by their pool."""

    def __init__(
        self,
        config: Config,
        signal: Signal,
        generating: Callable[[], Collection[str]],
        is_training: Callable[[], bool],
        beside: Callable[[], Mapping[str, int]],
    ) -> None:
        self._signal, self._generating, self._is_training, self._beside = signal, generating, is_training, beside
        self._is_stopping = False
        self._config, self._helpers, self._of_helper = config, helper_devices(config), config.train.least_threads
        self._on_cores = {"trainer": num_on_cores(config), "critic": num_critic_helpers(config)}
        self.pools, self._cores = pools_of(config), num_cores()
        self._threads = {name: pool.least for name, pool in self.pools.items()}  # of each worker, as dealt
        self._most_given = 0
        self._counts = is_on_cores(config) or any(pool.is_dealt for pool in self.pools.values())
        if self._counts:
            signal.watchers.append(self._look)

    def helpers_of(self, pool: str) -> tuple[int, ...]:
        """Helpers of each worker of a pool, the trainer's or the critic's, that may compute now, counted from 0: on cores the first
        ones, on devices those whose device is idle. Of the cores that both could use the trainer's have the first choice."""
        if pool == "trainer" and not self._on_cores[pool]:
            busy = {generating_device(self._config, name) for name in self._generating_here} if self._helpers else set()
            return tuple(number for number, device in enumerate(self._helpers) if device not in busy)
        free = self._cores - self._of(pool) - self.pools["rollout"].least * len(self._generating_here)
        free -= sum(threads for other, threads in self._of_beside.items() if other != pool)
        if pool != "trainer":
            free -= self._of_training
        return tuple(range(max(0, min(self._on_cores[pool], free // (self._of_helper * self.pools[pool].workers)))))

    @property
    def threads_now(self) -> int:
        """Number of threads that each worker that generates may compute with now."""
        pool = self.pools["rollout"]
        if not pool.is_dealt:
            return pool.least
        of_others = self._of_others + self._of_training + self._of_critic_helpers
        return max(pool.least, (self._cores - of_others) // max(1, len(self._generating_here)))

    def threads_of(self, pool: str) -> int:
        """Number of threads that each worker of a pool may compute with now."""
        return self.threads_now if pool == "rollout" else self._threads[pool]

    def seconds(self, spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
        """Seconds of cores that each pool has computed in [start, end], with the threads that it has been dealt. A client's are not
        this machine's; whose task is no pool of these has one."""

        def threads(pool: str, worker: str) -> int:
            task = worker.partition("/")[0]
            own = "rollout" if task == EVALUATORS else task
            return self._threads.get(own, 1) if own == pool and not is_guest(worker) else 0

        pools = {*self.pools, *(span.worker.partition("/")[0] for span in spans)} - {EVALUATORS}
        return {pool: computing_seconds(spans, start, end, partial(threads, pool)) for pool in sorted(pools)}

    def deal(self, seconds: Mapping[str, float]) -> None:
        """Deal out the cores by the seconds that each pool has computed in a step: a thread more for each of its workers, again and
        again, to the pool which would take longest alone, as long as there are cores for it."""
        threads = {name: pool.least for name, pool in self.pools.items()}
        left = self._cores - sum(pool.workers * pool.least for pool in self.pools.values())

        def alone(name: str) -> float:
            return seconds.get(name, 0.0) / (threads[name] * self.pools[name].workers)

        while may := [name for name, pool in self.pools.items() if pool.is_dealt and 0 < pool.workers <= left and alone(name)]:
            longest = max(may, key=alone)
            threads[longest] += 1
            left -= self.pools[longest].workers
        self._threads = threads
        self._signal.notify()

    def most_given(self) -> float | None:
        """Most threads that workers had to compute with at a time since the last call / cores; None if they compute elsewhere."""
        if not self._counts:
            return None
        self._look()
        most, self._most_given = self._most_given, 0
        return most / self._cores

    @remote
    async def helpers(self, pool: str, known: tuple[int, ...]) -> tuple[int, ...] | None:
        """Wait until other helpers of a worker of the pool than `known` may compute, and return them. None: the run is stopping."""
        await self._signal.until(lambda: self._is_news(self.helpers_of(pool) != known), FREE_CORES)
        return None if self._is_stopping else self.helpers_of(pool)

    @remote
    async def num_threads(self, pool: str, known: int) -> int | None:
        """Wait until a worker of the pool may compute with another number of threads than `known`, and return it. None: the run is
        stopping."""
        await self._signal.until(lambda: self._is_news(self.threads_of(pool) != known), FREE_CORES)
        return None if self._is_stopping else self.threads_of(pool)

    def stop(self) -> None:
        """Stop: nobody waits any more."""
        self._is_stopping = True
        self._signal.notify()

    @property
    def _generating_here(self) -> list[str]:
        """Workers that generate on this machine: not those of `asyncflow join`, nor clients."""
        return [name for name in self._generating() if not is_guest(name)]

    @property
    def _of_others(self) -> int:
        """Threads of the workers beside trainer and rollout, which `threads_now` leaves to them all the time: its changes cost more
        than a helper's."""
        return sum(self._of(name) for name in self.pools if name not in ("rollout", "trainer"))

    @property
    def _of_beside(self) -> dict[str, int]:
        """Threads of those of them that compute now, by pool."""
        return {pool: count * self._threads[pool] for pool, count in self._beside().items()}

    @property
    def _of_training(self) -> int:
        """Threads of the trainer and its helpers, while it has something to compute."""
        return self._of("trainer") + self._of_helpers("trainer") if self._is_training() else 0

    @property
    def _of_critic_helpers(self) -> int:
        """Threads of the critic's helpers, while it has a round or an update to compute."""
        return self._of_helpers("critic") if self._of_beside.get("critic") else 0

    def _of_helpers(self, pool: str) -> int:
        """Threads of a pool's helpers that may compute now on cores."""
        return self._of_helper * self.pools[pool].workers * len(self.helpers_of(pool)) if self._on_cores[pool] else 0

    def _of(self, pool: str) -> int:
        return self.pools[pool].workers * self._threads[pool]

    def _is_news(self, is_other: bool) -> bool:
        return is_other or self._is_stopping

    def _look(self) -> None:
        training = self._of_training + self._of_critic_helpers
        given = sum(self._of_beside.values()) + training + self.threads_now * len(self._generating_here)
        self._most_given = max(self._most_given, given)


def computing_beside(pools: Mapping[str, Pool], controllers: Mapping[str, Controller]) -> dict[str, int]:
    """How many workers of the pools beside trainer and rollout compute: those that hold rows, or all while rows are ready, which a
    worker between two leases is about to take."""
    found = {}
    for name in pools.keys() & controllers.keys() - {"rollout"}:
        controller = controllers[name]
        found[name] = pools[name].workers if controller.table.counts()["ready"] else len(controller.holders())
    return found


async def lend(cores: FreeCores, pool: str, helpers: Helpers[Any] | SleepingPasses, spans: Recorder) -> None:
    """Let the helpers of a worker of the pool compute while there are cores or devices for them, until the run stops. Their passes
    are spans."""
    loop = asyncio.get_running_loop()

    def record(start: float, end: float) -> None:
        loop.call_soon_threadsafe(partial(spans.off_lane, HELPER_TASK, start, end))

    known: tuple[int, ...] | None = ()
    helpers.on_pass = record
    try:
        while known is not None:
            known = await cores.helpers(pool, known)
            helpers.allow(known or ())
    finally:
        helpers.allow(())
        helpers.on_pass = lambda start, end: None


async def follow_threads(cores: FreeCores, pool: str, use_threads: Callable[[int], Awaitable[None]], least: int) -> None:
    """Let an engine of a pool, which computes with `least` threads, use as many as there are for it, until the run stops."""
    while (count := await cores.num_threads(pool, least)) is not None:
        await use_threads(least := count)


def following_threads(config: Config, cores: FreeCores, pool: str, engine: Any) -> tuple[list[Any], str]:
    """Coroutines that let an engine of a pool use more threads, and why no bits are promised then: none where it is fixed."""
    use_threads: Callable[[int], Awaitable[None]] | None = getattr(engine, "use_threads", None)
    of = pools_of(config)[pool]
    if not of.is_dealt or use_threads is None:
        return [], ""
    return [follow_threads(cores, pool, use_threads, of.least)], f"{of.key}=auto: the number of threads changes, and bits with it"
