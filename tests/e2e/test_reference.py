"""A KL term to the frozen reference, computed in the trainer or by workers of its own: the same run, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from asyncflow.telemetry.trace import read_spans
from tests.e2e.commands import rows, run_command, write_config


def test_the_reference_as_a_task_changes_no_bit(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    runs: dict[str, Path] = {}
    pools = {"reference": {"num_workers": 2}, "reward": {"num_workers": 2}}
    for name, kl_coefficient, reference, sections in (
        ("none", 0.0, "fused", {}),
        ("fused", 0.3, "fused", {}),
        ("task", 0.3, "task", {"plan": pools, "reward": {"place": "task"}}),
    ):
        tree = small(
            run={"name": name, "steps": 3},
            **sections,
            train={"accumulate": "exact", "reference": reference, "skip_zero_advantages": False, "tokens_per_micro_batch": 1},
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
    for task in pools:
        done = [
            (span.group, span.worker) for span in spans if span.task == task and span.worker.startswith(f"{task}/") and span.rows
        ]
        trained = {span.group for span in spans if span.task == "forward_backward"}
        assert {group for group, _ in done} == trained
        assert {worker for _, worker in done} == {f"{task}/0", f"{task}/1"}, "both workers of the pool have their share"
        assert task == "reward" or len(done) == len(trained), "once each"
