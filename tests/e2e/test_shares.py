"""A whole run whose prompts do not divide by its rollout workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.telemetry.trace import read_spans
from tests.depth import in_gate
from tests.e2e.commands import run_command, write_config
from tests.e2e.test_units import fingerprints


@pytest.mark.parametrize("schedule", in_gate("delayed", of=["periodic", "delayed"]))
def test_three_workers_train_four_prompts_to_the_bits_of_one(
    small: Callable[..., dict[str, Any]], tmp_path: Path, schedule: str
) -> None:
    config = write_config(
        tmp_path,
        small(
            run={"steps": 4}, cluster="inline", schedule=schedule, train={"accumulate": "exact"}, telemetry={"fingerprints": True}
        ),
    )
    run_dirs = {workers: tmp_path / "runs" / str(workers) for workers in (1, 3)}
    for workers in run_dirs:
        command = run_command("train", config, f"run.name='{workers}'", f"rollout.num_workers={workers}")
        assert command.returncode == 0, command.stderr
    assert fingerprints(run_dirs[1]) == fingerprints(run_dirs[3]) and len(fingerprints(run_dirs[3])) == 4
    generated = {span.worker for span in read_spans(run_dirs[3] / "spans.jsonl") if span.task == "generate_group"}
    assert generated == {"rollout/0", "rollout/1", "rollout/2"}
