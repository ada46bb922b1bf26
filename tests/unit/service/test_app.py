"""The gate before a web application, asked without a socket."""

from __future__ import annotations

import asyncio
import json
import re
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel, Field

from asyncflow.service import app as app_module
from asyncflow.service.app import AuditLog, CallerKey, GatePaths, make_app, needs
from asyncflow.service.keys import KeyRing
from asyncflow.service.limits import Limits
from asyncflow.service.repeats import LARGE, Repeats, WholeAnswer
from asyncflow.types import RunError, UserError


class Answer(BaseModel):
    """An answer."""

    words: list[str]
    number: int = Field(3, ge=1, description="How many.")


class World:
    """An application with a few routes, and its keys."""

    def __init__(self, folder: Path, ready: Callable[[], Awaitable[None]] | None = None, **limits: Any) -> None:
        self.keys, self.audit_file = KeyRing.open(folder / "keys.json", time.time), folder / "audit.jsonl"
        audit = AuditLog(self.audit_file)
        paths = GatePaths(streamed=("/stream",), at_once=("/stop",))
        self.app = make_app(
            title="t", description="", keys=self.keys, limits=Limits(**limits), audit=audit, paths=paths, ready=ready
        )
        self.calls = 0
        self.release = asyncio.Event()
        _add_routes(self, self.app)

    def client(self, secret: str | None = None, **headers: str) -> httpx2.AsyncClient:
        sent = {"Authorization": f"Bearer {secret}"} if secret is not None else {}
        transport = httpx2.ASGITransport(app=self.app, raise_app_exceptions=False)
        return httpx2.AsyncClient(transport=transport, base_url="http://run", headers={**sent, **headers})

    @property
    def admin(self) -> httpx2.AsyncClient:
        return self.client(self.keys.all[0].secret)

    @property
    def audited(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit_file.read_text().splitlines()]


def _add_routes(world: World, app: FastAPI) -> None:
    @app.post("/count")
    async def count() -> int:
        world.calls += 1
        return world.calls

    @app.post("/large/{name}")
    async def large(name: str, size: int) -> str:
        world.calls += 1
        return "x" * size

    @app.post("/wait")
    async def wait() -> int:
        await world.release.wait()
        world.calls += 1
        return world.calls

    @app.post("/fail")
    async def fail(kind: str) -> None:
        world.calls += 1
        raise {"user": UserError("do this instead"), "run": RunError("it has stopped")}.get(kind) or ValueError("secret detail")

    @app.post("/stop", dependencies=[needs("admin")])
    async def stop(key: CallerKey) -> str:
        return key.name

    @app.post("/echo")
    async def echo(body: dict[str, int]) -> dict[str, int]:
        return body

    @app.post("/stream")
    async def stream(request: Request) -> int:
        return sum([len(part) async for part in request.stream()])

    @app.get("/look")
    async def look() -> str:
        return "seen"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    yield World(tmp_path, body_bytes=1000, buffered_bytes=1500, streamed_bytes=4000)


async def test_no_route_without_a_valid_key_but_health(world: World) -> None:
    over = world.keys.add("over", "admin", expires=1.0)
    for secret, why in ((None, "no key"), ("af-wrong", "not known"), (over.secret, "expired"), ("", "not known")):
        async with world.client(secret) as client:
            for route in world.app.routes:
                for method in getattr(route, "methods", ()) or ():
                    answer = await client.request(method, route.path)  # type: ignore[attr-defined]
                    expected = 200 if route.path == "/health" else 401  # type: ignore[attr-defined]
                    assert answer.status_code in (expected, 429), (method, route)
            assert (await client.get("/nowhere")).status_code in (401, 429)
        world.app.middleware_stack = None  # forgets who was refused
        async with world.client(secret) as client:
            assert why in (await client.get("/look")).text
    assert world.calls == 0


async def test_scopes(world: World) -> None:
    reads, drives = world.keys.add("reads", "read"), world.keys.add("drives", "drive")
    async with world.client(reads.secret) as client:
        assert (await client.get("/look")).status_code == 200
        assert (await client.post("/count")).status_code == 403
    async with world.client(drives.secret) as client:
        assert (await client.post("/count")).json() == 1
        assert (await client.post("/stop")).status_code == 403
    async with world.admin as client:
        assert (await client.post("/stop")).json() == "admin"


async def test_a_browsers_password_looks_and_changes_nothing(world: World) -> None:
    secret = world.keys.all[0].secret
    async with world.client() as client:
        assert (await client.get("/docs", auth=("any", secret))).status_code == 200
        assert (await client.get("/openapi.json", auth=("any", secret))).status_code == 200
        assert (await client.post("/count", auth=("any", secret))).status_code == 401
        asked = await client.get("/docs")
        assert "Basic" in asked.headers["www-authenticate"]
        assert (await client.get("/docs", headers={"Authorization": "Basic !!!"})).status_code == 401


async def test_the_interface_is_a_page_that_needs_no_network(world: World) -> None:
    @world.app.get("/of/{number}", summary="<b>A look</b>", description="Says it.")
    async def of(number: int, kind: Literal["a", "b"] | None = None) -> list[Answer]:
        return []

    async with world.admin as client:
        page = await client.get("/docs")
    assert "default-src 'none'" in page.headers["content-security-policy"] and "<script" not in page.text
    linked = re.findall(r"(?:src|href|url|import|action)\s*[=(]\s*[\"']?([^\"' >)]+)", page.text)
    anchors = set(re.findall(r'id="([^"]+)"', page.text))
    assert {link for link in linked if not link.startswith("#")} == {"openapi.json"}
    assert {link[1:] for link in linked if link.startswith("#")} <= anchors
    text = " ".join(re.sub(r"<[^>]+>", " ", page.text).split())
    assert "GET /of/{number}" in text and "&lt;b&gt;A look&lt;/b&gt;" in text and "200 Successful Response list of Answer" in text
    assert "&#39;a&#39; or &#39;b&#39; or null (optional)" in text and "words list of string" in text
    assert "How many. Default: 3." in text and "integer from 1" in text and "POST /count" in text


async def test_a_repeated_request_has_one_effect(world: World) -> None:
    async with world.admin as client:
        first = await client.post("/count", headers={"Idempotency-Key": "a"})
        again = await client.post("/count", headers={"Idempotency-Key": "a"})
        assert first.json() == again.json() == 1 and again.headers["idempotency-replayed"] == "true"
        assert (await client.post("/count", headers={"Idempotency-Key": "b"})).json() == 2
        assert (await client.post("/count?x=1", headers={"Idempotency-Key": "a"})).json() == 3
        assert (await client.post("/count", headers={"Idempotency-Key": "a" * 200})).status_code == 400
    other = world.keys.add("other", "drive")
    async with world.client(other.secret) as client:
        assert (await client.post("/count", headers={"Idempotency-Key": "a"})).json() == 4


async def test_a_large_answer_is_given_again_too_and_pushes_no_small_one_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole step's experience: a trainer whose answer was lost would else have lost the groups."""
    monkeypatch.setattr(app_module, "REPEATS_BYTES", 10 * LARGE)
    world = World(tmp_path)
    async with world.admin as client:

        async def ask(path: str, own_id: str) -> httpx2.Response:
            return await client.post(path, headers={"Idempotency-Key": own_id})

        small = await ask("/count", "a")
        for name, size in (("one", 9 * LARGE), ("two", 20 * LARGE)):
            for own_id in ("b", "c"):
                first, again = [await ask(f"/large/{name}?size={size}", own_id) for _ in range(2)]
                assert first.content == again.content and again.headers["idempotency-replayed"] == "true"
        assert (await ask(f"/large/one?size={9 * LARGE}", "c")).headers["idempotency-replayed"] == "true"
        assert (await ask("/count", "a")).json() == small.json() == 1
    assert world.calls == 5


async def test_of_large_answers_the_oldest_go_and_the_newest_is_kept_whatever_its_size() -> None:
    repeats = Repeats(1000, max_large_bytes=5 * LARGE)

    async def is_kept(route: str, own_id: str, num_bytes: int) -> bool:
        """Whether a request was answered before; if not, it is now, with so many bytes."""
        request = ("key", "POST", route, "", own_id)
        if await repeats.begin(request) is not None:
            return True
        repeats.end(request, WholeAnswer({"status": 200}, bytes(num_bytes)))
        return False

    for own_id in ("1", "2"):  # two at a time of one client, each of which may be repeated
        assert not await is_kept("/a", own_id, 2 * LARGE)
    assert await is_kept("/a", "2", 0) and await is_kept("/a", "1", 0)
    assert not await is_kept("/c", "1", 2 * LARGE)
    assert await is_kept("/a", "1", 0) and await is_kept("/c", "1", 0)
    assert not await is_kept("/a", "2", 9 * LARGE)  # was the oldest; now it is the newest, and is kept though it is too large
    assert await is_kept("/a", "2", 0) and not await is_kept("/c", "1", 0)


async def test_the_body_of_a_repeated_request_is_bounded_and_not_kept(tmp_path: Path) -> None:
    world, num_bytes = World(tmp_path, streamed_bytes=32 << 20), 32 << 20

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(32):
            yield bytes(1 << 20)

    async with world.admin as client:
        headers = {"Idempotency-Key": "s", "Content-Length": str(num_bytes)}
        assert (await client.post("/stream", content=parts(), headers=headers)).json() == num_bytes
        tracemalloc.start()
        try:
            again = await client.post("/stream", content=parts(), headers=headers)
            assert tracemalloc.get_traced_memory()[1] < num_bytes / 4
        finally:
            tracemalloc.stop()
        assert again.json() == num_bytes and again.headers["idempotency-replayed"] == "true"
        headers["Content-Length"] = str(num_bytes + 1)
        assert (await client.post("/stream", content=parts(), headers=headers)).status_code == 413


async def test_a_request_that_is_repeated_while_it_is_under_way_waits_for_the_first(world: World) -> None:
    async with world.admin as client:
        both = [asyncio.create_task(client.post("/wait", headers={"Idempotency-Key": "w"})) for _ in range(2)]
        await asyncio.sleep(0.05)
        world.release.set()
        assert [(await one).json() for one in both] == [1, 1]


async def test_requests_wait_until_what_is_behind_the_gate_is_ready_but_for_those_that_are_answered_at_once(tmp_path: Path) -> None:
    ready = asyncio.Event()

    async def is_ready() -> None:
        await ready.wait()

    world = World(tmp_path, is_ready)
    async with world.admin as client, world.client() as stranger:
        counting, looking = (asyncio.create_task(each) for each in (client.post("/count"), client.get("/look")))
        assert (await client.post("/stop")).status_code == 200
        assert (await stranger.get("/look")).status_code == 401 and (await stranger.get("/health")).status_code == 200
        assert not counting.done() and not looking.done() and not world.calls
        ready.set()
        assert (await counting).json() == 1 and (await looking).status_code == 200


async def test_what_failed_may_be_tried_again_under_its_id(world: World) -> None:
    async with world.admin as client:
        for _ in range(2):
            assert (await client.post("/fail?kind=run", headers={"Idempotency-Key": "f"})).status_code == 409
    assert world.calls == 2


async def test_errors_are_one_sentence_and_tell_nothing_else(world: World) -> None:
    async with world.admin as client:
        assert (await client.post("/fail?kind=user")).json() == {"error": {"message": "do this instead"}}
        assert (await client.post("/fail?kind=run")).status_code == 409
        broken = await client.post("/fail?kind=x")
        assert broken.status_code == 500 and "secret" not in broken.text
        refused = await client.post("/echo", json={"a": "x" * 100})
        assert refused.status_code == 422 and "xxx" not in refused.text and "body.a" in refused.text


async def test_bodies_have_a_length_that_is_bounded(world: World) -> None:
    async with world.admin as client:
        assert (await client.post("/echo", content=b"x" * 1001)).status_code == 413
        assert (await client.post("/echo", json={"a": 1})).json() == {"a": 1}

        async def parts() -> Any:
            yield b"{}"

        assert (await client.post("/echo", content=parts())).status_code == 411
        assert (await client.post("/stream", content=b"x" * 3000)).json() == 3000
        assert (await client.post("/stream", content=b"x" * 4001)).status_code == 413
        assert (await client.get("/health", headers={"Content-Length": "5"})).status_code == 413


async def test_every_change_leaves_a_line_and_looking_leaves_none(world: World) -> None:
    async with world.admin as client:
        await client.get("/look")
        await client.post("/count", headers={"Idempotency-Key": "id-1"})
        await client.post("/fail?kind=user")
        await client.post("/echo", content=b"x" * 1001)
    lines = [(line["key"], line["path"], line["request"], line["status"]) for line in world.audited]
    assert lines == [("admin", "/count", "id-1", 200), ("admin", "/fail", "", 400), ("admin", "/echo", "", 413)]
    assert world.keys.all[0].secret not in world.audit_file.read_text()


async def test_rates_are_answered_with_a_time(tmp_path: Path) -> None:
    world = World(tmp_path, requests_per_second=0.5, burst=2)
    async with world.admin as client:
        answers = [await client.get("/look") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429] and int(answers[2].headers["retry-after"]) >= 1
