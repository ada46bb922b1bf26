"""A finished run's model on its way to the Hub (tests/hub.py): a push that fails leaves what can be pushed by hand."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import HfApi, get_session

from asyncflow.config import Config, parse
from asyncflow.run.models import hub_push
from asyncflow.run.models.model_card import CARD_FILE, push_model
from tests.hub import TOKEN, Hub, served

COMMIT = "0123456789" * 4


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of a run whose adapter is in its folder, over a snapshot of this machine's cache."""
    model = {"path": "somebody/tiny", "push_to_hub": "me/trained", "lora": {"rank": 4}}
    run = {"dir": str(tmp_path), "name": "run"}
    folder = tmp_path / "run" / "model"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": f"/cache/snapshots/{COMMIT}"}))
    (folder / "adapter_model.safetensors").write_bytes(b"of the tests")
    return parse({"model": model, "run": run, "data": {"path": "generated:arithmetic"}})


async def test_an_adapter_that_could_not_be_pushed_can_be_pushed_by_the_command_that_is_told(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    told: list[str] = []
    with served(Hub({})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_another")
        await push_model(config, {}, [], told.append)
        assert not hub.pushed and "could not be pushed to the Hugging Face Hub" in told[-1]
        assert f"it is in {tmp_path / 'run' / 'model'}, and to push it: hf upload" in told[-1]
        name, path, private = shlex.split(told[-1].partition(": hf upload ")[2])
        folder, own = Path(path), tmp_path / "run" / "model"
        assert (name, private) == ("me/trained", "--private") and folder != own and (folder / CARD_FILE).is_file()
        settings = json.loads((folder / "adapter_config.json").read_text())
        assert settings == {"base_model_name_or_path": "somebody/tiny", "revision": COMMIT}
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        await push_model(config, {}, [], told.append)
        assert told[-1] == f"the model is at {hub.url}/me/trained" and not folder.exists()
        assert json.loads(hub.pushed["me/trained"]["adapter_config.json"]) == settings
        assert "revision" not in json.loads((own / "adapter_config.json").read_text())


def test_a_hub_that_says_nothing_is_waited_for_so_long_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(hub_push, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(sys, "argv", ["hub_push", str(tmp_path), "me/trained"])
    before = get_session().timeout
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(hub_push, "HfApi", partial(HfApi, endpoint=url, token=TOKEN))
        assert hub_push.main() == 1
    get_session().timeout = before
    assert "timed out" in capsys.readouterr().err
