"""The client of a service: what it repeats, and what it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from asyncflow import repeated_requests
from asyncflow.client import AsyncClient, AsyncTrainerWorker, Client, read_key
from asyncflow.service.experience import columns_of
from asyncflow.types import RunError, UserError
from tests.patience import patience

Handler = Callable[[web.Request], Awaitable[web.Response]]


@asynccontextmanager
async def client_of(handler: Handler, patience_seconds: float = 5.0) -> AsyncIterator[AsyncClient]:
    """Client of a service that answers so, on loopback."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with (
        TestServer(app) as server,
        AsyncClient(str(server.make_url("")), "af-1", patience_seconds=patience_seconds) as client,
    ):
        yield client


def lost(request: web.Request) -> web.Response:
    """No answer: the connection is gone."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def error(status: int, why: str, **headers: str) -> web.Response:
    """Refusal, as the service words it."""
    return web.json_response(
        {"error": {"message": why}}, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


async def test_a_request_whose_answer_was_lost_is_repeated_under_its_id() -> None:
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer af-1" and request.method == "POST"
        seen.append(request.headers["Idempotency-Key"])
        if len(seen) == 1:
            return lost(request)
        return error(429, "busy", Retry_After="0") if len(seen) == 2 else web.json_response({"version": 7})

    async with client_of(handler) as client:
        assert await client.checkpoint() == 7 and len(seen) == 3 and len(set(seen)) == 1


async def test_patience_begins_with_the_first_failure_and_not_with_the_request() -> None:
    """A step takes minutes: a server that is started again meanwhile answers the request when it comes again."""
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.headers["Idempotency-Key"])
        if len(seen) > 1:
            return web.json_response({"version": 7})
        await asyncio.sleep(2 * patience_seconds)
        return lost(request)

    patience_seconds = 1.0
    async with client_of(handler, patience_seconds) as client:
        assert await client.checkpoint() == 7 and len(seen) == 2 and len(set(seen)) == 1


async def test_a_service_that_says_nothing_is_asked_a_second_time_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async def silent(request: web.Request) -> web.Response:
        seen.append(request.headers["Idempotency-Key"])
        await asyncio.sleep(patience(60))
        return lost(request)

    monkeypatch.setattr(repeated_requests, "ANSWER_SECONDS", 0.5)
    async with client_of(silent, 0.2) as client:
        with pytest.raises(RunError, match="cannot be reached"):
            await asyncio.wait_for(client.checkpoint(), patience(20))
        assert 1 <= len(seen) <= 2


async def test_patience_has_an_end() -> None:
    async def gone(request: web.Request) -> web.Response:
        return lost(request)

    async def busy(request: web.Request) -> web.Response:
        return error(429, "no room", Retry_After="9")

    async with client_of(gone, 0.1) as client:
        with pytest.raises(RunError, match=r"the service at http://127.* cannot be reached: Server disconnected"):
            await client.status()
        address = client.address
    async with AsyncClient(address, "af-1", patience_seconds=0.1) as client:  # nobody listens any more
        with pytest.raises(RunError, match=r"the service at http://127.* cannot be reached: Cannot connect"):
            await client.status()
    async with client_of(busy, 0.1) as client:
        with pytest.raises(RunError, match="no room"):
            await client.status()


@pytest.mark.parametrize(
    ("status", "kind"), [(400, UserError), (401, UserError), (422, UserError), (409, RunError), (500, RunError)]
)
async def test_the_services_sentence_is_the_errors(status: int, kind: type[Exception]) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return error(status, "do this")

    async with client_of(refuse) as client:
        with pytest.raises(kind, match="do this"):
            await client.status()


async def test_weights_are_uploaded_with_their_length_and_again_if_the_connection_was_lost(tmp_path: Path) -> None:
    bodies: list[bytes] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        assert request.headers["Content-Length"] == str(len(bodies[-1])) and request.path == "/v1/weights/t/3"
        return lost(request) if len(bodies) == 1 else web.json_response({"version": 4})

    async with client_of(handler) as client:
        assert await AsyncTrainerWorker(client, "t").publish(3, {"a": np.arange(3.0)}) == 4
    assert len(bodies) == 2 and bodies[0] == bodies[1] and b'"a"' in bodies[0]


async def test_a_file_for_which_there_was_no_room_or_that_was_cut_off_is_fetched_again(tmp_path: Path) -> None:
    num_asked = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            return error(429, "too many requests", Retry_After="0")
        return lost(request) if num_asked == 2 else web.Response(body=b"abc")

    async def busy(request: web.Request) -> web.Response:
        return error(429, "no room", Retry_After="9")

    async with client_of(handler) as client:
        await client._requests.download("/v1/model/a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"abc" and num_asked == 3
    async with client_of(busy, 0.1) as client:
        with pytest.raises(RunError, match="no room"):
            await client._requests.download("/v1/model/a", tmp_path / "b")


async def test_a_file_that_is_not_whole_leaves_nothing(tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=b"abc", headers={"X-Hash": "another"})

    async def none(request: web.Request) -> web.Response:
        return error(404, "no such version")

    async with client_of(handler) as client:
        with pytest.raises(RunError, match="came as something else"):
            await client._requests.download("/v1/model/a", tmp_path / "a")
    async with client_of(none) as client:
        with pytest.raises(UserError, match="no such version"):
            await client._requests.download("/v1/model/a", tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_key_file_without_a_key_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with pytest.raises(UserError, match="holds no key"):
        read_key(path)
    path.write_text(json.dumps({"keys": [{"secret": "af-1"}]}))
    assert read_key(path) == "af-1"
    with pytest.raises(UserError, match="asks for a key"):
        Client.connect("http://127.0.0.1:1")
    with pytest.raises(UserError, match="no address of a service"):
        Client.connect("127.0.0.1:1", key="af-1")


async def test_groups_come_as_they_were_taken() -> None:
    """From the columns that the service sends, end to end."""
    import msgspec

    from asyncflow.engines.train.experience import Experience
    from asyncflow.run.services.desk import DeskGroup, TakenGroups
    from asyncflow.service.experience import as_msgpack, as_safetensors

    rng = np.random.default_rng(0)
    groups = []
    for number, lengths in enumerate(([2, 3], [1], [4, 1, 2])):
        count, rows = sum(lengths), len(lengths)
        ids, floats = rng.integers(0, 50, count), rng.normal(size=count).astype(np.float32)
        one = Experience(
            np.arange(rows) + 8 * number, rng.integers(0, 50, number + 2), np.array(lengths), ids, (ids % 2).astype(np.uint8),
            floats, -floats, rng.normal(size=rows).astype(np.float32), np.zeros(rows, np.int64),
        )  # fmt: skip
        groups.append(DeskGroup(number, one))
    body = as_msgpack(TakenGroups(5, groups, 64), has_bulk=True)

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body)

    async with client_of(handler) as client:
        found = await AsyncTrainerWorker(client, "t").get_experience_data()
    assert (found.step, found.normaliser, found.is_complete) == (5, 64, True)
    for sent, got in zip(groups, found.groups, strict=True):
        assert got.number == sent.number and got.prompt_ids.tolist() == sent.experience.prompt_ids.tolist()
        assert [len(ids) for ids in got.response_ids] == sent.experience.lengths.tolist()
        for name in ("response_ids", "loss_mask", "rollout_logprobs", "advantages"):
            assert np.array_equal(np.concatenate(getattr(got, name)), getattr(sent.experience, name))
        assert np.array_equal(got.rewards, sent.experience.rewards)
    assert "response_ids" not in columns_of(groups, has_bulk=False)
    assert as_safetensors(TakenGroups(5, groups), has_bulk=True) and msgspec.msgpack.decode(body)["step"] == 5
