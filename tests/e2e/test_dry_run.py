"""`asyncflow train CONFIG --dry-run`: what would run, what it would take, and that nothing is started."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.e2e.commands import command_line, run_command, write_config
from tests.patience import patience


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "recipes" / "papers").glob("*.yaml")))
def test_a_papers_recipe_passes_without_model_and_network(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path = f"recipes/papers/{recipe}.yaml"
    command = run_command("train", path, "--dry-run", f"run.dir={tmp_path}")
    assert command.returncode == 0, command.stderr
    for said in (
        "parameters; GiB per device",
        "optimiser state",
        "activations",
        "keys and values",
        "not read",
        "nothing was started",
    ):
        assert said in command.stdout, said


def test_without_model_and_network_a_papers_recipe_is_refused(tmp_path: Path) -> None:
    command = command_line("train", "recipes/papers/qwen3-8b-deepscaler.yaml", f"run.dir={tmp_path}", "cluster=local")
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}  # else the hub's client tries for half a minute
    refused = subprocess.run(command, cwd=ROOT, env=offline, capture_output=True, text=True, timeout=patience(300), check=False)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert not list(tmp_path.iterdir())


def test_prompts_that_are_left_out_are_counted(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"question": "one " * (20 if n < 3 else 2), "answer": "1"}) + "\n" for n in range(9)))
    tree = small(data={"path": str(data), "max_prompt_tokens": 12}, eval={"path": str(data), "num_prompts": 4})
    command = run_command("train", write_config(tmp_path, tree), "--dry-run")
    assert command.returncode == 0, command.stderr
    assert "data       6 prompts to train on, 1 held out" in command.stdout
    assert "data       3 of 9 prompts have more than data.max_prompt_tokens = 12 tokens: left out" in command.stdout
    assert "data       3 of 4 held-out prompts have more than" in command.stdout


@pytest.mark.parametrize(("schedule", "workers", "is_said"), [("sub_step", 1, True), ("sub_step", 2, False), ("delayed", 1, False)])
def test_a_mode_that_one_worker_cannot_give_what_it_is_for_is_advised_against(
    small: Callable[..., dict[str, Any]], tmp_path: Path, schedule: str, workers: int, is_said: bool
) -> None:
    config = write_config(tmp_path, small(schedule=schedule, rollout={"num_workers": workers}))
    done = run_command("train", config, "--dry-run")
    assert done.returncode == 0 and ("set rollout.num_workers=2 or more" in done.stdout) is is_said, done.stdout + done.stderr


def test_evaluators_and_their_devices_are_counted(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    path = write_config(tmp_path, small(eval={"path": "generated:arithmetic", "num_prompts": 4}))
    counts = []
    for count, said in ((0, ""), (2, "2 evaluators on cpu, ")):
        command = run_command("train", path, "--dry-run", f"eval.num_workers={count}")
        assert command.returncode == 0, command.stderr
        assert said in command.stdout and ("evaluators on" in command.stdout) is bool(said)
        assert f"x {2 + count} versions" in command.stdout
        counts.append(int(re.search(r"devices +(\d+):", command.stdout)[1]))
    assert counts[1] == counts[0] + 2
