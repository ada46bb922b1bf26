"""Rollout workers that die: the run goes on, and what it trains is what it would have trained."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file

from asyncflow.run.watch import Watch
from asyncflow.run_dir import control_socket
from asyncflow.telemetry.certificate import read_certificate
from asyncflow.telemetry.trace import read_spans
from asyncflow.transport import Peer, proxy
from tests.conftest import merged
from tests.depth import deep
from tests.e2e.commands import processes_of, rows, run_command, wait_for, write_config
from tests.forked import Command
from tests.patience import patience
from tests.processes import alive, words_of

Small = Callable[..., dict[str, Any]]
Background = Callable[..., Command]
SLOW_REWARD = """
import time
def score(sample):
    time.sleep(0.02)  # the worker holds rows without a reward for most of the time
    return float(len(sample.response) % 3)
"""
STEPS = 6


def config(small: Small, tmp_path: Path, name: str, **changes: Any) -> Path:
    """Two rollout workers, and steps that take some tenths of a second."""
    (tmp_path / "slow.py").write_text(SLOW_REWARD)
    sections: dict[str, Any] = {
        "run": {"steps": STEPS, "name": name},
        "rollout": {"num_workers": 2, "num_slots": 16},
        "train": {"prompts_per_step": 8, "accumulate": "exact"},
        "reward": {"scorer": {"path": f"{tmp_path / 'slow.py'}:score"}},
    }
    folder = tmp_path / f"config-{name}"
    folder.mkdir()
    return write_config(folder, small(**merged(sections, changes)))


def committed(run_dir: Path) -> int:
    return len(rows(run_dir / "metrics.jsonl")) if (run_dir / "metrics.jsonl").exists() else 0


def worker(run_dir: Path, name: str) -> psutil.Process:
    return next(process for process in processes_of(run_dir) if is_named(process, name))


def is_named(process: psutil.Process, name: str) -> bool:
    try:
        return name in words_of(process)
    except psutil.Error:  # it has just ended
        return False


def holds(run_dir: Path, name: str) -> bool:
    """Whether the worker holds rows right now, by the run's own word."""

    async def ask() -> list[str]:
        peer = await Peer.connect(control_socket(run_dir), "test")
        status = await proxy(Watch, peer, "status").status()
        await peer.close()
        return status.waits

    return any(each.startswith(f"{name} holds") for each in asyncio.run(ask()))


def stopped_with_rows(run_dir: Path, process: psutil.Process) -> bool:
    """Stop it; whether it holds rows then. If not, it goes on."""
    process.suspend()
    holds(run_dir, "rollout/0")  # behind this answer the run has read what the worker had sent when it was stopped: rows perhaps
    if not (has_rows := holds(run_dir, "rollout/0")):
        process.resume()
    return has_rows


@deep
@pytest.mark.parametrize("schedule", ["periodic", "delayed"])
def test_a_rollout_worker_killed_in_mid_step_changes_no_bit(
    small: Small, tmp_path: Path, background: Background, schedule: str
) -> None:
    undisturbed = run_command("train", config(small, tmp_path, "undisturbed", schedule=schedule))
    assert undisturbed.returncode == 0, undisturbed.stderr
    run_dir = tmp_path / "runs" / "disturbed"
    command = background("train", config(small, tmp_path, "disturbed", schedule=schedule))
    wait_for(lambda: committed(run_dir) >= 1, command)
    victim = worker(run_dir, "rollout/0")
    wait_for(lambda: stopped_with_rows(run_dir, victim), command)
    victim.kill()
    output, errors = command.communicate(timeout=patience(90))
    assert command.returncode == 0, errors
    assert f"worker rollout/0 (process {victim.pid}) was ended by SIGKILL" in output + errors
    assert "it is started again in 0.5 s" in output + errors
    assert not processes_of(run_dir)

    one, two = (load_file(tmp_path / "runs" / name / "model" / "model.safetensors") for name in ("undisturbed", "disturbed"))
    assert one.keys() == two.keys() and all((one[name] == two[name]).all() for name in one)
    certificate = read_certificate(run_dir)
    assert certificate is not None and certificate.voided == [] and certificate.steps == STEPS
    assert certificate.rows_redelivered > 0, "the worker held nothing when it was killed: this shows nothing"


@deep
def test_a_worker_that_was_started_again_serves(small: Small, tmp_path: Path, background: Background) -> None:
    run_dir = tmp_path / "runs" / "test"
    command = background("train", config(small, tmp_path, "test", run={"steps": 200}))
    wait_for(lambda: committed(run_dir) >= 1, command)
    victim = worker(run_dir, "rollout/1")
    killed_at = time.monotonic()
    victim.kill()
    wait_for(lambda: any(p.pid != victim.pid and is_named(p, "rollout/1") for p in processes_of(run_dir)), command)
    assert 0.5 <= time.monotonic() - killed_at < patience(10.0)
    wait_for(lambda: holds(run_dir, "rollout/1"), command)
    before = committed(run_dir)
    wait_for(lambda: committed(run_dir) >= before + 2, command)
    command.terminate()
    command.communicate(timeout=patience(20))
    assert command.returncode == 143 and not processes_of(run_dir)
    installed = [s.version for s in read_spans(run_dir / "spans.jsonl") if s.worker == "rollout/1" and s.task == "install"]
    assert max(installed) >= before


def test_too_few_workers_end_the_run_with_a_sentence_and_leave_nothing(
    small: Small, tmp_path: Path, background: Background
) -> None:
    run_dir = tmp_path / "runs" / "test"
    command = background(
        "train",
        config(small, tmp_path, "test", run={"steps": 500}, rollout={"max_restarts": 1}, weight_sync={"min_healthy_workers": 2}),
    )
    wait_for(lambda: committed(run_dir) >= 1, command)
    everyone = processes_of(run_dir)
    kill_twice(run_dir, "rollout/1", command)
    _, errors = command.communicate(timeout=patience(90))
    assert command.returncode == 1
    (line,) = errors.strip().splitlines()
    for words in ("worker rollout/1", "SIGKILL", "1 of 2 rollout workers are left", "weight_sync.min_healthy_workers is 2"):
        assert words in line
    assert not processes_of(run_dir) and not alive(everyone)
    assert not Path(json.loads((run_dir / "job.json").read_text())["weights_dir"]).exists()
    assert (run_dir / "report.html").is_file()


def kill_twice(run_dir: Path, name: str, command: Command) -> None:
    """A worker, and the one that is started in its place."""
    first = worker(run_dir, name)
    first.kill()
    wait_for(lambda: any(p.pid != first.pid and is_named(p, name) for p in processes_of(run_dir)), command)
    worker(run_dir, name).kill()


@deep
def test_a_worker_that_dies_too_often_has_failed_and_the_others_go_on_while_there_are_any(
    small: Small, tmp_path: Path, background: Background
) -> None:
    run_dir = tmp_path / "runs" / "test"
    command = background("train", config(small, tmp_path, "test", run={"steps": 500}, rollout={"max_restarts": 1}))
    wait_for(lambda: committed(run_dir) >= 1, command)
    kill_twice(run_dir, "rollout/1", command)
    before = committed(run_dir)
    wait_for(lambda: committed(run_dir) >= before + 3, command)
    kill_twice(run_dir, "rollout/0", command)
    output, errors = command.communicate(timeout=patience(90))
    assert command.returncode == 1 and not processes_of(run_dir)
    assert "it has been started again 1 times, and is not started again" in output
    (line,) = errors.strip().splitlines()
    for words in ("worker rollout/0", "0 of 2 rollout workers are left", "weight_sync.min_healthy_workers is 1"):
        assert words in line
