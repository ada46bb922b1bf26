"""An event loop whose sockets are real and whose seconds are not: for tests that have all ends of their connections in one process.

While anything is ready, or a thread is at work, the clock stands still, however long that takes on a busy machine: no lease runs
out and no deadline is missed because of it. When there is nothing left but to wait, it jumps to the next timer: nobody sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import socket
from collections.abc import Callable, Mapping
from typing import Any

IDLE_SECONDS, IDLE_TCP_SECONDS = 0.001, 0.05
"""Real, until nothing is on its way any more: over a TCP connection to this machine that takes a moment, over others none."""
STUCK_SECONDS = 60.0
"""Real: of a thread, or with neither a timer nor anything else that could happen."""


class _Selector(selectors.DefaultSelector):
    """Asks what is ready, and has the clock jump when nothing is."""

    loop: UnhurriedLoop
    idle_seconds = IDLE_SECONDS

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = super().register(fileobj, events, data)
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(key.fd)) as other:
            if other.family in (socket.AF_INET, socket.AF_INET6):
                self.idle_seconds = IDLE_TCP_SECONDS
        return key

    def select(self, timeout: float | None = None) -> list[Any]:
        if (ready := super().select(0)) or timeout == 0:
            return ready
        if timeout is None or self.loop.in_threads:
            ready = super().select(STUCK_SECONDS)
            assert ready, "nothing will ever happen again"
            return ready
        ready = super().select(self.idle_seconds)
        if not ready:
            self.loop.now += timeout
        return ready


class UnhurriedLoop(asyncio.SelectorEventLoop):
    """Virtual seconds from 0."""

    def __init__(self) -> None:
        self.now, self.in_threads = 0.0, 0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = super().run_in_executor(executor, func, *args)
        self.in_threads += 1
        future.add_done_callback(self._is_done)
        return future

    def _is_done(self, future: asyncio.Future[Any]) -> None:
        self.in_threads -= 1


def loop_of(is_unhurried: bool) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """For `pytest_asyncio_loop_factories`."""
    return {"unhurried": UnhurriedLoop} if is_unhurried else {"real": asyncio.new_event_loop}
