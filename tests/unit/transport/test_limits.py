"""What a client may cost a server: time, room, unread answers. Others are served meanwhile."""

from __future__ import annotations

import asyncio
import gc
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncflow.transport import FrameLimits
from asyncflow.transport.frames import MAGIC, PREFIX
from tests.unit.transport.bench import Bench, Parcel, frame, request, until

SHORT = FrameLimits(hello_seconds=0.2, frame_seconds=0.3, frame_bytes_per_second=1e9)
PUT = request(1, "keep", ["uint8", [1_000_000], 0])
BIG = frame(PUT, bytes(1_000_000))


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What still came, once the server has hung up."""
    try:
        return await asyncio.wait_for(reader.read(), 3)
    except ConnectionError:
        return b""


async def test_who_does_not_say_hello_is_not_waited_for(tmp_path: Path) -> None:
    async with Bench(tmp_path / "s.sock", SHORT) as bench:
        client = await bench.client()
        silent, _ = await bench.rude(is_greeted=False)
        assert await ended(silent) == b""
        assert await client.add(1, 1) == 2, "an idle connection has no deadline"
        assert bench.gone == []


async def test_a_stranger_may_send_no_large_frame(tmp_path: Path) -> None:
    async with Bench(tmp_path / "s.sock") as bench:
        for sizes in ((5_000, 0, 0), (1, 1, 8)):
            reader, writer = await bench.rude(is_greeted=False)
            writer.write(PREFIX.pack(MAGIC, *sizes))
            assert await ended(reader) == b""


@pytest.mark.parametrize("sent", [5, PREFIX.size + 4, len(BIG) - 1])
@pytest.mark.parametrize("is_trickling", [False, True])
async def test_a_frame_that_does_not_end_is_not_waited_for(tmp_path: Path, sent: int, is_trickling: bool) -> None:
    async with Bench(tmp_path / "s.sock", SHORT) as bench:
        client = await bench.client()
        reader, writer = await bench.rude()
        await asyncio.sleep(0.6)  # idle: longer than any deadline
        began = asyncio.get_running_loop().time()
        writer.write(frame(request(1, "add", 1, 2)) + BIG[: sent // 2])
        await writer.drain()
        if is_trickling:  # an endless frame: there is always something new
            for at in range(sent // 2, min(sent, sent // 2 + 40)):
                writer.write(BIG[at : at + 1])
                await asyncio.sleep(0.05)
                if reader.at_eof() or bench.gone:
                    break
        else:
            writer.write(BIG[sent // 2 : sent])
        await ended(reader)
        assert asyncio.get_running_loop().time() < began + 1.5, "the deadline is counted from the frame's first byte"
        assert bench.gone == ["rude"] and bench.echo.kept == []
        assert await client.add(1, 1) == 2


async def test_a_large_frame_has_more_time(tmp_path: Path) -> None:
    limits = FrameLimits(frame_seconds=0.1, frame_bytes_per_second=1e6)  # so 1.1 s
    async with Bench(tmp_path / "s.sock", limits) as bench:
        _, writer = await bench.rude()
        writer.write(BIG[:-1])
        await asyncio.sleep(0.5)
        writer.write(BIG[-1:])
        await until(lambda: len(bench.echo.kept) == 1)
        writer.close()


ROOM = FrameLimits(
    header_bytes=10_000, body_bytes=1_000_000, assembly_bytes=1_500_000, frame_seconds=0.6, frame_bytes_per_second=1e9
)


async def test_frames_that_do_not_fit_wait_for_those_before_them(tmp_path: Path) -> None:
    """And the wait is not counted against them."""
    async with Bench(tmp_path / "s.sock", ROOM) as bench:
        client = await bench.client()
        _, blocking = await bench.rude()
        _, waiting = await bench.rude()
        blocking.write(BIG[:-1])
        await asyncio.sleep(0.1)
        waiting.write(BIG[:-1])
        await asyncio.sleep(0.1)
        assert await client.add(1, 1) == 2, "small frames need no room"
        room = bench.server._state.room
        assert room.used_bytes < 1_100_000 and len(room._waiting) == 1
        await until(lambda: bench.gone == ["rude"])  # the deadline of what was in the way
        await asyncio.sleep(0.4)  # by now the other's first byte is older than the deadline too
        waiting.write(BIG[-1:])
        await until(lambda: len(bench.echo.kept) == 1)
        assert room.used_bytes == 0
        assert await asyncio.wait_for(client.keep(np.ones(1_000_000, np.uint8)), 2) is False
        blocking.close()
        waiting.close()


async def test_who_goes_while_waiting_for_room_leaves_it_to_the_next(tmp_path: Path) -> None:
    async with Bench(tmp_path / "s.sock", ROOM) as bench:
        (_, first), (_, second), (_, third) = [await bench.rude() for _ in range(3)]
        room = bench.server._state.room
        first.write(BIG[:-1])
        await until(lambda: room.used_bytes > 0)
        second.write(BIG[:-1])
        await until(lambda: len(room._waiting) == 1)
        third.write(frame(request(1, "keep", ["uint8", [300_000], 0]), bytes(300_000)))
        await until(lambda: len(room._waiting) == 2)
        next(iter(room._waiting)).close("the client has gone")
        await until(lambda: len(bench.echo.kept) == 1)  # what fits beside the first
        first.write(BIG[-1:])
        await until(lambda: len(bench.echo.kept) == 2 and room.used_bytes == 0 and not room._waiting)
        for writer in (first, second, third):
            writer.close()


async def test_who_goes_in_the_moment_of_being_given_room_gives_it_back(tmp_path: Path) -> None:
    async with Bench(tmp_path / "s.sock", ROOM) as bench:
        (_, first), (_, second) = [await bench.rude() for _ in range(2)]
        room = bench.server._state.room
        first.write(BIG[:-1])
        await until(lambda: room.used_bytes > 0)
        second.write(BIG[:-1])
        await until(lambda: len(room._waiting) == 1)
        (waiting,) = room._waiting
        (blocking,) = bench.server._state.connections - {waiting}
        blocking.close("the client has gone")
        assert not room._waiting and room.used_bytes > 0
        waiting.close("and so has the other")
        await until(lambda: room.used_bytes == 0)
        first.close()
        second.close()


async def test_who_does_not_read_answers_is_not_read_either(tmp_path: Path) -> None:
    limits = FrameLimits(unsent_bytes=1_000_000)
    async with Bench(tmp_path / "s.sock", limits) as bench:
        client = await bench.client()
        reader, writer = await bench.rude()
        asks, size = 300, 200_000
        for i in range(asks):  # in one piece of the stream
            writer.write(frame(request(i, "who_at_once") if i % 2 else request(i, "last")))
        bench.echo.kept.append(np.zeros(size, np.uint8))
        bench.echo.who_at_once = lambda: _ready("x" * size)  # type: ignore[method-assign]
        await asyncio.sleep(0.3)
        (held_up,) = [c for c in bench.server._state.connections if c.name == "rude"]
        stream: Any = held_up._stream
        transport = stream._transport
        assert stream.is_full and len(held_up._backlog) > 0 and not transport.is_reading()
        assert stream.num_unsent_bytes < 1_000_000 + asks / 2 * size, "answers that need no task are not made"
        assert await asyncio.wait_for(client.add(1, 1), 1) == 2
        total = 0
        while total < asks * size:  # it reads after all, and gets every answer
            total += len(await asyncio.wait_for(reader.read(1 << 20), 2))
        await until(lambda: not stream.is_full and transport.is_reading() and not held_up._backlog)
        writer.close()


def _ready(value: str) -> asyncio.Future[str]:
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future


async def test_a_caller_waits_while_too_much_is_unsent(tmp_path: Path) -> None:
    async with Bench(tmp_path / "s.sock") as bench:
        peer = await bench.peer(limits=FrameLimits(unsent_bytes=1_000_000))
        stream: Any = peer._stream
        (connection,) = bench.server._state.connections
        assert connection._stream is not None
        connection._stream.set_reading(False)
        calls = [
            asyncio.create_task(peer.call(type(bench.echo), "echo", "keep", (np.zeros(500_000, np.uint8),))) for _ in range(20)
        ]
        await until(lambda: stream.num_unsent_bytes > 1_000_000)
        await asyncio.sleep(0.05)  # and no call goes further
        assert 1_000_000 < stream.num_unsent_bytes <= 1_500_000
        connection._stream.set_reading(True)
        await asyncio.wait_for(asyncio.gather(*calls), 5)
        assert len(bench.echo.kept) == 20


async def test_a_client_that_does_not_read_and_goes_leaves_nothing(tmp_path: Path) -> None:
    async with Bench(tmp_path / "s.sock") as bench:
        reader, writer = await bench.rude()
        for i in range(20):
            writer.write(frame(request(i, "zeros", 1_000_000)))
        await asyncio.sleep(0.1)
        writer.transport.abort()
        await until(lambda: bench.gone == ["rude"])
        assert not bench.server._state.connections
        del reader


async def test_a_connection_leaves_nothing_behind(tmp_path: Path) -> None:
    async with Bench(tmp_path / "s.sock") as bench:
        client = await bench.client()
        await client.echo(Parcel("x", np.zeros(100_000)))
        parked = asyncio.create_task(client.park())
        await until(lambda: bench.echo.parked == 1)
        await bench.peers.pop().close()
        with pytest.raises(Exception, match="closed on this side"):
            await parked
        await until(lambda: not bench.server._state.connections)
        del client, parked
        await asyncio.sleep(0.01)
        gc.collect()
        kinds = {type(o).__name__ for o in gc.get_objects()}
        assert not kinds & {"Connection", "FrameParser", "Peer", "Stream"}


async def test_a_full_queue_of_clients_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(str(path))
            bench = Bench(path)
            connecting = asyncio.create_task(bench.peer())
            await asyncio.sleep(0.05)
            assert not connecting.done()
            listener.accept()[0].close()
            await asyncio.sleep(0.05)
            accepted, _ = listener.accept()
            accepted.close()
    with pytest.raises(Exception, match="nothing answers"):
        await connecting
