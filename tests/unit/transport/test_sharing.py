"""Large answers out of the server's arena: handed over by reference, copied by the client, kept until it has."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncflow.transport import Arena, FrameLimits, Peer, proxy
from tests.unit.transport.bench import Bench, Echo, Parcel, frame, packed, read_frame, request, until

VALUES = np.random.default_rng(0).integers(0, 1 << 62, 50_000)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    arena = Arena(64 << 20, tmp_path / "arena")
    async with Bench(tmp_path / "s.sock", FrameLimits(hold_seconds=0.3), arena=arena) as made:
        yield made
    arena.close()


def arena_of(bench: Bench) -> Arena:
    arena = bench.server._state.arena
    assert arena is not None
    return arena


async def test_what_is_received_lies_in_the_arena_and_is_answered_by_reference(bench: Bench) -> None:
    client = await bench.client()
    await client.keep(VALUES)
    place = arena_of(bench).locate(bench.echo.kept[0])
    assert place is not None and place.num_bytes == VALUES.nbytes
    reader, writer = await bench.rude()
    writer.write(frame(request(1, "last")))
    reply = await read_frame(reader)
    assert reply[2] == ["int64", [50_000], -1, [place.offset, place.num_bytes, place.header, place.generation]]
    back = await client.last()
    assert np.array_equal(back, VALUES) and back.flags.writeable
    back[:] = 0
    assert np.array_equal(bench.echo.kept[0], VALUES) and np.array_equal(await client.last(), VALUES)
    writer.close()


async def test_small_arrays_and_parts_of_large_ones(bench: Bench) -> None:
    client = await bench.client()
    await client.keep(VALUES)
    for part in (bench.echo.kept[0][:10], bench.echo.kept[0][1000:30_000], bench.echo.kept[0][::2]):
        bench.echo.kept.append(part)
        assert np.array_equal(await client.last(), part)


async def test_an_answer_that_nobody_else_keeps_is_kept_until_it_has_been_copied(bench: Bench) -> None:
    client = await bench.client()
    for _ in range(5):
        back = await client.echo(Parcel("x", VALUES, [VALUES + 1]))
        assert np.array_equal(back.values, VALUES) and np.array_equal(back.more[0], VALUES + 1)
    await asyncio.sleep(0.05)
    gc.collect()
    assert arena_of(bench).used_bytes == 0, "the client has said that it has copied"


async def test_a_client_that_does_not_say_so_is_not_waited_for_for_ever(bench: Bench) -> None:
    reader, writer = await bench.rude()
    writer.write(frame(request(1, "echo", {"name": "x", "values": ["int64", [50_000], 0]}), VALUES.tobytes()))
    await read_frame(reader)
    assert arena_of(bench).used_bytes > 0
    await asyncio.sleep(0.4)
    gc.collect()
    assert arena_of(bench).used_bytes == 0
    writer.close()


@pytest.mark.parametrize("how", ["cancelled", "gone"])
async def test_who_goes_or_gives_up_keeps_nothing(bench: Bench, how: str) -> None:
    reader, writer = await bench.rude()
    writer.write(frame(request(1, "echo", {"name": "x", "values": ["int64", [50_000], 0]}), VALUES.tobytes()))
    await read_frame(reader)
    if how == "gone":
        writer.close()
    else:
        writer.write(frame(packed("cancel", 1)))
    await asyncio.sleep(0.1)
    gc.collect()
    assert arena_of(bench).used_bytes == 0
    writer.close()


async def test_rows_that_were_dropped_meanwhile_are_an_error_and_not_other_bytes(bench: Bench) -> None:
    client = await bench.client()
    await client.keep(VALUES)
    peer: Any = bench.peers[0]
    receive = peer._receive

    def late(one: Any) -> None:
        # The client is slow: meanwhile the server has let go, and somebody else's bytes lie there.
        peer._loop.call_later(0.5, receive, one)

    peer._receive = late
    reading = asyncio.ensure_future(client.last())
    await asyncio.sleep(0.1)
    bench.echo.kept.clear()
    await asyncio.sleep(0.3)
    gc.collect()
    assert arena_of(bench).used_bytes == 0
    other = arena_of(bench).allocate(VALUES.nbytes)
    other[:] = 7
    with pytest.raises(LookupError, match="dropped while"):
        await reading


async def test_a_client_of_a_server_without_an_arena_takes_no_place(tmp_path: Path) -> None:
    """Nor does a server from its clients: see test_rpc.py."""

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_frame(reader)
        writer.write(frame(packed("welcome", "")))
        await read_frame(reader)
        writer.write(frame(packed("reply", 1, ["uint8", [8], -1, [0, 8, 0, 0]], "", "")))

    server = await asyncio.start_unix_server(lie, tmp_path / "s.sock")
    peer = await Peer.connect(tmp_path / "s.sock", "client")
    with pytest.raises(ValueError, match="no such array"):
        await proxy(Echo, peer, "echo").last()
    await peer.close()
    server.close()


async def test_where_the_arena_is_full_everything_still_works(tmp_path: Path) -> None:
    arena = Arena(1 << 20, tmp_path / "arena")
    async with Bench(tmp_path / "s.sock", arena=arena) as bench:
        client = await bench.client()
        for i in range(6):
            await client.keep(VALUES + i)
            assert np.array_equal(await client.last(), VALUES + i)
        assert [arena.locate(a) is not None for a in bench.echo.kept] == [True, True, False, False, False, False]
        await until(lambda: bench.gone == [])
    arena.close()
