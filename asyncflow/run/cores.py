"""Cores of the machine that some workers leave free, for the others: helpers of the trainer, threads of rollout workers.

    driver: rows that are leased, versions        FreeCores --num_helpers--> trainer: lend --allow--> helpers (train/helpers.py)
    that are installed, rounds under way    -->             --num_threads--> rollout worker: widen --use_threads--> its engine

consumes: the number of helpers that may take passes, or of threads to compute with
waits for: another number
is unblocked by: a rollout worker that takes a row, has stored its last one, or installs weights; a round that the trainer is given,
and its last commit; the end of the run

A rollout worker's cores are free while it holds no row and installs no weights; the trainer's while it has no round and no update
to compute. The driver is the first to know of each, so nothing is polled or guessed. What is given out is never more than there are
cores, but for the first thread of each worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

from asyncflow.config import Config
from asyncflow.control.signal import Signal
from asyncflow.run.factories import devices_each, num_devices, num_helpers
from asyncflow.telemetry.idle import HELPER_TASK
from asyncflow.telemetry.spans import Recorder
from asyncflow.threads import num_cores
from asyncflow.transport import remote
from asyncflow.waits import FREE_CORES

if TYPE_CHECKING:
    from asyncflow.engines.sleeping import SleepingPasses
    from asyncflow.engines.train.helpers import Helpers


class FreeCores:
    """Service of the driver. `generating()`: the workers that generate or install weights now; `is_training()`: whether the trainer
    has passes, or an update, to compute."""

    def __init__(
        self, config: Config, signal: Signal, generating: Callable[[], Collection[str]], is_training: Callable[[], bool]
    ) -> None:
        self._signal, self._generating, self._is_training, self._is_stopping = signal, generating, is_training, False
        self._most_helpers, self._of_trainer = num_helpers(config), config.train.num_threads
        self._of_worker, self._is_auto = config.rollout.least_threads, config.rollout.num_threads == "auto"
        others = num_devices(config) - config.layout.size
        others -= (config.rollout.num_workers + config.eval.num_workers) * devices_each(config)
        self._cores = num_cores() - others * config.train.num_threads  # the other tasks' workers never count as idle

    @property
    def helpers_now(self) -> int:
        """Number of helpers that may compute now."""
        free = self._cores - self._of_trainer - self._of_worker * len(self._generating()) if self._most_helpers else 0
        return max(0, min(self._most_helpers, free // self._of_trainer))

    @property
    def threads_now(self) -> int:
        """Number of threads that each worker that generates may compute with now."""
        if not self._is_auto:
            return self._of_worker
        of_training = self._of_trainer * (1 + self.helpers_now) if self._is_training() else 0
        return max(self._of_worker, (self._cores - of_training) // max(1, len(self._generating())))

    @remote
    async def num_helpers(self, known: int) -> int | None:
        """Wait until another number of helpers than `known` may compute, and return it. None: the run is stopping."""
        await self._signal.until(lambda: self._is_stopping or self.helpers_now != known, FREE_CORES)
        return None if self._is_stopping else self.helpers_now

    @remote
    async def num_threads(self, known: int) -> int | None:
        """Wait until a worker that generates may compute with another number of threads than `known`, and return it. None: the run
        is stopping."""
        await self._signal.until(lambda: self._is_stopping or self.threads_now != known, FREE_CORES)
        return None if self._is_stopping else self.threads_now

    def stop(self) -> None:
        """Stop: nobody waits any more."""
        self._is_stopping = True
        self._signal.notify()


async def lend(cores: FreeCores, helpers: Helpers | SleepingPasses, spans: Recorder) -> None:
    """Let a trainer's helpers compute while there are cores for them, until the run stops. Their passes are spans."""
    loop = asyncio.get_running_loop()

    def record(start: float, end: float) -> None:
        loop.call_soon_threadsafe(partial(spans.beside, HELPER_TASK, start, end))

    known: int | None = 0
    helpers.on_pass = record
    try:
        while known is not None:
            known = await cores.num_helpers(known)
            helpers.allow(known or 0)
    finally:
        helpers.allow(0)
        helpers.on_pass = lambda start, end: None


async def widen(cores: FreeCores, use_threads: Callable[[int], None], least: int) -> None:
    """Let a rollout engine, which computes with `least` threads, use more while there are cores for them, until the run stops."""
    while (count := await cores.num_threads(least)) is not None:
        use_threads(least := count)
