"""Requests and frames over a real socket: what crosses, what is refused, and who pays for a bad frame."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow import transport
from asyncflow.transfer_queue.table import StaleToken
from asyncflow.transport import MAGIC, PREFIX, ConnectionLost, Peer, RemoteError, Server, client_name, proxy, remote
from asyncflow.types import RunError, UserError


class Parcel(msgspec.Struct):
    name: str
    values: np.ndarray
    more: list[np.ndarray] = []


class Echo:
    """A service with a method for everything that can happen."""

    def __init__(self) -> None:
        self.parked = self.cancelled = 0
        self.gate = asyncio.Event()

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
        errors = [UserError, RunError, StaleToken, ValueError, TimeoutError, ZeroDivisionError, UnicodeError]
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
    async def matrix(self) -> np.ndarray:
        return np.zeros((2, 2))

    @remote
    async def zeros(self, count: int) -> np.ndarray:
        return np.zeros(count, np.uint8)

    async def private(self) -> int:
        return 1


class Bench:
    """A server with one service, and its clients."""

    def __init__(self, path: Path) -> None:
        self.path, self.echo, self.gone = path, Echo(), list[str]()
        self.server = Server({"echo": self.echo}, self.gone.append)
        self.peers: list[Peer] = []

    async def peer(self, name: str = "client") -> Peer:
        self.peers.append(await Peer.connect(self.path, name, timeout_seconds=2))
        return self.peers[-1]

    async def client(self, name: str = "client") -> Echo:
        return proxy(Echo, await self.peer(name), "echo")


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path / "s.sock")
    await made.server.start(made.path)
    yield made
    for peer in made.peers:
        await peer.close()
    await made.server.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(2):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("dtype", sorted(transport.ARRAY_DTYPES))
async def test_arrays_travel_bitwise(bench: Bench, dtype: str) -> None:
    client = await bench.client()
    values = np.frombuffer(np.random.default_rng(0).bytes(8 * 1001), dtype) if dtype != "bool" else np.arange(1001) % 3 == 0
    strided, empty = values[::-3], np.empty(0, dtype)
    back = await client.echo(Parcel("x", values, [strided, empty]))
    for sent, received in zip([values, strided, empty], [back.values, *back.more], strict=True):
        assert received.dtype == sent.dtype and received.shape == sent.shape and received.tobytes() == sent.tobytes()


async def test_a_large_array_travels_whole(bench: Bench) -> None:
    values = np.arange(1_500_000)
    back = await (await bench.client()).echo(Parcel("x", values, [values[:5]]))
    assert np.array_equal(back.values, values) and back.more[0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("values", [np.zeros((2, 3)), np.zeros(()), np.zeros(2, "float16"), np.zeros(2, ">i8")])
async def test_an_array_that_would_arrive_as_another_is_refused_where_it_is_sent(bench: Bench, values: np.ndarray) -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        await (await bench.client()).echo(Parcel("x", values))


async def test_an_answer_that_cannot_be_sent_is_an_error_at_the_caller(bench: Bench) -> None:
    with pytest.raises(RemoteError, match=r"echo\.matrix failed: TypeError: an array of 2 dimensions"):
        await asyncio.wait_for((await bench.client()).matrix(), 2)


async def test_numpy_numbers_arrive_as_numbers_and_a_default_argument_must_be_given(bench: Bench) -> None:
    client = await bench.client()
    assert await client.add(np.int64(2), 3) == 5  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of length 2, got 1"):
        await client.add(2)


@pytest.mark.parametrize("error", [UserError, RunError, StaleToken, ValueError, TimeoutError])
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
    with pytest.raises(ConnectionLost, match="nobody answers"):
        await Peer.connect(bench.path, "late", timeout_seconds=1)


async def test_after_closing_requests_fail_and_none_hangs(bench: Bench) -> None:
    client = await bench.client()
    await bench.peers[0].close()
    with pytest.raises(ConnectionLost, match="closed on this side"):
        await asyncio.wait_for(client.add(1, 1), 1)


async def test_nobody_there_is_said_with_the_address(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost, match=r"absent\.sock"):
        await Peer.connect(tmp_path / "absent.sock", "client")


def frame(header: bytes, *buffers: bytes, magic: bytes = MAGIC, body: int | None = None, count: int | None = None) -> bytes:
    sizes = [len(b) for b in buffers]
    prefix = PREFIX.pack(magic, len(header), len(buffers) if count is None else count, sum(sizes) if body is None else body)
    return prefix + struct.pack(f"<{len(sizes)}Q", *sizes) + header + b"".join(buffers)


HELLO = frame(msgspec.msgpack.encode({"type": "hello", "name": "rude"}))
REQUEST = msgspec.msgpack.encode({"type": "request", "id": 1, "service": "echo", "method": "who", "arguments": []})
BAD_FRAMES = {
    "magic": frame(b"", magic=b"HTTP"),
    "header above the limit": PREFIX.pack(MAGIC, transport.MAX_HEADER_BYTES + 1, 0, 0),
    "buffers above the limit": PREFIX.pack(MAGIC, 1, transport.MAX_BUFFERS + 1, 0),
    "body above the limit": PREFIX.pack(MAGIC, 1, 1, transport.MAX_BODY_BYTES + 1),
    "lengths that do not add up": frame(REQUEST, b"abc", body=4),
    "lengths above the body": PREFIX.pack(MAGIC, len(REQUEST), 2, 6) + struct.pack("<2Q", 2**63, 2**63 + 6) + REQUEST,
    "no msgpack": frame(b"\xc1"),
    "trailing bytes": frame(msgspec.msgpack.encode({"type": "hello", "name": "x"}) + b"x"),
    "unknown message": frame(msgspec.msgpack.encode({"type": "eval", "code": "1"})),
    "no UTF-8": frame(b"\x82\xa4type\xa5hello\xa4name\xa1\xff"),
    "too deep": frame(b"\x82\xa4type\xa7request\xa9arguments" + b"\x91" * 100_000),
    "a second hello": HELLO,
    "a reply": frame(msgspec.msgpack.encode({"type": "reply", "id": 1})),
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
    reader, writer = await asyncio.open_unix_connection(bench.path)
    writer.write((HELLO if greeted else b"") + BAD_FRAMES[kind])
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


async def test_limits_are_checked_before_anything_is_allocated_or_awaited() -> None:
    """Nothing follows the prefix: a reader that believed it would wait for it."""
    for kind in ("header above the limit", "buffers above the limit", "body above the limit"):
        reader = asyncio.StreamReader()
        reader.feed_data(BAD_FRAMES[kind])
        with pytest.raises(ConnectionLost, match="limits"):
            await asyncio.wait_for(transport._read_frame(reader), 0.5)


async def test_a_reference_to_an_array_that_is_not_in_the_frame_is_refused(bench: Bench) -> None:
    reader, writer = await asyncio.open_unix_connection(bench.path)
    references = [["int64", 2], ["int64", -2], ["object", 0], ["int64", 1]]  # the last is of 3 bytes
    for i, reference in enumerate(references):
        arguments = msgspec.Raw(msgspec.msgpack.encode([{"name": "x", "values": reference}]))
        request = {"type": "request", "id": i, "service": "echo", "method": "echo", "arguments": arguments}
        writer.write((HELLO if i == 0 else b"") + frame(msgspec.msgpack.encode(request), bytes(8), b"abc"))
    for i in range(len(references)):
        reply, _ = await asyncio.wait_for(transport._read_frame(reader), 1)
        assert isinstance(reply, transport._Reply) and (reply.id, reply.error) == (i, "ValueError")
    writer.close()


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.binary(max_size=60) | st.binary(max_size=40).map(lambda tail: frame(b"\x82\xa4type\xa7request" + tail)))
def test_any_bytes_are_a_message_or_a_lost_connection(content: bytes) -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(content)
        reader.feed_eof()
        with contextlib.suppress(ConnectionLost):
            await transport._read_frame(reader)

    asyncio.run(read())


async def test_a_garbled_answer_ends_the_connection_and_its_requests(tmp_path: Path) -> None:
    async def garble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(BAD_FRAMES["no UTF-8"])

    server = await asyncio.start_unix_server(garble, tmp_path / "s.sock")
    peer = await Peer.connect(tmp_path / "s.sock", "client")
    with pytest.raises(ConnectionLost):
        await asyncio.wait_for(proxy(Echo, peer, "echo").who(), 2)
    await peer.close()
    server.close()


async def test_what_is_above_the_limits_is_refused_where_it_is_sent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await bench.client()
    monkeypatch.setattr(transport, "MAX_BODY_BYTES", 1000)
    with pytest.raises(ValueError, match="above the limits"):
        await client.echo(Parcel("x", np.zeros(1001, np.uint8)))
    with pytest.raises(ValueError, match="above the limits"):  # by the server, of its own answer
        await asyncio.wait_for(client.zeros(1001), 2)
    monkeypatch.setattr(transport, "MAX_BUFFERS", 2)
    with pytest.raises(ValueError, match="above the limits"):
        await client.echo(Parcel("x", np.zeros(1), [np.zeros(1)] * 2))
    assert len(await client.zeros(1000)) == 1000


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
