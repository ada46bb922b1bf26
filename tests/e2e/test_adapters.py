"""Whole runs with other people's train engines: led and followed, published from, saved and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.contract.test_train_engine import needed
from tests.e2e.commands import processes_of, rows, run_command, write_config

Small = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(
    ("engine", "plan"),
    [
        pytest.param({"name": "deepspeed", "stage": 2}, {"dp": 2}, id="deepspeed-dp2", marks=pytest.mark.smoke),
        pytest.param({"name": "megatron"}, {"tp": 2}, id="megatron-tp2", marks=pytest.mark.smoke),
        pytest.param({"name": "megatron"}, {"pp": 2}, id="megatron-pp2"),
    ],
)
def test_a_run_and_its_continuation_train_what_the_torch_engine_trains(
    small: Small, tmp_path: Path, engine: dict[str, Any], plan: dict[str, int]
) -> None:
    needed(engine["name"])

    def train(name: str, steps: int, *options: str, **changes: Any) -> Path:
        folder = tmp_path / f"config-{name}"
        folder.mkdir(exist_ok=True)
        tree = small(run={"name": name, "steps": 4}, checkpoint={"every_steps": 1}, **changes)
        command = run_command("train", write_config(folder, tree), f"run.steps={steps}", *options)
        assert command.returncode == 0, command.stdout + command.stderr
        assert not processes_of(tmp_path / "runs" / name)
        return tmp_path / "runs" / name

    section = {"prompts_per_step": 4, "accumulate": "fp32"}
    one = train("one", 4, train=section)
    changes = {"train": {**section, "engine": engine}, "plan": {"train": plan}}
    train("several", 2, **changes)
    several = train("several", 4, "--resume", **changes)
    mine, theirs = ([row["reward/mean"] for row in rows(run / "metrics.jsonl")] for run in (one, several))
    assert mine == theirs and len(theirs) == 4
    weights, others = (load_file(run / "model" / "model.safetensors") for run in (one, several))
    before = load_file(Path(small()["model"]["path"]) / "model.safetensors")
    moved = max(abs(weights[name] - before[name]).max() for name in weights)
    assert weights.keys() == others.keys()
    assert max(abs(weights[name] - others[name]).max() for name in weights) < 0.02 * moved
