"""A model that `asyncflow serve --tinker` serves, by requests as the SDK sends them. The SDK itself: tests/tinker."""

from __future__ import annotations

import json
import signal
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.conftest import MODEL
from tests.e2e.commands import rows
from tests.forked import Command
from tests.patience import patience

PROMPT, TAUGHT = [5, 6, 7], [20, 21, 22]
"""Tokens that say nothing, and what the model is to say after them."""


class Client:
    """Client of one session, whose requests are numbered."""

    def __init__(self, address: str, key: str, trusted: ssl.SSLContext) -> None:
        self._http = httpx2.Client(base_url=f"{address}/api/v1", headers={"X-API-Key": key}, verify=trusted, timeout=patience(60))
        self.post = lambda path, body: self._http.post(path, json=body).raise_for_status().json()
        asked = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0", "type": "create_session"}
        self.session = self.post("/create_session", asked)["session_id"]
        self._number = 0

    def numbered(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Result of a request that has its turn."""
        self._number += 1
        return self.done(path, {**body, "seq_id": self._number})

    def done(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Result of a request, asked for until it is there."""
        future, deadline = self.post(path, body), time.monotonic() + patience(60)
        while (answer := self.post("/retrieve_future", {"request_id": future["request_id"]})).get("type") == "try_again":
            assert time.monotonic() < deadline
        return answer

    def close(self) -> None:
        self._http.close()


def test_a_model_that_is_served_learns_and_says_what_it_has_learnt(background: Callable[..., Command], tmp_path: Path) -> None:
    where = f"run.dir={tmp_path}"
    served = background(
        "serve", "--tinker", MODEL, where, "--model-name", "tiny", "--listen", "127.0.0.1:0", "--self-signed", "--max-rank", "8"
    )
    said = served.stdout.readline()
    folder = tmp_path / f"{MODEL.name}.tinker"
    assert said.startswith("serving tiny at https://127.0.0.1:") and str(folder / "keys.json") in said, said
    key = json.loads((folder / "keys.json").read_text())["keys"][0]["secret"]
    client = Client(said.split()[3].rstrip(","), key, ssl.create_default_context(cafile=str(folder / "tls.crt")))
    made = {"session_id": client.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 8, "seed": 1}}
    model = client.done("/create_model", made)["model_id"]
    tokens = PROMPT + TAUGHT
    weights = [0.0] * (len(PROMPT) - 1) + [1.0] * len(TAUGHT)
    datum = {
        "model_input": {"chunks": [{"tokens": tokens[:-1], "type": "encoded_text"}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": tokens[1:], "dtype": "int64", "shape": [len(tokens) - 1]},
            "weights": {"data": weights, "dtype": "float32", "shape": [len(weights)]},
        },
    }
    losses = []
    for _ in range(12):
        done = client.numbered(
            "/forward_backward", {"forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"}, "model_id": model}
        )
        losses.append(done["metrics"]["loss:sum"])
        client.numbered("/optim_step", {"adam_params": {"learning_rate": 0.02}, "model_id": model, "type": "optim_step"})
    assert losses[0] > 5.0 and losses[-1] < 0.5, losses
    sampler = client.numbered("/save_weights_for_sampler", {"model_id": model, "sampling_session_seq_id": 1})["sampling_session_id"]
    asked = {"prompt": {"chunks": [{"tokens": PROMPT}]}, "sampling_params": {"max_tokens": 3, "temperature": 0.0}, "num_samples": 1}
    assert client.numbered("/asample", {**asked, "sampling_session_id": sampler})["sequences"][0]["tokens"] == TAUGHT
    base = {"session_id": client.session, "sampling_session_seq_id": 2, "base_model": "tiny"}
    of_base = client.post("/create_sampling_session", base)["sampling_session_id"]
    assert client.numbered("/asample", {**asked, "sampling_session_id": of_base})["sequences"][0]["tokens"] != TAUGHT
    with pytest.raises(httpx2.HTTPStatusError) as refused:
        client.post("/create_model", {**made, "model_seq_id": 1, "lora_config": {"rank": 16}})
    assert "adapters have rank 8 at most here" in refused.value.response.text
    client.close()
    served.send_signal(signal.SIGTERM)
    assert served.wait(patience(60)) == 128 + signal.SIGTERM
    assert {line["path"] for line in rows(folder / "audit.jsonl")} >= {"/api/v1/create_model", "/api/v1/asample"}
