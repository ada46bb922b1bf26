"""A fuzz of every request of the service's description, against a live run: no error of the server's, no leak, and it goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.client import Client, read_key
from tests.depth import in_gate
from tests.e2e.fuzzing import fuzz
from tests.e2e.service import Served
from tests.forked import Command


@pytest.mark.parametrize("num_cases", in_gate(200, of=[200, 50_000]))
def test_no_request_breaks_the_service(
    background: Callable[..., Command], small: Callable[..., dict[str, Any]], tmp_path: Path, num_cases: int
) -> None:
    tree = small(rollout={"num_workers": 0}, train={"engine": "outside"}, model={"max_context_tokens": 128})
    del tree["data"]
    served = Served(background, tmp_path, tree, listen="127.0.0.1:0")
    with Client.connect(served.url, key_file=served.key_file) as client:
        client.init_engines()
        client.put_prompts_data([{"prompt": "a", "answer": "1"}] * 8)
        client.join_generators(), client.join_trainers()
        statuses = fuzz(served.url, read_key(served.key_file), num_cases)
        assert statuses[200] and statuses[422] and sum(statuses.values()) >= num_cases / 2, statuses  # some have few requests
        assert client.status()["is_live"]
        client.stop()
