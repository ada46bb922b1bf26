"""The first hour with AsyncFlow: nothing is silent, and every mistake is one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.checkpoint import Checkpoints
from asyncflow.trainer import Trainer
from asyncflow.types import UserError
from tests.e2e.commands import rows, write_config
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
    assert Checkpoints(run_dir / "checkpoints").newest(print) == 4


def test_a_trainer_from_python_takes_overrides_and_says_what_is_wrong(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    tree = small(run={"steps": 4}, cluster="inline")
    with pytest.raises(UserError, match=r"unknown key 'run\.nosuch'"):
        Trainer.from_config(tree, "run.steps=3", "run.nosuch=1")
    with Trainer.from_config(tree, "run.steps=2") as trainer:
        assert trainer.config.run.steps == 2 and tree["run"]["steps"] == 4
        with pytest.raises(UserError, match="the pushed prompts must be a list of rows, each a mapping of columns"):
            trainer.push_prompts({"question": "How many?", "answer": "1"})  # type: ignore[arg-type]
        with pytest.raises(UserError, match="row 1 of the pushed prompts has no answer, as the rows of generated:arithmetic have"):
            trainer.push_prompts([{"question": "How many?"}])
        metrics = trainer.step()
        assert metrics is not None and metrics["step"] == 0
        assert trainer.step() is not None and trainer.step() is None
    assert rows(tmp_path / "runs" / "test" / "metrics.jsonl")[0].keys() == metrics.keys()
