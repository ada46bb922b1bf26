"""Runs whose storage units are in processes of their own: `queue.place=workers`. No Ray is needed for that."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncflow.cluster.remote_node import RemoteNode
from tests.depth import deep, in_gate
from tests.e2e.commands import processes_of, rows, run_command, wait_for, write_config
from tests.forked import Command
from tests.patience import patience
from tests.processes import words_of

Small = Callable[..., dict[str, Any]]
UNITS = ("queue.place=workers", "queue.num_units=2")


HELD = """
import asyncio
from pathlib import Path
from asyncflow.engines.train.torch_engine import TorchEngine

class Held(TorchEngine):
    def __init__(self, *arguments, until, at=2, **options):
        super().__init__(*arguments, **options)
        self.until, self.at, self.updates = Path(until), at, 0

    async def optim_step(self, normaliser):
        self.updates += 1
        while self.updates == self.at and not self.until.exists():
            await asyncio.sleep(0.01)
        return await super().optim_step(normaliser)
"""
"""A trainer one of whose updates, the second one if it is not told otherwise, waits for a file."""


def recipe(small: Small, **changes: Any) -> dict[str, Any]:
    exact = {"telemetry": {"fingerprints": True}, "train": {"accumulate": "exact"}, "rollout": {"num_workers": 2}}
    return small(**exact | changes)


def fingerprints(run_dir: Path) -> list[Any]:
    """Of each step, all groups with their rows, losses, and the bits of weights and optimiser."""
    return [(sorted(step["groups"], key=lambda g: g["group"]), step["tensors"]) for step in rows(run_dir / "fingerprints.jsonl")]


def units_of(run_dir: Path) -> dict[str, psutil.Process]:
    found = {words_of(process)[-2]: process for process in processes_of(run_dir)}
    return {name: process for name, process in found.items() if name.startswith("storage/")}


@deep
def test_units_in_processes_of_their_own_give_the_same_bits(
    small: Small, tmp_path: Path, background: Callable[..., Command]
) -> None:
    config = write_config(tmp_path, recipe(small, eval={"path": "generated:arithmetic", "num_prompts": 4}))
    near = run_command("train", config, "run.name=near")
    assert near.returncode == 0, near.stderr
    run_dirs = [tmp_path / "runs" / name for name in ("near", "far")]
    command = background("train", config, "run.name=far", *UNITS)
    units = wait_for(lambda: (found := units_of(run_dirs[1])).keys() == {"storage/0", "storage/1"} and found, command)
    output, errors = command.communicate(timeout=patience(120))
    assert command.returncode == 0, output + errors
    assert fingerprints(run_dirs[0]) == fingerprints(run_dirs[1])
    assert "did not end within" not in output
    assert not [unit for unit in units.values() if unit.is_running()]
    assert (run_dirs[1] / "logs" / "storage-1.log").read_text() == ""


@deep
def test_units_that_are_reached_by_tls_alone_give_the_same_bits(small: Small, tmp_path: Path) -> None:
    """As on other machines: each listens where its machine reaches the driver."""
    places = RemoteNode(tmp_path / "memory", tmp_path / "files")
    for place in (places.memory, places.files):
        place.mkdir(mode=0o700)
    config, listen = write_config(tmp_path, recipe(small)), "tls:127.0.0.1:0"
    assert run_command("train", config, "run.name=near").returncode == 0
    doors = [f"queue.listen={listen}", "weight_sync.name=network", f"weight_sync.listen={listen}"]
    far = run_command("train", config, "run.name=far", *UNITS, *doors, **places.environment())
    assert far.returncode == 0, far.stdout + far.stderr
    assert fingerprints(tmp_path / "runs" / "near") == fingerprints(tmp_path / "runs" / "far")
    assert len([*places.memory.glob("unit-*.arena")]) == 2 and not [*places.memory.glob("unit-*.sock")]


def test_a_run_that_has_lost_rows_with_a_unit_says_so_and_saves_its_model(
    small: Small, tmp_path: Path, background: Callable[..., Command]
) -> None:
    run_dir = tmp_path / "runs" / "test"
    command = background("train", write_config(tmp_path, recipe(small, run={"steps": 5000})), *UNITS)
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and rows(run_dir / "metrics.jsonl"), command)
    everyone = processes_of(run_dir)
    units_of(run_dir)["storage/1"].kill()
    output, errors = command.communicate(timeout=patience(120))
    assert command.returncode == 1, output + errors
    assert "worker storage/1 (process" in output and "was ended by SIGKILL" in output and "it is started again in 0.5 s" in output
    assert "storage unit 1 has died and lost" in errors and "a durable queue.storage would have kept them" in errors
    assert (run_dir / "model" / "model.safetensors").exists() and (run_dir / "report.html").exists()
    psutil.wait_procs(everyone, timeout=patience(20.0))
    assert not [process for process in everyone if process.is_running()]


def test_a_unit_that_dies_is_started_again_and_goes_on_with_what_is_durable(
    small: Small, tmp_path: Path, background: Callable[..., Command], redis_url: str
) -> None:
    (tmp_path / "held.py").write_text(HELD)
    (until := tmp_path / "go-on").touch()
    engine = {"path": f"{tmp_path / 'held.py'}:Held", "until": str(until)}
    config = write_config(tmp_path, recipe(small, run={"steps": 4}, train={"accumulate": "exact", "engine": engine}))
    assert run_command("train", config, "run.name=near").returncode == 0
    run_dirs = [tmp_path / "runs" / name for name in ("near", "far")]
    until.unlink()
    command = background("train", config, "run.name=far", *UNITS, "queue.storage.name=redis", f"queue.storage.url={redis_url}")
    wait_for(lambda: (run_dirs[1] / "metrics.jsonl").exists() and rows(run_dirs[1] / "metrics.jsonl"), command)
    units_of(run_dirs[1])["storage/1"].kill()
    until.touch()
    output, errors = command.communicate(timeout=patience(200))
    assert command.returncode == 0, output + errors
    assert "worker storage/1 (process" in output and "it is started again in 0.5 s" in output
    assert fingerprints(run_dirs[0]) == fingerprints(run_dirs[1])


@pytest.mark.parametrize("number", in_gate(signal.SIGKILL, of=[signal.SIGTERM, signal.SIGKILL]))
def test_units_end_with_their_run_and_no_sooner(
    small: Small, tmp_path: Path, background: Callable[..., Command], number: int
) -> None:
    """Told to end, the run still writes a checkpoint, with rows that lie on units; killed, it leaves nobody behind."""
    run_dir = tmp_path / "runs" / "test"
    bounded = {"name": "bounded", "max_staleness": 1}
    tree = recipe(small, run={"steps": 5000}, schedule=bounded, algorithm={"correction": "truncated"}, telemetry={})
    command = background("train", write_config(tmp_path, tree), *UNITS)
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and rows(run_dir / "metrics.jsonl"), command)
    everyone = processes_of(run_dir)
    command.send_signal(number)
    output, errors = command.communicate(timeout=patience(120))
    psutil.wait_procs(everyone, timeout=patience(20.0))
    assert not [process for process in everyone if process.is_running()]
    if number == signal.SIGTERM:
        assert command.returncode == 143, output + errors
        assert [*(run_dir / "checkpoints").glob("step-*/manifest.json")] and "did not end within" not in output
        assert not errors.strip()
