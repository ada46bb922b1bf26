"""`asyncflow check --profile`: a layer's costs as a table and as a trace, and an end in time when something is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from asyncflow.engines.costs import Costs
from asyncflow.telemetry.idle import busy_and_idle
from asyncflow.telemetry.profile import costs
from asyncflow.telemetry.trace import read_spans
from tests.e2e.commands import processes_of, run_command, write_config

Small = Callable[..., dict[str, Any]]


def test_a_layer_on_two_ranks_is_timed_and_kept_as_a_trace(small: Small, tmp_path: Path) -> None:
    config = write_config(tmp_path, small(plan={"train": {"tp": 2}}, rollout={"group_size": 4}))
    command = run_command("check", "--profile", config, "--tokens", "64,128", "--repeats", "2", "algorithm.kl_coefficient=0.1")
    assert command.returncode == 0, command.stdout + command.stderr
    for words in ("dp 1 x tp 2 x pp 1 on cpu", "layer backward", "a token", "a parameter", "tp/reduce scatter", "fetch"):
        assert words in command.stdout
    run_dir = tmp_path / "runs" / "test-profile"
    spans = read_spans(run_dir / "spans.jsonl")
    found = {(cost.task, cost.tokens): cost for cost in costs(spans)}
    for task, tokens in (("layer_forward", 60), ("layer_backward", 125), ("head_loss", 48), ("optim_step", 0), ("publish", 0)):
        assert found[task, tokens].repeats == 2 and 0 < found[task, tokens].seconds < 10
    assert {span.layout for span in spans if span.task == "layer_forward"} == {"dp1-tp2-pp1"}
    assert {span.worker for span in spans} == {"trainer/0", "trainer/1", "rollout/0"}
    steps = {span.rows for span in spans if span.task == "decode_step"}
    assert {"decode_step", "prefill", "install", "score"} <= {span.task for span in spans} and 1 in steps and len(steps) > 1
    fitted = msgspec.json.decode((run_dir / "costs.json").read_bytes(), type=Costs)
    assert 0 < fitted.decode_step(4) < 1 and fitted.publish() > 0 and fitted.weight_bytes > 10_000
    for worker in ("trainer/0", "trainer/1"):
        activity = busy_and_idle(spans, worker)
        assert activity.wall > 0 and activity.unrecorded_seconds < 1e-6 * activity.wall
    names = {event["name"] for event in json.loads((run_dir / "trace.json").read_text())["traceEvents"]}
    assert {"layer_forward", "tp/all_reduce", "fetch"} <= names
    assert not processes_of(run_dir)


def test_what_is_wrong_is_one_sentence_and_leaves_nobody_behind(small: Small, tmp_path: Path) -> None:
    config = write_config(tmp_path, small(run={"name": "wrong"}))
    refused = run_command("check", "--profile", config, "plan.train.tp=3")
    assert refused.returncode == 2 and refused.stderr.startswith("asyncflow: ") and "plan.train.tp" in refused.stderr
    late = run_command("check", "--profile", config, "--deadline", "1")
    assert late.returncode == 1 and late.stderr.startswith("asyncflow: the profile had not ended within 1 s")
    assert not processes_of(tmp_path / "runs" / "wrong-profile")
    for arguments in (("plan.train.tp=2",), ("--profile", config, "--tokens", "many")):
        mistaken = run_command("check", *arguments)
        assert mistaken.returncode == 2 and mistaken.stderr.startswith("asyncflow: ") and len(mistaken.stderr.splitlines()) == 1
