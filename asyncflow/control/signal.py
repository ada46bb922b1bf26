"""Waiting for a condition over pure state, without polling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncflow.transport import client_name
from asyncflow.waits import OpenWait, Wait


class _PendingWait:
    """A wait that has not ended."""

    __slots__ = ("condition", "facts", "future", "since", "wait", "worker")
    future: asyncio.Future[None]

    def __init__(self, condition: Callable[[], bool], wait: Wait, facts: dict[str, int | str]) -> None:
        self.condition, self.wait, self.facts = condition, wait, facts
        self.worker, self.since = client_name.get(), asyncio.get_running_loop().time()


class Signal:
    """`until(condition, wait)` returns once the condition holds; it is looked at again after every `notify`, and at no other
    time."""

    def __init__(self) -> None:
        self._waiting: list[_PendingWait] = []
        self.watchers: list[Callable[[], None]] = []
        """Callback that hears of every change before those that wait, and does not wait itself."""

    async def until(self, condition: Callable[[], bool], wait: Wait, **facts: int | str) -> None:
        """`wait` and its facts: what is waited for, in the answer to why nothing moves."""
        entry: _PendingWait | None = None
        while not condition():  # once more after waking: another waiter may have changed things in between
            entry = entry or _PendingWait(condition, wait, facts)
            entry.future = asyncio.get_running_loop().create_future()
            self._waiting.append(entry)
            try:
                await entry.future
            finally:
                if entry in self._waiting:
                    self._waiting.remove(entry)

    def notify(self) -> None:
        """Wake all waits: the state has changed."""
        for watcher in self.watchers:
            watcher()
        for entry in [each for each in self._waiting if each.condition()]:
            self._waiting.remove(entry)
            if not entry.future.done():
                entry.future.set_result(None)

    def open_waits(self, now: float) -> list[OpenWait]:
        """Waits that have not ended, each with the client that waits, the oldest first. `now`: the event loop's time."""
        waiting = sorted(self._waiting, key=lambda each: each.since)
        return [OpenWait(name=each.wait.name, seconds=now - each.since, worker=each.worker, facts=each.facts) for each in waiting]
