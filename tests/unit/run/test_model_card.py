"""A finished run's model on its way to the Hub (tests/hub.py): a push that fails leaves what can be pushed by hand."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import HfApi, get_session
from safetensors.numpy import load, load_file

from asyncflow.config import Config, parse
from asyncflow.engines.lora_files import write_lora
from asyncflow.run.models import hub_push
from asyncflow.run.models.model_card import CARD_FILE, push_model
from asyncflow.types import LoraSpec
from tests.conftest import MODEL
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


@pytest.mark.parametrize("path", ["somebody/tiny/tiny-Q8.gguf@v1", "random:qwen2-tiny"])
async def test_an_adapter_of_a_base_that_the_run_has_made_goes_merged_into_it(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name of what that was made of, PEFT would load another model, or none."""
    own, name = tmp_path / "run" / "model", "model.layers.0.self_attn.q_proj"
    before = load_file(MODEL / "model.safetensors")
    rows, columns = before[f"{name}.weight"].shape
    own.mkdir(parents=True)
    arrays = {f"{name}.lora_A.weight": np.ones((4, columns), "f4"), f"{name}.lora_B.weight": np.ones((rows, 4), "f4")}
    write_lora(own, LoraSpec(4, 1.0), MODEL, arrays)
    run = {"dir": str(tmp_path), "name": "run"}
    model = {"path": path, "push_to_hub": "me/trained", "lora": {"rank": 4, "alpha": 1.0}}
    told: list[str] = []
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with served(Hub({})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        await push_model(parse({"model": model, "run": run, "data": {"path": "generated:arithmetic"}}), {}, [], told.append)
    assert told[-1] == f"the model is at {hub.url}/me/trained" and not own.with_name("model-to-push").exists()
    files = hub.pushed["me/trained"]
    assert "adapter_config.json" not in files and {"config.json", "tokenizer.json"} <= files.keys()
    merged = load(files["model.safetensors"])
    assert [each for each in before if not np.array_equal(before[each], merged[each])] == [f"{name}.weight"]
    assert b"library_name: transformers" in files[CARD_FILE] and b"An adapter of (merged into it) " in files[CARD_FILE]
    assert b"library_name: peft" in (own / CARD_FILE).read_bytes()


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
