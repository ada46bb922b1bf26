"""A server with one service, its clients, and frames made by hand."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncflow.transport import FrameLimits, Peer, Server, client_name, proxy, remote
from asyncflow.transport.frames import MAGIC, PREFIX
from asyncflow.types import RunError, UserError, crosses


@crosses
class StaleParcel(Exception):
    """An exception that a service has registered."""


class Parcel(msgspec.Struct):
    name: str
    values: np.ndarray
    more: list[np.ndarray] = []


class Echo:
    """A service with a method for everything that can happen."""

    def __init__(self) -> None:
        self.parked = self.cancelled = 0
        self.gate = asyncio.Event()
        self.kept: list[np.ndarray] = []
        self.futures: list[asyncio.Future[int]] = []
        self.tasks_seen: list[object] = []

    @remote
    async def echo(self, parcel: Parcel) -> Parcel:
        return parcel

    @remote
    async def add(self, a: int, b: int = 0) -> int:
        return a + b

    @remote
    async def who(self) -> str:
        return client_name.get()

    @remote
    async def nothing(self, value: int | None) -> None:
        pass

    @remote
    async def fail(self, kind: str) -> None:
        errors = [UserError, RunError, StaleParcel, ValueError, TimeoutError, ZeroDivisionError, UnicodeError]
        raise {error.__name__: error for error in errors}[kind](f"a {kind}")

    @remote
    async def park(self) -> int:
        self.parked += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.parked -= 1
        return 7

    @remote
    async def after(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    @remote
    async def keep(self, values: np.ndarray) -> bool:
        self.kept.append(values)
        return values.flags.writeable

    @remote
    async def last(self) -> np.ndarray:
        return self.kept[-1]

    @remote
    async def matrix(self) -> np.ndarray:
        return np.zeros((1, 1, 1, 1, 2))

    @remote
    async def zeros(self, count: int) -> np.ndarray:
        return np.zeros(count, np.uint8)

    @remote
    def who_at_once(self) -> Awaitable[str]:
        self.tasks_seen.append(asyncio.current_task())
        return done(client_name.get())

    @remote
    def fail_at_once(self, is_inside: bool) -> Awaitable[int]:
        if not is_inside:
            raise ValueError("before there is a future")
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        future.set_exception(ValueError("in the future"))
        return future

    @remote
    def later(self) -> Awaitable[int]:
        self.futures.append(asyncio.get_running_loop().create_future())
        return self.futures[-1]

    async def private(self) -> int:
        return 1


def done(result: Any) -> asyncio.Future[Any]:
    future = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future


class Bench:
    def __init__(self, path: Path, limits: FrameLimits | None = None, **server: Any) -> None:
        self.path, self.echo, self.gone = path, Echo(), list[str]()
        self.server = Server({"echo": self.echo}, lambda key: self.gone.append(key.partition("@")[0]), limits=limits, **server)
        self.peers: list[Peer] = []

    async def peer(self, name: str = "client", **options: Any) -> Peer:
        self.peers.append(await Peer.connect(self.path, name, timeout_seconds=2, **options))
        return self.peers[-1]

    async def client(self, name: str = "client", **options: Any) -> Echo:
        return proxy(Echo, await self.peer(name, **options), "echo")

    async def rude(self, *, is_greeted: bool = True) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection whose bytes are made by hand, with the welcome read."""
        reader, writer = await asyncio.open_unix_connection(self.path)
        if is_greeted:
            writer.write(HELLO)
            await read_frame(reader)
        return reader, writer

    async def __aenter__(self) -> Bench:
        await self.server.start(self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        for peer in self.peers:
            await peer.close()
        await self.server.close()


async def until(condition: Callable[[], bool], seconds: float = 2.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def frame(header: bytes, *buffers: bytes, magic: bytes = MAGIC, body: int | None = None, count: int | None = None) -> bytes:
    sizes = [len(b) for b in buffers]
    padded = [b + bytes(-len(b) % 8) for b in buffers]
    total = sum(map(len, padded)) if body is None else body
    prefix = PREFIX.pack(magic, len(header), len(buffers) if count is None else count, total)
    return prefix + struct.pack(f"<{len(sizes)}Q", *sizes) + header + b"".join(padded)


def packed(*fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


def request(number: int, method: str, *arguments: Any) -> bytes:
    return packed("request", number, "echo", method, arguments)


async def read_frame(reader: asyncio.StreamReader) -> list[Any]:
    """The header of the next frame, decoded as it comes."""
    _, header_bytes, num_buffers, body_bytes = PREFIX.unpack(await reader.readexactly(PREFIX.size))
    await reader.readexactly(8 * num_buffers)
    header = msgspec.msgpack.decode(await reader.readexactly(header_bytes))
    await reader.readexactly(body_bytes)
    return header  # type: ignore[no-any-return]


HELLO = frame(packed("hello", "rude"))
