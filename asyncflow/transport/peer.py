"""The calling side.

    proxy(LedgerService, peer, "ledger").commit(...) --> Peer.call --frame--> Server: services["ledger"].commit(...) --> answer

consumes: calls, and the replies to them
waits for: the reply, and for the server to read while much is unsent
is unblocked by: the reply, or the loss of the connection
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import msgspec
import numpy as np

from asyncflow.transport import codec
from asyncflow.transport.arena import ArenaReader, receive_buffer
from asyncflow.transport.codec import ConnectionLost
from asyncflow.transport.credentials import Credentials
from asyncflow.transport.frames import Frame, FrameParser, encode_frame
from asyncflow.transport.limits import FrameLimits
from asyncflow.transport.stream import Stream, parse_address, socket_path
from asyncflow.types import UserError

T = TypeVar("T")
_RawReply = tuple[codec.Reply[msgspec.Raw], Sequence[np.ndarray]]


class Peer:
    """A client's connection to a server. Requests run side by side; the answers come in any order."""

    def __init__(self, address: str, limits: FrameLimits) -> None:
        """Make an unconnected peer: use `connect`."""
        self.address = address
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self.parser = FrameParser(limits, receive_buffer)
        self._stream: Stream | None = None
        self._pending: dict[int, asyncio.Future[_RawReply]] = {}
        self._next_id = 0
        self._why_lost = ""
        self._arena: Callable[[], ArenaReader] | None = None  # opened when the first array that lies in it arrives
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._welcome: asyncio.Future[codec.Welcome] = self._loop.create_future()
        self._drained: asyncio.Future[None] | None = None

    @classmethod
    async def connect(
        cls,
        address: str | Path,
        name: str,
        *,
        credentials: Credentials | None = None,
        timeout_seconds: float = 20.0,
        limits: FrameLimits | None = None,
    ) -> Peer:
        """Connect to `unix:/path/to.sock` (or a `Path`) or `tls:host:port` as `name`, and wait for the server's welcome.

        Raises:
            UserError: it is no address, or one that needs credentials, and there are none.
            ConnectionLost: nothing answers there in time, or does not let this client in. Names the address.
        """
        place = parse_address(address)
        peer = cls(str(address), limits or FrameLimits())
        try:
            async with asyncio.timeout(timeout_seconds):
                await peer._open(place, credentials)
                peer._send(codec.Hello(name))
                welcome = await peer._welcome
        except (OSError, TimeoutError, ConnectionLost) as error:  # ssl.SSLError is an OSError
            await peer.close()
            why = "no welcome in time" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or error
            raise ConnectionLost(f"nothing answers at {address}: {why}") from error
        except BaseException:
            await peer.close()
            raise
        peer._arena = functools.cache(lambda: ArenaReader(Path(welcome.arena))) if welcome.arena else None
        return peer

    @property
    def is_lost(self) -> bool:
        """Whether every call raises `ConnectionLost` from now on."""
        return bool(self._why_lost)

    async def wait_lost(self) -> None:
        """Return when the connection is lost or closed."""
        await asyncio.shield(self._lost)

    async def call(self, interface: type, service: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """Send a request and wait for its answer. The exceptions of `CROSSING` arrive as themselves.

        Arrays in `arguments` must not change until the answer is there. Those in the answer are writeable.

        Raises:
            ConnectionLost: before the answer was there; the request may have been served.
            RemoteError: the handler raised something else; names the service, the method and the exception.
            LookupError: there is no such service or method.
            ValueError: above the limits, or arguments or an answer that are not of the method's types.
        """
        result = codec.schema(interface, method).result
        while self._stream is not None and self._stream.is_full and not self._why_lost:
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)
        if self._why_lost:
            raise ConnectionLost(self._why_lost)
        self._next_id += 1
        number = self._next_id
        self._send(codec.Request(number, service, method, arguments))
        future: asyncio.Future[_RawReply] = self._loop.create_future()
        self._pending[number] = future
        try:
            reply, buffers = await future
        except asyncio.CancelledError:
            self._send(codec.Cancel(number))
            raise
        finally:
            del self._pending[number]
        if reply.error:
            raise codec.raised(service, method, reply.error, reply.message)
        if (arena := self._arena) is None:
            return codec.decode(result, reply.result, buffers, is_writeable=True)
        has_copied = False

        def shared() -> ArenaReader:
            nonlocal has_copied
            has_copied = True
            return arena()

        try:
            return codec.decode(result, reply.result, buffers, is_writeable=True, arena=shared)
        finally:
            if has_copied:
                self._send(codec.Taken(number))

    async def close(self) -> None:
        """Hang up. Requests under way, and later ones, raise `ConnectionLost`."""
        self._end(f"{self.address} was closed on this side")

    def _send(self, message: msgspec.Struct) -> None:
        arrays: list[np.ndarray] = []
        header = codec.encode(message, arrays, [])
        pieces = encode_frame(header, arrays, self._limits)
        if self._stream is not None and not self._why_lost:
            self._stream.write(pieces)

    async def _open(self, place: Path | tuple[str, int], credentials: Credentials | None) -> None:
        stream = self._stream = Stream(self, self._limits.unsent_bytes)
        if isinstance(place, Path):
            await self._loop.create_unix_connection(lambda: stream, sock=await _connect_unix(place))
        elif credentials is None:
            raise UserError(f"the address {self.address} can be reached from other machines, so it needs credentials.")
        else:
            await self._loop.create_connection(
                lambda: stream,
                *place,
                ssl=credentials.client_context,
                server_hostname="asyncflow",  # not checked, see credentials.py
                ssl_shutdown_timeout=1.0,
            )

    # What the stream calls

    def received(self, frames: list[Frame]) -> None:
        """See `Owner.received`."""
        try:
            for frame in frames:
                self._receive(frame)
        except ValueError as error:
            self._end(f"lost {self.address}: it sent no message: {error}")
            return
        if self.parser.failure:
            self._end(f"lost {self.address}: {self.parser.failure}")

    def drained(self) -> None:
        """See `Owner.drained`."""
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None

    def lost(self, why: str) -> None:
        """See `Owner.lost`."""
        self._end(f"lost {self.address}: {why}")

    def _receive(self, frame: Frame) -> None:
        header, buffers = frame
        message = codec.decode_message(codec.from_server, header)
        if isinstance(message, codec.Reply):
            future = self._pending.get(message.id)
            if future is not None and not future.done():
                future.set_result((message, buffers))
        elif not self._welcome.done():
            self._welcome.set_result(message)

    def _end(self, why: str) -> None:
        if self._why_lost:
            return
        self._why_lost = why
        if self._stream is not None:
            self._stream.close()
        self.parser.close()
        self._lost.set_result(None)
        for future in self._pending.values():
            if not future.done():
                future.set_exception(ConnectionLost(why))
        if not self._welcome.done():
            self._welcome.set_exception(ConnectionLost(why))
            self._welcome.exception()  # `connect` may have ended already
        self.drained()


async def _connect_unix(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        while True:
            with contextlib.suppress(BlockingIOError):  # its queue of clients is full
                with socket_path(path) as address:
                    sock.connect(address)
                return sock
            await asyncio.sleep(0.01)
    except BaseException:
        sock.close()
        raise


class Caller(Protocol):
    """Sends requests to services, as `Peer.call` does."""

    def call(self, interface: type, service: str, method: str, arguments: tuple[Any, ...]) -> Awaitable[Any]:
        """Answer of a service's method, whose types are in `interface`."""
        ...


def proxy(interface: type[T], caller: Caller, service: str) -> T:
    """An object of `interface`'s remote methods whose calls are answered by the `service` that `caller` asks."""

    class Proxy:
        pass

    for method, function in inspect.getmembers(interface, inspect.isfunction):
        if getattr(function, "__remote__", False):

            def call(self: Any, *arguments: Any, _method: str = method) -> Awaitable[Any]:
                return caller.call(interface, service, _method, arguments)

            setattr(Proxy, method, call)
    return cast(T, Proxy())
