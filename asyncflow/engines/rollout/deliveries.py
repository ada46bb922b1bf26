"""Deliveries from the embedded engine's thread to the event loops that wait for its responses.

An event loop that wakes takes the interpreter from the thread, and a core from other work, and a group is of use only when its last
response is there. So responses are handed over some together; a reward may begin that much later. A loop is woken at once for
what ends a request, and by the engine where a slot stands empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from asyncflow.engines.base import Response

HOLD_SECONDS: Final = 0.02
"""Seconds from one handing over to the next, where nothing is urgent. Where a decode step takes longer, each hands over what it
made."""


class Deliveries:
    """Responses and errors that are not handed over yet. The thread's own, but for `to`; it asks after each decode step."""

    def __init__(self) -> None:
        self._made: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        self._is_urgent = False
        self._handed_over = -math.inf  # on the monotonic clock

    def to(
        self, loop: asyncio.AbstractEventLoop, take: Callable[[Response | Exception], None], count: int
    ) -> Callable[[Response | Exception], None]:
        """Function that delivers `count` responses of one request, or an error that ends it, to `take`, which the loop calls."""

        def deliver(item: Response | Exception) -> None:
            nonlocal count
            count -= 1
            self._made.setdefault(loop, []).append(partial(take, item))
            self._is_urgent |= not count or isinstance(item, Exception)

        return deliver

    @property
    def are_due(self) -> bool:
        """Something ended a request, or the last handing over is long enough ago."""
        return self._is_urgent or (bool(self._made) and time.monotonic() >= self._handed_over + HOLD_SECONDS)

    def hand_over(self) -> None:
        """Deliver what was made, in the order in which it was made."""
        if not self._made:
            return
        made, self._made, self._is_urgent, self._handed_over = self._made, {}, False, time.monotonic()
        for loop, calls in made.items():
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_call_all, calls)


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
