"""Waiting for a condition over pure state, without polling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """`until(condition)` returns once the condition holds; it is looked at again after every `notify`, and at no other time."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # once more after waking: another waiter may have changed things in between
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = (condition, future)
            self._waiting.append(entry)
            try:
                await future
            finally:
                if entry in self._waiting:
                    self._waiting.remove(entry)

    def notify(self) -> None:
        """The state has changed."""
        for entry in [e for e in self._waiting if e[0]()]:
            self._waiting.remove(entry)
            if not entry[1].done():
                entry[1].set_result(None)
