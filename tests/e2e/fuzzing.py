"""Fuzzing of a service: requests made from its own description, valid ones and others."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx2
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.patience import patience

if TYPE_CHECKING:
    from schemathesis.generation.case import Case

LEFT_OUT = ("/v1/stop", "/v1/init_engines", "/v1/scale", "/v1/step")
"""They end the run, start workers, or wait for what nobody does."""
WAITS = ("/prompts", "/experience", "/weight_sync_notify", "/weights")
"""Ends of paths whose bodies say how long they wait."""
STARTS = ("/v1/generators",)
"""A valid request starts a reward process, for as long as its client lives."""
LEAKS = ("Traceback", "asyncflow/", ".py", "0x7")
"""What no answer may hold."""


def fuzz(address: str, key: str, num_cases: int) -> Counter[int]:
    """Send so many requests. Returns the number of answers by status.

    Raises `AssertionError` with the request that found something.
    """
    import schemathesis  # half a second, which every process that collects the tests would pay
    from schemathesis import GenerationMode

    with httpx2.Client(base_url=address, headers={"Authorization": f"Bearer {key}"}, timeout=patience(60.0)) as http:
        described = http.get("/openapi.json").json()
        schema, statuses = schemathesis.openapi.from_dict(described), Counter[int]()
        operations = [found.ok() for found in schema.get_all_operations() if found.ok().path not in LEFT_OUT]
        each = -(-num_cases // len(operations))
        for operation in operations:
            modes = [GenerationMode.NEGATIVE] if operation.path in STARTS else list(GenerationMode)
            cases = st.one_of(*(operation.as_strategy(mode) for mode in modes))

            @settings(
                max_examples=each,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(cases)
            def check(case: Case) -> None:
                statuses[_send(http, case)] += 1

            check()
    return statuses


def _send(http: httpx2.Client, case: Case) -> int:
    """Send one request, and look at its answer."""
    body, headers = case.body, {name: str(value) for name, value in (case.headers or {}).items()}
    if isinstance(body, dict) and case.operation.path.endswith(WAITS) and case.operation.path != "/v1/prompts":
        body = {**body, "timeout_seconds": 0.01}  # it is not patience that is tried here
    query = {name: value for name, value in (case.query or {}).items() if name != "timeout_seconds"}
    if case.operation.path.startswith("/v1/weights/"):
        query["timeout_seconds"] = 0.01
    headers = {name: value for name, value in headers.items() if name.lower() not in ("authorization", "content-length", "host")}
    content = body if isinstance(body, bytes) else _encoded(body)
    if content is not None:
        headers["Content-Type"] = "application/json"
    try:
        request = http.build_request(case.method, case.formatted_path, params=query, headers=headers, content=content)
    except (httpx2.InvalidURL, UnicodeError, TypeError, ValueError):
        return 0  # no HTTP client can send that
    try:
        answer = http.send(request)
    except (httpx2.LocalProtocolError, httpx2.UnsupportedProtocol, httpx2.RemoteProtocolError):
        return 0
    assert answer.status_code < 500, (answer.status_code, case.method, str(request.url), content, answer.text[:300])
    if answer.status_code >= 400:
        said = f"{case.formatted_path} {query} {(content or b'').decode(errors='replace')}"  # an answer may repeat it
        leaks = [leak for leak in LEAKS if leak in answer.text and leak not in said]
        assert not leaks, (leaks, str(request.url), content, answer.text[:300])
    return answer.status_code


def _encoded(body: Any) -> bytes | None:
    try:
        return None if type(body).__name__ == "NotSet" else json.dumps(body).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError):
        return repr(body).encode("utf-8", "surrogatepass")
