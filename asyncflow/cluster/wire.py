"""The wire of a simulated cluster: what `transport.Peer` and `transport.Server` do, late, in order, and gone with its worker.

The server hears of a client's death as a server does: the requests under way are cancelled, and `on_disconnect` is told which
client has gone. Left out: messages that are lost (the transport's to survive).
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from asyncflow.cluster.clock import VirtualLoop, current_process
from asyncflow.transport import ConnectionLost, RemoteError, client_key, client_name
from asyncflow.transport.codec import error_name, raised

LATENCY_SECONDS: Final = 1e-4
OnReply = Callable[[str, str, str, tuple[Any, ...], Any], None]


class Wire:
    """Stands for `transport.Server`. A message takes up to twice `LATENCY_SECONDS`; those of one client keep their order."""

    def __init__(
        self,
        loop: VirtualLoop,
        services: Mapping[str, object],
        on_disconnect: Callable[[str], None],
        *,
        rng: random.Random,
        on_reply: OnReply = lambda worker, service, method, arguments, result: None,
    ) -> None:
        """`on_reply(worker, service, method, arguments, result)` is told of every request that was served."""
        self.loop, self.services, self.on_disconnect, self.on_reply = loop, services, on_disconnect, on_reply
        self.peers: list[SimulatedPeer] = []
        self.numbers = itertools.count(1)
        self.context = contextvars.copy_context()
        self._rng = rng

    async def start(self, address: object) -> str:
        """Do nothing: there is no door, every client that has the wire may connect."""
        return str(address)

    async def close(self) -> None:
        """Hang up on everybody: handlers under way are cancelled."""
        for peer in list(self.peers):
            peer.hang_up()

    def delay(self) -> float:
        """Seconds that the next message takes, at random."""
        return 2 * LATENCY_SECONDS * self._rng.random()


class SimulatedPeer:
    """Stands for `transport.Peer`, with both ends of its connection. Made by the worker's process. Arguments are not copied."""

    def __init__(self, wire: Wire, name: str) -> None:
        self._wire, self.name = wire, name
        self._key = f"{name}@{next(wire.numbers)}"
        self._why_lost = ""
        self._is_served = True
        self._here, self._there = contextvars.copy_context(), wire.context.copy()
        self._there.run(client_key.set, self._key)
        self._there.run(client_name.set, name)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._running: dict[int, asyncio.Future[Any]] = {}
        self._up_at = self._down_at = 0.0  # when the last message of each direction arrives
        wire.peers.append(self)
        current_process().on_death.append(partial(self._up, self.hang_up))

    @property
    def is_lost(self) -> bool:
        """See `Peer`."""
        return bool(self._why_lost)

    async def call(self, interface: type, service: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """See `Peer`: one request and its answer, or what it raised."""
        if self._why_lost:
            raise ConnectionLost(self._why_lost)
        number = next(self._wire.numbers)
        answer = self._pending[number] = self._wire.loop.create_future()
        self._up(self._serve, number, service, method, arguments)
        try:
            return await answer
        except asyncio.CancelledError:
            self._up(self._cancel, number)
            raise
        finally:
            del self._pending[number]

    async def close(self) -> None:
        """See `Peer`."""
        self._lose("closed on this side")
        self._up(self.hang_up)

    # -- the server's end ---------------------------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """End the connection of a client that has gone, or is to go."""
        if not self._is_served:
            return
        self._is_served = False
        self._wire.peers.remove(self)
        running, self._running = self._running, {}
        for future in running.values():
            future.cancel()
        self._wire.on_disconnect(self._key)
        self._down(self._lose, "the server has closed")

    def _serve(self, number: int, service: str, method: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_served:
            return
        try:
            if service not in self._wire.services:
                raise LookupError(f"no service {service!r}")
            result = getattr(self._wire.services[service], method)(*arguments)
        except Exception as error:  # the answer to the caller, which raises it
            self._down(self._answer, number, raised(service, method, error_name(error), str(error)), None)
            return
        if not isinstance(result, asyncio.Future):
            result = self._wire.loop.create_task(result, name=f"{self._key}>{service}.{method}")
        self._running[number] = result
        result.add_done_callback(partial(self._done, number, service, method, arguments))

    def _done(self, number: int, service: str, method: str, arguments: tuple[Any, ...], future: asyncio.Future[Any]) -> None:
        if self._running.pop(number, None) is not future:  # nobody asks any more
            if not future.cancelled():
                future.exception()
        elif future.cancelled():
            self._down(self._answer, number, RemoteError(f"{service}.{method} was cancelled by its service"), None)
        elif (error := future.exception()) is not None:
            self._down(self._answer, number, raised(service, method, error_name(error), str(error)), None)
        else:
            self._wire.on_reply(self.name, service, method, arguments, future.result())
            self._down(self._answer, number, None, future.result())

    def _cancel(self, number: int) -> None:
        if (future := self._running.pop(number, None)) is not None:
            future.cancel()

    # -- the client's end ---------------------------------------------------------------------------------------------------

    def _answer(self, number: int, error: Exception | None, result: Any) -> None:
        answer = self._pending.get(number)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    def _lose(self, why: str) -> None:
        if self._why_lost:
            return
        self._why_lost = f"lost the driver: {why}"
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(ConnectionLost(self._why_lost))

    def _up(self, deliver: Callable[..., None], *arguments: Any) -> None:
        self._up_at = max(self._up_at + 1e-9, self._wire.loop.now + self._wire.delay())  # a heap does not keep the order of equals
        self._wire.loop.call_at(self._up_at, deliver, *arguments, context=self._there)

    def _down(self, deliver: Callable[..., None], *arguments: Any) -> None:
        self._down_at = max(self._down_at + 1e-9, self._wire.loop.now + self._wire.delay())
        self._wire.loop.call_at(self._down_at, deliver, *arguments, context=self._here)
