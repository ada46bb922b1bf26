"""From the embedded engine's thread to the event loops that wait for its responses.

consumes: responses as they are made, and errors
waits for: nothing; who makes them says when they are handed over
is unblocked by: -

An event loop that wakes takes the interpreter from the thread, and its core from other work, once for each response of a group that
nobody uses before its last one is there. So responses are handed over some together, unless somebody can do something with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from asyncflow.engines.base import Response

Item = Response | Exception

HOLD_SECONDS: Final = 0.02
"""For no longer than that is a response kept while others are made; its reward may take long."""


class Deliveries:
    """The thread's half, but for `to`."""

    def __init__(self) -> None:
        self._made: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        self._due = float("inf")  # on the monotonic clock

    def to(self, loop: asyncio.AbstractEventLoop, take: Callable[[Item], None], count: int) -> Callable[[Item], None]:
        """What delivers `count` responses of one request, or an error that ends it, to `take`, which the loop calls."""

        def deliver(item: Item) -> None:
            nonlocal count
            count -= 1
            self._made.setdefault(loop, []).append(partial(take, item))
            is_last = not count or isinstance(item, Exception)
            self._due = 0.0 if is_last else min(self._due, time.monotonic() + HOLD_SECONDS)

        return deliver

    @property
    def are_due(self) -> bool:
        """A request has its last response, or something was kept for long enough."""
        return time.monotonic() >= self._due

    def hand_over(self) -> None:
        """What was made, in the order in which it was made."""
        made, self._made, self._due = self._made, {}, float("inf")
        for loop, calls in made.items():
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_call_all, calls)


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
