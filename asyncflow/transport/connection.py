"""A client, as its server sees it.

consumes: hello, then requests
waits for: the handlers, room for a frame that is arriving, and a client that does not read its answers
is unblocked by: a handler's result, another connection's frame that is complete, and the client when it reads
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np

from asyncflow.transport import codec
from asyncflow.transport.arena import Arena
from asyncflow.transport.frames import Frame, FrameParser, encode_frame, new_buffer
from asyncflow.transport.limits import FrameLimits
from asyncflow.transport.stream import Stream

log = logging.getLogger(__name__)

_GREETING = {"header_bytes": 4096, "buffers": 0, "body_bytes": 0}
"""Limits of what a connection may send before its hello has been answered."""
_MESSAGE_CHARACTERS = 64 << 10  # of an exception, in a reply


@dataclass(frozen=True, slots=True)
class ServerState:
    """State that the connections of a server share."""

    services: Mapping[str, object]
    on_disconnect: Callable[[str], None] | None
    arena: Arena | None
    limits: FrameLimits
    room: ReceiveRoom
    connections: set[Connection]


SMALL_FRAME_BYTES = 4 << 20
_numbers = itertools.count()  # of all connections of this process


class ReceiveRoom:
    """Memory that arriving frames may take together; first come, first served."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._waiting: dict[Connection, int] = {}

    def reserve(self, connection: Connection, num_bytes: int) -> bool:
        """False: the connection is told `has_room` when it has what it asked for."""
        is_small = num_bytes <= min(SMALL_FRAME_BYTES, self.capacity_bytes >> 10)  # these are not to wait for giants
        if not is_small and (self._waiting or self.used_bytes + num_bytes > self.capacity_bytes):
            self._waiting[connection] = num_bytes
            return False
        self.used_bytes += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        """Give back the memory of a frame."""
        self.used_bytes -= num_bytes
        self._admit()

    def forget(self, connection: Connection) -> None:
        """Remove a connection that waits."""
        if self._waiting.pop(connection, None) is not None:
            self._admit()

    def _admit(self) -> None:
        while self._waiting:
            connection, num_bytes = next(iter(self._waiting.items()))
            if self.used_bytes + num_bytes > self.capacity_bytes:
                return
            del self._waiting[connection]
            self.used_bytes += num_bytes
            asyncio.get_running_loop().call_soon(connection.has_room, num_bytes)


class Connection:
    """Connection of one client. A fault in what the client sends ends this connection and nothing else."""

    def __init__(self, server: ServerState, *, is_local: bool) -> None:
        """`is_local`: the client is on this machine, so arrays may be handed to it by reference to where they lie in the arena."""
        self.name = self.key = ""
        self._server, self._limits = server, server.limits
        self._arena = server.arena if is_local and server.arena is not None and server.arena.path is not None else None
        self._loop = asyncio.get_running_loop()
        self.parser = FrameParser(
            FrameLimits(**_GREETING),
            server.arena.allocate if server.arena is not None else new_buffer,
            functools.partial(server.room.reserve, self),
            server.room.release,
        )
        self._stream: Stream | None = None
        self._is_greeted = self._is_closed = False
        self._opened_at = self._loop.time()
        self._frame_began_at: float | None = None
        self._backlog: deque[Frame] = deque()
        self._running: dict[int, asyncio.Future[Any]] = {}
        self._held: dict[int, asyncio.TimerHandle] = {}  # its arguments hold the arrays
        self._context = contextvars.copy_context()

    def open(self, stream: Stream) -> None:
        """Begin the connection over this stream."""
        self._stream = stream
        self._server.connections.add(self)

    def tasks(self) -> list[asyncio.Future[Any]]:
        """Requests that are being served."""
        return [task for task in self._running.values() if isinstance(task, asyncio.Task)]

    def close(self, why: str) -> None:
        """End the connection; `why` is logged."""
        if self._is_closed:
            return
        self._is_closed = True
        log.debug("the connection of %r ends: %s", self.name, why)
        assert self._stream is not None
        self._stream.close()
        self._server.connections.discard(self)
        self._server.room.forget(self)
        self.parser.close()
        self._backlog.clear()
        for timer in self._held.values():
            timer.cancel()
        self._held.clear()
        running, self._running = self._running, {}
        for future in running.values():  # a parked request dies with its connection
            future.cancel()
        if self._is_greeted and self._server.on_disconnect is not None:
            self._server.on_disconnect(self.key)

    def end_if_late(self, now: float) -> None:
        """End the connection if its greeting or a frame takes too long."""
        limits, began = self._limits, self._frame_began_at
        if not self._is_greeted and now > self._opened_at + limits.hello_seconds:
            self.close("it did not say hello")
        elif began is not None and self._may_read():
            allowed = limits.frame_seconds + self.parser.frame_bytes / limits.frame_bytes_per_second
            if now > began + allowed:
                self.close(f"a frame was not complete after {allowed:.1f} s")

    # What the stream calls

    def received(self, frames: list[Frame]) -> None:
        """See `Owner.received`."""
        if not self.parser.is_midway:
            self._frame_began_at = None
        elif frames or self._frame_began_at is None:
            self._frame_began_at = self._loop.time()
        self._backlog.extend(frames)
        if self._backlog:
            self._context.run(self._serve)
        if self.parser.failure and not self._is_closed:
            self.close(self.parser.failure)
        if not self._is_closed and self._stream is not None:
            self._stream.set_reading(self._may_read())

    def drained(self) -> None:
        """See `Owner.drained`."""
        if not self._is_closed:
            self._frame_began_at = None  # it was not read meanwhile
            self.received([])

    def lost(self, why: str) -> None:
        """See `Owner.lost`."""
        self.close(why)

    # What the room calls

    def has_room(self, num_bytes: int) -> None:
        """Go on with the frame that has waited: there is room for so many bytes now."""
        if self._is_closed:
            self._server.room.release(num_bytes)
            return
        self._frame_began_at = None  # the wait was not its sender's fault
        self.received(self.parser.unblock())

    def _may_read(self) -> bool:
        # A large frame that has begun is received to its end, so that the room it takes becomes free.
        return not self.parser.is_blocked and (self.parser.is_assembling or not self._is_held_up())

    def _is_held_up(self) -> bool:
        """Whether the client must read its answers before more of its requests are read."""
        return self._stream is not None and self._stream.is_full

    def _serve(self) -> None:
        while self._backlog and not self._is_closed and not self._is_held_up():
            header, buffers = self._backlog.popleft()
            try:
                message = codec.decode_message(codec.from_client, header)
            except ValueError as error:
                self.close(f"it sent no message: {error}")
                return
            match message:
                case codec.Request() if self._is_greeted:
                    self._request(message, buffers)
                case codec.Cancel(number) if self._is_greeted:
                    self._cancel(number)
                case codec.Taken(number) if self._is_greeted:
                    self._let_go(number)
                case codec.Hello() if not self._is_greeted:
                    self._hello(message)
                case _:
                    self.close(f"it sent a {type(message).__name__} where none belongs")

    def _hello(self, hello: codec.Hello) -> None:
        self.name, self.key, self._is_greeted = hello.name, f"{hello.name}@{next(_numbers)}", True
        codec.client_key.set(self.key)
        codec.client_name.set(hello.name)  # in this connection's context, which is that of all its handlers
        self.parser.limits = self._limits
        welcome = codec.Welcome(str(self._arena.path) if self._arena is not None else "")
        self._send(welcome)

    def _request(self, request: codec.Request[msgspec.Raw], buffers: Sequence[np.ndarray]) -> None:
        number = request.id
        if number in self._running:
            self.close(f"it used the number {number} of a request that is under way")
            return
        if len(self._running) >= self._limits.requests:
            self.close(f"it has {len(self._running)} requests under way and sent one more")
            return
        try:
            service = self._server.services.get(request.service)
            if service is None:
                raise LookupError(f"no service {request.service!r}")
            method = codec.schema(cast(Any, type(service)), request.method)
            arguments = codec.decode(method.arguments, request.arguments, buffers, is_writeable=False)
            result = getattr(service, request.method)(*arguments)
            future = result if isinstance(result, asyncio.Future) else asyncio.ensure_future(result)
        except Exception as error:  # the answer to the caller, which raises it
            self._fail(number, error)
            return
        if future.done():
            self._answer(number, future)
        else:
            self._running[number] = future
            future.add_done_callback(functools.partial(self._done, number))

    def _cancel(self, number: int) -> None:
        future = self._running.pop(number, None)
        if future is not None:
            future.cancel()
        else:
            self._let_go(number)  # the answer is on its way

    def _let_go(self, number: int, *held: np.ndarray) -> None:
        timer = self._held.pop(number, None)
        if timer is not None:
            timer.cancel()

    def _done(self, number: int, future: asyncio.Future[Any]) -> None:
        if self._running.get(number) is future:
            del self._running[number]
            self._answer(number, future)
        elif not future.cancelled():
            future.exception()  # its caller has gone, nobody else is to hear of it

    def _answer(self, number: int, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            self._fail(number, RuntimeError("it was cancelled by its service"))
            return
        error = future.exception()
        if error is not None:
            self._fail(number, error)
            return
        held: list[np.ndarray] = []
        try:
            self._send(codec.Reply(number, future.result()), held)
        except Exception as refused:  # what cannot be sent is an error at the caller
            self._fail(number, refused)
            return
        if held:
            self._let_go(number)
            self._held[number] = self._loop.call_later(self._limits.hold_seconds, self._let_go, number, *held)

    def _fail(self, number: int, error: BaseException) -> None:
        message = f"{error}"[: min(_MESSAGE_CHARACTERS, self._limits.header_bytes // 8)]
        self._send(codec.Reply(number, None, error=codec.error_name(error), message=message.encode(errors="replace").decode()))

    def _send(self, message: msgspec.Struct, held: list[np.ndarray] | None = None) -> None:
        if self._is_closed or self._stream is None:
            return
        arrays: list[np.ndarray] = []
        header = codec.encode(message, arrays, held if held is not None else [], self._arena)
        self._stream.write(encode_frame(header, arrays, self._limits))
