"""What is left of a model whose trainer could not save."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from asyncflow.config import dump, parse
from asyncflow.run.preparation.prepare import Prepared
from asyncflow.run.records.record import RecordState
from asyncflow.run.state.driver_state import DriverState, write_driver
from asyncflow.run.state.run_folder import RunFolder
from asyncflow.run.state.saving import places_of
from asyncflow.run_dir import RunDir, make_shared_dir, remove_shared_dir
from asyncflow.types import CheckpointPlace, UserError
from asyncflow.weight_sync.base import Manifest
from tests.conftest import MODEL


async def test_a_run_that_failed_before_its_first_step_makes_room_and_says_so(
    small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    async def mistaken(scratch: Path, resumed: object) -> Prepared:
        raise UserError("a mistake")

    said: list[str] = []
    config = parse(small())
    RunDir(config.run_dir).claim("run: {}")
    with pytest.raises(UserError, match="a mistake"):
        await RunFolder(config, said.append, resume=False).begin(mistaken)
    assert said == [f"{config.run_dir} holds a run that ended before its first step: this one begins in its place"]
    (config.run_dir / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="holds an earlier run"):
        await RunFolder(config, said.append, resume=False).begin(mistaken)


def test_the_last_published_weights_are_the_model_unless_they_are_on_another_machine(
    small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    said: list[str] = []
    config = parse(small())
    config.run_dir.mkdir(parents=True)
    folder = RunFolder(config, said.append, resume=False)
    published = tmp_path / "weights-2.safetensors"
    manifest = Manifest("first", 2, str(published), "", 7, {})
    folder.save_published_model(manifest, MODEL, 2)
    assert not (config.run_dir / "model").exists()
    assert said == [
        "the trainer has saved no model, and its last published weights are not on this machine: the newest checkpoint "
        "has the model, if there is one"
    ]
    published.write_bytes(b"weights")
    folder.save_published_model(manifest, MODEL, 2)
    assert (config.run_dir / "model" / "model.safetensors").read_bytes() == b"weights"
    assert "holds the last published weights" in said[1]


@pytest.mark.parametrize(
    ("on_disk", "in_memory", "damaged", "expected"),
    [(3, 5, "", 5), (3, 2, "", 3), (3, 5, "memory", 3), (None, 5, "", 5), (5, 5, "", 5), (3, None, "", 3)],
)
async def test_the_newest_whole_checkpoint_of_both_places_is_resumed_and_later_ones_go(
    small: Callable[..., dict[str, Any]], tmp_path: Path, on_disk: int | None, in_memory: int | None, damaged: str, expected: int
) -> None:
    config, said = parse(small()), list[str]()
    RunDir(config.run_dir).claim("run: {}")
    folder = RunFolder(config, said.append, resume=False, memory=tmp_path / "memory").next()
    for version, place in ((on_disk, "disk"), (in_memory, "memory")):
        if version is not None:
            checkpoints = places_of(config, folder.memory)[cast(CheckpointPlace, place)]
            state = DriverState(
                version=version, config=dump(config), data="", position=0, pushed=[], steps={}, record=RecordState()
            )
            write_driver(checkpoints.partial(version), state, [])
            checkpoints.commit(version)
            if place == damaged:
                (checkpoints.path(version) / "driver.msgpack").write_bytes(b"")
    resumed = await folder._last_checkpoint()
    assert resumed is not None and resumed.state.version == expected
    assert resumed.folder.is_relative_to(tmp_path / "memory") == (expected == in_memory)
    assert bool(said) == bool(damaged)
    folder._forget_after(expected)
    left = [version for checkpoints in places_of(config, folder.memory).values() for version in checkpoints.versions()]
    assert max(left) == expected


async def test_what_a_dead_run_left_in_shared_memory_goes_also_where_nothing_is_to_be_done(
    small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """As where an attempt was killed when all its steps were done, and the next one finds the run finished."""

    async def nothing(scratch: Path, resumed: object) -> Prepared:
        raise UserError("nothing is to be done")

    dead = subprocess.Popen(["true"])
    dead.wait()
    left, held = (Path("/dev/shm") / f"asyncflow-{dead.pid}-{name}" for name in ("0123abcd", "4567abcd"))
    left.mkdir()
    begun = held.with_name(f"begun-{held.name}")  # which nobody removes
    begun.mkdir()
    descriptor = os.open(begun, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)  # of a process that this one cannot see, in another container
    begun.rename(held)
    with pytest.raises(UserError, match="nothing is to be done"):
        await RunFolder(parse(small()), lambda line: None, resume=True).begin(nothing)
    assert not left.exists() and held.exists()
    os.close(descriptor)
    held.rmdir()


def test_a_folder_in_shared_memory_is_held_until_it_is_removed() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    folder = make_shared_dir()
    assert folder is not None
    with pytest.raises(BlockingIOError):
        other = os.open(folder, os.O_RDONLY)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    remove_shared_dir(folder)
    assert not folder.exists() and len(os.listdir("/proc/self/fd")) == descriptors
