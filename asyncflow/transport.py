"""Requests and frames between processes.

    proxy(Board, peer, "board").publish(...)  --frame-->  Server: services["board"].publish(...)  --frame-->  the answer

A service is a plain object whose remote methods are marked `@remote`; a proxy has the same type, so a loop cannot tell whether its
queue, ledger or board is in this process or in another one. A request may be parked: its handler simply awaits.

One frame is

    prefix    magic (4 bytes), header length, number of buffers (uint32 each), sum of the buffers' lengths (uint64), little endian
    lengths   of the buffers, uint64 each
    header    msgpack: the request or the reply, decoded against the types of the method called and nothing else
    buffers   the raw bytes of the numpy arrays in the message

and its sizes are checked against the limits before anything is allocated. Private unix sockets only: a routable address would
need credentials, and there are none here yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

import msgspec
import numpy as np

from asyncflow.types import CROSSING, RunError

MAGIC = b"AFT1"
PREFIX = struct.Struct("<4sIIQ")
MAX_HEADER_BYTES = 64 << 20
MAX_BUFFERS = 4096
MAX_BODY_BYTES = 4 << 30
CONNECT_SECONDS = 20.0
ARRAY_DTYPES = frozenset({"int64", "int32", "uint8", "float32", "float64", "bool"})

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Awaitable[Any]])

client_name: contextvars.ContextVar[str] = contextvars.ContextVar("client_name", default="driver")
"""Inside a handler: the name that the calling process gave in its hello."""


class ConnectionLost(RunError):
    """The other side of a connection has gone, or sent what is no frame."""


class RemoteError(RunError):
    """A handler raised something that is not part of its contract."""


def remote(method: F) -> F:
    """Mark a service's method as callable through a proxy. Its annotations are its message schema."""
    method.__remote__ = True  # type: ignore[attr-defined]
    return method


class _Hello(msgspec.Struct, tag="hello"):
    name: str


class _Request(msgspec.Struct, tag="request"):
    id: int
    service: str
    method: str
    arguments: msgspec.Raw


class _Cancel(msgspec.Struct, tag="cancel"):
    """The caller of request `id` has gone: nobody is to answer it any more."""

    id: int


class _Reply(msgspec.Struct, tag="reply"):
    id: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str = ""
    message: str = ""


_Message = _Hello | _Request | _Cancel | _Reply
_message_decoder = msgspec.msgpack.Decoder(_Message)


class _ArrayRef(msgspec.Struct, array_like=True):
    """Stands for a numpy array in a header: its dtype and which of the frame's buffers holds its bytes."""

    dtype: str
    buffer: int


def _encode(value: Any, buffers: list[np.ndarray]) -> bytes:
    def hook(item: Any) -> Any:
        if isinstance(item, np.ndarray):
            if item.ndim != 1 or item.dtype.name not in ARRAY_DTYPES or not item.dtype.isnative:
                raise TypeError(f"an array of {item.ndim} dimensions and dtype {item.dtype.str} cannot be sent")
            buffers.append(np.ascontiguousarray(item))
            return _ArrayRef(item.dtype.name, len(buffers) - 1)
        if isinstance(item, np.generic):
            return item.item()
        raise TypeError(f"{type(item).__name__} cannot be sent")

    return msgspec.msgpack.encode(value, enc_hook=hook)


def _decode(raw: bytes | msgspec.Raw, kind: Any, buffers: list[bytes]) -> Any:
    def hook(wanted: type, item: Any) -> Any:
        if wanted is np.ndarray:
            ref = msgspec.convert(item, _ArrayRef)
            if ref.dtype not in ARRAY_DTYPES or not 0 <= ref.buffer < len(buffers):
                raise ValueError(f"no such array in the frame: {ref}")
            return np.frombuffer(buffers[ref.buffer], ref.dtype)
        raise TypeError(f"{wanted} cannot be received")

    return msgspec.msgpack.decode(raw, type=kind, dec_hook=hook)


@functools.cache
def _schema(interface: type, method: str) -> tuple[Any, Any]:
    """(tuple type of the arguments, type of the result) of a remote method."""
    function = getattr(interface, method, None)
    if not getattr(function, "__remote__", False):
        raise LookupError(f"{interface.__name__} has no remote method {method!r}")
    hints = get_type_hints(function)
    names = list(inspect.signature(cast(Callable[..., Any], function)).parameters)[1:]
    return tuple[tuple(hints[n] for n in names)] if names else tuple[()], hints.get("return", type(None))  # type: ignore[misc]


def _frame(message: _Message, buffers: list[np.ndarray]) -> list[bytes | memoryview]:
    """Raises `ValueError` when it is above the limits: the other side would hang up."""
    header = msgspec.msgpack.encode(message)
    views = [b.data.cast("B") if b.nbytes else memoryview(b"") for b in buffers]
    total = sum(v.nbytes for v in views)
    if not _is_within_limits(len(header), len(views), total):
        raise ValueError(f"a message of {len(header)} header bytes and {len(views)} arrays of {total} bytes is above the limits")
    lengths = struct.pack(f"<{len(views)}Q", *(v.nbytes for v in views))
    return [PREFIX.pack(MAGIC, len(header), len(views), total) + lengths + header, *views]


def _is_within_limits(header_bytes: int, num_buffers: int, body_bytes: int) -> bool:
    return header_bytes <= MAX_HEADER_BYTES and num_buffers <= MAX_BUFFERS and body_bytes <= MAX_BODY_BYTES


async def _read_frame(reader: asyncio.StreamReader) -> tuple[_Message, list[bytes]]:
    try:
        magic, header_bytes, num_buffers, body_bytes = PREFIX.unpack(await reader.readexactly(PREFIX.size))
        if magic != MAGIC or not _is_within_limits(header_bytes, num_buffers, body_bytes):
            raise ConnectionLost("a frame with a wrong prefix or above the size limits")
        lengths = struct.unpack(f"<{num_buffers}Q", await reader.readexactly(8 * num_buffers))
        if sum(lengths) != body_bytes:
            raise ConnectionLost("a frame whose buffer lengths do not add up")
        message = _message_decoder.decode(await reader.readexactly(header_bytes))
        return message, [await reader.readexactly(n) for n in lengths]
    except (asyncio.IncompleteReadError, ConnectionError, ValueError, RecursionError) as error:  # the last two: no such message
        raise ConnectionLost(f"the connection ended: {error}") from error


def socket_path(path: Path) -> str:
    """An address for `path` within the 108 bytes that a unix socket's address may have, however long the path is."""
    if len(os.fsencode(path)) < 100:
        return str(path)
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)  # stays open: the address refers to it
    return f"/proc/self/fd/{directory}/{path.name}"


class Server:
    """Serves objects by name on a private unix socket (mode 0600)."""

    def __init__(self, services: Mapping[str, object], on_disconnect: Callable[[str], None] | None = None) -> None:
        """`on_disconnect` is told the name of every client that goes."""
        self.services = dict(services)
        self._on_disconnect = on_disconnect
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        previous = os.umask(0o177)  # of the whole process, so nothing may be awaited until it is restored
        try:
            listener.bind(socket_path(path))
        finally:
            os.umask(previous)
        self._server = await asyncio.start_unix_server(self._accept, sock=listener, limit=1 << 20)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._connections.add(task)
        handlers: dict[int, asyncio.Task[None]] = {}
        name = ""
        try:
            hello, _ = await asyncio.wait_for(_read_frame(reader), CONNECT_SECONDS)
            if not isinstance(hello, _Hello):
                return
            name = hello.name
            client_name.set(name)
            while True:
                message, buffers = await _read_frame(reader)
                if isinstance(message, _Cancel):
                    if (parked := handlers.get(message.id)) is not None:
                        parked.cancel()
                elif isinstance(message, _Request) and message.id not in handlers:
                    handler = asyncio.create_task(self._handle(message, buffers, writer))
                    handlers[message.id] = handler
                    handler.add_done_callback(functools.partial(lambda number, _: handlers.pop(number), message.id))
                else:
                    return
        except (ConnectionLost, TimeoutError, asyncio.CancelledError):
            pass  # its sender has lost the connection and nobody else anything
        finally:
            self._connections.discard(task)
            for handler in handlers.values():  # a parked request dies with its connection
                handler.cancel()
            writer.close()
            if name and self._on_disconnect is not None:
                self._on_disconnect(name)

    async def _handle(self, request: _Request, buffers: list[bytes], writer: asyncio.StreamWriter) -> None:
        out: list[np.ndarray] = []
        try:
            service = self.services.get(request.service)
            if service is None:
                raise LookupError(f"no service {request.service!r}")
            arguments, _ = _schema(cast(Any, type(service)), request.method)
            result = await getattr(service, request.method)(*_decode(request.arguments, arguments, buffers))
            frame = _frame(_Reply(request.id, msgspec.Raw(_encode(result, out))), out)
        except Exception as error:  # the answer to the caller, who raises it
            name = next((base.__name__ for base in type(error).__mro__ if base.__name__ in CROSSING), type(error).__name__)
            frame = _frame(_Reply(request.id, error=name, message=f"{error}"), [])
        if not writer.is_closing():
            writer.writelines(frame)
            with contextlib.suppress(ConnectionError):  # the caller has gone
                await writer.drain()


class Peer:
    """A client's connection to a server. Requests run side by side; the answers come in any order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        self._reader, self._writer, self._address = reader, writer, address
        self._pending: dict[int, asyncio.Future[tuple[_Reply, list[bytes]]]] = {}
        self._next_id = 0
        self._lost: ConnectionLost | None = None
        self._receiving = asyncio.create_task(self._receive())

    @classmethod
    async def connect(cls, path: Path, name: str, timeout_seconds: float = CONNECT_SECONDS) -> Peer:
        """Connect as `name`. Raises `ConnectionLost` naming the address when nobody answers in time."""
        try:
            opening = asyncio.open_unix_connection(socket_path(path), limit=1 << 20)
            reader, writer = await asyncio.wait_for(opening, timeout_seconds)
        except (OSError, TimeoutError) as error:
            raise ConnectionLost(f"nobody answers at {path}: {error}") from error
        writer.writelines(_frame(_Hello(name), []))
        return cls(reader, writer, str(path))

    async def call(self, interface: type, service: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """One request and its answer. The exceptions of `CROSSING` arrive as themselves."""
        if self._lost is not None:
            raise self._lost
        _, result_type = _schema(interface, method)
        buffers: list[np.ndarray] = []
        self._next_id += 1
        request = _Request(self._next_id, service, method, msgspec.Raw(_encode(arguments, buffers)))
        frame = _frame(request, buffers)
        future: asyncio.Future[tuple[_Reply, list[bytes]]] = asyncio.get_running_loop().create_future()
        self._pending[request.id] = future
        try:
            self._writer.writelines(frame)
            await self._writer.drain()
            reply, received = await future
        except ConnectionError as error:
            raise ConnectionLost(f"lost {self._address}: {error}") from error
        except asyncio.CancelledError:
            if not self._writer.is_closing():
                self._writer.writelines(_frame(_Cancel(request.id), []))
            raise
        finally:
            self._pending.pop(request.id, None)
        if reply.error in CROSSING:
            raise CROSSING[reply.error](reply.message)
        if reply.error:
            raise RemoteError(f"{service}.{method} failed: {reply.error}: {reply.message}")
        return _decode(reply.result, result_type, received)

    async def close(self) -> None:
        """Hang up. Requests under way, and later ones, raise `ConnectionLost`."""
        self._receiving.cancel()
        self._writer.close()
        self._lose(f"{self._address} was closed on this side")

    async def _receive(self) -> None:
        try:
            while True:
                message, buffers = await _read_frame(self._reader)
                future = self._pending.get(message.id) if isinstance(message, _Reply) else None
                if future is not None and not future.done():
                    future.set_result((cast(_Reply, message), buffers))
        except ConnectionLost as error:
            self._lose(f"lost {self._address}: {error}")

    def _lose(self, why: str) -> None:
        self._lost = ConnectionLost(why)
        for future in self._pending.values():
            if not future.done():
                future.set_exception(self._lost)


def proxy(interface: type[T], peer: Peer, service: str) -> T:
    """An object of `interface`'s remote methods whose calls are answered by the `service` behind `peer`."""

    class Proxy:
        pass

    for method, function in inspect.getmembers(interface, inspect.isfunction):
        if getattr(function, "__remote__", False):

            async def call(self: Any, *arguments: Any, _method: str = method) -> Any:
                return await peer.call(interface, service, _method, arguments)

            setattr(Proxy, method, call)
    return cast(T, Proxy())
