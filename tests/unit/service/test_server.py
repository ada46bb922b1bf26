"""Where a service may listen."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import httpx2
import pytest

from asyncflow.service.limits import Limits
from asyncflow.service.server import HttpServer, Listen, make_self_signed
from asyncflow.types import UserError


async def _answers(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def test_places_are_read_and_others_are_refused() -> None:
    assert Listen.parse("127.0.0.1:80") == Listen(None, "127.0.0.1", 80)
    assert Listen.parse("[::1]:0") == Listen(None, "::1", 0)
    assert Listen.parse("unix:/a/b") == Listen(Path("/a/b"))
    for wrong in ("", "8321", ":8321", "host:", "host:x", "host:65536", "unix:", "host:-1"):
        with pytest.raises(UserError, match="no place to listen at"):
            Listen.parse(wrong)


@pytest.mark.parametrize("place", ["0.0.0.0:0", "192.0.2.1:80", "[::]:0", "example.org:80"])
def test_an_address_that_others_reach_needs_tls(place: str) -> None:
    with pytest.raises(UserError, match="needs TLS"):
        HttpServer(_answers, Listen.parse(place), Limits())


async def test_a_unix_socket_is_its_owners_alone_and_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "own" / "run.sock"
    for _ in range(2):
        server = HttpServer(_answers, Listen(path), Limits())
        assert await server.start() == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=str(path))) as client:
            assert (await client.get("http://run/")).text == "ok"
        await server.stop()
        assert not path.exists()


async def test_a_self_signed_certificate_is_made_once_and_trusted_by_its_copy(tmp_path: Path) -> None:
    import ssl

    pem = tmp_path / "tls.pem"
    trusted = make_self_signed(pem, "127.0.0.1")
    assert make_self_signed(pem, "127.0.0.1") == trusted and stat.S_IMODE(pem.stat().st_mode) == 0o600
    assert "PRIVATE" not in trusted.read_text()
    server = HttpServer(_answers, Listen.parse("127.0.0.1:0"), Limits(), pem)
    address = await server.start()
    assert address.startswith("https://127.0.0.1:")
    async with httpx2.AsyncClient(verify=ssl.create_default_context(cafile=str(trusted))) as client:
        assert (await client.get(address)).text == "ok"
    async with httpx2.AsyncClient() as client:
        with pytest.raises(httpx2.ConnectError):
            await client.get(address)
    await server.stop()


async def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    first = HttpServer(_answers, Listen.parse("127.0.0.1:0"), Limits())
    port = (await first.start()).rpartition(":")[2]
    with pytest.raises(UserError, match=f"nothing can listen at 127.0.0.1:{port}"):
        await HttpServer(_answers, Listen.parse(f"127.0.0.1:{port}"), Limits()).start()
    await first.stop()
