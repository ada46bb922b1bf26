"""Cores of the machine that the run's workers leave free, for helpers of the trainer (engines/train/helpers.py).

    driver: rows that are leased, versions that are installed --> FreeCores --num_helpers--> trainer: lend --allow--> its helpers

consumes: at the trainer, the number of helpers that may take passes
waits for: another number
is unblocked by: a rollout worker that takes a row, or has stored its last one; one that installs weights; the end of the run

A rollout worker's cores are free while it holds no row and installs no weights: its engine is idle then. The driver is the first to
know of both, so nothing is polled or guessed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

from asyncflow.config import Config
from asyncflow.control.signal import Signal
from asyncflow.run.factories import devices_each, num_devices, num_helpers
from asyncflow.telemetry.spans import Recorder
from asyncflow.threads import num_cores
from asyncflow.transport import remote
from asyncflow.waits import FREE_CORES

if TYPE_CHECKING:
    from asyncflow.engines.train.helpers import Helpers


class FreeCores:
    """Service of the driver. `busy()`: the workers that generate or install weights now."""

    def __init__(self, config: Config, signal: Signal, busy: Callable[[], Collection[str]]) -> None:
        self._signal, self._busy, self._is_stopping = signal, busy, False
        self._most, self._each, self._of_worker = num_helpers(config), config.train.num_threads, config.rollout.num_threads
        generating = (config.rollout.num_workers + config.eval.num_workers) * devices_each(config)
        self._not_generating = num_cores() - self._each * (num_devices(config) - generating)  # the others never count as free

    @property
    def now(self) -> int:
        """Number of helpers that may compute now."""
        free = self._not_generating - self._of_worker * len(self._busy()) if self._most else 0
        return max(0, min(self._most, free // self._each))

    @remote
    async def num_helpers(self, known: int) -> int | None:
        """Wait until another number of helpers than `known` may compute, and return it. None: the run is stopping."""
        await self._signal.until(lambda: self._is_stopping or self.now != known, FREE_CORES)
        return None if self._is_stopping else self.now

    def stop(self) -> None:
        """Stop: nobody waits any more."""
        self._is_stopping = True
        self._signal.notify()


async def lend(cores: FreeCores, helpers: Helpers, spans: Recorder) -> None:
    """Let a trainer's helpers compute while there are cores for them, until the run stops. Their passes are spans."""
    loop = asyncio.get_running_loop()

    def record(start: float, end: float) -> None:
        loop.call_soon_threadsafe(partial(spans.beside, "helper_pass", start, end))

    known: int | None = 0
    helpers.on_pass = record
    try:
        while known is not None:
            known = await cores.num_helpers(known)
            helpers.allow(known or 0)
    finally:
        helpers.allow(0)
        helpers.on_pass = lambda start, end: None
