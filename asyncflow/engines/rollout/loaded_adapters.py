"""Adapters that an engine has loaded beside its weights, by name, and the requests that name them. Pure but for its one wait.

    load   -> a number of the decoder's is taken -> requests may name it
    unload -> no new request may name it -> the last one that does ends -> its number is free

A request names an adapter from its beginning to its end, so what it is made by cannot go before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from asyncflow.engines.rollout.slot_options import AdapterRoom


class LoadedAdapter:
    """Adapter of a name, or on its way. `number`: the decoder's for it."""

    def __init__(self, name: str, number: int, *, is_there: bool) -> None:
        self.name, self.number, self.is_there = name, number, is_there
        self._num_requests = 0
        self._is_unused = asyncio.Event()
        self._is_unused.set()

    @contextmanager
    def request(self) -> Iterator[int]:
        """Context of a request that names it; gives its number. Raises `ValueError` if it has gone."""
        if not self.is_there:
            raise ValueError(f"no adapter {self.name!r} is loaded here: load it before a request names it")
        self._num_requests += 1
        self._is_unused.clear()
        try:
            yield self.number
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._is_unused.set()

    async def unused(self) -> None:
        """Return when no request names it; new ones are refused from now on, unless this is cancelled."""
        self.is_there = False
        try:
            await self._is_unused.wait()
        except asyncio.CancelledError:
            self.is_there = True
            raise


class LoadedAdapters:
    """The adapters of one engine. None as a name: what is installed, which is always there."""

    def __init__(self, room: AdapterRoom, installed: int) -> None:
        """`installed`: the decoder's number for what is installed; the numbers behind it are for adapters."""
        self._room = room
        self._installed = LoadedAdapter("", installed, is_there=True)
        self._free = [installed + 1 + place for place in reversed(range(room.number))]
        self._adapters: dict[str, LoadedAdapter] = {}

    def named(self, name: str | None) -> LoadedAdapter:
        """Adapter of a name. Raises `ValueError` if none is there."""
        if name is None:
            return self._installed
        found = self._adapters.get(name)
        if found is None or not found.is_there:
            raise ValueError(f"no adapter {name!r} is loaded here: load it before a request names it")
        return found

    def begin(self, name: str, rank: int) -> LoadedAdapter:
        """Take a number for an adapter that is being loaded. Raises `ValueError` where there is no room for it."""
        if name in self._adapters:
            raise ValueError(f"an adapter {name!r} is loaded already: unload it first, or take another name")
        if rank > self._room.rank:
            raise ValueError(f"an adapter of rank {rank} exceeds the largest rank that this engine has room for, {self._room.rank}")
        if not self._free:
            raise ValueError(f"{len(self._adapters)} adapters are loaded, which is all that this engine has room for: unload one")
        self._adapters[name] = made = LoadedAdapter(name, self._free.pop(), is_there=False)
        return made

    def forget(self, adapter: LoadedAdapter) -> None:
        """Free the number of an adapter that no request names."""
        del self._adapters[adapter.name]
        self._free.append(adapter.number)
