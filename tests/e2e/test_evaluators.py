"""Evaluations by workers of their own, with the real model: figures and training are those of a run without them, bit by bit."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.telemetry.trace import SPANS_FILE, read_spans
from tests.conftest import MODEL
from tests.depth import deep
from tests.e2e.attempts import AttemptProcess
from tests.e2e.commands import processes_of, rows, run_command, wait_for, write_config
from tests.forked import Command
from tests.patience import patience
from tests.processes import words_of


def tree(folder: Path, mode: str, num_evaluators: int, **sections: Any) -> dict[str, Any]:
    return {
        "run": {"name": "test", "dir": str(folder), "steps": 6, "stall_timeout_seconds": 60},
        "model": {"path": str(MODEL)},
        "data": {"path": "generated:arithmetic", "limit": 64},
        "schedule": mode,
        "rollout": {"num_slots": 16, "group_size": 4, "max_new_tokens": 24},
        "train": {"prompts_per_step": 4, "learning_rate": 1e-3, "accumulate": "exact", "old": "step_start"},
        "eval": {
            "path": "generated:arithmetic",
            "num_prompts": 4,
            "samples_per_prompt": 3,
            "every_steps": 3,
            "num_workers": num_evaluators,
        },
        "telemetry": {"trackers": [], "fingerprints": True},
        **sections,
    }


def prints(run_dir: Path) -> list[dict[str, Any]]:
    """The fingerprints, without the order in which groups came."""
    found = rows(run_dir / "fingerprints.jsonl")
    return [{**step, "groups": sorted(step["groups"], key=lambda group: group["group"])} for step in found]


@pytest.mark.parametrize(
    ("mode", "num_evaluators", "sections"),
    [
        pytest.param("periodic", 1, {}, marks=deep),
        pytest.param("periodic", 1, {"cluster": "inline"}, marks=deep),
        ("delayed", 2, {"weight_sync": {"name": "network"}}),
        pytest.param("synchronous", 1, {"reward": {"place": "task"}, "queue": {"place": "workers"}}, marks=deep),
    ],
)
def test_figures_and_training_are_those_of_a_run_without_evaluators(
    mode: str, num_evaluators: int, sections: dict[str, Any], tmp_path: Path
) -> None:
    folders = []
    for count in (0, num_evaluators):
        (folder := tmp_path / str(count)).mkdir()
        command = run_command("train", write_config(folder, tree(folder, mode, count, **sections)))
        assert command.returncode == 0, command.stderr
        folders.append(folder / "test")
    without, own = folders
    assert [row["step"] for row in rows(own / "eval.jsonl")] == [0, 3, 6]
    assert (own / "eval.jsonl").read_bytes() == (without / "eval.jsonl").read_bytes()
    assert prints(own) == prints(without)  # rows' tokens and log-probs, losses, weights, optimiser state
    groups = [s for s in read_spans(own / SPANS_FILE) if s.task == "generate_group" and s.group >= 1 << 40]
    assert {(s.worker.split("/")[0], s.version) for s in groups} == {("evaluator", 0), ("evaluator", 3), ("evaluator", 6)}
    assert '"evaluator/0"' in (own / "report.html").read_text()


@deep
def test_an_evaluator_that_is_killed_is_started_again(tmp_path: Path, background: Callable[..., Command]) -> None:
    run = background("train", write_config(tmp_path, tree(tmp_path, "periodic", 1, cluster="local")))
    run_dir = tmp_path / "test"
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and rows(run_dir / "metrics.jsonl"), run)
    killed = [process for process in processes_of(run_dir) if "evaluator/0" in words_of(process)]
    killed[0].kill()
    said, errors = run.communicate(timeout=patience(120))
    assert run.returncode == 0, errors
    assert "worker evaluator/0" in said + errors
    figures = {row["step"]: row for row in rows(run_dir / "eval.jsonl")}
    assert {0, 6} <= figures.keys() and all(row["num_responses/sampled"] == 12 for row in figures.values())


@deep
def test_weights_that_wait_for_their_evaluation_are_in_the_checkpoint(tmp_path: Path) -> None:
    """An evaluation takes longer than the run's first attempt, which ends after step 4: version 3 waits, or is under way."""
    config = tree(tmp_path, "periodic", 1)
    config["eval"] |= {"num_prompts": 256, "every_steps": 3}
    attempt = AttemptProcess(config, resume=False)
    attempt.wait_for_steps(4)
    assert attempt.end(by=signal.SIGINT) == 130, attempt.said()
    run_dir = attempt.run_dir
    assert 3 not in [row["step"] for row in rows(run_dir / "eval.jsonl")]
    checkpoint = max((run_dir / "checkpoints").iterdir())
    assert checkpoint.name > "step-000003"
    assert [path.stat().st_size > 1000 for path in checkpoint.glob("versions/*3/model.safetensors")] == [True]
    attempt = AttemptProcess(config)
    assert attempt.end(seconds=240) == 0, attempt.said()
    evaluations = {row["step"]: row for row in rows(run_dir / "eval.jsonl")}
    assert {0, 6} <= evaluations.keys() and (3 in evaluations) is not ("version 3 is not evaluated" in attempt.said())
    assert all(row["num_responses/sampled"] == 768 for row in evaluations.values())
