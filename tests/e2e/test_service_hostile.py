"""Clients of a service that mean no good: each is refused or cut off, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest
from fastapi import APIRouter, FastAPI, Request

from asyncflow.config import parse
from asyncflow.service.app import AuditLog, GatePaths, make_app
from asyncflow.service.hosted import HostedRun
from asyncflow.service.keys import KeyRing
from asyncflow.service.limits import Limits
from asyncflow.service.routes import STREAMED, routes
from asyncflow.service.routes.trainers import add_trainers
from asyncflow.service.server import HttpServer, Listen
from tests.depth import in_gate
from tests.patience import patience, until

QUICK = {"head_seconds": 0.5, "slowest_bytes_per_second": 10_000, "refusals_per_second": 1e6}


class Service:
    """A service in this event loop, and its keys."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.keys = KeyRing.open(folder / "keys.json", time.time)
        self.limits = Limits(**{**QUICK, **limits})
        paths, audit = GatePaths(streamed=("/stream",)), AuditLog(None)
        self.app = make_app(title="t", description="", keys=self.keys, limits=self.limits, audit=audit, paths=paths)

        @self.app.post("/echo")
        async def echo(body: dict[str, Any]) -> int:
            return len(body)

        @self.app.post("/stream")
        async def stream(request: Request) -> int:
            return sum([len(part) async for part in request.stream()])

        @self.app.get("/large")
        async def large() -> str:
            return "x" * (32 << 20)

    @property
    def secret(self) -> str:
        return self.keys.all[0].secret

    @property
    def key(self) -> bytes:
        return b"Content-Type: application/json\r\nAuthorization: Bearer " + self.secret.encode() + b"\r\n"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        server = HttpServer(self.app, Listen.parse("127.0.0.1:0"), self.limits)
        self.connections = server._server.server_state.connections
        try:
            yield int((await server.start()).rpartition(":")[2])
        finally:
            await server.stop()

    @asynccontextmanager
    async def good_client(self, port: int) -> AsyncIterator[list[float]]:
        """A client that goes on asking, and expects to be served; the seconds that each of its requests takes."""
        taken: list[float] = []

        async def ask() -> None:
            headers = {"Authorization": f"Bearer {self.secret}"}
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=patience(20)) as client:
                while True:
                    began = time.monotonic()
                    assert (await client.post("/echo", json={"a": 1})).json() == 1
                    taken.append(time.monotonic() - began)
                    await asyncio.sleep(0.01)

        task = asyncio.create_task(ask())
        try:
            yield taken
            served = len(taken)
            while len(taken) < served + 2:  # it goes on
                assert not task.done(), task.exception()
                await asyncio.sleep(0.01)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)


async def said(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """All that the service answers to some bytes, until it hangs up."""
    reader, writer = await connected(port)
    answers: list[bytes] = []

    async def read() -> None:
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(1 << 16):
                answers.append(part)

    reading = asyncio.create_task(read())
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
    await asyncio.wait_for(reading, patience(20))
    writer.close()
    return b"".join(answers)


def drips(text: bytes, seconds: float) -> list[bytes]:
    return [text[i : i + 1] for i in range(int(seconds / 0.05))]


async def test_slow_heads_bodies_and_readers_are_cut_off(tmp_path: Path) -> None:
    service = Service(tmp_path)
    async with service.serving() as port, service.good_client(port):
        head = b"POST /echo HTTP/1.1\r\nHost: x\r\n" + service.key
        nothing, slow_head, slow_body, second_head = await asyncio.gather(
            said(port),
            said(port, *drips(head * 9, 2.0), pause=0.05),
            said(port, head + b"Content-Length: 90\r\n\r\n", *drips(b"{" * 90, 2.0), pause=0.05),
            said(port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", *drips(head * 9, 2.0), pause=0.05),
        )
        assert b" 408 " in nothing and b" 408 " in slow_head and b" 408 " in slow_body
        assert b" 200 " in second_head and b" 408 " in second_head


async def test_a_client_that_does_not_read_its_answer_is_hung_up_on(tmp_path: Path) -> None:
    service = Service(tmp_path, slowest_bytes_per_second=64 << 20, head_seconds=1.5)
    async with service.serving() as port, service.good_client(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\n" + service.key + b"\r\n")
        assert await asyncio.wait_for(reader.read(1), patience(20))
        connections = service.connections
        async with asyncio.timeout(patience(20)):
            while len(connections) > 1:  # the good client's stays
                await asyncio.sleep(0.01)
        num_bytes = 1
        with contextlib.suppress(ConnectionError):
            while part := await asyncio.wait_for(reader.read(1 << 20), patience(20)):
                num_bytes += len(part)
        assert num_bytes < 32 << 20
        writer.close()


async def test_heads_that_are_too_large_and_malformed_requests_are_refused(tmp_path: Path) -> None:
    service = Service(tmp_path, head_bytes=8 << 10)
    key = service.key
    async with service.serving() as port, service.good_client(port):
        answers = await asyncio.gather(
            said(port, b"GET /" + b"a" * (64 << 10), b"a" * (64 << 10), pause=0.05),
            said(port, b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * 3000, b"X-A: b\r\n" * 3000, pause=0.05),
            said(port, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200)),
            said(port, b"GET /%00%ff%fe HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + key + b"\r\n"),
            said(port, b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n" + key + b"\r\n"),
            said(port, b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n" + key + b"\r\nhello"),
            said(port, b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + key + b"\r\nfffffffff\r\n"),
            said(port, b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n" + key + b"\r\n"),
            said(port, b"GET /echo HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade, close\r\n" + key + b"\r\n"),
            said(port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        )
    statuses = [int(answer.split(b" ")[1]) if answer.startswith(b"HTTP/1.1 ") else 0 for answer in answers]
    assert statuses[:2] in ([431, 431], [0, 431], [431, 0], [0, 0]) and all(status < 500 for status in statuses), statuses


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": "\\ud800"}',
        b"\xff\xfe",
        b"null",
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:8]),
)
async def test_malformed_bodies_are_the_clients_mistake(tmp_path: Path, body: bytes) -> None:
    service = Service(tmp_path)
    async with service.serving() as port, httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        headers = {"Authorization": f"Bearer {service.secret}", "Content-Type": "application/json"}
        answer = await client.post("/echo", content=body, headers=headers)
        assert answer.status_code < 500


async def test_clients_that_hang_up_in_the_middle_leave_nothing(tmp_path: Path) -> None:
    service = Service(tmp_path, body_bytes=1 << 20, buffered_bytes=1 << 20)
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n" + service.key + b"\r\n"
    async with service.serving() as port:
        for cut in range(0, len(head) + 4000, 97):
            _, writer = await connected(port)
            writer.write((head + b"x" * 4000)[:cut])
            await writer.drain()
            writer.transport.abort()
        async with service.good_client(port):
            answer, deadline = b"", time.monotonic() + patience(20)
            while not answer.startswith(b"HTTP/1.1 200"):  # the budget of bodies is whole again
                assert time.monotonic() < deadline, answer
                reader, writer = await connected(port)
                writer.write(head + b'{"a": "' + b"x" * (1_000_000 - 9) + b'"}')
                answer = await asyncio.wait_for(reader.readline(), patience(10))
                writer.close()


async def test_a_body_without_room_is_told_to_wait_before_it_is_read(tmp_path: Path) -> None:
    service = Service(tmp_path, body_bytes=1 << 20, buffered_bytes=1 << 20, head_seconds=20.0)
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n" + service.key + b"\r\n"
    async with service.serving() as port:
        writers = [(await connected(port)) for _ in range(3)]
        for _, writer in writers:
            writer.write(head)
        said_to = [await asyncio.wait_for(reader.readline(), patience(10)) for reader, _ in writers[1:]]
        assert all(line.startswith(b"HTTP/1.1 429") for line in said_to)
        for _, writer in writers:
            writer.close()


@pytest.mark.parametrize("count", in_gate(200, of=[200, 2000]))
async def test_connections_without_a_key_give_way(tmp_path: Path, count: int) -> None:
    """Many that say nothing: the oldest ones go, and who has a key is served all the time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if count * 2 + 200 > hard:
        pytest.skip(f"this machine allows {hard} file handles, and {count * 2 + 200} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count * 2 + 200), hard))
    service = Service(tmp_path, connections=64, head_seconds=60.0)
    try:
        async with service.serving() as port, service.good_client(port) as taken:
            held = [await connected(port) for _ in range(count)]
            await asyncio.sleep(0.5)
            alive = [reader for reader, _ in held if not reader.at_eof()]
            assert 0 < len(alive) <= 64
            for _, writer in held:
                writer.close()
        assert max(taken) < patience(5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_wrong_key_is_told_to_wait_and_a_good_one_is_not(tmp_path: Path) -> None:
    service = Service(tmp_path, refusals_per_second=1.0)
    async with service.serving() as port, service.good_client(port):
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            answers = [await client.post("/echo", json={}, headers={"X-API-Key": f"guess-{n}"}) for n in range(60)]
        statuses = {answer.status_code for answer in answers}
        waits = {answer.headers["retry-after"] for answer in answers if answer.status_code == 429}
        assert statuses == {401, 429} and waits == {"1"}  # of the 60 one a second is told that its key is wrong


def application(folder: Path, tree: dict[str, Any]) -> tuple[FastAPI, KeyRing]:
    """The routes of a run that has not begun."""
    keys = KeyRing.open(folder / "keys.json", time.time)
    limits = Limits(refusals_per_second=1e6, requests_per_second=1e6)
    paths = GatePaths(streamed=STREAMED)
    app = make_app(title="t", description="", keys=keys, limits=limits, audit=AuditLog(None), paths=paths)
    app.include_router(routes(HostedRun(parse(tree), folder / "journal"), keys))
    return app, keys


async def test_every_route_of_the_service_asks_for_a_key(tmp_path: Path, small: Any) -> None:
    app, keys = application(tmp_path, small())
    over = keys.add("over", "admin", expires=1.0)
    reads = keys.add("reads", "read")
    paths = app.openapi()["paths"]
    assert len(paths) > 20
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://run") as client:
        for path, operations in paths.items():
            url = re.sub(r"\{[^}]*\}", "1", path)
            for method in operations:
                for headers in ({}, {"X-API-Key": "af-wrong"}, {"X-API-Key": over.secret}):
                    answer = await client.request(method.upper(), url, headers=headers)
                    assert answer.status_code == (200 if path == "/health" else 401), (method, path, headers)
                if method != "get":
                    assert (await client.request(method.upper(), url, headers={"X-API-Key": reads.secret})).status_code == 403


async def test_keys_are_made_and_removed_by_who_may_and_shown_to_nobody(tmp_path: Path, small: Any) -> None:
    app, keys = application(tmp_path, small())
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://run") as client:
        admin = {"X-API-Key": keys.all[0].secret}
        made = await client.post("/v1/keys", json={"name": "guest", "scope": "drive", "expires_seconds": 60}, headers=admin)
        guest = {"X-API-Key": made.json()["secret"]}
        assert (await client.get("/v1/status", headers=guest)).status_code == 200
        for method, path in (("GET", "/v1/keys"), ("DELETE", "/v1/keys/admin")):
            assert (await client.request(method, path, headers=guest)).status_code == 403
        assert (await client.post("/v1/keys", json={"name": "own", "scope": "admin"}, headers=guest)).status_code == 403
        shown = await client.get("/v1/keys", headers=admin)
        assert [key["name"] for key in shown.json()] == ["admin", "guest"] and guest["X-API-Key"] not in shown.text
        assert (await client.delete("/v1/keys/guest", headers=admin)).status_code == 200
        assert (await client.get("/v1/status", headers=guest)).status_code == 401
        assert "the last one" in (await client.delete("/v1/keys/admin", headers=admin)).text


async def test_an_upload_that_nobody_wants_is_refused_before_it_is_read(tmp_path: Path, small: Any) -> None:
    app, keys = application(tmp_path, small())
    limits = Limits(**QUICK)
    server = HttpServer(app, Listen.parse("127.0.0.1:0"), limits)
    port = int((await server.start()).rpartition(":")[2])
    key = b"Authorization: Bearer " + keys.all[0].secret.encode() + b"\r\n"
    head = b"PUT /v1/weights/trainer-1/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n" + key + b"\r\n"
    answer = await said(port, head, b"x" * 1000, pause=0.05)
    assert b" 409 " in answer  # the run has not begun
    await server.stop()


@pytest.mark.parametrize("ends", ["hangs up", "says no more"])
async def test_an_upload_that_is_cut_off_leaves_no_file(tmp_path: Path, ends: str) -> None:
    file = tmp_path / "weights" / "upload.safetensors"
    file.parent.mkdir()
    hosted = SimpleNamespace(
        workers=SimpleNamespace(trainer=lambda name: contextlib.nullcontext()),
        most_weight_bytes=1 << 20,
        is_published=lambda step: False,
        uploading=asyncio.Lock(),
        upload_file=lambda step: file,
    )
    keys, limits, router = KeyRing.open(tmp_path / "keys.json", time.time), Limits(**QUICK), APIRouter(prefix="/v1")
    add_trainers(router, cast(HostedRun, hosted))
    app = make_app(title="t", description="", keys=keys, limits=limits, audit=AuditLog(None), paths=GatePaths(streamed=STREAMED))
    app.include_router(router)
    server = HttpServer(app, Listen.parse("127.0.0.1:0"), limits)
    reader, writer = await connected(int((await server.start()).rpartition(":")[2]))
    key = b"Authorization: Bearer " + keys.all[0].secret.encode() + b"\r\n"
    writer.write(b"PUT /v1/weights/trainer-1/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n" + key + b"\r\n" + b"x" * 1000)
    await until(file.exists)
    if ends == "hangs up":
        writer.transport.abort()
    else:
        assert b" 408 " in await asyncio.wait_for(reader.readline(), patience(20))
    await until(lambda: not hosted.uploading.locked())
    assert not file.exists()
    writer.close()
    await server.stop()
