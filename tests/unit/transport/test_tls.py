"""Doors that other machines can reach: only who has the run's key gets in."""

from __future__ import annotations

import asyncio
import socket
import ssl
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from asyncflow.transport import ConnectionLost, Credentials, FrameLimits, Peer, Server, proxy
from asyncflow.types import UserError
from tests.unit.transport.bench import HELLO, Bench, Echo, Parcel, frame, packed, read_frame, request, until


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return tmp_path / "key.pem"


@pytest.fixture
def credentials(key: Path) -> Credentials:
    return Credentials.create(key)


@pytest.fixture
async def bench(tmp_path: Path, credentials: Credentials) -> AsyncIterator[Bench]:
    limits = FrameLimits(unsent_bytes=1_000_000, hello_seconds=1.0)
    async with Bench(tmp_path / "s.sock", limits, credentials=credentials) as made:
        yield made


@pytest.fixture
async def address(bench: Bench) -> str:
    return await bench.server.start("tls:127.0.0.1:0")


async def test_both_doors_lead_to_the_same_services(bench: Bench, address: str, credentials: Credentials) -> None:
    assert address.startswith("tls:127.0.0.1:") and not address.endswith(":0")
    far = proxy(Echo, await Peer.connect(address, "far", credentials=credentials), "echo")
    near = await bench.client("near")
    assert await asyncio.gather(far.who(), near.who(), far.who_at_once()) == ["far", "near", "far"]


async def test_both_ends_have_the_kernel_ask_for_a_machine_that_says_nothing(
    bench: Bench, address: str, credentials: Credentials
) -> None:
    peer = await Peer.connect(address, "far", credentials=credentials)
    (connection,) = bench.server._state.connections
    for stream in (peer._stream, connection._stream):
        assert stream is not None and stream._transport is not None
        sock = stream._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000  # also of what it has been sent


async def test_large_arrays_travel_whole_and_many_requests_side_by_side(
    bench: Bench, address: str, credentials: Credentials
) -> None:
    peer = await Peer.connect(address, "far", credentials=credentials, limits=FrameLimits(unsent_bytes=1_000_000))
    far, values = proxy(Echo, peer, "echo"), np.random.default_rng(0).integers(0, 1 << 62, 400_000)
    for back in await asyncio.gather(*(far.echo(Parcel("x", values, [values[:i]])) for i in range(8))):
        assert np.array_equal(back.values, values) and back.values.flags.writeable
    assert await asyncio.gather(*(far.add(i, 1) for i in range(500))) == list(range(1, 501))
    await peer.close()
    await until(lambda: bench.gone == ["far"])


async def test_a_client_that_reads_nothing_is_held_up(bench: Bench, address: str, credentials: Credentials) -> None:
    peer = await Peer.connect(address, "far", credentials=credentials)
    assert peer._stream is not None
    peer._stream.set_reading(False)
    far = proxy(Echo, peer, "echo")
    asked = [asyncio.ensure_future(far.zeros(1_000_000)) for _ in range(40)]
    await asyncio.sleep(0.5)
    (connection,) = bench.server._state.connections
    assert connection._stream is not None and connection._stream.is_full
    peer._stream.set_reading(True)
    assert sum(map(len, await asyncio.wait_for(asyncio.gather(*asked), 10))) == 40_000_000
    await peer.close()


async def refused(address: str, context: ssl.SSLContext | None) -> None:
    """Neither a handshake that seems to succeed nor bytes without one lead to an answer."""
    host, port = address.removeprefix("tls:").split(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        writer.write(HELLO + frame(request(1, "who")))
        assert not (await asyncio.wait_for(reader.read(), 3)).count(b"welcome")
        writer.close()
    except (ssl.SSLError, ConnectionError):
        pass


async def test_who_has_not_the_key_does_not_get_in(
    bench: Bench, address: str, credentials: Credentials, key: Path, tmp_path: Path
) -> None:
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    other = Credentials.create(tmp_path / "other.pem")
    with pytest.raises(ConnectionLost, match=address):
        await Peer.connect(address, "stranger", credentials=other, timeout_seconds=3)
    careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
    await refused(address, careless)  # no certificate
    careless.load_cert_chain(tmp_path / "other.pem")
    await refused(address, careless)  # another run's
    await refused(address, None)  # no TLS
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode, old.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2
    old.load_cert_chain(key)
    await refused(address, old)  # the run's key, but an older protocol
    far = proxy(Echo, await Peer.connect(address, "far", credentials=credentials), "echo")
    assert await far.who() == "far" and bench.gone == []
    await until(lambda: len(bench.server._state.connections) == 1)
    assert errors == []


async def test_a_client_does_not_trust_another_server(bench: Bench, credentials: Credentials, tmp_path: Path) -> None:
    server = Server({"echo": Echo()}, credentials=Credentials.create(tmp_path / "other.pem"))
    address = await server.start("tls:127.0.0.1:0")
    with pytest.raises(ConnectionLost, match=f"nothing answers at {address}.*certificate"):
        await Peer.connect(address, "client", credentials=credentials, timeout_seconds=3)
    await server.close()


async def test_a_connection_that_has_the_key_and_says_nothing_is_not_waited_for(
    bench: Bench, address: str, credentials: Credentials
) -> None:
    host, port = address.removeprefix("tls:").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=credentials.client_context, server_hostname="x")
    assert await asyncio.wait_for(reader.read(), 4) == b""
    writer.close()


async def test_a_bad_frame_ends_a_tls_connection_too(bench: Bench, address: str, credentials: Credentials) -> None:
    host, port = address.removeprefix("tls:").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=credentials.client_context, server_hostname="x")
    writer.write(frame(packed("hello", "rude")))
    assert await read_frame(reader) == ["welcome", ""]
    writer.write(b"GET / HTTP/1.1\r\n\r\n" * 3)
    assert await asyncio.wait_for(reader.read(), 2) == b""
    await until(lambda: bench.gone == ["rude"])
    writer.close()


async def test_a_routable_address_needs_credentials() -> None:
    with pytest.raises(UserError, match="needs credentials"):
        await Server({}).start("tls:127.0.0.1:0")
    with pytest.raises(UserError, match="needs credentials"):
        await Peer.connect("tls:127.0.0.1:1", "client")


def test_the_key_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    Credentials.create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = path.read_bytes()
    with pytest.raises(UserError, match="cannot be written"):
        Credentials.create(path)
    assert path.read_bytes() == content
    Credentials.load(path)
    for mode in (0o640, 0o604, 0o620, 0o601):
        path.chmod(mode)
        with pytest.raises(UserError, match="chmod 600"):
            Credentials.load(path)
    with pytest.raises(UserError, match="cannot be read"):
        Credentials.load(tmp_path / "absent")
    path.chmod(0o600)
    path.write_text("no key")
    with pytest.raises(UserError, match="holds no credentials"):
        Credentials.load(path)
