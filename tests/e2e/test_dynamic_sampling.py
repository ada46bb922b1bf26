"""DAPO's dynamic sampling, by real engines: which groups are trained depends on rewards alone, in all runs that should be equal."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.trainer import Trainer
from asyncflow.types import MAX_CANDIDATES, RunError
from tests.conftest import merged
from tests.depth import deep
from tests.e2e.attempts import AttemptProcess
from tests.e2e.commands import rows, run_command, write_config
from tests.e2e.test_resume import check_same, tree

Small = Callable[..., dict[str, Any]]

CHOOSING: dict[str, Any] = {
    "algorithm": {"name": "dapo", "dynamic_sampling": True},
    "train": {"oversampling": 1.5, "max_candidates": 40},
}


def trained(run: Path) -> list[list[int]]:
    """By step, its groups, in order. All of their rows have trained, and their rewards are not all the same."""
    steps = []
    for step in rows(run / "fingerprints.jsonl"):
        assert all(len({row["reward"] for row in group["rows"]}) > 1 for group in step["groups"])
        steps.append(sorted(group["group"] for group in step["groups"]))
    return steps


def test_a_run_trains_as_many_groups_as_it_should_and_says_what_it_went_through(small: Small, tmp_path: Path) -> None:
    config = small(cluster="inline", run={"steps": 3}, telemetry={"fingerprints": True}, data={"limit": 12})
    with Trainer.from_config(merged(config, CHOOSING)) as trainer:
        while trainer.step() is not None:
            pass
    run = tmp_path / "runs" / "test"
    groups = trained(run)
    assert [len(of_step) for of_step in groups] == [4, 4, 4]
    metrics = rows(run / "metrics.jsonl")
    assert sum(row["rows/degenerate"] for row in metrics) > 0  # else it was not tested
    for step, (of_step, row) in enumerate(zip(groups, metrics, strict=True)):
        first = step * MAX_CANDIDATES
        assert first <= of_step[0] and of_step[-1] < first + 40
        assert row["rows/trained"] == 16 and row["rows/degenerate"] == 4 * (of_step[-1] + 1 - first - 4)
        assert row["rows/surplus"] % 4 == 0 and row["rows/dead"] == 0 and 0 < row["reward/mean"] < 1


@deep
def test_periodic_equals_synchronous_with_a_worker_killed(small: Small, tmp_path: Path) -> None:
    tree = small(
        run={"steps": 500}, rollout={"num_slots": 16}, train={"prompts_per_step": 8, "warmup_steps": 0}, data={"limit": 256}
    )
    config = write_config(tmp_path, merged(tree, CHOOSING))
    command = run_command("verify", config, "--steps", "4", "train.accumulate=exact", "train.max_candidates=80")
    assert command.returncode == 0, command.stdout + command.stderr
    assert "EQUAL: synchronous and periodic gave the same bits in 4 steps" in command.stdout
    folder = tmp_path / "runs" / "test-verify"
    first, second = (trained(folder / name) for name in ("synchronous", "periodic"))
    assert first == second and [len(groups) for groups in first] == [8] * 4
    given = json.loads((folder / "certificate.json").read_text())
    assert given["verdict"] == "equal" and given["reordered_steps"] >= 3 and given["kill"]["rows"] > 0
    degenerate = [[row["rows/degenerate"] for row in rows(folder / name / "metrics.jsonl")] for name in ("synchronous", "periodic")]
    assert degenerate[0] == degenerate[1] and sum(degenerate[0]) > 0


@pytest.mark.parametrize("schedule", ["periodic", "delayed"])
@deep
def test_a_run_that_is_killed_and_resumed_comes_to_the_same_bits(tmp_path: Path, schedule: str) -> None:
    changes = {
        "schedule": schedule,
        "telemetry": {"samples_per_step": 0},
        "rollout": {"max_new_tokens": 48},
        "train": {"learning_rate": 1e-4, "max_candidates": 400},
    }
    whole = AttemptProcess(tree(tmp_path / "whole", CHOOSING, changes), resume=False)
    assert whole.end(seconds=120) == 0, whole.said()
    config = tree(tmp_path / "killed", CHOOSING, changes)
    for number in (2, 5):
        attempt = AttemptProcess(config)
        attempt.wait_for_steps(number)
        assert attempt.end(signal.SIGKILL) == 137, attempt.said()
    last = AttemptProcess(config)
    assert last.end() == 0, last.said()
    assert "resumed from" in last.said()
    check_same(last.run_dir, whole.run_dir)
    assert trained(last.run_dir) == trained(whole.run_dir)


def test_a_run_whose_prompts_teach_nothing_ends_in_a_sentence(small: Small, tmp_path: Path) -> None:
    (tmp_path / "always.py").write_text("def score(sample):\n    return 1.0\n")
    scorer = {"path": f"{tmp_path / 'always.py'}:score"}
    trainer = Trainer.from_config(merged(small(cluster="inline", reward={"scorer": scorer}), CHOOSING))
    with (
        pytest.raises(RunError, match="step 0 has gone through 40 prompts, of which 0 had responses with different rewards"),
        trainer,
    ):
        trainer.step()
    assert not (tmp_path / "runs" / "test" / "metrics.jsonl").read_text()
