"""Rollout workers that join and leave a live run: `asyncflow cluster scale`. What is trained is what it would have been anyway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from asyncflow.run.services.scaling import Scaling
from asyncflow.run_dir import control_socket
from asyncflow.telemetry.certificate import read_certificate
from asyncflow.telemetry.idle import busy_and_idle
from asyncflow.telemetry.trace import read_spans
from asyncflow.transport import Peer, proxy
from tests.conftest import merged
from tests.depth import deep, few
from tests.e2e.commands import processes_of, rows, run_command, wait_for, write_config
from tests.e2e.test_restart import committed, holds, is_named, worker
from tests.forked import Command
from tests.patience import patience

Small = Callable[..., dict[str, Any]]
Background = Callable[..., Command]
SLOW_REWARD = """
import os, time
def score(sample, *, gate):
    time.sleep(0.0 if os.path.exists(gate) else 0.3)  # a step takes seconds, in which workers hold rows without a reward
    return float(len(sample.response) % 3)
"""
STEPS = few(12, 30)


def config(small: Small, tmp_path: Path, name: str, **changes: Any) -> Path:
    (tmp_path / "slow.py").write_text(SLOW_REWARD)
    sections: dict[str, Any] = {
        "run": {"steps": STEPS, "name": name},
        "train": {"prompts_per_step": 6, "accumulate": "exact"},
        "reward": {"scorer": {"path": f"{tmp_path / 'slow.py'}:score", "gate": str(tmp_path / f"hurry-{name}")}},
    }
    folder = tmp_path / f"config-{name}"
    folder.mkdir()
    return write_config(folder, small(**merged(sections, changes)))


def scale(run_dir: Path, size: str, *options: str) -> str:
    command = run_command("cluster", "scale", size, "--run", run_dir, *options)
    assert command.returncode == 0, command.stderr
    return command.stdout


async def ask_to_scale(run_dir: Path, size: int, grace_seconds: float) -> None:
    peer = await Peer.connect(control_socket(run_dir), "test")
    await proxy(Scaling, peer, "scaling").scale("rollout", size, grace_seconds)
    await peer.close()


def is_there(run_dir: Path, name: str) -> bool:
    return any(is_named(process, name) for process in processes_of(run_dir))


@deep
@pytest.mark.parametrize(
    ("schedule", "weight_sync", "grace_seconds"), [("periodic", "shared_memory", 60), ("delayed", "network", 0)]
)
def test_a_run_of_one_worker_then_three_then_one_changes_no_bit(
    small: Small, tmp_path: Path, background: Background, schedule: str, weight_sync: str, grace_seconds: float
) -> None:
    changes = {"schedule": schedule, "weight_sync": {"name": weight_sync}}
    (tmp_path / "hurry-alone").touch()
    alone = run_command("train", config(small, tmp_path, "alone", **changes))
    assert alone.returncode == 0, alone.stderr
    run_dir = tmp_path / "runs" / "scaled"
    command = background("train", config(small, tmp_path, "scaled", **changes))
    wait_for(lambda: committed(run_dir) >= 1, command)

    assert "rollout/1 and rollout/2 join" in scale(run_dir, "rollout=3")
    assert "3 rollout workers already" in scale(run_dir, "rollout=3")
    for name in ("rollout/1", "rollout/2"):
        wait_for(lambda name=name: holds(run_dir, name), command)  # type: ignore[misc]
    if grace_seconds:
        assert "rollout/1 and rollout/2 leave" in scale(run_dir, "rollout=1", "--grace", str(grace_seconds))
    else:
        wait_for(lambda: holds(run_dir, "rollout/1"), command)
        asyncio.run(ask_to_scale(run_dir, 1, 0.0))  # as the command does, while it holds them still
    wait_for(lambda: not is_there(run_dir, "rollout/1") and not is_there(run_dir, "rollout/2"), command)
    assert committed(run_dir) < STEPS - 1  # it goes on with the one that is left
    (tmp_path / "hurry-scaled").touch()
    output, errors = command.communicate(timeout=patience(90))
    assert command.returncode == 0, errors
    assert not processes_of(run_dir)

    one, two = (load_file(tmp_path / "runs" / name / "model" / "model.safetensors") for name in ("alone", "scaled"))
    assert one.keys() == two.keys() and all((one[name] == two[name]).all() for name in one)
    assert [row["reward/mean"] for row in rows(run_dir / "metrics.jsonl")] == [
        row["reward/mean"] for row in rows(tmp_path / "runs" / "alone" / "metrics.jsonl")
    ]
    certificate = read_certificate(run_dir)
    assert certificate is not None and certificate.voided == [] and certificate.steps == STEPS
    spans = read_spans(run_dir / "spans.jsonl")
    whole = busy_and_idle(spans, "trainer/0").wall
    for name in ("rollout/1", "rollout/2"):
        assert output.count(f"worker {name} ") == 1
        lane = busy_and_idle(spans, name)
        assert 0 < lane.wall < whole and lane.unrecorded_seconds < 0.01
    if grace_seconds:
        assert certificate.rows_redelivered == 0, "a leaver ends what it holds"
        assert output.count("has left") == 2
        assert {span.worker for span in spans if span.task == "generate_group"} == {"rollout/0", "rollout/1", "rollout/2"}
    else:
        assert certificate.rows_redelivered > 0, "the leavers held nothing: this shows nothing"


@deep
def test_workers_that_lack_the_reward_file_have_failed_and_the_run_goes_on(
    small: Small, tmp_path: Path, background: Background
) -> None:
    run_dir, reward = tmp_path / "runs" / "test", tmp_path / "slow.py"
    command = background("train", config(small, tmp_path, "test", rollout={"num_workers": 2}))
    wait_for(lambda: committed(run_dir) >= 1, command)
    reward.unlink()  # as on a node that does not have it
    assert "rollout/2 joins" in scale(run_dir, "rollout=3")
    wait_for(lambda: is_there(run_dir, "rollout/2"), command)
    wait_for(lambda: not is_there(run_dir, "rollout/2"), command)
    worker(run_dir, "rollout/1").kill()
    wait_for(lambda: str(reward) in (run_dir / "logs" / "rollout-1.log").read_text(), command)  # the one in its place
    wait_for(lambda: not is_there(run_dir, "rollout/1"), command)
    before = committed(run_dir)
    assert before < STEPS - 1
    (tmp_path / "hurry-test").touch()
    output, errors = command.communicate(timeout=patience(90))
    assert command.returncode == 0 and committed(run_dir) == STEPS, errors
    for name in ("rollout/1", "rollout/2"):
        (line,) = [line for line in output.splitlines() if f"worker {name} " in line and "found a mistake" in line]
        assert str(reward) in line and "it is not started again" in line
    certificate = read_certificate(run_dir)
    assert certificate is not None and certificate.voided == []


def test_what_a_run_cannot_have_is_refused_with_a_sentence(small: Small, tmp_path: Path, background: Background) -> None:
    run_dir = tmp_path / "runs" / "test"
    (tmp_path / "hurry-test").touch()
    command = background("train", config(small, tmp_path, "test", run={"steps": 500}))
    wait_for(lambda: committed(run_dir) >= 1, command)
    for size, words in {
        "rollout=0": "a run needs a rollout worker",
        "rollout=7": "rollout=7 is more than train.prompts_per_step=6, so 1 of them would have nothing to generate: take 6",
        "trainer=2": "only rollout workers may join and leave a run",
        "rollout": "'rollout' is not of the form rollout=NUMBER",
    }.items():
        refused = run_command("cluster", "scale", "--run", run_dir, "--", size)
        assert refused.returncode == 2 and words in refused.stderr, (size, refused.stderr)
        assert len(refused.stderr.strip().splitlines()) == 1
    assert "rollout/1 join" not in run_command("status", run_dir).stdout
    command.terminate()
    command.communicate(timeout=patience(20))
    ended = run_command("cluster", "scale", "rollout=2", "--run", run_dir)
    assert ended.returncode == 2 and "no run is live in" in ended.stderr
