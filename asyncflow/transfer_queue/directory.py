"""Directory of a queue's controllers and units, and the connections to them, made anew when they are lost.

A process that serves the queue registers under a name, `controller/<task>` or `unit/<number>`, with the address that it listens
at; one that is restarted registers again, at another address perhaps. Everybody else learns of it by `describe`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar, cast

import msgspec

from asyncflow.transfer_queue.notices import Superseded
from asyncflow.transfer_queue.schema import Schema
from asyncflow.transfer_queue.storage.base import QueueOwner
from asyncflow.transport import ConnectionLost, Credentials, Peer, proxy, remote

T = TypeVar("T")

HERE = ""
"""The address of what is served by the process that serves the directory."""


class Description(msgspec.Struct, frozen=True, dict=True):
    """A queue, as a newcomer has to know it. `version` rises with every change of `places` (name -> address). `owner`: if it is
    a run's."""

    version: int
    schema: Schema
    places: dict[str, str]
    owner: QueueOwner | None = None

    @functools.cached_property
    def units(self) -> list[int]:
        """The numbers of the units."""
        return sorted(int(name.removeprefix("unit/")) for name in self.places if name.startswith("unit/"))


class Directory:
    """Addresses of the queue: its units, and the controllers of its tasks. There is one for each queue."""

    def __init__(self, schema: Schema, owner: QueueOwner | None = None) -> None:
        self.current = Description(0, schema, {}, owner)
        self._changed = asyncio.Event()
        self._last_term = 0
        self._terms: dict[str, int] = {}  # of those that serve a place

    @remote
    async def describe(self, after: int) -> Description:
        """The queue, as soon as its version is above `after` (-1: at once)."""
        while self.current.version <= after:
            await self._changed.wait()
        return self.current

    @remote
    async def term(self) -> int:
        """Number above all that have been given out: a process that asked later serves in the place of one that asked sooner."""
        self._last_term += 1
        return self._last_term

    @remote
    async def register(self, name: str, address: str, term: int) -> None:
        """`name` is served at `address` from now on.

        Raises `ValueError` for a name that is none, `Superseded` when a process with a later one serves it.
        """
        kind, _, which = name.partition("/")
        if kind == "controller":
            self.current.schema.task(which)
        elif kind != "unit" or not which.isdecimal():
            raise ValueError(f"{name!r} is no place in a queue: controller/<task> or unit/<number>")
        if kind == "unit" and self.current.places.get(name) == HERE:
            raise ValueError(f"{name} is served by the queue's own process: take another number, or serve the queue without units")
        if term < self._terms.get(name, 0):
            raise Superseded(f"another process serves {name} by now")
        self._terms[name] = term
        if self.current.places.get(name) != address:
            self.add(name, address)

    def add(self, name: str, address: str = HERE) -> None:
        """Add a part of the queue under its name, or change its address; `HERE`: it is in the process of the directory."""
        old = self.current
        self.current = Description(old.version + 1, old.schema, {**old.places, name: address}, old.owner)
        self._changed.set()
        self._changed = asyncio.Event()


class Places:
    """The controllers and units of a queue, by name: objects of this process, or proxies that connect again when they must.

    A call that gets no answer is repeated until `patience_seconds` have passed, looking at the directory each time;
    all requests of the queue may be repeated. Then it raises `ConnectionLost` naming what did not come back.
    """

    def __init__(
        self,
        directory: Directory,
        name: str,
        *,
        peer: Peer | None = None,
        here: Mapping[str, object] | None = None,
        credentials: Credentials | None = None,
        patience_seconds: float = 60.0,
        known: Description | None = None,
    ) -> None:
        """`peer`: the connection to the directory's process. `here`: what this process serves itself."""
        self._directory, self._name, self._peer = directory, name, peer
        self.known = known
        self._here = {} if here is None else here
        self._credentials = credentials
        self.patience_seconds = patience_seconds
        self.request_keys = itertools.count(1)  # of all clients here: to a controller they are one worker
        self._watching: asyncio.Task[None] | None = None
        self._peers: dict[str, Peer] = {}
        self._dialling: dict[str, asyncio.Lock] = {}
        self._proxies: dict[str, Any] = {}

    @property
    def schema(self) -> Schema:
        """Schema of the queue."""
        return self._description.schema

    @property
    def _description(self) -> Description:
        if self.known is None:
            raise RuntimeError("`learn` first")
        return self.known

    async def learn(self, after: int = -1) -> Description:
        """Look at the directory: at once, or when it is newer than version `after`. Connections to places that have moved end: one
        whose machine was cut off would not say so, and what waits for an answer there is asked again elsewhere."""
        self.known = await self._directory.describe(after)
        for address in self._peers.keys() - self.known.places.values():
            await self._peers.pop(address).close()
        return self.known

    async def changes(self) -> AsyncIterator[list[int]]:
        """The numbers of the units: now, and whenever there is a new one."""
        description, yielded = await self.learn(), None
        while True:
            if (units := self.units) != yielded:
                yielded = units
                yield units
            description = await self.learn(description.version)

    @property
    def units(self) -> list[int]:
        """The numbers of the units known by now."""
        return self._description.units

    def get(self, interface: type[T], name: str) -> T:
        """Proxy of the service `name`."""
        if name in self._here:
            return cast(T, self._here[name])
        if name not in self._proxies:
            self._proxies[name] = proxy(interface, self, name)
        return cast(T, self._proxies[name])

    def watch(self) -> None:
        """Learn of changes as they happen, until `close`."""
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        with contextlib.suppress(ConnectionLost):  # the next that asks is told
            async for _ in self.changes():
                pass

    async def close(self) -> None:
        """Hang up (the connection to the directory stays)."""
        if self._watching is not None:
            self._watching.cancel()
        for peer in self._peers.values():
            await peer.close()

    async def call(self, interface: type, name: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """Send a request, and repeat it while there is no answer: patience begins when the first one is lost, however long that was
        under way."""
        clock, pause = asyncio.get_running_loop().time, 0.02
        deadline = math.inf
        while True:
            try:
                peer = await self._dial(name)
                return await peer.call(interface, name, method, arguments)
            except Superseded:  # a controller says so: its successor is to be asked; a unit says so: its controller is to end
                deadline = min(deadline, clock() + self.patience_seconds)
                if not name.startswith("controller/") or clock() + pause > deadline:
                    raise
            except ConnectionLost as error:
                if self._peer is not None and self._peer.is_lost:
                    raise  # the queue itself is gone
                deadline = min(deadline, clock() + self.patience_seconds)
                if clock() + pause > deadline:
                    raise ConnectionLost(f"{name} has not come back within {self.patience_seconds:g} s: {error}") from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)
            await self.learn()

    async def _dial(self, name: str) -> Peer:
        if name not in self._description.places:
            await self.learn()
        address = self._description.places.get(name)
        if address is None:
            raise ConnectionLost(f"{name} is not registered")
        if address == HERE:
            if self._peer is None:
                raise ConnectionLost(f"{name} is not served here")
            return self._peer
        async with self._dialling.setdefault(address, asyncio.Lock()):
            peer = self._peers.get(address)
            if peer is None or peer.is_lost:
                peer = await Peer.connect(address, self._name, credentials=self._credentials, timeout_seconds=5.0)
                if address not in self._description.places.values():
                    await peer.close()
                    raise ConnectionLost(f"{name} has moved")
                self._peers[address] = peer
            return peer


def remote_directory(peer: Peer) -> Directory:
    """The directory served at the other end of a connection."""
    return proxy(Directory, peer, "directory")
