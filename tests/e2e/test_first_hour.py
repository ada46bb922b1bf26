"""The first hour with AsyncFlow: nothing is silent, and every mistake is one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.checkpoint.folder import Checkpoints
from asyncflow.trainer import Trainer
from asyncflow.types import UserError
from tests.e2e.commands import rows, run_command, write_config
from tests.forked import Command
from tests.patience import patience


def test_a_run_whose_output_nobody_reads_goes_on_to_its_checkpoint(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """As `asyncflow train ... | head -1` does."""
    tree = small(run={"steps": 4}, checkpoint={"every_steps": 2, "keep": 2})
    command = Command("train", write_config(tmp_path, tree))
    assert command.stdout.readline()
    command.stdout.close()
    command.stderr.close()
    assert command.wait(patience(120.0)) == 0
    run_dir = tmp_path / "runs" / "test"
    assert len(rows(run_dir / "metrics.jsonl")) == 4 and (run_dir / "report.html").is_file()
    assert Checkpoints(run_dir / "checkpoints", keep=2).newest(print) == 4


def test_a_trainer_from_python_takes_overrides_and_says_what_is_wrong(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    tree = small(run={"steps": 4}, cluster="inline")
    with pytest.raises(UserError, match=r"unknown key 'run\.nosuch'"):
        Trainer.from_config(tree, "run.steps=3", "run.nosuch=1")
    with Trainer.from_config(tree, "run.steps=2") as trainer:
        assert trainer.config.run.steps == 2 and tree["run"]["steps"] == 4
        with pytest.raises(UserError, match="the pushed prompts must be a list of rows, each a mapping of columns"):
            trainer.put_prompts_data({"question": "How many?", "answer": "1"})  # type: ignore[arg-type]
        for odd in (5, None, iter([])):
            with pytest.raises(UserError, match="the pushed prompts must be a list of rows, each a mapping of columns"):
                trainer.put_prompts_data(odd)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="row 1 of the pushed prompts has no answer"):
            trainer.put_prompts_data(row for row in [{"question": "How many?"}])
        with pytest.raises(UserError, match="row 1 of the pushed prompts has no answer, as the rows of generated:arithmetic have"):
            trainer.put_prompts_data([{"question": "How many?"}])
        metrics = trainer.step()
        assert metrics is not None and metrics["step"] == 0
        assert trainer.step() is not None and trainer.step() is None
    assert rows(tmp_path / "runs" / "test" / "metrics.jsonl")[0].keys() == metrics.keys()


SCORERS = """
import json
import time

from asyncflow.own_metrics import log_metric


def hangs(sample):
    time.sleep(600)


def raises(sample):
    return json.loads("{")["x"]


def says_nothing(sample):
    sample.response.strip()


def counts(sample):
    log_metric("length", len(sample.response))
    return float(len(sample.response) % 2)
"""


def scored_by(small: Callable[..., dict[str, Any]], tmp_path: Path, name: str, **reward: Any) -> Path:
    (tmp_path / "scorers.py").write_text(SCORERS)
    scorer = {"path": f"{tmp_path / 'scorers.py'}:{name}"}
    return write_config(tmp_path, small(run={"steps": 2, "stall_timeout_seconds": 600}, reward={"scorer": scorer, **reward}))


def test_a_scorer_that_always_hangs_is_told_at_once_and_ends_the_run(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    config = scored_by(small, tmp_path, "hangs", deadline_seconds=0.5)
    command = run_command("train", config, seconds=120.0)
    assert command.returncode == 1
    first = next(line for line in command.stdout.splitlines() if "could not be scored" in line)
    assert "scorers.py:hangs" in first and "gave no answer within 0.5 s" in first and "raise reward.deadline_seconds" in first
    assert "none of the first" in command.stderr and "responses could be scored" in command.stderr
    kept = rows(tmp_path / "runs" / "test" / "unscored.jsonl")
    assert {row["kind"] for row in kept} == {"timeout"} and all(row["prompt"] and row["example"] for row in kept)
    assert "Responses that could not be scored" in (tmp_path / "runs" / "test" / "report.html").read_text()


def test_a_scorer_that_raises_is_found_by_a_dry_run_with_its_line(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    config = scored_by(small, tmp_path, "raises")
    tried = run_command("train", config, "--dry-run")
    line = SCORERS.splitlines().index('    return json.loads("{")["x"]') + 1
    assert tried.returncode == 2 and f"scorers.py:{line})" in tried.stderr and "JSONDecodeError" in tried.stderr
    silent = run_command("train", scored_by(small, tmp_path, "says_nothing"), "--dry-run")
    assert silent.returncode == 2 and "returned None for each of 4 tried responses" in silent.stderr
    assert not (tmp_path / "runs").exists()
    config = scored_by(small, tmp_path, "raises")
    shown = run_command("reward", config, "--rows", "1")
    assert shown.returncode == 1 and "Traceback" in shown.stdout and "0 of 2 responses scored, 2 failed" in shown.stdout


def test_a_scorer_s_own_metrics_and_a_file_of_responses(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    config = scored_by(small, tmp_path, "counts")
    assert run_command("train", config).returncode == 0
    assert all(row["own/length"] > 0 for row in rows(tmp_path / "runs" / "test" / "metrics.jsonl"))
    (tmp_path / "responses.jsonl").write_text('{"prompt": "How many?", "response": "123", "answer": "3"}\n{"response": "12"}\n')
    scored = run_command("reward", config, "--responses", str(tmp_path / "responses.jsonl"))
    assert scored.returncode == 0 and "2 of 2 responses scored, mean 0.5, 0 failed" in scored.stdout
    (tmp_path / "responses.jsonl").write_text('{"prompt": "How many?"}\n')
    refused = run_command("reward", config, "--responses", str(tmp_path / "responses.jsonl"))
    assert refused.returncode == 2 and "line 1 has no text 'response'" in refused.stderr
    refused = run_command("reward", config, "data.path=null")
    assert refused.returncode == 2 and "data.path is not set" in refused.stderr


def test_a_fork_begins_with_another_run_s_checkpoint(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    tree = small(run={"steps": 2, "name": "origin"}, cluster="inline", schedule="delayed", checkpoint={"keep": 2})
    with Trainer.from_config(tree) as trainer:
        assert trainer.step() is not None and trainer.step() is not None
    refused = run_command("train", write_config(tmp_path, tree), "--resume", "run.steps=4", "train.learning_rate=1e-5")
    assert refused.returncode == 2 and "--fork-from" in refused.stderr and "another run.name" in refused.stderr
    overrides = ["run.name=fork", "run.steps=4", "train.learning_rate=1e-5", "schedule=periodic"]
    for source, words in (
        (f"{tmp_path}/runs/origin@7", "no checkpoint of step 7: there is 2"),
        (f"{tmp_path}/no", "no whole checkpoint"),
    ):
        refused = run_command("train", tmp_path / "config.yaml", *overrides, "--fork-from", source)
        assert refused.returncode == 2 and words in refused.stderr and not (tmp_path / "runs" / "fork").exists()
    tried = run_command("train", tmp_path / "config.yaml", *overrides, "--dry-run", "--fork-from", f"{tmp_path}/runs/origin@2")
    assert tried.returncode == 0 and "would be forked from" in tried.stdout and "1e-05 here" in tried.stdout
    assert not (tmp_path / "runs" / "fork").exists()
    forked = run_command("train", tmp_path / "config.yaml", *overrides, "--fork-from", f"{tmp_path}/runs/origin@2")
    assert forked.returncode == 0, forked.stderr
    assert "after 2 steps, with its weights and data and optimizer" in forked.stdout
    assert "train.learning_rate: " in forked.stdout and " there, 1e-05 here" in forked.stdout
    metrics = rows(tmp_path / "runs" / "fork" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [2, 3] and metrics[0]["policy/learning_rate"] == pytest.approx(1e-5)
    again = tmp_path / "config.yaml", *overrides, "run.steps=5", "--resume", "--fork-from"
    refused = run_command("train", *again, f"{tmp_path}/runs/another@2")
    assert refused.returncode == 2 and "is a fork of" in refused.stderr and "runs/origin@2" in refused.stderr
    refused = run_command("train", *again, f"{tmp_path}/runs/origin@2", "--fork-keep", "data")
    assert refused.returncode == 2 and "with its weights and data and optimizer, which is not what" in refused.stderr
    stranger = "run.name=origin", "run.overwrite=true", "--resume", "--fork-from", f"{tmp_path}/runs/fork"
    refused = run_command("train", tmp_path / "config.yaml", *stranger)
    assert refused.returncode == 2 and "holds a run that is no fork" in refused.stderr
    assert run_command("train", *again, f"{tmp_path}/runs/origin@02").returncode == 0
    assert [row["step"] for row in rows(tmp_path / "runs" / "fork" / "metrics.jsonl")] == [2, 3, 4]
    fresh = tmp_path / "config.yaml", *overrides, "run.overwrite=true", "train.warmup_steps=10", "--fork-keep", ""
    assert run_command("train", *fresh, "--fork-from", f"{tmp_path}/runs/origin").returncode == 0
    metrics = rows(tmp_path / "runs" / "fork" / "metrics.jsonl")
    assert metrics[0]["policy/learning_rate"] == pytest.approx(1e-6), "the warm-up begins anew"


def test_an_error_of_the_user_s_algorithm_names_their_file_and_line(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    lines = ["from asyncflow.algorithms.grpo import GRPO", "class Mine(GRPO):", "    def advantages(self, group):"]
    (tmp_path / "mine.py").write_text("\n".join([*lines, "        return super().advantages(group)['x']", ""]))
    command = run_command("train", write_config(tmp_path, small(algorithm={"path": f"{tmp_path / 'mine.py'}:Mine"})))
    assert command.returncode == 1 and f"{tmp_path / 'mine.py'}:4)" in command.stderr, command.stderr
