"""Handover: rollout workers and evaluators that stay for the attempt of a run that follows, with their processes and engines.

    an attempt is over --stays()--> True: a worker ends its connection, and waits for the next attempt's driver at the same place
                                    False: its process ends

consumes: the word that another attempt follows; questions of workers whose loops have ended
waits for: these workers to let go of the attempt that is over
is unblocked by: their connections' ends, or the deadline: a worker that is late is ended
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from typing import Final

from asyncflow.control.signal import Signal
from asyncflow.transport import client_name, remote
from asyncflow.waits import HANDOVER

STAY_SECONDS: Final = 5.0
"""Seconds that a worker that may stay for the next attempt has to let go of this one: many times an installation of weights."""


class Handover:
    """Service of the driver for the handover."""

    def __init__(self) -> None:
        self._may_stay: Collection[str] = ()
        self._staying: set[str] = set()
        self._connected: set[str] = set()
        self._changed = Signal()

    @remote
    async def stays(self) -> bool:
        """Whether the calling worker, whose loop has ended, is to stay: another attempt follows."""
        worker = client_name.get()
        if worker in self._may_stay:
            self._staying.add(worker)
            self._connected.add(worker)
        return worker in self._may_stay

    def left(self, worker: str) -> None:
        """Take note that a worker's connection has ended."""
        self._connected.discard(worker)
        self._changed.notify()

    def begin(self, workers: Collection[str]) -> None:
        """Another attempt follows, for which these workers may stay."""
        self._may_stay = frozenset(workers)

    async def staying(self) -> Collection[str]:
        """Wait until each worker that may stay has let go of this attempt. Returns those that have in time, and stay."""
        awaited = set(self._may_stay)

        def have_let_go() -> bool:
            return awaited <= self._staying - self._connected

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STAY_SECONDS):
                await self._changed.until(have_let_go, HANDOVER, workers=len(awaited))
        return self._staying - self._connected
