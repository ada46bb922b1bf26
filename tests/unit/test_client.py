"""The client of a service: what it repeats, and what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx2
import numpy as np
import pytest

from asyncflow.client import AsyncClient, AsyncTrainerWorker, Client, read_key
from asyncflow.service.experience import columns_of
from asyncflow.types import RunError, UserError

Handler = Callable[[httpx2.Request], httpx2.Response]


def client_of(handler: Handler, patience_seconds: float = 5.0) -> AsyncClient:
    return AsyncClient(httpx2.AsyncClient(transport=httpx2.MockTransport(handler), base_url="http://run"), patience_seconds)


async def test_a_request_whose_answer_was_lost_is_repeated_under_its_id() -> None:
    seen: list[str] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.headers["Idempotency-Key"])
        if len(seen) == 1:
            raise httpx2.ReadError("gone")
        if len(seen) == 2:
            return httpx2.Response(429, headers={"Retry-After": "0"}, json={"error": {"message": "busy"}})
        return httpx2.Response(200, json={"version": 7})

    assert await client_of(handler).checkpoint() == 7 and len(seen) == 3 and len(set(seen)) == 1


async def test_patience_has_an_end() -> None:
    def gone(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("nobody")

    with pytest.raises(RunError, match=r"the service at http://run.* cannot be reached: nobody"):
        await client_of(gone, 0.1).status()
    with pytest.raises(RunError, match="no room"):
        busy = httpx2.Response(429, headers={"Retry-After": "9"}, json={"error": {"message": "no room"}})
        await client_of(lambda request: busy, 0.1).status()


@pytest.mark.parametrize(
    ("status", "error"), [(400, UserError), (401, UserError), (422, UserError), (409, RunError), (500, RunError)]
)
async def test_the_services_sentence_is_the_errors(status: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="do this"):
        await client_of(lambda request: httpx2.Response(status, json={"error": {"message": "do this"}})).status()


async def test_weights_are_uploaded_with_their_length_and_again_if_the_connection_was_lost(tmp_path: Path) -> None:
    bodies: list[bytes] = []

    async def handler(request: httpx2.Request) -> httpx2.Response:
        bodies.append(await request.aread())
        assert request.headers["Content-Length"] == str(len(bodies[-1])) and request.url.path == "/v1/weights/t/3"
        if len(bodies) == 1:
            raise httpx2.WriteError("gone")
        return httpx2.Response(200, json={"version": 4})

    worker = AsyncTrainerWorker(client_of(handler), "t")  # type: ignore[arg-type]
    assert await worker.publish(3, {"a": np.arange(3.0)}) == 4
    assert len(bodies) == 2 and bodies[0] == bodies[1] and b'"a"' in bodies[0]


def test_a_key_file_without_a_key_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with pytest.raises(UserError, match="holds no key"):
        read_key(path)
    path.write_text(json.dumps({"keys": [{"secret": "af-1"}]}))
    assert read_key(path) == "af-1"
    with pytest.raises(UserError, match="asks for a key"):
        Client.connect("http://127.0.0.1:1")


async def test_groups_come_as_they_were_taken() -> None:
    """From the columns that the service sends, end to end."""
    import msgspec

    from asyncflow.engines.train.experience import Experience
    from asyncflow.run.desk import DeskGroup, TakenGroups
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
    found = await AsyncTrainerWorker(client_of(lambda request: httpx2.Response(200, content=body)), "t").get_experience_data()
    assert (found.step, found.normaliser, found.is_complete) == (5, 64, True)
    for sent, got in zip(groups, found.groups, strict=True):
        assert got.number == sent.number and got.prompt_ids.tolist() == sent.experience.prompt_ids.tolist()
        assert [len(ids) for ids in got.response_ids] == sent.experience.lengths.tolist()
        for name in ("response_ids", "loss_mask", "rollout_logprobs", "advantages"):
            assert np.array_equal(np.concatenate(getattr(got, name)), getattr(sent.experience, name))
        assert np.array_equal(got.rewards, sent.experience.rewards)
    assert "response_ids" not in columns_of(groups, has_bulk=False)
    assert as_safetensors(TakenGroups(5, groups), has_bulk=True) and msgspec.msgpack.decode(body)["step"] == 5
