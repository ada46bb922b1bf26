"""`asyncflow replay`: a kept batch, trained again from the command line, agrees bit for bit, and says so where it does not."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from asyncflow.replay import plan_replay, replay_config
from asyncflow.types import UserError
from tests.conftest import MODEL, merged
from tests.depth import deep
from tests.e2e.commands import rows, run_command, write_config

TREE: dict[str, Any] = {
    "run": {"name": "test", "steps": 4},
    "model": {"path": str(MODEL)},
    "data": {"path": "generated:arithmetic", "limit": 64},
    "rollout": {"num_slots": 16, "group_size": 4, "max_new_tokens": 32},
    "train": {"prompts_per_step": 4, "learning_rate": 1e-3, "accumulate": "exact"},
    "telemetry": {"trackers": [], "fingerprints": True, "keep_batches": 2},
    "checkpoint": {"every_steps": 2, "keep": 2},
}


def train(folder: Path, **changes: Any) -> Path:
    config = write_config(folder, merged(TREE, {"run": {"dir": str(folder / "runs")}, **changes}))
    command = run_command("train", config)
    assert command.returncode == 0, command.stderr
    return folder / "runs" / "test"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("replay"))


def replayed(run_dir: Path, step: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    return run_command("replay", run_dir, "--step", str(step), *overrides)


def test_a_step_behind_a_checkpoint_agrees_bit_for_bit(finished: Path) -> None:
    command = replayed(finished, 3)
    assert command.returncode == 0, command.stderr
    assert "checkpoints/step-000002, and trains step 2 before it" in command.stdout
    assert "run and replay agree bit for bit: metrics, losses, weights and optimiser state" in command.stdout
    assert "losses of micro-batches with the same bits: 4 of 4" in command.stdout
    norm = rows(finished / "metrics.jsonl")[3]["policy/grad_norm"]
    (line,) = [line for line in command.stdout.splitlines() if line.strip().startswith("policy/grad_norm")]
    assert line.split()[1:] == [f"{norm:.9g}", f"{norm:.9g}", "="]


def test_training_otherwise_is_told_apart(finished: Path) -> None:
    command = replayed(finished, 2, "train.learning_rate=2.0e-3")
    assert command.returncode == 0 and "run and replay do not agree bit for bit" in command.stdout
    assert "policy/learning_rate" in command.stdout and "+0.001" in command.stdout
    assert "losses of micro-batches with the same bits: 4 of 4" in command.stdout, "the step itself began with the same weights"


def test_a_batch_that_is_another_one_does_not_agree(finished: Path, tmp_path: Path) -> None:
    path = finished / "batches" / "step-000002.safetensors"
    before = path.read_bytes()
    tensors = safetensors.numpy.load(before)
    tensors["reward"] = (1.0 - tensors["reward"]).astype(np.float32)
    try:
        path.write_bytes(safetensors.numpy.save(tensors))
        command = replayed(finished, 2)
    finally:
        path.write_bytes(before)
    assert command.returncode == 1 and "do not agree bit for bit" in command.stdout


def test_a_step_that_had_chosen_its_members_chooses_them_again(tmp_path: Path) -> None:
    brief = {"scorer": {"name": "length", "max_tokens": 32, "soft_tokens": 32}}
    run_dir = train(tmp_path, algorithm={"name": "dapo", "dynamic_sampling": True}, reward=brief)
    command = replayed(run_dir, 2, "run.stall_timeout_seconds=20")
    assert command.returncode == 0, command.stderr
    assert "losses of micro-batches with the same bits: 4 of 4" in command.stdout


def test_what_was_not_kept_is_refused(finished: Path, tmp_path: Path) -> None:
    command = replayed(finished, 0)
    assert command.returncode == 2 and "has no batch of step 0; kept are steps 2, 3" in command.stderr
    assert "holds no run" in replayed(tmp_path, 0).stderr
    with pytest.raises(UserError, match="holds no run"):
        plan_replay(tmp_path, 0)


def test_where_and_on_what_it_is_done_is_not_the_users_to_say(finished: Path) -> None:
    """By `run.dir` and `run.name` a replay could take the run's own folder, and make it anew."""
    before = sorted(finished.rglob("*"))
    for override in (
        f"run.dir={finished.parent}",
        "run.name=test",
        "run={dir: x}",
        "run.overwrite=true",
        "model.path=x",
        "queue.num_units=2",
    ):
        command = replayed(finished, 2, override)
        assert command.returncode == 2 and "replay sets " in command.stderr, override
    plan = plan_replay(finished, 2)
    config = replay_config(finished, plan, finished / "scratch", ["run={seed: 0}", "train.learning_rate=0.5"])
    assert config.run_dir == finished / "scratch" / "replay" and not config.run.overwrite and config.train.learning_rate == 0.5
    assert sorted(finished.rglob("*")) == before


@deep
def test_a_run_that_has_left_nothing_to_compare_with_agrees_with_nothing(finished: Path, tmp_path: Path) -> None:
    """As one that was killed after its trainer's commit: the batch is there, the step's metrics are not."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:3]))
    command = replayed(run_dir, 3)
    assert command.returncode == 0, command.stdout + command.stderr
    assert "run and replay agree bit for bit: losses, weights and optimiser state" in command.stdout
    (run_dir / "fingerprints.jsonl").unlink()
    command = replayed(run_dir, 3)
    assert command.returncode == 1 and "there is nothing to compare the replay with" in command.stderr
    assert "agree" not in command.stdout
    (run_dir / "metrics.jsonl").write_text("".join(lines).replace('"policy/entropy"', '"policy/entropie"'))
    command = replayed(run_dir, 3)
    assert command.returncode == 1 and "do not agree bit for bit: metrics" in command.stdout, "what one of them lacks is not equal"


@deep
def test_a_critic_is_trained_again_and_compared(tmp_path: Path) -> None:
    run_dir = train(
        tmp_path,
        algorithm="ppo",
        train={"critic": {"learning_rate": 1e-3}, "epochs": 2, "old": "step_start"},
        run={"steps": 3, "dir": str(tmp_path / "runs")},
    )
    command = replayed(run_dir, 2)
    assert command.returncode == 0, command.stdout + command.stderr
    assert "losses of micro-batches with the same bits: 16 of 16" in command.stdout, "two epochs of four groups, of both models"
    assert "critic/loss" in command.stdout and "critic/grad_norm" in command.stdout
    path = run_dir / "fingerprints.critic.jsonl"
    line = json.loads(path.read_text().splitlines()[2])
    tensor = sorted(line["tensors"])[0]
    line["tensors"][tensor] = "00"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]) + json.dumps(line) + "\n")
    command = replayed(run_dir, 2)
    assert command.returncode == 1 and f"with other bits: critic/{tensor}" in command.stdout


@deep
def test_a_run_without_checkpoints_is_replayed_from_its_model(tmp_path: Path) -> None:
    """A model made for the run, a KL term whose reference is a task of its own, and two data-parallel ranks."""
    run_dir = train(
        tmp_path,
        run={"steps": 2, "dir": str(tmp_path / "runs")},
        model={"path": "random:qwen2-tiny"},
        algorithm={"kl_coefficient": 0.1},
        train={"reference": "task"},
        plan={"train": {"dp": 2}},
        checkpoint={"every_steps": None, "keep": 0},
    )
    command = replayed(run_dir, 1)
    assert command.returncode == 0, command.stderr
    assert "the model that the run began with" in command.stdout and "trains step 0 before it" in command.stdout
    assert "run and replay agree bit for bit" in command.stdout


def test_rows_that_failed_in_the_run_fail_again(tmp_path: Path) -> None:
    scorer = tmp_path / "picky.py"
    scorer.write_text(
        "def score(sample):\n"
        "    if len(sample.response) % 3 == 0:\n"
        "        raise ValueError('not this one')\n"
        "    return float(len(sample.response) % 2)\n"
    )
    reward = {"scorer": {"path": f"{scorer}:score"}, "max_attempts": 1, "max_failed_fraction": 1.0}
    run_dir = train(tmp_path, run={"steps": 1, "dir": str(tmp_path / "runs")}, reward=reward)
    assert rows(run_dir / "metrics.jsonl")[0]["rows/dead"] > 0
    command = replayed(run_dir, 0)
    assert command.returncode == 0, command.stdout + command.stderr
    assert "run and replay agree bit for bit" in command.stdout
