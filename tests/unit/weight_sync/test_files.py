"""The files that hold the retained versions: whose pages are used again, and what a reader may see meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

from asyncflow.types import Array
from asyncflow.weight_sync.base import Manifest, WeightSyncError
from asyncflow.weight_sync.files import FileReader, VersionFiles, held
from tests.patience import patience

NUM_BYTES = 4096


def write(files: VersionFiles, version: int) -> Path:
    files.begin(version, NUM_BYTES)[:] = version
    return files.commit(version)


def hold(reader: FileReader, path: Path) -> Array:
    return reader.hold(Manifest("first", 0, str(path), "", NUM_BYTES, {}))


def named(folder: Path) -> dict[str, int]:
    """Inodes, by name."""
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_the_pages_of_the_oldest_version_are_written_over(tmp_path: Path, keep: int) -> None:
    files, inodes = VersionFiles(tmp_path / "w", keep, 10.0), set[int]()
    for version in range(12):
        path = write(files, version)
        assert np.all(np.fromfile(path, np.uint8) == version)
        inodes |= set(named(tmp_path / "w").values())
        kept = {f"weights-{v}.safetensors" for v in range(max(0, version - keep + 1), version + 1)}
        assert {name for name in named(tmp_path / "w") if not name.endswith(".tmp")} == kept
    assert len(inodes) == keep == len(named(tmp_path / "w"))


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_while_a_version_is_written_there_is_none_that_is_not_whole(tmp_path: Path, keep: int) -> None:
    files = VersionFiles(tmp_path / "w", keep, 10.0)
    for version in range(5):
        path = write(files, version)
        files.begin(version + 1, NUM_BYTES)[:] = 255
        if keep == 1:
            assert not path.exists() and files.get(version) is None
        else:
            assert np.all(np.fromfile(path, np.uint8) == version) and files.get(version) is not None
        assert not (tmp_path / "w" / f"weights-{version + 1}.safetensors").exists() and files.get(version + 1) is None


def test_a_version_that_a_checkpoint_copies_stays_until_it_has(tmp_path: Path) -> None:
    files = VersionFiles(tmp_path / "w", 2, 10.0)
    copied = held(Manifest("first", 0, str(write(files, 0)), "", NUM_BYTES, {}))
    assert copied is not None
    for version in (1, 2, 3):
        write(files, version)
    assert copied.read() == bytes(NUM_BYTES) and len(named(tmp_path / "w")) == 2
    copied.close()
    oldest = Manifest("first", 2, str(tmp_path / "w" / "weights-2.safetensors"), "", NUM_BYTES, {})
    files.begin(4, NUM_BYTES)
    with pytest.raises(OSError):
        held(oldest)
    assert held(Manifest("first", 0, "", "", NUM_BYTES, {})) is None


def test_a_version_that_is_written_again_costs_no_other(tmp_path: Path) -> None:
    files = VersionFiles(tmp_path / "w", 2, 10.0)
    write(files, 0), write(files, 1)
    before = named(tmp_path / "w")
    files.begin(1, NUM_BYTES)
    assert files.get(0) is not None and files.get(1) is None  # it is over as soon as that begins
    files.commit(1)
    assert named(tmp_path / "w") == before


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_publishing_again_and_again_keeps_nothing_open(tmp_path: Path, keep: int) -> None:
    files, process = VersionFiles(tmp_path / "w", keep, 10.0), psutil.Process()
    write(files, 0), write(files, 1)
    for _ in range(2):
        before = process.num_fds()
        for _ in range(4):
            write(files, 1)
    assert process.num_fds() == before
    files.close()
    assert not any(str(tmp_path) in file.path for file in process.open_files())


def test_a_reader_maps_each_file_once_and_lets_go_of_another_writers(tmp_path: Path) -> None:
    def mapped() -> set[str]:
        return {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line}

    reader = FileReader()
    for incarnation in ("first", "second"):
        files = VersionFiles(tmp_path / incarnation, 2, 10.0)
        for version in range(6):
            manifest = Manifest(incarnation, version, str(write(files, version)), "", NUM_BYTES, {})
            assert np.all(reader.hold(manifest) == version)
        assert len(reader._files) == 2
    assert len(mapped()) == 2  # `files` and the reader have the same two; those of the first are gone


def test_nobody_writes_where_a_reader_reads(tmp_path: Path) -> None:
    files, late, others = VersionFiles(tmp_path / "w", 2, 10.0), FileReader(), FileReader()
    held = hold(late, write(files, 0))
    for version in range(1, 9):
        assert np.all(hold(others, write(files, version)) == version)
    assert np.all(held == 0)
    assert len(named(tmp_path / "w")) == 2  # the file that was left to the reader has no name any more, and goes with it
    inodes = set(named(tmp_path / "w").values())
    assert np.all(hold(late, write(files, 9)) == 9) and len(late._files) == 1
    late.release(), others.release()
    write(files, 10), write(files, 11)
    assert set(named(tmp_path / "w").values()) == inodes


def test_without_room_beside_what_is_read_the_writer_waits_until_it_is_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, reader = VersionFiles(tmp_path / "w", 2, 0.5), FileReader()
    path = write(files, 0)
    hold(reader, path)
    write(files, 1)
    inodes = set(named(tmp_path / "w").values())

    def no_room(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(WeightSyncError, match=rf"no room .*; a worker has been reading {path} for 0.5 s"):
        files.begin(2, NUM_BYTES)
    assert set(named(tmp_path / "w").values()) == inodes and files.get(0) is not None and files.get(1) is not None
    letting_go = threading.Timer(0.1, reader.release)
    letting_go.start()
    write(files, 2)
    letting_go.join()
    assert set(named(tmp_path / "w").values()) == inodes


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_that_dies_lets_go_and_one_that_hangs_keeps_what_it_has(tmp_path: Path, number: int) -> None:
    files = VersionFiles(tmp_path / "w", 1, 10.0)
    path, inodes = write(files, 0), set(named(tmp_path / "w").values())
    holding = (
        "import sys; from pathlib import Path; from asyncflow.weight_sync.base import Manifest\n"
        "from asyncflow.weight_sync.files import FileReader\n"
        f"held = FileReader(); held.hold(Manifest('first', 0, sys.argv[1], '', {NUM_BYTES}, {{}})); print(); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holding, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(number)
        if number == signal.SIGKILL:
            process.wait(patience(20))
        write(files, 1), write(files, 2)
        assert (named(tmp_path / "w")["weights-2.safetensors"] in inodes) == (number == signal.SIGKILL)
        process.kill()


def test_a_file_that_is_written_over_cannot_be_held(tmp_path: Path) -> None:
    files, reader = VersionFiles(tmp_path / "w", 1, 10.0), FileReader()
    path = write(files, 0)
    another = tmp_path / "w" / "another-name"
    another.hardlink_to(path)
    files.begin(1, NUM_BYTES)
    with pytest.raises(WeightSyncError, match=r"no longer kept: .* is being written over"):
        hold(reader, another)
    files.commit(1)
    assert np.all(hold(reader, another) == 0)  # nothing was stored; a hash would tell


def test_what_a_reader_stores_is_its_own(tmp_path: Path) -> None:
    files, reader = VersionFiles(tmp_path / "w", 1, 10.0), FileReader()
    path = write(files, 7)
    hold(reader, path)[:] = 1
    assert np.all(hold(FileReader(), path) == 7)
    reader.forget()
    assert np.all(hold(reader, path) == 7)


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    files = VersionFiles(tmp_path / "w", 1, 10.0)
    manifest = Manifest("first", 0, str(write(files, 0)), "", NUM_BYTES, {})
    write(files, 1)
    with pytest.raises(WeightSyncError, match="version 0 is not at"):
        FileReader().hold(manifest)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_version_that_is_retained_stays_and_its_file_is_used_again_afterwards(tmp_path: Path, keep: int) -> None:
    files, inodes = VersionFiles(tmp_path / "w", keep, 10.0, max_retained=2), set[int]()
    for version in range(1, 40):
        files.retained = {v for v in (version - version % 7, version - version % 7 - 7) if v > 0}
        path = write(files, version)
        assert np.all(np.fromfile(path, np.uint8) == version)
        inodes |= set(named(tmp_path / "w").values())
        for there in {*range(max(1, version - keep + 1), version + 1), *files.retained}:
            assert np.all(np.fromfile(tmp_path / "w" / f"weights-{there}.safetensors", np.uint8) == there)
    assert len(inodes) == keep + 2 == len(named(tmp_path / "w"))


def test_room_for_what_is_retained_is_reserved_with_the_first_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = VersionFiles(tmp_path / "w", 1, 0.5, max_retained=2)
    write(files, 1)
    assert len(named(tmp_path / "w")) == 3

    def no_room(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    files.retained = {1}
    write(files, 2)
    files.retained = {1, 2}
    write(files, 3)
    assert set(named(tmp_path / "w")) == {f"weights-{version}.safetensors" for version in (1, 2, 3)}
    files.close()


def test_without_room_for_what_is_retained_it_is_said_at_once_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, reserve, calls = VersionFiles(tmp_path / "w", 1, 0.5, max_retained=2), os.posix_fallocate, list[int]()

    def room_for_one(fd: int, offset: int, length: int) -> None:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        reserve(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", room_for_one)
    with pytest.raises(WeightSyncError, match=r"no room .*; evaluators need 2 older versions there: .* eval\.num_workers=0"):
        files.begin(1, NUM_BYTES)
    assert not named(tmp_path / "w")
    write(files, 1)  # there is room by now
    assert len(named(tmp_path / "w")) == 3
