"""Runs whose storage outlives them: an attempt that goes back to a checkpoint finds nothing of what the one before has stored."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import small_in
from tests.depth import in_gate
from tests.e2e.commands import processes_of, rows, run_command, wait_for, write_config
from tests.e2e.test_units import HELD, UNITS, fingerprints, recipe
from tests.forked import Command
from tests.patience import patience
from tests.processes import words_of

Small = Callable[..., dict[str, Any]]


def stored(redis_url: str) -> list[str]:
    """Keys that the server holds."""
    command = ["redis-cli", "-s", redis_url.removeprefix("unix://"), "--scan"]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines()


def held(small: Small, folder: Path) -> tuple[Path, Path]:
    """Configuration of a run whose fourth update waits for a file, and the file."""
    (folder / "held.py").write_text(HELD)
    until = folder / "go-on"
    engine = {"path": f"{folder / 'held.py'}:Held", "until": str(until), "at": 4}
    changes = {"run": {"steps": 6}, "train": {"accumulate": "exact", "engine": engine}}
    return write_config(folder, recipe(small, checkpoint={"every_steps": 2, "in_memory": False}, **changes)), until


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the run that nothing disturbs, whose rows are in the driver."""
    folder = tmp_path_factory.mktemp("near")
    config, until = held(small_in(folder), folder)
    until.touch()
    assert run_command("train", config).returncode == 0
    return folder / "runs" / "test"


@pytest.mark.parametrize("killed", in_gate("driver", of=["driver", "trainer"]))
@pytest.mark.parametrize("place", in_gate("driver", of=["driver", "workers"]))
def test_a_killed_run_goes_on_from_its_checkpoint_with_the_same_bits_and_leaves_nothing(
    near: Path, small: Small, tmp_path: Path, background: Callable[..., Command], redis_url: str, place: str, killed: str
) -> None:
    """It is killed in its fourth step. The third one is committed and not in a checkpoint: its groups come a second time."""
    config, until = held(small, tmp_path)
    far = tmp_path / "runs" / "far"
    units = UNITS if place == "workers" else ()
    options = ["run.name=far", *units, "queue.storage.name=redis", f"queue.storage.url={redis_url}"]
    command = background("train", config, *options)
    saved = far / "checkpoints" / "step-000002" / "manifest.json"
    wait_for(lambda: (far / "metrics.jsonl").exists() and len(rows(far / "metrics.jsonl")) == 3 and saved.exists(), command)
    assert stored(redis_url)
    if killed == "driver":
        command.kill()
        command.communicate()
    else:
        [trainer] = [process for process in processes_of(far) if words_of(process)[-2:-1] == ["trainer/0"]]
        trainer.kill()
    until.touch()
    if killed == "driver":
        command = background("train", config, "--resume", *options)
    output, errors = command.communicate(timeout=patience(120))
    assert command.returncode == 0, output + errors
    assert "step-000002: 2 of 6 steps are done" in output
    assert fingerprints(near) == fingerprints(far)
    assert stored(redis_url) == []
