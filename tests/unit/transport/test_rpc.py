"""Requests and frames over a real socket: what crosses, what is refused, and who pays for a bad frame."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from asyncflow.transport import ConnectionLost, FrameLimits, Peer, RemoteError, Server, proxy, remote
from asyncflow.transport.codec import DTYPES
from asyncflow.transport.frames import MAGIC, PREFIX
from asyncflow.types import RunError, UserError
from tests.unit.transport.bench import HELLO, Bench, Echo, Parcel, StaleParcel, frame, packed, read_frame, request, until


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with Bench(tmp_path / "s.sock") as made:
        yield made


@pytest.mark.parametrize("dtype", sorted(DTYPES))
async def test_arrays_travel_bitwise(bench: Bench, dtype: str) -> None:
    client = await bench.client()
    values = np.frombuffer(np.random.default_rng(0).bytes(8 * 1001), dtype) if dtype != "bool" else np.arange(1001) % 3 == 0
    strided, empty = values[::-3], np.empty(0, dtype)
    shaped = [values[:1000].reshape(5, 10, 20), values[:16].reshape(2, 2, 2, 2).T, values[:1].reshape(()), empty.reshape(0, 3)]
    more = [strided, empty, *shaped]
    back = await client.echo(Parcel("x", values, more))
    for sent, received in zip([values, *more], [back.values, *back.more], strict=True):
        assert received.dtype == sent.dtype and received.shape == sent.shape and received.tobytes() == sent.tobytes()
        assert received.flags.writeable and received.flags.aligned


async def test_a_large_array_travels_whole(bench: Bench) -> None:
    values = np.arange(1_500_000)
    back = await (await bench.client()).echo(Parcel("x", values, [values[:5]]))
    assert np.array_equal(back.values, values) and back.more[0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("values", [np.zeros((1, 1, 1, 1, 2)), np.zeros(2, ">i8"), np.zeros(2, complex), np.array(["a"])])
async def test_an_array_that_would_arrive_as_another_is_refused_where_it_is_sent(bench: Bench, values: np.ndarray) -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        await (await bench.client()).echo(Parcel("x", values))


async def test_an_answer_that_cannot_be_sent_is_an_error_at_the_caller(bench: Bench) -> None:
    with pytest.raises(RemoteError, match=r"echo\.matrix failed: TypeError: an array of 5 dimensions"):
        await asyncio.wait_for((await bench.client()).matrix(), 2)


async def test_numpy_numbers_arrive_as_numbers_and_a_default_argument_must_be_given(bench: Bench) -> None:
    client = await bench.client()
    assert await client.add(np.int64(2), 3) == 5  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of length 2, got 1"):
        await client.add(2)


@pytest.mark.parametrize("error", [UserError, RunError, StaleParcel, ValueError, TimeoutError])
async def test_the_exceptions_of_a_contract_cross_as_themselves(bench: Bench, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        await (await bench.client()).fail(error.__name__)
    assert type(caught.value) is error and str(caught.value) == f"a {error.__name__}"


async def test_a_subclass_crosses_as_the_nearest_that_may(bench: Bench) -> None:
    with pytest.raises(ValueError, match="a UnicodeError") as caught:
        await (await bench.client()).fail("UnicodeError")
    assert type(caught.value) is ValueError


async def test_other_exceptions_arrive_as_one_that_names_service_method_and_error(bench: Bench) -> None:
    with pytest.raises(RemoteError, match=r"^echo\.fail failed: ZeroDivisionError: a ZeroDivisionError$"):
        await (await bench.client()).fail("ZeroDivisionError")


class Impostor:
    """An interface that the service does not have."""

    @remote
    async def absent(self) -> int: ...  # type: ignore[empty-body]

    @remote
    async def private(self) -> int: ...  # type: ignore[empty-body]

    @remote
    async def add(self, a: str, b: int) -> int: ...  # type: ignore[empty-body]

    @remote
    async def who(self) -> int: ...  # type: ignore[empty-body]


async def test_what_is_not_served_is_refused(bench: Bench) -> None:
    peer = await bench.peer()
    with pytest.raises(LookupError, match="no service 'other'"):
        await proxy(Echo, peer, "other").who()
    impostor = proxy(Impostor, peer, "echo")
    with pytest.raises(LookupError, match="no remote method 'absent'"):
        await impostor.absent()
    with pytest.raises(LookupError, match="no remote method 'private'"):
        await impostor.private()
    assert not hasattr(proxy(Echo, peer, "echo"), "private")


async def test_arguments_and_answers_of_another_type_are_refused(bench: Bench) -> None:
    impostor = proxy(Impostor, await bench.peer(), "echo")
    with pytest.raises(ValueError, match="Expected `int`, got `str`"):
        await impostor.add("one", 2)
    with pytest.raises(ValueError, match="Expected `int`, got `str`"):
        await impostor.who()


async def test_a_handler_knows_who_asks(bench: Bench) -> None:
    one, two = await bench.client("one"), await bench.client("two")
    assert await asyncio.gather(one.who(), two.who()) == ["one", "two"]


async def test_many_requests_are_answered_in_any_order(bench: Bench) -> None:
    client, order = await bench.client(), list[float]()

    async def ask(seconds: float) -> None:
        assert await client.after(seconds) == seconds
        order.append(seconds)

    waits = [0.12, 0.06, 0.0]
    await asyncio.gather(*(ask(seconds) for seconds in waits), *(client.add(i, i) for i in range(300)))
    assert order == sorted(waits)
    assert await asyncio.gather(*(client.add(i, 1) for i in range(300))) == list(range(1, 301))


async def test_a_parked_request_dies_with_its_connection_and_its_client_is_named(bench: Bench) -> None:
    await bench.client("other")
    parked = asyncio.create_task((await bench.client("leaver")).park())
    await until(lambda: bench.echo.parked == 1)
    await bench.peers[1].close()
    await until(lambda: bench.echo.cancelled == 1 and bench.gone == ["leaver"])
    with pytest.raises(ConnectionLost, match="closed on this side"):
        await asyncio.wait_for(parked, 1)


async def test_a_parked_request_dies_with_its_caller(bench: Bench) -> None:
    """As it does when caller and service are in one process."""
    client = await bench.client()
    parked = asyncio.create_task(client.park())
    await until(lambda: bench.echo.parked == 1)
    parked.cancel()
    await until(lambda: bench.echo.cancelled == 1)
    assert await client.add(1, 1) == 2 and bench.gone == []


async def test_after_the_server_has_gone_requests_fail_and_none_hangs(bench: Bench) -> None:
    client = await bench.client()
    parked = asyncio.create_task(client.park())
    await until(lambda: bench.echo.parked == 1)
    await bench.server.close()
    with pytest.raises(ConnectionLost, match=str(bench.path)):
        await asyncio.wait_for(parked, 1)
    with pytest.raises(ConnectionLost):
        await asyncio.wait_for(client.add(1, 1), 1)
    with pytest.raises(ConnectionLost, match="nothing answers"):
        await Peer.connect(bench.path, "late", timeout_seconds=1)


async def test_after_closing_requests_fail_and_none_hangs(bench: Bench) -> None:
    client = await bench.client()
    await bench.peers[0].close()
    with pytest.raises(ConnectionLost, match="closed on this side"):
        await asyncio.wait_for(client.add(1, 1), 1)


async def test_nobody_there_is_said_with_the_address(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost, match=r"absent\.sock"):
        await Peer.connect(tmp_path / "absent.sock", "client")


REQUEST = request(1, "who")
BAD_FRAMES = {
    "magic": frame(b"", magic=b"HTTP"),
    "header above the limit": PREFIX.pack(MAGIC, FrameLimits().header_bytes + 1, 0, 0),
    "buffers above the limit": PREFIX.pack(MAGIC, 1, FrameLimits().buffers + 1, 0),
    "body above the limit": PREFIX.pack(MAGIC, 1, 1, FrameLimits().body_bytes + 1),
    "lengths that do not add up": frame(REQUEST, b"abc", body=16),
    "lengths above the body": PREFIX.pack(MAGIC, len(REQUEST), 2, 8) + struct.pack("<2Q", 2**63, 2**63 + 8) + REQUEST,
    "no msgpack": frame(b"\xc1"),
    "trailing bytes": frame(packed("hello", "x") + b"x"),
    "unknown message": frame(packed("eval", "1")),
    "no UTF-8": frame(b"\x92\xa5hello\xa1\xff"),
    "too deep": frame(b"\x95\xa7request\x01\xa1s\xa1m" + b"\x91" * 100_000),
    "a second hello": HELLO,
    "a reply": frame(packed("reply", 1, None, "", "")),
    "cut short": frame(b"abcdef")[:-2],
}


@pytest.mark.parametrize("kind", [*BAD_FRAMES, *(f"ungreeted, {kind}" for kind in BAD_FRAMES if kind != "a second hello")])
async def test_a_bad_frame_costs_its_sender_the_connection_and_nobody_else(bench: Bench, kind: str) -> None:
    greeted, kind = not kind.startswith("ungreeted"), kind.removeprefix("ungreeted, ")
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    other = await bench.client("other")
    parked = asyncio.create_task(other.park())
    await until(lambda: bench.echo.parked == 1)
    reader, writer = await bench.rude(is_greeted=greeted)
    writer.write(BAD_FRAMES[kind])
    if kind == "cut short":
        writer.write_eof()
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 2) == b""
    writer.close()
    await until(lambda: bench.gone == (["rude"] if greeted else []))
    bench.echo.gate.set()
    assert await asyncio.wait_for(parked, 1) == 7
    assert await other.add(2, 2) == 4
    await asyncio.sleep(0)
    assert errors == []


async def test_a_reference_to_an_array_that_is_not_in_the_frame_is_refused(bench: Bench) -> None:
    reader, writer = await bench.rude()
    references = {
        "no such buffer": ["int64", [1], 3],
        "a buffer below": ["int64", [1], -2],
        "no dtype": ["object", [1], 0],
        "too few bytes": ["int64", [1], 1],
        "too many bytes": ["uint8", [2], 1],
        "negative": ["uint8", [-1, -8], 0],
        "an overflow": ["uint8", [1 << 32, 1 << 32, 8], 0],
        "huge and empty": ["uint8", [0, 1 << 62], 2],
        "too many dimensions": ["uint8", [8, 1, 1, 1, 1], 0],
        "no shape": ["uint8", 8, 0],
        "a place in an arena": ["uint8", [8], -1, [0, 8, 0, 0]],
    }
    for i, reference in enumerate(references.values()):
        writer.write(frame(request(i, "echo", {"name": "x", "values": reference}), bytes(8), b"abc", b""))
    for i in range(len(references)):
        reply = await asyncio.wait_for(read_frame(reader), 1)
        assert (reply[0], reply[1], reply[3]) == ("reply", i, "ValueError")
    writer.write(frame(request(99, "echo", {"name": "x", "values": ["uint8", [2, 1, 4], 0]}), bytes(8), b"abc"))
    reply = await asyncio.wait_for(read_frame(reader), 1)
    assert reply[2] == {"name": "x", "values": ["uint8", [2, 1, 4], 0, None], "more": []}
    writer.close()


async def test_a_garbled_answer_ends_the_connection_and_its_requests(tmp_path: Path) -> None:
    async def garble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_frame(reader)
        writer.write(frame(packed("welcome", "")))
        await read_frame(reader)
        writer.write(BAD_FRAMES["no UTF-8"])

    server = await asyncio.start_unix_server(garble, tmp_path / "s.sock")
    peer = await Peer.connect(tmp_path / "s.sock", "client")
    with pytest.raises(ConnectionLost):
        await asyncio.wait_for(proxy(Echo, peer, "echo").who(), 2)
    await peer.close()
    server.close()


async def test_what_is_above_the_limits_is_refused_where_it_is_sent(tmp_path: Path) -> None:
    limits = FrameLimits(header_bytes=1000, body_bytes=1000, buffers=2)
    async with Bench(tmp_path / "s.sock", limits) as bench:
        client, free = await bench.client(limits=limits), await bench.client()
        with pytest.raises(ValueError, match="above the limits"):
            await client.echo(Parcel("x", np.zeros(1001, np.uint8)))
        with pytest.raises(ValueError, match="above the limits"):
            await client.echo(Parcel("x", np.zeros(1), [np.zeros(1)] * 2))
        with pytest.raises(ValueError, match="above the limits"):
            await client.echo(Parcel("x" * 1000, np.zeros(1)))
        with pytest.raises(ValueError, match="above the limits"):  # by the server, of its own answer
            await asyncio.wait_for(free.zeros(1001), 2)
        assert len(await client.zeros(1000)) == 1000 and not bench.gone


async def test_the_socket_is_private_and_replaces_a_stale_one(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    path.write_text("left by a run that was killed")
    before = os.umask(0o022)
    server = Server({"echo": Echo()})
    try:
        await server.start(path)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_ISSOCK(path.stat().st_mode)
    await server.close()


async def test_a_socket_may_lie_below_a_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    bench = Bench(folder / "s.sock")
    await bench.server.start(bench.path)
    assert bench.path.exists()
    assert await (await bench.client()).add(1, 2) == 3
    await bench.peers[0].close()
    await bench.server.close()


async def test_a_server_opens_several_doors_and_gains_services(tmp_path: Path) -> None:
    async with Bench(tmp_path / "s.sock") as bench:
        second = await bench.server.start(f"unix:{tmp_path / 't.sock'}")
        assert second == f"unix:{tmp_path / 't.sock'}"
        peer = await Peer.connect(second, "late")
        bench.server.services["more"] = Echo()
        assert await proxy(Echo, peer, "more").who() == "late"
        await peer.close()


@pytest.mark.parametrize(
    "address", ["", "/tmp/x", "unix:", "tls:", "tls:host", "tls::1", "tls:host:x", "tls:host:70000", "tcp:host:1"]
)
async def test_what_is_no_address_is_said(address: str) -> None:
    with pytest.raises(UserError, match="is neither unix:"):
        await Server({}).start(address)
    with pytest.raises(UserError, match="is neither unix:"):
        await Peer.connect(address, "client")


async def test_without_a_welcome_there_is_no_connection(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    server = await asyncio.start_unix_server(silent, tmp_path / "s.sock")
    with pytest.raises(ConnectionLost, match=r"s\.sock: no welcome in time"):
        await Peer.connect(tmp_path / "s.sock", "client", timeout_seconds=0.1)
    server.close()


async def test_nothing_is_served_before_the_hello(bench: Bench) -> None:
    reader, writer = await bench.rude(is_greeted=False)
    writer.write(frame(request(1, "who")))
    assert await asyncio.wait_for(reader.read(), 2) == b"" and bench.gone == []
    writer.close()


async def test_a_future_that_is_done_is_answered_without_a_task(bench: Bench) -> None:
    one, two = await bench.client("one"), await bench.client("two")
    assert await asyncio.gather(*(c.who_at_once() for c in (one, two, one))) == ["one", "two", "one"]
    assert bench.echo.tasks_seen == [None] * 3  # called, and answered, in the callback that received it
    made: list[object] = []
    asyncio.get_running_loop().set_task_factory(
        lambda loop, *args, **options: made.append(args) or asyncio.Task(*args, loop=loop, **options)
    )
    assert await one.who_at_once() == "one" and made == []
    assert await one.who() == "one" and len(made) == 1
    for is_inside in (False, True):
        with pytest.raises(ValueError, match="future"):
            await one.fail_at_once(is_inside)


async def test_a_pending_future_is_answered_when_it_is_done(bench: Bench) -> None:
    client = await bench.client()
    asked = [asyncio.ensure_future(client.later()) for _ in range(3)]
    await until(lambda: len(bench.echo.futures) == 3)
    bench.echo.futures[2].set_result(2)
    assert await asked[2] == 2 and not asked[0].done()
    asked[0].cancel()
    await until(bench.echo.futures[0].cancelled)
    assert not bench.echo.futures[1].done()
    bench.echo.futures[1].cancel()  # by its service: its caller must not wait for ever
    with pytest.raises(RemoteError, match="cancelled by its service"):
        await asyncio.wait_for(asked[1], 1)


async def test_a_pending_future_dies_with_its_connection(bench: Bench) -> None:
    asked = asyncio.ensure_future((await bench.client()).later())
    await until(lambda: len(bench.echo.futures) == 1)
    await bench.peers[0].close()
    await until(bench.echo.futures[0].cancelled)
    with pytest.raises(ConnectionLost):
        await asked


async def test_a_method_that_is_no_coroutine_must_say_what_it_promises(bench: Bench) -> None:
    class Plain:
        @remote  # type: ignore[type-var]
        def number(self) -> int:
            return 1

    bench.server.services["plain"] = Plain()
    with pytest.raises(TypeError, match="no coroutine and not annotated"):
        await proxy(Plain, await bench.peer(), "plain").number()  # type: ignore[misc]


async def test_a_peer_knows_when_it_is_lost(bench: Bench) -> None:
    peer = await bench.peer()
    waiting = asyncio.create_task(peer.wait_lost())
    await asyncio.sleep(0.01)
    assert not peer.is_lost and not waiting.done()
    await bench.server.close()
    await asyncio.wait_for(waiting, 1)
    assert peer.is_lost and bench.gone == ["client"]


async def test_stored_arrays_are_read_only(bench: Bench) -> None:
    client = await bench.client()
    for size in (10, 100_000):
        assert await client.keep(np.zeros(size)) is False
        with pytest.raises(ValueError, match="read-only"):
            bench.echo.kept[-1][0] = 1
        assert (await client.last()).flags.writeable
