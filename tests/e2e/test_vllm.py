"""A whole run whose rollout engine is vLLM's stand-in: `tests/vllm` has those on the real one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.telemetry.certificate import read_certificate
from asyncflow.telemetry.trace import SPANS_FILE, read_spans
from tests.conftest import MODEL
from tests.depth import deep, in_gate
from tests.e2e.commands import processes_of, rows, run_command, write_config
from tests.vllm.servers import fake_python

BOUNDED = {"name": "bounded", "max_staleness": 1}


@pytest.mark.parametrize("schedule", in_gate(BOUNDED, of=["periodic", BOUNDED]))
def test_a_run_over_two_servers(small: Callable[..., dict[str, Any]], tmp_path: Path, schedule: Any) -> None:
    """The stand-in's log-probs are not the model's, of which the run warns."""
    engine = {"name": "vllm", "python": str(fake_python(tmp_path)), "instances": 2}
    rollout, every_row = {"engine": engine, "kv_on_install": "recompute"}, {"skip_zero_advantages": False, "weight_decay": 0.1}
    config = small(schedule=schedule, rollout=rollout, run={"steps": 3}, train=every_row)
    done = run_command("train", write_config(tmp_path, config))
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "runs" / "test"
    assert (done.stdout + done.stderr).count("the rollout engine's log-probs are not the train engine's: mismatch/kl is") == 1
    assert "vLLM's sums depend on what else is in its batch" in done.stdout
    steps = rows(run_dir / "metrics.jsonl")
    assert [step["rows/trained"] for step in steps] == [16, 16, 16]
    assert [step["weights/attested"] for step in steps[1:]] == [1.0, 1.0], "both servers have shown what they generate with"
    assert steps[0]["mismatch/kl"] > 0.01 and steps[0]["mismatch/logprob_difference"] > 0.1
    certificate = read_certificate(run_dir)
    assert certificate is not None and not certificate.is_deterministic and certificate.max_staleness <= (schedule != "periodic")
    log = (run_dir / "logs" / "rollout-0.log").read_text()
    assert "[vLLM 0]" in log and "[vLLM 1]" in log
    assert not processes_of(run_dir)


@deep
def test_servers_that_load_nothing_get_no_prompts_and_end_the_run_by_name(
    small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """The stand-in earns no reward, so it is weight decay that changes the weights."""
    model = shutil.copytree(MODEL, tmp_path / "model")
    (model / "deaf").write_text("nothing")
    changes: dict[str, Any] = {
        "model": {"path": str(model)},
        "rollout": {"engine": {"name": "vllm", "python": str(fake_python(tmp_path))}},
        "train": {"skip_zero_advantages": False, "weight_decay": 0.1},
        "weight_sync": {"deadline_seconds": 2},
    }
    done = run_command("train", write_config(tmp_path, small(**changes)))
    assert done.returncode == 1 and "the engine generates with other weights than those of version 1" in done.stderr, done.stderr
    assert len(rows(tmp_path / "runs" / "test" / "metrics.jsonl")) == 1


@deep
def test_evaluators_have_servers_of_their_own(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    engine = {"name": "vllm", "python": str(fake_python(tmp_path))}
    evaluation = {"path": "generated:arithmetic", "num_prompts": 4, "every_steps": 2, "num_workers": 1}
    done = run_command("train", write_config(tmp_path, small(rollout={"engine": engine}, eval=evaluation, run={"steps": 4})))
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "runs" / "test"
    assert [row["step"] for row in rows(run_dir / "eval.jsonl")] == [0, 2, 4]
    spans = [span for span in read_spans(run_dir / SPANS_FILE) if span.task == "generate_group"]
    assert {(s.worker.split("/")[0], s.version) for s in spans if s.group >= 1 << 40} == {("evaluator", s) for s in (0, 2, 4)}
    assert [row["rows/trained"] for row in rows(run_dir / "metrics.jsonl")] == [16] * 4
    assert "[vLLM 0]" in (run_dir / "logs" / "evaluator-0.log").read_text()
    assert not processes_of(run_dir)


@deep
def test_a_resumed_run_says_that_its_bits_may_be_others(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """And why. One on an engine that is deterministic says nothing of it."""
    path = write_config(tmp_path, small(run={"steps": 1}, checkpoint={"every_steps": 1}))
    assert run_command("train", path).returncode == 0
    done = run_command("train", path, "run.steps=2", "--resume")
    assert "resumed from" in done.stdout + done.stderr and "may have other bits" not in done.stdout + done.stderr
    engine = {"name": "vllm", "python": str(fake_python(tmp_path))}
    changes = {"run": {"steps": 1, "name": "other"}, "rollout": {"engine": engine}, "checkpoint": {"every_steps": 1}}
    path = write_config(tmp_path, small(**changes))
    assert run_command("train", path).returncode == 0
    done = run_command("train", path, "run.steps=2", "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert said.count("so later steps may have other bits (vLLM's sums depend on what else is in its batch") == 1


def test_a_server_that_does_not_start_ends_the_run_with_its_own_reason(
    small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    config = small(rollout={"engine": {"name": "vllm", "python": "/nowhere/python"}})
    done = run_command("train", write_config(tmp_path, config))
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "rollout.engine.python is '/nowhere/python', which cannot be started: No such file or directory" in line
