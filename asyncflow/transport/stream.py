"""Byte streams: what a connection reads and writes, over a private unix socket or over TLS.

consumes: pieces to send, and whatever arrives
waits for: the other side to send, and to take what it is sent
is unblocked by: the event loop, which says that the socket is ready

Both kinds receive into the buffer that their owner offers, and keep what cannot be sent yet as views of what they were given: it is
not copied, and counted. For unix sockets the non-blocking calls are made here, since the transports of asyncio copy it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, cast

from asyncflow.transport.frames import Buffer
from asyncflow.types import UserError

_TURN_BYTES = 8 << 20  # one connection moves at a time, before the others have their turn
_JOIN_BYTES = 64 << 10  # below, one copy costs less than handing the kernel a list
_MANY_BYTES = 256 << 10  # that much is not left to the end of the loop's turn
_PIECES = 256  # handed to the kernel at once; it takes 1024
_TLS_BYTES = 256 << 10  # encrypted at once: the whole of it is copied
_SOCKET_BYTES = 1 << 20  # asked for as the kernel's buffer; it grants what it allows


class Owner(Protocol):
    """Owner of a stream: gives memory for bytes, and hears of what arrives."""

    def get_buffer(self) -> memoryview:
        """Memory for received bytes."""

    def advance(self, num_bytes: int) -> None:
        """Take note that so many bytes have been received."""

    def drained(self) -> None:
        """The stream was full, and is not any more."""

    def lost(self, why: str) -> None:
        """The other side has gone. Not called after `close`."""


class Stream(Protocol):
    """Stream of bytes in both directions."""

    @property
    def is_full(self) -> bool:
        """More than the limit is unsent, or has been and half of it still is."""

    def write(self, pieces: Sequence[Buffer]) -> None:
        """Send, now or later. Ignored once the stream has ended."""

    def set_reading(self, is_reading: bool) -> None:
        """Stop or go on receiving."""

    def close(self) -> None:
        """Hang up, after a last attempt to send what is unsent."""


class _Unsent:
    """Pieces in the order in which they are sent."""

    def __init__(self, limit_bytes: int) -> None:
        self.pieces: deque[Buffer] = deque()
        self.num_bytes = 0
        self.is_full = False
        self._limit_bytes = limit_bytes

    def add(self, pieces: Sequence[Buffer]) -> None:
        self.pieces.extend(pieces)
        for piece in pieces:
            self.num_bytes += len(piece)
        self.is_full = self.is_full or self.num_bytes > self._limit_bytes

    def remove(self, num_bytes: int) -> bool:
        """Take note that so many bytes have been sent. True: it was full until now."""
        self.num_bytes -= num_bytes
        pieces = self.pieces
        if not self.num_bytes:
            pieces.clear()
        else:
            while num_bytes >= len(pieces[0]):
                num_bytes -= len(pieces.popleft())
            if num_bytes:
                pieces[0] = memoryview(pieces[0])[num_bytes:]
        was_full, self.is_full = self.is_full, self.is_full and self.num_bytes > self._limit_bytes // 2
        return was_full and not self.is_full


class UnixStream:
    """A connected unix socket."""

    def __init__(self, sock: socket.socket, owner: Owner, limit_bytes: int) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self._socket, self._fd, self._owner = sock, sock.fileno(), owner
        self._loop = asyncio.get_running_loop()
        self._unsent = _Unsent(limit_bytes)
        self._is_open, self._is_reading = True, False
        self._is_waiting = False  # for the socket to take more
        self._is_corked = False  # something was sent in this turn of the loop: the rest goes at once at its end
        self.set_reading(True)

    @property
    def is_full(self) -> bool:
        return self._unsent.is_full

    def write(self, pieces: Sequence[Buffer]) -> None:
        if not self._is_open:
            return
        self._unsent.add(pieces)
        if self._is_waiting or (self._is_corked and self._unsent.num_bytes < _MANY_BYTES):
            return
        if not self._is_corked:
            self._is_corked = True
            self._loop.call_soon(self._uncork)
        self._send()

    def set_reading(self, is_reading: bool) -> None:
        if is_reading == self._is_reading or not self._is_open:
            return
        self._is_reading = is_reading
        if is_reading:
            self._loop.add_reader(self._fd, self._receive)
        else:
            self._loop.remove_reader(self._fd)

    def close(self) -> None:
        if not self._is_open:
            return
        with contextlib.suppress(OSError):
            self._send_some()
        self._end()

    def _end(self) -> None:
        self.set_reading(False)
        self._wait(False)
        self._is_open = False
        self._unsent.pieces.clear()
        self._socket.close()

    def _lose(self, why: str) -> None:
        if self._is_open:
            self._end()
            self._owner.lost(why)

    def _uncork(self) -> None:
        self._is_corked = False
        if self._unsent.pieces and not self._is_waiting and self._is_open:
            self._send()

    def _send(self) -> None:
        try:
            was_full = self._send_some()
        except OSError as error:
            # Not from within `write`: its caller does not expect to be told here.
            self._wait(False)
            self._loop.call_soon(self._lose, error.strerror or str(error))
            return
        self._wait(bool(self._unsent.pieces))
        if was_full:
            self._loop.call_soon(self._owner.drained)

    def _send_some(self) -> bool:
        unsent, turn, was_full = self._unsent, _TURN_BYTES, False
        try:
            while unsent.pieces and turn > 0:
                if len(unsent.pieces) == 1:
                    sent = self._socket.send(unsent.pieces[0])
                elif unsent.num_bytes <= _JOIN_BYTES:
                    sent = self._socket.send(b"".join(unsent.pieces))
                else:
                    sent = self._socket.sendmsg(itertools.islice(unsent.pieces, _PIECES))
                turn -= sent
                was_full = unsent.remove(sent) or was_full
        except (BlockingIOError, InterruptedError):
            pass
        return was_full

    def _wait(self, is_waiting: bool) -> None:
        if is_waiting == self._is_waiting:
            return
        self._is_waiting = is_waiting
        if is_waiting:
            self._loop.add_writer(self._fd, self._send)
        else:
            self._loop.remove_writer(self._fd)

    def _receive(self) -> None:
        turn = _TURN_BYTES
        while turn > 0 and self._is_reading:
            buffer = self._owner.get_buffer()
            try:
                received = self._socket.recv_into(buffer)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._lose(error.strerror or str(error))
                return
            if received == 0:
                self._lose("it hung up")
                return
            self._owner.advance(received)
            if received < _JOIN_BYTES:  # usually all there was
                return
            turn -= received


class TlsStream(asyncio.BufferedProtocol):
    """The protocol of a TLS transport."""

    def __init__(self, owner: Owner, limit_bytes: int, opened: Callable[[Stream], None]) -> None:
        """`opened` is told when the other side has shown its certificate: what goes before is of no connection yet."""
        self._owner, self._opened = owner, opened
        self._transport: asyncio.Transport | None = None
        self._unsent = _Unsent(limit_bytes)
        self._is_paused = self._is_closed = False
        self._is_corked = False  # as in `UnixStream`

    @property
    def is_full(self) -> bool:
        return self._unsent.is_full

    def write(self, pieces: Sequence[Buffer]) -> None:
        if self._transport is None:
            return
        self._unsent.add(pieces)
        if self._is_corked and self._unsent.num_bytes < _MANY_BYTES:
            return
        if not self._is_corked:
            self._is_corked = True
            asyncio.get_running_loop().call_soon(self._uncork)
        self._send()

    def set_reading(self, is_reading: bool) -> None:
        if self._transport is None or self._transport.is_closing() or is_reading == self._transport.is_reading():
            return
        if is_reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def close(self) -> None:
        self._send()
        self._is_closed = True
        transport, self._transport = self._transport, None
        self._unsent.pieces.clear()
        if transport is not None:
            transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._is_closed:
            transport.close()
            return
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=4 * _TLS_BYTES)
        self._opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._is_closed:
            self._is_closed = True
            self._owner.lost(str(exc) if exc else "it hung up")

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._owner.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if not self._is_closed:
            self._owner.advance(nbytes)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._send()

    def _uncork(self) -> None:
        self._is_corked = False
        self._send()

    def _send(self) -> None:
        unsent, was_full = self._unsent, False
        while unsent.pieces and not self._is_paused and self._transport is not None:
            if unsent.num_bytes <= _JOIN_BYTES:
                piece: Buffer = b"".join(unsent.pieces)
            else:
                piece = memoryview(unsent.pieces[0])[:_TLS_BYTES]
            self._transport.write(piece)
            was_full = unsent.remove(len(piece)) or was_full
        if was_full:
            asyncio.get_running_loop().call_soon(self._owner.drained)


def socket_path(path: Path) -> str:
    """An address for `path` within the 108 bytes that a unix socket's address may have, however long the path is."""
    if len(os.fsencode(path)) < 100:
        return str(path)
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)  # stays open: the address refers to it
    return f"/proc/self/fd/{directory}/{path.name}"


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


def listen(path: Path) -> socket.socket:
    """A private (mode 0600) unix socket at `path`, in place of one that nobody serves any more.

    Raises `UserError` when somebody does.
    """
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        if path.exists() and probe.connect_ex(socket_path(path)) == 0:
            raise UserError(f"somebody serves at {path} already: end that one, or choose another path")
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    previous = os.umask(0o177)  # of the whole process, so nothing may be awaited until it is restored
    try:
        listener.bind(socket_path(path))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(previous)
    return listener
