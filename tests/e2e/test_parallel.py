"""The same training on one process and on several: as the command line starts them, and as torchrun does."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from safetensors.numpy import load_file

from asyncflow.telemetry.fingerprints import StepPrint, read_fingerprints
from asyncflow.telemetry.trace import read_spans
from tests.conftest import merged
from tests.contract.conftest import free_port
from tests.depth import deep, few
from tests.e2e.commands import processes_of, rows, run_command, wait_for, write_config
from tests.forked import Command
from tests.patience import patience
from tests.processes import alive, below

Small = Callable[..., dict[str, Any]]
STEPS = 5
SECTIONS: dict[str, Any] = {
    "run": {"steps": STEPS},
    "train": {"prompts_per_step": 4, "accumulate": "exact", "max_grad_norm": 0.01},
    "telemetry": {"fingerprints": True},
}


def trained(small: Small, tmp_path: Path, name: str, **changes: Any) -> Path:
    """A run's folder, when it has ended well."""
    folder = tmp_path / f"config-{name}"
    folder.mkdir()
    config = write_config(folder, small(**merged(merged(SECTIONS, {"run": {"name": name}}), changes)))
    command = run_command("train", config)
    assert command.returncode == 0, command.stdout + command.stderr
    run_dir = tmp_path / "runs" / name
    assert not processes_of(run_dir)
    return run_dir


def prints(run_dir: Path) -> list[StepPrint]:
    """The fingerprints, without the order in which groups came."""
    found = read_fingerprints(run_dir / "fingerprints.jsonl")
    return [msgspec.structs.replace(step, groups=sorted(step.groups, key=lambda group: group.group)) for step in found]


def of_metric(run_dir: Path, name: str) -> list[float]:
    return [row[name] for row in rows(run_dir / "metrics.jsonl")]


@deep
def test_data_parallel_training_gives_the_bits_of_one_process(small: Small, tmp_path: Path) -> None:
    every_row = {"skip_zero_advantages": False}
    one = trained(small, tmp_path, "one", train=every_row)
    two = trained(small, tmp_path, "two", train=every_row, plan={"train": {"dp": 2}})
    assert sum(norm > 0.01 for norm in of_metric(one, "policy/grad_norm")) >= 3  # the clip is at work
    assert of_metric(one, "policy/grad_norm") == of_metric(two, "policy/grad_norm")
    for alone, together in zip(prints(one), prints(two), strict=True):
        assert alone.tensors == together.tensors
        by_group = ({group.group: group for group in step.groups} for step in (alone, together))
        assert next(by_group) == next(by_group)
    assert (one / "model" / "model.safetensors").read_bytes() == (two / "model" / "model.safetensors").read_bytes()

    spans = [span for span in read_spans(two / "spans.jsonl") if span.task == "forward_backward"]
    assert {span.worker for span in spans if span.rows} == {"trainer/0", "trainer/1"}  # both had their share
    assert sum(span.rows for span in spans) == STEPS * 16


def test_tensor_and_pipeline_parallel_training_is_that_of_one_process(small: Small, tmp_path: Path) -> None:
    one = trained(small, tmp_path, "one")
    four = trained(small, tmp_path, "four", plan={"train": {"tp": 2, "pp": 2}}, train={"pipeline_micro_batches": 2})
    assert of_metric(one, "reward/mean") == of_metric(four, "reward/mean")
    weights, others = (load_file(run / "model" / "model.safetensors") for run in (one, four))
    assert weights.keys() == others.keys()
    assert max(abs(weights[name] - others[name]).max() for name in weights) < 1e-4
    original = load_file(Path(small()["model"]["path"]) / "model.safetensors")
    assert max(abs(weights[name] - original[name]).max() for name in weights) > 1e-4  # or nothing would have been shown
    lanes = {span.worker for span in read_spans(four / "spans.jsonl") if span.task == "forward_backward"}
    assert lanes == {f"trainer/{rank}" for rank in range(4)}


@deep
@pytest.mark.parametrize(("before", "after"), [("dp", "tp"), ("pp", "dp"), ("dp", "pp")])
def test_a_run_that_is_interrupted_goes_on_under_another_layout(small: Small, tmp_path: Path, before: str, after: str) -> None:
    """Saved by two ranks, each with its part of every parameter, or of the layers; loaded by two that cut in another way."""
    whole = trained(small, tmp_path, "whole", plan={"train": {before: 2}})
    tree = merged(merged(SECTIONS, {"run": {"name": "cut"}}), {"plan": {"train": {before: 2}}})
    config, run_dir = write_config(tmp_path, small(**tree)), tmp_path / "runs" / "cut"
    process = Command("train", config)
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and (run_dir / "metrics.jsonl").read_text(), process, 300)
    process.terminate()
    _, errors = process.communicate(timeout=patience(300))
    assert process.returncode == 143, errors
    saved = [folder.name for folder in (run_dir / "checkpoints").iterdir()]
    assert saved and saved[0] < f"step-{STEPS:06}"  # or nothing would have been shown
    command = run_command("train", config, f"plan.train.{before}=1", f"plan.train.{after}=2", "--resume")
    assert command.returncode == 0, command.stdout + command.stderr
    assert of_metric(run_dir, "reward/mean") == of_metric(whole, "reward/mean")
    for name in ("policy/loss", "policy/grad_norm"):
        assert of_metric(run_dir, name) == pytest.approx(of_metric(whole, name), rel=1e-5, abs=1e-7)
    assert not processes_of(run_dir)


@deep
def test_tensor_parallel_training_has_the_same_bits_whatever_shares_a_pass(small: Small, tmp_path: Path) -> None:
    """All groups of a step are there when its training begins."""
    own: dict[str, Any] = {"plan": {"train": {"tp": 2}}, "schedule": "synchronous"}
    runs, counts = [], []
    for name, tokens in (("each", None), ("together", "auto")):
        train = {"skip_zero_advantages": False, "tokens_per_micro_batch": tokens}
        run_dir = trained(small, tmp_path, name, train=train, **own)
        spans = [span for span in read_spans(run_dir / "spans.jsonl") if span.task == "forward_backward" and span.rows]
        assert sum(span.rows for span in spans if span.worker == "trainer/0") == STEPS * 16
        counts.append(sum(span.worker == "trainer/0" for span in spans))
        runs.append(run_dir)
    each, together = runs
    assert counts[0] == STEPS * 4 and counts[1] < STEPS * 4
    assert [step.tensors for step in prints(each)] == [step.tensors for step in prints(together)]
    assert of_metric(each, "policy/grad_norm") == of_metric(together, "policy/grad_norm")
    assert (each / "model" / "model.safetensors").read_bytes() == (together / "model" / "model.safetensors").read_bytes()


AGAIN = ((["--resume"], 0, "finished already"), ([], 1, "holds an earlier run"))


@deep
def test_torchrun_may_start_the_trainers(small: Small, tmp_path: Path) -> None:
    sections = merged(SECTIONS, {"run": {"steps": 2}, "plan": {"train": {"dp": 2}}})
    config = write_config(tmp_path, small(**sections))
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    assert torchrun is not None
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    wrong = subprocess.run(
        [torchrun, "--nproc-per-node", "1", "-m", "asyncflow", "train", config],
        capture_output=True, text=True, timeout=patience(60), env=environment, check=False,
    )  # fmt: skip
    assert wrong.returncode != 0 and "--nproc-per-node 2" in wrong.stderr
    done = subprocess.run(
        [torchrun, "--nproc-per-node", "2", "-m", "asyncflow", "train", config],
        capture_output=True, text=True, timeout=patience(120), env=environment, check=False,
    )  # fmt: skip
    run_dir = tmp_path / "runs" / "test"
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished after 2 steps" in done.stdout and (run_dir / "model" / "model.safetensors").is_file()
    assert {span.worker for span in read_spans(run_dir / "spans.jsonl")} == {"rollout/0", "trainer/0", "trainer/1"}
    for more, status, words in few(AGAIN[:1], AGAIN):
        again = subprocess.run(  # every rank ends with the driver, which has nothing for them to do
            [torchrun, "--nproc-per-node", "2", "-m", "asyncflow", "train", config, *more],
            capture_output=True, text=True, timeout=patience(60), env=environment, check=False,
        )  # fmt: skip
        assert again.returncode == status and words in again.stdout + again.stderr


@deep
def test_two_torchruns_may_start_the_trainers_and_resume_the_run_that_was_killed(small: Small, tmp_path: Path) -> None:
    """As on two nodes, here on this machine's loopback: the second launch goes on from the checkpoint of the first, of which all
    processes were killed in the middle of a step, to the same bits."""
    folder, run_dir = tmp_path / "config-cut", tmp_path / "runs" / "cut"
    folder.mkdir()
    sections = {"run": {"name": "cut", "steps": 400}, "plan": {"train": {"dp": 2}}, "checkpoint": {"every_steps": 1}}
    config = write_config(folder, small(**merged(SECTIONS, sections)))
    torchrun = str(shutil.which("torchrun", path=str(Path(sys.executable).parent)))

    def launched(*more: str) -> list[subprocess.Popen[str]]:
        nodes = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        return [
            subprocess.Popen(
                [torchrun, *nodes, "--node-rank", str(node), "-m", "asyncflow", "train", config, *more],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for node in range(2)
        ]  # fmt: skip

    def newest() -> int:
        """The newest checkpoint that is on the disk; 0: there is none."""
        numbers = [each.name.removeprefix("step-") for each in (run_dir / "checkpoints").glob("step-*")]
        return max((int(number) for number in numbers if number.isdecimal()), default=0)

    launches = launched()
    try:
        deadline = time.monotonic() + patience(120)
        while not newest():
            assert time.monotonic() < deadline and all(launch.poll() is None for launch in launches), "there is no checkpoint"
            time.sleep(0.01)
    finally:
        everyone = [process for launch in launches for process in below(launch.pid)]
        for launch in launches:
            launch.kill()
        for process in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    assert len(everyone) >= 4  # two ranks, the driver and a rollout worker
    said = [launch.communicate(timeout=patience(60))[0] for launch in launches]
    assert [launch.returncode for launch in launches] == [-signal.SIGKILL] * 2, "\n".join(said)
    wait_for(lambda: not alive(everyone))
    kept = newest()
    last = kept + 3

    launches = launched("--resume", f"run.steps={last}")
    said = [launch.communicate(timeout=patience(120))[0] for launch in launches]
    assert [launch.returncode for launch in launches] == [0, 0], "\n".join(said)
    assert f"{kept} of {last} steps are done" in "\n".join(said)
    assert [row["step"] for row in rows(run_dir / "metrics.jsonl")] == [*range(last)]
    whole = trained(small, tmp_path, "whole", run={"steps": last}, plan={"train": {"dp": 2}})
    same = [(folder / "model" / "model.safetensors").read_bytes() for folder in (whole, run_dir)]
    assert same[0] == same[1]
    assert not processes_of(run_dir)
