"""Limits of a service: what a client may cost before it is answered. All are checked before anything is allocated for it.

connections   more than that: the oldest one that has not shown a key yet is closed, or else the new one is told to wait
head          bytes and seconds of a request's line and headers
body          its length is said beforehand (411 without), bounded (413), and reserved from one budget for all (429)
pace          a body has as long as its length takes at the slowest allowed rate (408); a reader that does not read is cut off
rate          requests a second of each key, and how many of its requests may be under way (429, with a time)
"""

from __future__ import annotations

import asyncio
import math
import resource
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

WRITTEN_AT_ONCE: Final = 16 << 10
"""Bytes that are not kept back for what may come behind them."""
HANDLES_KEPT: Final = 128
"""File handles that connections do not take: files, workers, the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one service. Rates are per key."""

    connections: int = 1024
    head_bytes: int = 32 << 10
    head_seconds: float = 10.0
    """Seconds from the first byte of a request, or from the connection, to the end of the headers."""
    body_bytes: int = 64 << 20
    """Bytes of one request's body."""
    streamed_bytes: int = 1 << 40
    """Bytes of one request's body that goes to a file as it comes."""
    buffered_bytes: int = 256 << 20
    """Bytes of all bodies that are being read or worked on."""
    slowest_bytes_per_second: int = 64 << 10
    """A body, or an answer, that is slower is cut off, after `head_seconds` at the soonest."""
    requests_per_second: float = 10_000.0
    burst: int = 2_000
    """Requests that may come at once, beyond the rate."""
    under_way: int = 1024
    """Requests of one key that are not answered yet."""
    refusals_per_second: float = 20.0
    """Requests with a wrong key from one address, each of which is told so; others are told to wait."""

    def body_seconds(self, num_bytes: int) -> float:
        """Time that a body of so many bytes may take."""
        return self.head_seconds + num_bytes / self.slowest_bytes_per_second

    @property
    def allowed_connections(self) -> int:
        """Connections that this process's file handles allow, `connections` at most."""
        handles = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if handles == resource.RLIM_INFINITY:
            return self.connections
        return max(1, min(self.connections, handles - HANDLES_KEPT))


class Denied(Exception):
    """A request that gets no answer but this one."""

    def __init__(self, status: int, why: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(why)
        self.status, self.headers = status, dict(headers or {})


class Busy(Denied):
    """Error for want of room at the moment: the same request is welcome after so many seconds."""

    def __init__(self, why: str, seconds: float) -> None:
        self.seconds = max(0.01, seconds)
        super().__init__(429, why, {"Retry-After": str(math.ceil(self.seconds))})


class Bucket:
    """Token bucket: `rate` a second, `burst` at once. Pure: time is an argument."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst, self._left, self._at = rate, burst, burst, -math.inf

    def take(self, now: float) -> float:
        """Take one request's token. Returns 0, or, with nothing taken, the seconds until there is one."""
        if self._at > -math.inf:
            self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left >= 1 - 1e-9:  # sums of fractions
            self._left -= 1
            return 0.0
        return (1 - self._left) / self._rate


class ByteBudget:
    """Budget of bytes that all requests share."""

    def __init__(self, num_bytes: int) -> None:
        self.left = self._all = num_bytes

    def take(self, num_bytes: int) -> None:
        """Reserve bytes. Raises `Busy` where too few are left at the moment; what is larger than all of them waits to be alone."""
        if num_bytes > self.left and self.left < self._all:
            raise Busy(f"{num_bytes} bytes have no room beside the requests under way", 1.0)
        self.left -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Give back what was taken."""
        self.left += num_bytes


class Callers:
    """Rates and requests under way, by key; and refusals, by address. Of as many addresses as there may be connections."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits, self._clock = limits, clock
        self._rates: dict[str, Bucket] = {}
        self._under_way: dict[str, int] = {}
        self._refused: OrderedDict[str, Bucket] = OrderedDict()

    def enter(self, key: str) -> None:
        """Count a request of a key as under way. Raises `Busy`, and then it is not."""
        limits, under_way = self._limits, self._under_way.get(key, 0)
        if under_way >= limits.under_way:
            raise Busy(f"{under_way} requests of this key are under way", 1.0)
        bucket = self._rates.setdefault(key, Bucket(limits.requests_per_second, limits.burst))
        if wait := bucket.take(self._clock()):
            raise Busy(f"this key sends more than {limits.requests_per_second:g} requests a second", wait)
        self._under_way[key] = under_way + 1

    def leave(self, key: str) -> None:
        """End a request of this key: it has been answered."""
        self._under_way[key] -= 1

    def refuse(self, address: str) -> None:
        """Count a request without a valid key. Raises `Busy` where an address has too many of them."""
        rate = self._limits.refusals_per_second
        bucket = self._refused.pop(address, None) or Bucket(rate, 2 * rate)
        self._refused[address] = bucket
        if len(self._refused) > self._limits.connections:
            self._refused.popitem(last=False)
        if wait := bucket.take(self._clock()):
            raise Busy("too many requests without a valid key", wait)


class WholeAnswers:
    """Transport that sends what is written within one turn of the event loop at once: an answer's head and body are one packet."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: Any) -> None:
        """See `asyncio.WriteTransport`."""
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)
        if len(data) > WRITTEN_AT_ONCE:
            self._send()

    def _send(self) -> None:
        if self._parts:
            self._transport.write(b"".join(self._parts))
            self._parts.clear()

    def close(self) -> None:
        """See `asyncio.BaseTransport`."""
        self._send()
        self._transport.close()


def limited(limits: Limits) -> type[HttpToolsProtocol]:
    """uvicorn's connections under these limits."""
    unproven: OrderedDict[LimitedConnection, None] = OrderedDict()  # those that have not shown a key yet, oldest first
    most = limits.allowed_connections

    class LimitedConnection(HttpToolsProtocol):
        """Connection of a client. `proven`: it has shown a valid key."""

        _deadline: asyncio.TimerHandle | None = None
        _to_be_read: asyncio.TimerHandle | None = None  # what was written last, by the client
        _head_bytes = 0
        _in_head = True

        def connection_made(self, transport: Any) -> None:
            super().connection_made(cast(asyncio.Transport, WholeAnswers(transport, self.loop)))
            if len(self.connections) > most:
                if not unproven:
                    self._refuse(b"429 Too Many Requests", b"too many connections", b"retry-after: 1\r\n")
                    return
                unproven.popitem(last=False)[0].transport.abort()
            unproven[self] = None
            self._begin_head()

        def connection_lost(self, exc: Exception | None) -> None:
            unproven.pop(self, None)
            self._end_head()
            self._is_read()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            seconds = limits.body_seconds(self.transport.get_write_buffer_size())
            self._to_be_read = self.loop.call_later(seconds, self.transport.abort)

        def resume_writing(self) -> None:
            self._is_read()
            super().resume_writing()

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            if self._in_head:
                self._head_bytes += len(data)
            if self.parser is not None:
                super().data_received(data)
            if self._in_head and self._head_bytes > limits.head_bytes and not self.transport.is_closing():
                self._refuse(b"431 Request Header Fields Too Large", b"the request's head is too large")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope["state"]["connection"] = self
            self._begin_head()

        def on_headers_complete(self) -> None:
            self._end_head()
            super().on_headers_complete()

        def proven(self) -> None:
            """Note that the client has shown a good key: the connection no longer counts among those that have not."""
            unproven.pop(self, None)

        def _is_read(self) -> None:
            if self._to_be_read is not None:
                self._to_be_read.cancel()
                self._to_be_read = None

        def _begin_head(self) -> None:
            self._in_head = True
            if self._deadline is None:
                self._head_bytes = 0
                self._deadline = self.loop.call_later(limits.head_seconds, self._late)

        def _end_head(self) -> None:
            self._in_head, self._head_bytes = False, 0
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _late(self) -> None:
            self._refuse(b"408 Request Timeout", b"the request's head did not come in time")

        def _refuse(self, status: bytes, why: bytes, headers: bytes = b"") -> None:
            head = b"content-type: text/plain\r\nconnection: close\r\n" + headers + b"content-length: %d" % len(why)
            self.transport.write(b"HTTP/1.1 " + status + b"\r\n" + head + b"\r\n\r\n" + why)
            self.transport.close()

    return LimitedConnection
