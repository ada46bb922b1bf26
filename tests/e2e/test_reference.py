"""A KL term to the frozen reference, computed in the trainer or by a worker of its own: the same run, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from asyncflow.telemetry.trace import read_spans
from tests.e2e.commands import rows, run_command, write_config


def test_the_reference_as_a_task_changes_no_bit(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    runs: dict[str, Path] = {}
    for name, kl_coefficient, reference in (("none", 0.0, "fused"), ("fused", 0.3, "fused"), ("task", 0.3, "task")):
        tree = small(
            run={"name": name, "steps": 3},
            train={"accumulate": "exact", "reference": reference},
            algorithm={"name": "grpo", "kl_coefficient": kl_coefficient},
        )
        folder = tmp_path / f"config-{name}"
        folder.mkdir()
        command = run_command("train", write_config(folder, tree))
        assert command.returncode == 0, command.stderr
        runs[name] = tmp_path / "runs" / name
    weights = {name: load_file(path / "model" / "model.safetensors") for name, path in runs.items()}
    assert all((weights["task"][tensor] == value).all() for tensor, value in weights["fused"].items())
    assert any((weights["none"][tensor] != value).any() for tensor, value in weights["fused"].items())
    kl = {name: [row["policy/kl"] for row in rows(path / "metrics.jsonl")] for name, path in runs.items()}
    assert kl["fused"] == kl["task"] and kl["fused"][0] == 0 < kl["fused"][2]
    spans = read_spans(runs["task"] / "spans.jsonl")
    referred = sorted(s.group for s in spans if s.task == "reference" and s.worker == "reference" and s.rows)
    assert referred == sorted({s.group for s in spans if s.task == "forward_backward"})
