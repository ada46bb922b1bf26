"""Runs whose model is on the Hub, and goes there when they are done. The Hub is a stand-in (tests/hub.py)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncflow.config import parse
from asyncflow.service.hosted import HostedRun
from asyncflow.trainer import Trainer
from tests.conftest import MODEL
from tests.depth import in_gate
from tests.e2e.commands import command_line, run_command, wait_for, write_config
from tests.hub import TOKEN, Hub, served
from tests.patience import patience

NAME, OURS = "somebody/tiny", "me/tiny-trained"


def test_a_model_comes_from_the_hub_is_resumed_at_its_commit_and_goes_there_with_a_card(
    small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    hub = Hub({NAME: {"main": MODEL}})
    with served(hub):
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
        tree = small(model={"path": NAME, "push_to_hub": OURS}, run={"steps": 1})
        config = write_config(tmp_path, tree)
        first = run_command("train", config, **environment)
        assert first.returncode == 0, first.stderr
        assert f"downloading {NAME}" in first.stdout and f"the model is at {hub.url}/{OURS}" in first.stdout
        files = hub.pushed[OURS]
        assert files["private"] == b"True" and {"model.safetensors", "tokenizer.json", "config.json"} <= files.keys()
        header, text = files["README.md"].decode().removeprefix("---\n").split("\n---\n", 1)
        assert yaml.safe_load(header)["base_model"] == NAME and "reinforcement-learning" in yaml.safe_load(header)["tags"]
        assert "trained with GRPO by AsyncFlow for 1 steps" in text and "mean reward, first and last step" in text

        hub.revisions[NAME] = {"moved": MODEL}  # the branch is gone
        resumed = run_command("train", config, "run.steps=2", "--resume", **environment)
        assert resumed.returncode == 0, resumed.stderr
        run_dir = Path(tree["run"]["dir"]) / tree["run"]["name"]
        assert json.loads((run_dir / "job.json").read_text())["model"].endswith(Hub({NAME: {"main": MODEL}}).commit(NAME, "main"))


@pytest.mark.parametrize(
    ("number", "to_all"),
    in_gate((signal.SIGINT, True), of=[(signal.SIGTERM, False), (signal.SIGINT, True)]),
    ids=["SIGTERM", "Ctrl-C"],
)
def test_a_run_that_is_interrupted_ends_its_download_and_the_next_one_goes_on_with_it(
    small: Callable[..., dict[str, Any]], tmp_path: Path, number: int, to_all: bool
) -> None:
    model, name = tmp_path / "model", "model.safetensors"
    shutil.copytree(MODEL, model)
    content = bytes(25 << 20)
    (model / name).write_bytes(content)
    with served(hub := Hub({NAME: {"main": model}}, stands=(name, 22 << 20))):
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
        line = command_line("train", write_config(tmp_path, small(model={"path": NAME})))
        process = subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
        try:
            wait_for(lambda: sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*.incomplete")) >= 20 << 20)
            (os.killpg if to_all else os.kill)(process.pid, number)  # a terminal sends it to all of them
            said, _ = process.communicate(timeout=patience(30))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 128 + number and "interrupted after 0 steps" in said, said
        hub.stands = None
        hub.asked.clear()
        command = [sys.executable, "-m", "asyncflow.run.models.hub_download", NAME]
        folder = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        assert (Path(folder) / name).read_bytes() == content
        assert [asked for method, path, asked in hub.asked if method == "GET" and path.endswith(name)] == [f"bytes={20 << 20}-"]


def test_an_adapter_goes_to_the_hub_with_its_base_by_name_and_commit(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    hub = Hub({NAME: {"main": MODEL}})
    with served(hub):
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
        tree = small(model={"path": NAME, "push_to_hub": OURS, "lora": {"rank": 4, "alpha": 8}}, run={"steps": 1})
        done = run_command("train", write_config(tmp_path, tree), **environment)
    assert done.returncode == 0, done.stderr
    files, commit = hub.pushed[OURS], Hub({NAME: {"main": MODEL}}).commit(NAME, "main")
    settings = json.loads(files["adapter_config.json"])
    assert (settings["base_model_name_or_path"], settings["revision"]) == (NAME, commit)
    header, text = files["README.md"].decode().removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(header)["library_name"] == "peft" and yaml.safe_load(header)["base_model"] == NAME
    assert "An adapter of [" in text and "| adapter | rank 4, alpha 8, of all linear layers |" in text
    model = Path(tree["run"]["dir"]) / tree["run"]["name"] / "model"
    assert Path(json.loads((model / "adapter_config.json").read_text())["base_model_name_or_path"]).is_dir()

    (pushed := tmp_path / "pushed").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (pushed / name).write_bytes(files[name])
    offline = {"HF_HOME": environment["HF_HOME"], "HF_HUB_OFFLINE": "1"}
    assert run_command("merge", model, tmp_path / "merged", **offline).returncode == 0
    merged = run_command("merge", pushed, tmp_path / "by-name", **offline)
    assert merged.returncode == 0, merged.stderr
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("merged", "by-name")]
    assert weights[0] == weights[1]


def test_a_run_driven_from_python_pushes_its_model_when_it_is_done(
    small: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(hub := Hub({})):
        for name, value in {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}.items():
            monkeypatch.setenv(name, value)
        tree = small(model={"push_to_hub": OURS}, cluster="inline")
        with Trainer.from_config(tree) as trainer:
            trainer.step()
        assert not hub.pushed  # another step is to come
        with Trainer.from_config(tree, resume=True) as trainer:
            while trainer.step() is not None:
                pass
    assert {"model.safetensors", "README.md"} <= hub.pushed[OURS].keys()


async def test_a_served_run_pushes_its_model_when_it_is_stopped_at_its_end(
    small: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(hub := Hub({})):
        for name, value in {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}.items():
            monkeypatch.setenv(name, value)
        hosted = HostedRun(parse(small(model={"push_to_hub": OURS}, cluster="inline")), tmp_path / "journal")
        await hosted.init_engines()
        while await hosted.step() is not None:
            pass
        await hosted.stop()
    assert {"model.safetensors", "README.md"} <= hub.pushed[OURS].keys()


def test_pushing_without_a_token_is_refused_before_anything_starts(
    small: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    config = write_config(tmp_path, small(model={"push_to_hub": OURS}))
    refused = run_command("train", config, HF_HOME=str(tmp_path / "empty"))
    assert refused.returncode == 2 and "model.push_to_hub needs a token of the Hugging Face Hub" in refused.stderr


def test_check_says_whether_a_model_will_run_without_its_weights(tmp_path: Path) -> None:
    hub = Hub({NAME: {"main": MODEL}})
    with served(hub):
        checked = run_command("check", NAME, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "cache"), HF_HUB_OFFLINE="0")
    assert checked.returncode == 0, checked.stderr
    for words in ("qwen2", "GiB", "train.engine", "rollout.engine"):
        assert words in checked.stdout
    assert not [path for _, path, _ in hub.asked if path.endswith(".safetensors")]
