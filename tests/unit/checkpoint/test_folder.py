"""Checkpoints on disk: whole, or not there at all."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.checkpoint import folder as folder_file
from asyncflow.checkpoint.folder import MANIFEST_FILE, Checkpoints
from asyncflow.types import RunError
from tests.killing import in_a_process, killed_at

WRITES = [(folder_file, "_hashed_and_synced"), (folder_file, "replace"), (folder_file, "sync_folder"), (Path, "rename"),
          (Path, "mkdir"), (shutil, "rmtree"), (os, "fsync"), (os, "unlink"), (os, "rmdir")]  # fmt: skip


def write(checkpoints: Checkpoints, version: int) -> list[str]:
    """A checkpoint of two files, which say their version. Returns what could not be done after it was one."""
    partial = checkpoints.partial(version)
    (partial / "trainer").mkdir(parents=True)
    (partial / "driver").write_text(f"driver {version}")
    (partial / "trainer" / "shard").write_text(f"shard {version}" * 1000)
    return checkpoints.commit(version)


def says_nothing(text: str) -> None:
    raise AssertionError(text)


def test_as_many_as_are_kept_and_the_newest_is_chosen(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.newest(says_nothing) is None
    for version in (2, 10, 4_000_000):
        write(checkpoints, version)
    assert checkpoints.versions() == [10, 4_000_000] and checkpoints.newest(says_nothing) == 4_000_000
    checkpoints.forget_after(10)
    assert checkpoints.versions() == [10]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000010"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "driver").write_text("driver 9"), "driver is not what was written"),
        (lambda path: (path / "driver").write_text(""), "driver is not what was written"),
        (lambda path: (path / "trainer" / "shard").unlink(), "trainer/shard is missing"),
        (lambda path: (path / "more").touch(), "more is too many"),
        (lambda path: (path / MANIFEST_FILE).unlink(), "no manifest"),
        (lambda path: (path / MANIFEST_FILE).write_text('{"format": 1'), "no manifest"),
        (lambda path: path.rename(path.with_name("step-000009")), "is of version 4"),
    ],
)
def test_one_that_is_not_whole_is_passed_over_aloud(tmp_path: Path, damage: Callable[[Path], Any], words: str) -> None:
    checkpoints, said = Checkpoints(tmp_path, keep=3), list[str]()
    write(checkpoints, 3)
    write(checkpoints, 4)
    damage(checkpoints.path(4))
    assert checkpoints.newest(said.append) == 3
    assert len(said) == 1 and words in said[0] and said[0].endswith("it is passed over")
    damage_of = next(version for version in (9, 4) if version in checkpoints.versions())
    with pytest.raises(RunError, match=words):
        checkpoints.check(damage_of)


@pytest.mark.parametrize("is_before", [True, False])
def test_killed_at_each_write_the_one_before_or_the_new_one_is_whole(tmp_path: Path, is_before: bool) -> None:
    """Every place at which the third of three is written, or the first of them removed."""
    for number in range(100):
        folder = tmp_path / str(number)
        checkpoints = Checkpoints(folder, keep=2)
        write(checkpoints, 1)
        write(checkpoints, 2)
        status = in_a_process(lambda checkpoints=checkpoints, number=number: write_and_be_killed(checkpoints, number, is_before))
        newest = Checkpoints(folder, keep=2).newest(says_nothing)
        if os.WIFEXITED(status):
            assert number > 20 and newest == 3
            return
        assert os.WTERMSIG(status) == signal.SIGKILL and newest in (2, 3)
        checkpoints.sweep()
        shutil.rmtree(checkpoints.path(3), ignore_errors=True)
        write(checkpoints, 3)  # the next attempt writes it again
        assert checkpoints.versions()[-2:] == [2, 3] and checkpoints.newest(says_nothing) == 3
    raise AssertionError("writing does not end")


def write_and_be_killed(checkpoints: Checkpoints, number: int, is_before: bool) -> None:
    killed_at(WRITES, number, is_before)
    write(checkpoints, 3)


def test_every_folder_is_flushed_and_so_is_the_one_that_checkpoints_are_made_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, synced = Checkpoints(tmp_path / "checkpoints", keep=2), list[Path]()
    monkeypatch.setattr(folder_file, "sync_folder", synced.append)
    partial = checkpoints.partial(1)
    (partial / "versions" / "000000").mkdir(parents=True)
    (partial / "versions" / "000000" / "model.safetensors").touch()
    checkpoints.commit(1)
    expected = [partial / "versions" / "000000", partial / "versions", partial, tmp_path / "checkpoints", tmp_path]
    assert synced == expected


def test_every_file_is_flushed_before_the_manifest_that_names_it_and_the_name_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[str]()
    replace, rename = folder_file.replace, Path.rename
    monkeypatch.setattr(folder_file, "sync_file", lambda path: done.append(str(path.relative_to(tmp_path))))
    monkeypatch.setattr(folder_file, "replace", lambda path, content: (done.append(path.name), replace(path, content))[1])
    monkeypatch.setattr(Path, "rename", lambda path, to: (done.append(f"rename to {Path(to).name}"), rename(path, to))[1])
    write(Checkpoints(tmp_path, keep=2), 1)
    partial = "step-000001.partial"
    assert done == [f"{partial}/driver", f"{partial}/trainer/shard", MANIFEST_FILE, "rename to step-000001"]


def test_what_is_added_goes_with_its_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for version in (1, 2, 3):
        write(checkpoints, version)
        checkpoints.added(version).touch()
    assert [checkpoints.added(version).exists() for version in (1, 2, 3)] == [False, True, True]
    assert checkpoints.versions() == [2, 3] and checkpoints.newest(says_nothing) == 3
    write(checkpoints, 3)  # again: nothing has come after it yet
    assert not checkpoints.added(3).exists()
    checkpoints.forget_after(1)
    assert not [*tmp_path.iterdir()]


def test_what_cannot_be_written_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    write(checkpoints, 1)

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folder_file, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            write(checkpoints, 2)
    checkpoints.discard(2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"] and checkpoints.newest(says_nothing) == 1


@pytest.mark.parametrize("number", [0, 1])
def test_one_whose_name_could_not_be_flushed_is_one_and_the_older_ones_stay_until_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    write(checkpoints, 1)
    broken = [tmp_path / "checkpoints", tmp_path][number]

    def fail(path: Path) -> None:
        if path == broken:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(folder_file, "sync_folder", fail)
        (said,) = write(checkpoints, 2)
    assert "step-000002 is written, but its name could not be flushed" in said and said.endswith("Input/output error")
    assert checkpoints.versions() == [1, 2] and checkpoints.newest(says_nothing) == 2
    assert not write(checkpoints, 3) and checkpoints.versions() == [3]


@pytest.mark.parametrize(("owner", "name"), [(Path, "rename"), (shutil, "rmtree")])
def test_old_ones_that_cannot_be_removed_are_told_and_the_new_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    checkpoints, original = Checkpoints(tmp_path, keep=9), getattr(owner, name)
    for version in (1, 2, 3):
        write(checkpoints, version)
    fewer = Checkpoints(tmp_path, keep=2)

    def fail(path: Path, *args: Any, **options: Any) -> Any:
        if "step-000001" in path.name and not options.get("ignore_errors"):
            raise OSError(30, "Read-only file system")
        return original(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        said = write(fewer, 4)
    assert said == [f"the old checkpoint {fewer.path(1)} could not be removed: Read-only file system"]
    assert fewer.versions() == ([1, 3, 4] if name == "rename" else [3, 4]) and fewer.newest(says_nothing) == 4
    assert not write(fewer, 5) and fewer.versions() == [4, 5]
    fewer.sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000005"]
