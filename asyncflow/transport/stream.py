"""Byte streams: what a connection reads and writes, over a private unix socket or over TLS.

consumes: pieces to send, and whatever arrives
waits for: the other side to send, and to take what it is sent
is unblocked by: the event loop, which says that the socket is ready

A stream receives into the buffer that its owner offers, and keeps what cannot be sent yet as views of what it was given. asyncio's
transport copies what the socket does not take at once, so it is handed a chunk at a time, and none while it has some left.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, cast

from asyncflow.transport.frames import Buffer, Frame, FrameParser
from asyncflow.types import UserError

_JOIN_BYTES = 64 << 10  # below, one copy costs less than a call for each piece
_MANY_BYTES = 256 << 10  # that much is not left to the end of the loop's turn
_CHUNK_BYTES = 1 << 20  # handed over at once
BACKLOG = 1024  # clients that may wait to be accepted at a unix socket
_ALIVE_SECONDS, _PROBE_SECONDS, _PROBES = 60, 15, 4  # of silence, between questions, and how many without an answer end it
_SOCKET_BYTES = 2 << 20  # asked for as the kernel's buffer of a unix socket; it grants what it allows


class Owner(Protocol):
    """Owner of a stream: hears of what arrives. `parser`: where the bytes go."""

    parser: FrameParser

    def received(self, frames: list[Frame]) -> None:
        """Event: bytes have been received; these frames are complete by them."""

    def drained(self) -> None:
        """Event: the stream was full, and is not any more."""

    def lost(self, why: str) -> None:
        """Event: the other side has gone. Not called after `close`."""


class Stream(asyncio.BufferedProtocol):
    """Stream of bytes in both directions. `is_full`: more than the limit is unsent, or has been and half of it still is."""

    def __init__(self, owner: Owner, limit_bytes: int, opened: Callable[[Stream], None] = lambda stream: None) -> None:
        """`opened` is told when bytes may travel; by TLS, when the other side has shown its certificate."""
        self.is_full = False
        self.num_unsent_bytes = 0
        self._owner, self._limit_bytes, self._opened = owner, limit_bytes, opened
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unsent: deque[Buffer] = deque()
        self._is_paused = self._is_closed = False
        self._is_corked = False  # something was sent in this turn of the loop: the rest goes at once at its end

    def write(self, pieces: Sequence[Buffer]) -> None:
        """Send, now or later. Ignored once the stream has ended."""
        if self._transport is None:
            return
        self._unsent.extend(pieces)
        for piece in pieces:
            self.num_unsent_bytes += len(piece)
        self.is_full = self.is_full or self.num_unsent_bytes > self._limit_bytes
        if self._is_corked and self.num_unsent_bytes < _MANY_BYTES:
            return
        if not self._is_corked:
            self._is_corked = True
            self._loop.call_soon(self._uncork)
        self._send()

    def set_reading(self, is_reading: bool) -> None:
        """Stop or go on receiving."""
        if self._transport is None or self._transport.is_closing() or is_reading == self._transport.is_reading():
            return
        if is_reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def close(self) -> None:
        """Hang up, after a last attempt to send what is unsent."""
        self._send()
        self._is_closed = True
        transport, self._transport = self._transport, None
        self._unsent.clear()
        if transport is None:
            return
        if transport.get_extra_info("sslcontext") is None:
            transport.abort()  # the socket has taken what it takes
        else:
            transport.close()

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio's `BufferedProtocol.connection_made`."""
        if self._is_closed:
            transport.close()
            return
        self._transport = cast(asyncio.Transport, transport)
        if transport.get_extra_info("sslcontext") is None:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            self._transport.set_write_buffer_limits(high=0)
        else:
            _keep_alive(transport.get_extra_info("socket"))
            self._transport.set_write_buffer_limits(high=_CHUNK_BYTES)
        self._opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio's `BufferedProtocol.connection_lost`."""
        self._transport = None
        if not self._is_closed:
            self._is_closed = True
            self._owner.lost(getattr(exc, "strerror", None) or str(exc) if exc else "it hung up")

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio's `BufferedProtocol.get_buffer`."""
        return self._owner.parser.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio's `BufferedProtocol.buffer_updated`."""
        if not self._is_closed:
            self._owner.received(self._owner.parser.advance(nbytes))

    def eof_received(self) -> bool:
        """See asyncio's `BufferedProtocol.eof_received`."""
        return False

    def pause_writing(self) -> None:
        """See asyncio's `BufferedProtocol.pause_writing`."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """See asyncio's `BufferedProtocol.resume_writing`."""
        self._is_paused = False
        self._send()

    def _uncork(self) -> None:
        self._is_corked = False
        self._send()

    def _send(self) -> None:
        was_full = self.is_full
        while self._unsent and not self._is_paused and self._transport is not None:
            self._transport.write(self._next_chunk())
        self.is_full = self.is_full and self.num_unsent_bytes > self._limit_bytes // 2
        if was_full and not self.is_full:
            self._loop.call_soon(self._owner.drained)

    def _next_chunk(self) -> Buffer:
        """Bytes to hand over next: a part of a large piece, or small ones as one."""
        first = self._unsent.popleft()
        if len(first) > _CHUNK_BYTES:
            rest = memoryview(first)
            self._unsent.appendleft(rest[_CHUNK_BYTES:])
            first = rest[:_CHUNK_BYTES]
        elif len(first) < _JOIN_BYTES and self._unsent:
            small, size = [first], len(first)
            while self._unsent and size + len(self._unsent[0]) <= _JOIN_BYTES:
                small.append(self._unsent.popleft())
                size += len(small[-1])
            first = b"".join(small)
        self.num_unsent_bytes -= len(first)
        return first


def _keep_alive(sock: socket.socket) -> None:
    """Have the kernel end a connection whose other machine is gone without a word: nothing that is sent there comes back."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ALIVE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    # And where something has been sent, which the other machine does not acknowledge: then it is not asked.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (_ALIVE_SECONDS + _PROBES * _PROBE_SECONDS))


@contextlib.contextmanager
def socket_path(path: Path) -> Iterator[str]:
    """An address for `path` within the 108 bytes that a unix socket's address may have, however long the path is. Good as long as
    the block runs."""
    if len(os.fsencode(path)) < 100:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)  # open in the block: the address refers to it
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def parse_address(address: str | Path) -> Path | tuple[str, int]:
    """The path of `unix:/path/to.sock` (or of a bare `Path`), or the host and port of `tls:host:port`.

    Raises:
        UserError: it is neither.
    """
    if isinstance(address, Path):
        return address
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest:
        return Path(rest)
    host, _, port = rest.rpartition(":")
    if scheme == "tls" and host and port.isascii() and port.isdecimal() and int(port) < 1 << 16:
        return host.removeprefix("[").removesuffix("]"), int(port)
    raise UserError(f"the address {address!r} is neither unix:/path/to.sock nor tls:host:port.")


def is_served(path: Path) -> bool:
    """Whether a process serves at this unix socket."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)) as probe:
        # EAGAIN: too many wait there.
        if not path.exists():
            return False
        with socket_path(path) as address:
            return probe.connect_ex(address) in (0, errno.EAGAIN)


def listen(path: Path) -> socket.socket:
    """A private (mode 0600) unix socket at `path`, in place of one that nobody serves any more.

    Raises `UserError` when somebody does.
    """
    if is_served(path):
        raise UserError(f"a process serves at {path} already: end it, or choose another path")
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    previous = os.umask(0o177)  # of the whole process, so nothing may be awaited until it is restored
    try:
        with socket_path(path) as address:
            listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(previous)
    return listener
