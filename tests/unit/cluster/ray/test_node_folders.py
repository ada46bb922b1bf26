"""Folders of a machine that is not the driver's: shared by those who hold them, gone with the last of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from asyncflow.cluster.ray.node_folders import NodeFolders
from asyncflow.types import UserError

HOLD = """
import sys
from pathlib import Path
from asyncflow.cluster.ray import node_folders
from asyncflow.cluster.ray.node_folders import NodeFolders
node_folders.SHARED_MEMORY = Path(sys.argv[1])
folders = NodeFolders("r1")
folders.hold()
(folders.places.files / "model").touch()
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing outside the test's folder is made or swept."""
    for name in ("memory", "files"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "files"))
    monkeypatch.setattr("asyncflow.cluster.ray.node_folders.SHARED_MEMORY", tmp_path / "memory")


def left(tmp_path: Path) -> list[str]:
    return sorted(str(path.relative_to(tmp_path)) for name in ("memory", "files") for path in (tmp_path / name).iterdir())


def test_the_folders_are_this_user_s_alone_and_go_with_the_last_holder(tmp_path: Path) -> None:
    first, second = NodeFolders("r1"), NodeFolders("r1")
    first.hold()
    second.hold()
    assert first.places == second.places
    for place in (first.places.memory, first.places.files):
        assert place.is_dir() and place.stat().st_mode & 0o077 == place.parent.stat().st_mode & 0o077 == 0
    first.release()
    assert second.places.files.is_dir() and second.places.memory.is_dir()
    second.release()
    assert left(tmp_path) == []
    second.release()  # once more is nothing


def test_nobody_comes_to_share_folders_that_are_half_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = NodeFolders("r1"), NodeFolders("r1")
    remove, places = shutil.rmtree, (second.places.memory, second.places.files)

    def half_way(path: Path, **options: object) -> None:
        (path / "held.lock").unlink()
        second.hold()
        remove(path, ignore_errors=True)
        assert all(place.is_dir() for place in places)

    first.hold()
    monkeypatch.setattr("shutil.rmtree", half_way)
    first.release()
    monkeypatch.undo()
    assert all(place.is_dir() for place in places)
    second.release()


@pytest.mark.parametrize("run_id", ["r1", "r2"])
def test_what_is_held_stays_though_others_have_another_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_id: str
) -> None:
    """Two Ray nodes on one machine, perhaps, whose memory is one."""
    first = NodeFolders("r1")
    first.hold()
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "other"))
    other = NodeFolders(run_id)
    for folder in (tmp_path / "memory").iterdir():
        os.utime(folder, (time.time() - 3600, time.time() - 3600))
    other.sweep()
    assert first.places.memory.is_dir() and first.places.files.is_dir()
    other.hold()
    other.release()
    assert first.places.memory.is_dir() and not [*(tmp_path / "other").iterdir()]
    first.release()
    assert left(tmp_path) == []


def test_a_run_does_not_sweep_its_own_folders(tmp_path: Path) -> None:
    """Before it holds them, as another of its hosts may be making them."""
    folder = tmp_path / "memory" / "asyncflow-node-r1"
    folder.mkdir(mode=0o700)
    os.utime(folder, (time.time() - 3600, time.time() - 3600))
    NodeFolders("r1").sweep()
    assert folder.is_dir()


@pytest.mark.parametrize("parent", ["memory", "files"])
@pytest.mark.parametrize("kind", ["open", "link", "file", "inner link"])
def test_folders_that_are_not_this_user_s_alone_are_refused(tmp_path: Path, parent: str, kind: str) -> None:
    folder = tmp_path / parent / "asyncflow-node-r1"
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    if kind == "open":
        folder.mkdir()
        folder.chmod(0o755)
    elif kind == "link":
        folder.symlink_to(tmp_path / "elsewhere")
    elif kind == "inner link":
        folder.mkdir(mode=0o700)
        (folder / {"memory": "weights", "files": "files"}[parent]).symlink_to(tmp_path / "elsewhere")
    else:
        folder.touch()
    with pytest.raises(UserError, match=r"asyncflow-node-r1\S* must be a folder that only you can open"):
        NodeFolders("r1").hold()
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_folders_of_another_user_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    NodeFolders("r1").hold()
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tempfile.gettempdir()).st_uid + 1)
    with pytest.raises(UserError, match="must be a folder that only you can open"):
        NodeFolders("r1").hold()


def test_a_folder_that_another_sweeps_meanwhile_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.glob
    gone = tmp_path / "memory" / "asyncflow-node-gone"
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [gone, *real(path, pattern)])
    NodeFolders("r1").sweep()


def test_what_a_killed_run_has_left_is_swept_and_what_is_held_stays(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path / "files")}
    other = NodeFolders("r2")
    command = [sys.executable, "-c", HOLD, str(tmp_path / "memory")]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"holds\n"
        model = tmp_path / "files" / "asyncflow-node-r1" / "files" / "model"
        other.sweep()
        assert model.exists()
        holder.kill()
        holder.wait()
        assert model.exists()
    assert (tmp_path / "memory" / "asyncflow-node-r1" / "weights").is_dir()  # its other half
    other.sweep()
    assert left(tmp_path) == []


def test_a_half_without_the_other_is_swept_when_nobody_can_be_making_it(tmp_path: Path) -> None:
    for name, age in (("old", 3600), ("new", 0)):
        folder = tmp_path / "memory" / f"asyncflow-node-{name}"
        folder.mkdir()
        os.utime(folder, (time.time() - age, time.time() - age))
    (tmp_path / "files" / "asyncflow-other").mkdir()
    NodeFolders("r1").sweep()
    assert left(tmp_path) == ["files/asyncflow-other", "memory/asyncflow-node-new"]


def test_folders_that_have_no_place_are_not_tried_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders, tried = NodeFolders("r1"), []
    (tmp_path / "memory").rmdir()
    make = Path.mkdir

    def counted(path: Path, **options: Any) -> None:
        tried.append(path)
        assert len(tried) < 10
        make(path, **options)

    monkeypatch.setattr(Path, "mkdir", counted)
    with pytest.raises(FileNotFoundError):
        folders.hold()
