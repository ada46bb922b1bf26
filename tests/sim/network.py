"""The wire between simulated processes: what `transport.Peer` and `transport.Server` do, over streams that misbehave as streams do.

A connection is two streams; each delivers a prefix of what was sent, in order and late. It breaks at either end at another moment:
a request may still be served whose caller has long asked again over a new connection. A handler dies with its connection, and the
server is told that the client has gone. Seeds that are `loose` deliver requests out of order, and some twice, within a connection
too. Everything crosses as bytes.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from asyncflow.cluster.clock import VirtualLoop, current_process
from asyncflow.transport import codec
from asyncflow.transport.codec import ConnectionLost, client_name

NOT_TWICE = ("follow", "describe")  # parked for ever by one asker at a time: never twice on one connection


class Network:
    """Who listens where, which links are cut, and the running hash of all that is delivered."""

    active: Network | None = None

    def __init__(self, loop: VirtualLoop, rng: random.Random, *, latency: float, loose: bool) -> None:
        self.loop, self.rng, self.latency, self.loose = loop, rng, latency, loose
        self.servers: dict[str, SimServer] = {}
        self.links: list[SimPeer] = []
        self.healed_at: dict[frozenset[str], float] = {}
        self.counts: Counter[str] = Counter()
        self.trace: list[str] | None = None
        self._hash = hashlib.blake2b(digest_size=16)
        self._numbers = itertools.count()

    def note(self, what: str) -> None:
        """One line of the trace."""
        line = f"{self.loop.now:.6f} {what}"
        self._hash.update(line.encode())
        if self.trace is not None:
            self.trace.append(line)

    def digest(self) -> str:
        return self._hash.hexdigest()

    def delay(self) -> float:
        """Mostly short, sometimes ten times as long."""
        delay = self.rng.random() * self.latency
        return delay if self.rng.random() < 0.95 else 10 * delay

    def cut(self, one: str, other: str, seconds: float) -> None:
        self.healed_at[frozenset((one, other))] = self.loop.now + seconds

    def arrival(self, one: str, other: str) -> float:
        """When what is sent now between two processes is there."""
        return max(self.loop.now, self.healed_at.get(frozenset((one, other)), 0.0)) + self.delay()


class SimServer:
    """Stands for `transport.Server`."""

    def __init__(
        self,
        services: Mapping[str, object],
        on_disconnect: Callable[[str], None] | None = None,
        *,
        credentials: Any = None,
        arena: Any = None,
    ) -> None:
        self.services, self.on_disconnect = services, on_disconnect
        self.process = current_process()
        self.network = _network()
        self.address = ""

    async def start(self, address: object) -> str:
        self.address = str(address)
        self.network.servers[self.address] = self
        self.process.on_death.append(self._die)
        return self.address

    async def close(self) -> None:
        self._leave()
        for peer in self.network.links:
            if peer.server is self and peer.is_served:
                peer.hang_up()
                peer.tell_client("the server has closed")

    def _die(self) -> None:
        self._leave()
        for peer in self.network.links:
            if peer.server is self:
                peer.is_served = False
                peer.tell_client("the connection was reset")

    def _leave(self) -> None:
        if self.network.servers.get(self.address) is self:
            del self.network.servers[self.address]


class SimPeer:
    """Stands for `transport.Peer`, with both ends of its connection."""

    def __init__(self, address: str, name: str, server: SimServer) -> None:
        self.address, self.name, self.server = address, name, server
        self.client = current_process()
        self.network = server.network
        self.number = next(self.network._numbers)
        self.loop = self.network.loop
        self.is_served = True
        self._error: ConnectionLost | None = None
        self._welcome = asyncio.Event()
        self._lost: asyncio.Future[None] = self.loop.create_future()
        self._pending: dict[int, asyncio.Future[tuple[Any, Sequence[np.ndarray]]]] = {}
        self._running: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count(1)
        self._up_at = self._down_at = 0.0  # when the last message of each direction arrives
        self._at_server = server.process.run(contextvars.copy_context)
        self._at_server.run(client_name.set, name)
        self._at_client = self.client.run(contextvars.copy_context)
        self.client.on_death.append(self._client_died)

    @classmethod
    async def connect(cls, address: object, name: str, *, credentials: Any = None, timeout_seconds: float = 20.0) -> SimPeer:
        network, here = _network(), current_process()
        server = network.servers.get(str(address))
        wait = network.arrival(here.name, server.process.name if server else "") - network.loop.now
        if server is None or wait > timeout_seconds:
            await asyncio.sleep(min(wait, timeout_seconds))
            raise ConnectionLost(f"nothing answers at {address}")
        peer = cls(str(address), name, server)
        network.links.append(peer)
        network.loop.call_at(network.loop.now + wait, peer._greet, context=peer._at_server)
        try:
            async with asyncio.timeout(timeout_seconds):
                await peer._welcome.wait()
        except TimeoutError:
            peer.end("no welcome in time")
        if peer._error is not None:
            raise ConnectionLost(f"nothing answers at {address}: {peer._error}")
        return peer

    def _greet(self) -> None:
        self.loop.call_at(self._down(), self._welcome.set, context=self._at_client)

    @property
    def is_lost(self) -> bool:
        return self._error is not None

    async def wait_lost(self) -> None:
        await asyncio.shield(self._lost)

    async def close(self) -> None:
        self.end("closed on this side")

    async def call(self, interface: type, service: str, method: str, arguments: tuple[Any, ...]) -> Any:
        result = codec.schema(interface, method).result
        if self._error is not None:
            raise self._error
        number = next(self._ids)
        self._send_up(codec.from_client, codec.Request(number, service, method, arguments))
        future = self._pending[number] = self.loop.create_future()
        try:
            reply, buffers = await future
        except asyncio.CancelledError:
            self._send_up(codec.from_client, codec.Cancel(number))
            raise
        finally:
            del self._pending[number]
        if reply.error:
            raise codec.raised(service, method, reply.error, reply.message)
        return codec.decode(result, reply.result, buffers, is_writeable=True)

    # -- faults -------------------------------------------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """The client's end closes; the server hears of it later."""
        if self._error is not None:
            return
        self._error = ConnectionLost(f"lost {self.address}: {why}")
        self._welcome.set()
        if not self._lost.done():
            self._lost.set_result(None)
        for future in self._pending.values():
            if not future.done():
                future.set_exception(self._error)
        if self.is_served:
            self.loop.call_at(self._up(), self.hang_up, context=self._at_server)

    def tell_client(self, why: str) -> None:
        self.loop.call_at(self._down(), self.end, why, context=self._at_client)

    def break_off(self, client_after: float, server_after: float) -> None:
        """The connection is no more; both ends notice, each in its own time. What is on its way until then may arrive."""
        self.loop.call_later(client_after, self.end, "it broke", context=self._at_client)
        self.loop.call_later(server_after, self.hang_up, context=self._at_server)

    def hang_up(self) -> None:
        """The server's end closes: handlers are cancelled, then it is told who has gone."""
        if not self.is_served:
            return
        self.is_served = False
        self.network.note(f"hang up {self.name} at {self.address}")
        running, self._running = self._running, {}
        for future in running.values():
            if not future.done():
                self.network.counts["handler cancelled"] += 1
            future.cancel()
        if self.server.on_disconnect is not None:
            self.server.on_disconnect(self.name)

    def _client_died(self) -> None:
        if self.is_served:
            self._error = self._error or ConnectionLost("dead")
            self.loop.call_at(self._up(), self.hang_up, context=self._at_server)

    # -- inside -------------------------------------------------------------------------------------------------------------

    def _up(self) -> float:
        self._up_at = max(self._up_at, self.network.arrival(self.client.name, self.server.process.name))
        return self._up_at

    def _down(self) -> float:
        self._down_at = max(self._down_at, self.network.arrival(self.client.name, self.server.process.name))
        return self._down_at

    def _send_up(self, decoder: Any, message: Any) -> None:
        if self._error is not None:
            return
        header, buffers = _encoded(message)
        network = self.network
        if isinstance(message, codec.Request) and network.loose and message.method not in NOT_TWICE:
            at = network.arrival(self.client.name, self.server.process.name)
            if network.rng.random() < 0.5:
                at = self._up_at = max(at, self._up_at)
            if network.rng.random() < 0.05:
                network.counts["duplicate"] += 1
                again = network.arrival(self.client.name, self.server.process.name) + 3 * network.rng.random()
                self.loop.call_at(again, self._receive, header, buffers, True, context=self._at_server)
        else:
            at = self._up()
        if at < self._up_at:
            network.counts["reorder"] += 1
        self.loop.call_at(at, self._receive, header, buffers, False, context=self._at_server)

    def _receive(self, header: bytes, buffers: list[np.ndarray], is_copy: bool) -> None:
        if not self.is_served:
            self.network.counts["request lost"] += 1
            return
        message = codec.decode_message(codec.from_client, header)
        if isinstance(message, codec.Cancel):
            future = self._running.pop(message.id, None)
            if future is not None:
                future.cancel()
            return
        number = message.id
        what = f"{self.name}>{message.service}.{message.method} #{self.number}.{number}{'+' if is_copy else ''}"
        self.network.note(f"{what} {_checksum(message.arguments, buffers)}")
        if self._error is not None and self.client.is_alive:
            self.network.counts["late request served"] += 1
        try:
            service = self.server.services.get(message.service)
            if service is None:
                raise LookupError(f"no service {message.service!r}")
            method = codec.schema(type(service), message.method)
            arguments = codec.decode(method.arguments, message.arguments, buffers, is_writeable=False)
            result = getattr(service, message.method)(*arguments)
            future = result if isinstance(result, asyncio.Future) else self.loop.create_task(result, name=what)
        except Exception as error:  # the answer to the caller, who raises it
            self._reply(what, number, error)
            return
        if is_copy:  # nobody reads its answer; it dies with its connection
            number = -number
        self._running[number] = future
        if future.done():
            self._done(what, number, future)
        else:
            future.add_done_callback(functools.partial(self._done, what, number))

    def _done(self, what: str, number: int, future: asyncio.Future[Any]) -> None:
        if self._running.pop(number, None) is not future:
            if not future.cancelled():
                future.exception()
        elif future.cancelled():
            self._reply(what, number, RuntimeError("it was cancelled by its service"))
        elif (error := future.exception()) is not None:
            self._reply(what, number, error)
        else:
            self._reply(what, number, None, future.result())

    def _reply(self, what: str, number: int, error: BaseException | None, result: Any = None) -> None:
        if number < 0:
            return
        if error is not None:
            name = codec.error_name(error)
            header, buffers = _encoded(codec.Reply(number, None, error=name, message=str(error)))
            self.network.counts[f"raised {name}"] += 1
        else:
            header, buffers = _encoded(codec.Reply(number, result))
        self.network.note(f"<{what} {_checksum(header, buffers)} {error or ''}")
        self.loop.call_at(self._down(), self._answer, header, buffers, context=self._at_client)

    def _answer(self, header: bytes, buffers: list[np.ndarray]) -> None:
        message = codec.decode_message(codec.from_server, header)
        future = self._pending.get(message.id)
        if self._error is not None or future is None or future.done():
            self.network.counts["reply lost"] += 1
            return
        future.set_result((message, buffers))


def _network() -> Network:
    assert Network.active is not None, "no simulation is running"
    return Network.active


def _encoded(message: Any) -> tuple[bytes, list[np.ndarray]]:
    arrays: list[np.ndarray] = []
    header = codec.encode(message, arrays, [])
    return header, [np.frombuffer(bytearray(array.tobytes()), np.uint8) for array in arrays]


def _checksum(header: Any, buffers: list[np.ndarray]) -> str:
    digest = hashlib.blake2b(bytes(header), digest_size=4)
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()
