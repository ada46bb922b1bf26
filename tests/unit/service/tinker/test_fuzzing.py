"""Requests made from the API's own description, valid ones and others: none is answered by a server's error."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from asyncflow.service.tinker import routes
from tests.depth import few
from tests.unit.service.tinker.test_routes import World

if TYPE_CHECKING:
    from schemathesis.generation.case import Case

LEAKS = ("Traceback", "asyncflow/", ".py", "0x7")


@pytest.fixture
def loop() -> Any:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.mark.filterwarnings("ignore")
def test_no_request_is_a_servers_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: asyncio.AbstractEventLoop) -> None:
    import schemathesis  # half a second, which every process that collects the tests would pay
    from schemathesis import GenerationMode

    async def begun() -> tuple[World, dict[str, Any]]:
        world = World(tmp_path, models=3, sessions=1 << 20)
        session = await world.session()
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "base"}
        sampler = (await world.post("/create_sampling_session", body))["sampling_session_id"]
        return world, {"session_id": session, "model_id": await world.model(session), "sampling_session_id": sampler}

    world, known = loop.run_until_complete(begun())
    monkeypatch.setattr(routes, "RETRIEVE_SECONDS", 0.01)
    known |= {"base_model": "base", "sampler_id": known["sampling_session_id"], "request_id": f"{known['model_id']}:0"}
    schema, statuses = schemathesis.openapi.from_dict(world.app.openapi()), Counter[int]()
    paths = [found.ok() for found in schema.get_all_operations() if found.ok().path.startswith("/api/v1/")]
    operations = [operation for operation in paths if not operation.path.endswith("/finish")]  # it would end the only session

    async def send(case: Case) -> None:
        body = case.body
        if isinstance(body, dict):
            body = {name: known[name] if name in known and isinstance(value, str) else value for name, value in body.items()}
        case.path_parameters = {name: known.get(name, value) for name, value in (case.path_parameters or {}).items()}
        try:
            content = None if type(body).__name__ == "NotSet" else body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"Content-Type": "application/json"}
            url = f"http://t{case.formatted_path}"
            request = world.client.build_request(case.method, url, params=case.query, headers=headers, content=content)
        except (httpx2.InvalidURL, UnicodeError, TypeError, ValueError):
            return  # no HTTP client can send that
        answer = await world.client.send(request)
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, (case.method, url, body, answer.text[:300])
        said = f"{url} {case.query} {(content or b'').decode(errors='replace')}"  # an answer may repeat it
        leaks = [leak for leak in LEAKS if leak in answer.text and leak not in said]
        assert answer.status_code < 400 or not leaks, (leaks, url, body, answer.text[:300])

    for operation in operations:
        cases = st.one_of(operation.as_strategy(GenerationMode.POSITIVE), operation.as_strategy(GenerationMode.NEGATIVE))

        @settings(
            max_examples=few(4, 300),
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(cases)
        def check(case: Case) -> None:
            loop.run_until_complete(send(case))

        check()

    async def ended() -> None:
        await world.sessions.close()
        await world.client.aclose()

    loop.run_until_complete(ended())
    assert statuses[200] > len(operations) and statuses[400] + statuses[422] > len(operations), statuses
