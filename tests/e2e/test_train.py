"""`asyncflow train` from the command line: one small run, everything that it leaves, and what the driver must not import."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoConfig

from asyncflow.service.groups import group_figures, groups_of, steps_with_groups
from asyncflow.telemetry.idle import busy_and_idle
from asyncflow.telemetry.metrics import DEFINITIONS, metric_key
from asyncflow.telemetry.run_reader import RunReader
from asyncflow.telemetry.tokens import read_tokens
from asyncflow.telemetry.trace import read_spans
from asyncflow.threads import num_cores
from tests.conftest import MODEL
from tests.depth import deep
from tests.e2e.commands import command_line, processes_of, rows, run_command, write_config
from tests.patience import patience
from tests.report_page import check_chart

NAMES = [
    "reward/mean", "reward/std", "reward/zero_std_groups", "response_length/mean", "response_length/clipped_ratio", "policy/kl",
    "policy/entropy", "policy/clip_ratio", "policy/grad_norm", "staleness/mean", "staleness/max", "perf/tpspd", "perf/step_seconds",
    "perf/train_startup_seconds", "perf/rollout_tokens_per_second", "perf/train_tokens_per_second", "perf/physical_tokens_ratio",
    "perf/idle_ratio/rollout/0", "perf/idle_ratio/rollout/1", "perf/idle_ratio/trainer/0",
]  # fmt: skip


def test_that_prompts_are_too_short_to_share_is_said_once(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    every_row = {"skip_zero_advantages": False}
    tree = small(run={"steps": 2}, data={"prompt_template": "{answer}"}, rollout={"max_new_tokens": 64}, train=every_row)
    command = run_command("train", write_config(tmp_path, tree))
    assert command.returncode == 0 and command.stdout.count("prompts are not shared where that saves less than a tenth") == 1
    for row in rows(tmp_path / "runs" / "test" / "metrics.jsonl"):
        assert row["perf/physical_tokens_ratio"] == 1.0


def test_a_model_whose_config_is_written_whole_and_names_no_architecture(
    small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    whole = {name: value for name, value in AutoConfig.from_pretrained(model).to_dict().items() if name != "architectures"}
    assert whole["chunk_size_feed_forward"] == 0
    (model / "config.json").write_text(json.dumps(whole))
    command = run_command("train", write_config(tmp_path, small(run={"steps": 1}, model={"path": str(model)})))
    assert command.returncode == 0 and "finished after 1 step" in command.stdout, command.stdout + command.stderr


def test_versions_that_travel_rounded_are_served(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """All that computes does so in float32: the version is what the workers have, and not what the trainer keeps."""
    command = run_command("train", write_config(tmp_path, small(weight_sync={"dtype": "bfloat16"})))
    assert command.returncode == 0 and "finished after 2 steps" in command.stdout, command.stdout + command.stderr
    assert "no weights to serve" not in command.stdout + command.stderr
    assert rows(tmp_path / "runs" / "test" / "metrics.jsonl")[-1]["weights/attested"] == 1.0
    assert any(span.task == "probe" for span in read_spans(tmp_path / "runs" / "test" / "spans.jsonl")), "it was compared"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run of three steps with two rollout workers, evaluated before and after."""
    folder = tmp_path_factory.mktemp("train")
    root = Path(__file__).parent.parent.parent
    config = write_config(
        folder,
        {
            "run": {"name": "small", "dir": str(folder / "runs"), "steps": 3},
            "model": {"path": str(root / "recipes" / "models" / "tiny-arithmetic")},
            "data": {"path": "generated:arithmetic", "limit": 64},
            "rollout": {"num_workers": 2, "num_slots": 16, "group_size": 4, "max_new_tokens": 48},
            "train": {"prompts_per_step": 8, "learning_rate": 1e-4},
            "eval": {"path": "generated:arithmetic", "num_prompts": 16},
        },
    )
    return folder / "runs" / "small", run_command("train", config)


def test_ends_well_and_leaves_everything(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    run_dir, command = finished
    assert command.returncode == 0, command.stderr
    steps = [line for line in command.stdout.splitlines() if line.startswith("step ")]
    assert len(steps) == 3 and "reward" in steps[0] and "TPSPD" in steps[0] and "staleness" in steps[0]
    files = ("config.yaml", "metrics.jsonl", "eval.jsonl", "trace.json", "samples.jsonl", "tokens.jsonl", "report.html")
    for name in (*files, "certificate.json", "model/config.json"):
        assert (run_dir / name).stat().st_size > 0, name
    assert not (run_dir / "fingerprints.jsonl").exists()
    assert any((run_dir / "tensorboard").iterdir())
    assert not processes_of(run_dir)
    assert not Path(json.loads((run_dir / "job.json").read_text())["weights_dir"]).exists()


def test_the_certificate_holds_and_is_shown(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    run_dir, command = finished
    certificate = json.loads((run_dir / "certificate.json").read_text())
    overlapped = certificate.pop("overlapped_steps")
    assert certificate == {
        "schedule": "periodic", "steps": 3, "planned_steps": 3, "promised_staleness": 0, "max_staleness": 0, "max_spans": 1,
        "rows_redelivered": 0, "rows_dead": 0, "reward_timeouts": 0, "reward_failures": {}, "episode_timeouts": 0,
        "skipped_updates": 0, "is_deterministic": True, "why_not_deterministic": "", "voided": [], "resumed_at": [],
    }  # fmt: skip
    assert 0 <= overlapped <= 3
    line = "on-policy certificate holds (periodic, 3 of 3 steps; staleness 0, spans per row 1,"
    assert line in command.stdout and line in (run_dir / "report.html").read_text()


def test_samples_that_were_trained_are_told_token_by_token(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    run_dir, _ = finished
    samples = {row["row"]: row for row in rows(run_dir / "samples.jsonl") if row["purpose"] == "train"}
    trained = read_tokens(run_dir, samples)
    assert trained and len(trained) == len((run_dir / "tokens.jsonl").read_bytes().splitlines())
    told = [row for row in trained if row.ids]
    assert told and len({samples[row.row]["group"] for row in told}) == len(told)  # one of a prompt
    for row in told:
        sampled, found = (np.array(values) for values in (row.logprobs, row.figures["log-prob of the trainer"]))
        assert row.step == samples[row.row]["step"] and row.length == len(row.ids) == len(found)
        np.testing.assert_allclose(found, sampled, atol=2e-4)  # two engines, the same weights
        assert set(row.figures["clipped"]) <= {0, 1} and set(row.versions) <= {row.step - 1, row.step}


def test_a_group_of_each_step_is_kept_whole_with_its_advantages(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    run = RunReader(finished[0])
    run.read_all()
    assert steps_with_groups(run) == [0, 1, 2]
    for step in range(3):
        ((group, size),) = ((each["group"], each["size"]) for each in groups_of(run, step))
        found = group_figures(run, step, group)["rows"]
        rewards, advantages = (np.array([row[name] for row in found]) for name in ("reward", "advantage"))
        assert size == len(found) == 4 and sum(row["is_told"] for row in found) <= 1
        np.testing.assert_allclose(advantages, (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6), atol=1e-4)


def test_metrics_have_one_row_per_step_and_every_name(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    metrics = rows(finished[0] / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2]
    for row in metrics:
        assert not [name for name in NAMES if name not in row]
        assert not [name for name in row if name != "step" and metric_key(name) not in DEFINITIONS]
        assert {name for name in DEFINITIONS if name.startswith("queue/")} <= {metric_key(name) for name in row}
        assert row["rows/trained"] == 32 and row["staleness/max"] == 0 and 0.3 < row["perf/physical_tokens_ratio"] < 0.9
        assert 0 < row["perf/train_startup_seconds"] < row["perf/step_seconds"]
    evaluations = rows(finished[0] / "eval.jsonl")
    assert [row["step"] for row in evaluations] == [0, 3]
    assert all(row["num_responses/sampled"] == row["num_responses/greedy"] == 16 for row in evaluations)


def test_busy_and_idle_add_up_to_wall_time(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    spans = read_spans(finished[0] / "spans.jsonl")
    for worker in ("rollout/0", "rollout/1", "trainer/0"):
        activity = busy_and_idle(spans, worker)
        assert activity.busy_seconds + activity.idle_seconds == pytest.approx(activity.wall, rel=0.01)
        assert activity.busy_seconds > 0 and activity.idle_seconds > 0
    assert {s.task for s in spans if s.worker == "trainer/0"} >= {
        "load",
        "forward_backward",
        "optim_step",
        "publish",
        "save",
        "wait",
    }
    assert {s.task for s in spans if s.worker == "rollout/0"} >= {"load", "generate", "install", "wait", "fetch", "generate_group"}
    steps = rows(finished[0] / "metrics.jsonl")
    assert sum(step["rows/trained"] for step in steps) == 3 * 32
    assert all(0 < step["perf/cores_busy"] <= 4 / num_cores() for step in steps)  # three workers, and a helper
    computed = sum(step["rows/trained"] - step["rows/zero_advantage"] for step in steps)
    beyond = sum(s.rows for s in spans if s.task == "forward_backward") - computed
    assert beyond in range(0, 3 * 4 + 1, 4), "the first group of a step is computed in any case, to see that nothing is left out"


def test_both_workers_generate(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    groups = dict.fromkeys(("rollout/0", "rollout/1"), 0)
    for span in read_spans(finished[0] / "spans.jsonl"):
        if span.task == "generate_group":
            groups[span.worker] += 1
    assert min(groups.values()) >= 3


def test_the_report_has_the_chart(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    check_chart(finished[0], ["rollout/0", "rollout/1", "trainer/0"], 3)


def test_trace_is_what_perfetto_opens(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    events = json.loads((finished[0] / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} >= {"M", "X", "b", "e"}


def test_the_saved_model_loads_in_transformers_and_has_changed(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_dir = finished[0]
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model")
    assert model.config.model_type == "qwen2" and tokenizer.eos_token_id is not None
    before = load_file(Path(__file__).parent.parent.parent / "recipes/models/tiny-arithmetic/model.safetensors")
    after = load_file(run_dir / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before)


def test_report_is_made_again(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    page = finished[0] / "report.html"
    page.unlink()
    again = run_command("report", finished[0])
    assert again.returncode == 0 and page.stat().st_size > 1000


def test_a_used_run_directory_is_not_overwritten_unless_asked(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    config = finished[0].parent.parent / "config.yaml"
    again = run_command("train", config)
    assert again.returncode == 2 and "run.overwrite=true" in again.stderr and len(again.stderr.splitlines()) == 1
    assert (finished[0] / "metrics.jsonl").is_file()


def test_eval_of_the_saved_model(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    command = run_command("eval", finished[0] / "model", "generated:arithmetic", "eval.num_prompts=16", "rollout.max_new_tokens=48")
    assert command.returncode == 0, command.stderr
    assert "sampled 0." in command.stdout and "greedy" in command.stdout and "16 prompts" in command.stdout


def test_check_says_what_there_is() -> None:
    command = run_command("check")
    assert command.returncode == 0
    for word in ("python", "cores", "torch", "ray", "accelerators"):
        assert word in command.stdout


def test_the_driver_imports_no_torch(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    config = write_config(tmp_path, small(run={"steps": 1}))
    program = (
        "import asyncio, pathlib, sys; from asyncflow.config import load; from asyncflow.run.job import Job;"
        "async def main(): return await Job(load(pathlib.Path(sys.argv[1]))).run()\n"
    ).replace(";async", "\nasync") + "assert asyncio.run(main())\nprint(sorted({'torch', 'transformers'} & set(sys.modules)))"
    command = subprocess.run(
        [sys.executable, "-c", program, str(config)], capture_output=True, text=True, timeout=patience(120), check=False
    )
    assert command.returncode == 0, command.stderr
    assert command.stdout.splitlines()[-1] == "[]"


def test_inline_runs_everything_in_one_process(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    command = run_command("train", write_config(tmp_path, small(cluster="inline")))
    assert command.returncode == 0, command.stderr
    assert len(rows(tmp_path / "runs" / "test" / "metrics.jsonl")) == 2
    assert not (tmp_path / "runs" / "test" / "logs").exists()


def test_dry_run_starts_nothing(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    command = run_command("train", write_config(tmp_path, small()), "--dry-run")
    assert command.returncode == 0 and "4 prompts x 4 responses = 16 rows" in command.stdout
    assert not (tmp_path / "runs").exists()


@deep
def test_a_terminal_gets_a_progress_bar(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """In a pseudo-terminal: steps, reward, TPSPD, staleness and the time left, in one line that is drawn over and over."""
    config = write_config(tmp_path, small(cluster="inline"))
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "140", "TERM": "xterm"}
    with subprocess.Popen(command_line("train", config), stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as command:
        os.close(theirs)
        shown = b""
        while chunk := _read(ours):
            shown += chunk
    os.close(ours)
    assert command.returncode == 0, shown.decode(errors="replace")
    bars = [line for line in shown.decode().replace("\r", "\n").split("\n") if "2/2" in line]
    assert bars and all(word in bars[-1] for word in ("test", "reward", "TPSPD", "staleness", "left"))


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end is closed: on Linux that is an error, not an end
        return b""
