"""Files of workers on another machine than the driver's: folders that all workers of the run on that machine share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
import uuid
from pathlib import Path
from typing import Final

from asyncflow.cluster.remote_node import RemoteNode
from asyncflow.types import UserError

_PREFIX: Final = "asyncflow-node-"  # not what a driver sweeps: its folders go by process ids, and these are of another machine's
SHARED_MEMORY = Path("/dev/shm")
_LOCK_FILE: Final = "held.lock"
_MAKING_SECONDS: Final = 60.0


class NodeFolders:
    """Folders of a run on this machine, held by whatever places workers here; they are removed with the last holder.

    A holder locks a file in each of them, as other holders may have another temporary folder. The kernel releases the lock when
    the holder ends. Folders of runs that are not held any more, since all holders were killed, are removed by the next run that
    comes here.
    """

    def __init__(self, run_id: str) -> None:
        files = Path(tempfile.gettempdir())
        memory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else files
        name = f"{_PREFIX}{run_id}"
        self._own = list(dict.fromkeys([memory / name, files / name]))
        self.places = RemoteNode(memory / name / "weights", files / name / "files")
        self._locks: dict[Path, int] = {}

    def hold(self) -> None:
        """Make the folders, or share those that exist. Raises `UserError` where one of that name is not this user's alone."""
        for folder in self._own:
            if folder not in self._locks:
                self._locks[folder] = _hold(folder)
        for place in (self.places.memory, self.places.files):
            _make_private(place)

    def release(self) -> None:
        """Give up the folders, and remove them if no other process holds them."""
        while self._locks:
            folder, lock = self._locks.popitem()
            _remove_if_free(lock, folder)
            os.close(lock)

    def sweep(self) -> None:
        """Remove what killed runs have left, other ones than this."""
        for parent in [folder.parent for folder in self._own]:
            for folder in parent.glob(f"{_PREFIX}*"):
                if folder not in self._own:
                    _sweep(folder)


def _hold(folder: Path) -> int:
    """Make a folder, or share it. Returns the lock that says so."""
    while True:
        try:
            _make_private(folder)
            lock = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # as below
            if not folder.parent.is_dir():
                raise
            continue
        fcntl.flock(lock, fcntl.LOCK_SH)  # others have it alone for one renaming, no longer
        if _is_at(lock, folder / _LOCK_FILE):
            return lock
        os.close(lock)  # the last holder has removed it in this very moment


def _sweep(folder: Path) -> None:
    try:
        there = folder.stat(follow_symlinks=False)
    except FileNotFoundError:  # another has swept it meanwhile
        return
    if there.st_uid != os.getuid() or not stat.S_ISDIR(there.st_mode):
        return
    try:
        lock = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        if time.time() - there.st_mtime > _MAKING_SECONDS:  # the process that made it, or removed it, was killed in between
            shutil.rmtree(folder, ignore_errors=True)
        return
    _remove_if_free(lock, folder)
    os.close(lock)


def _remove_if_free(lock: int, folder: Path) -> None:
    """Move a folder out of the way, then remove it, so that no process comes to share what is half gone."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    if _is_at(lock, folder / _LOCK_FILE):
        going = folder.with_name(f"{_PREFIX}going-{uuid.uuid4().hex}")
        folder.rename(going)
        fcntl.flock(lock, fcntl.LOCK_UN)
        shutil.rmtree(going, ignore_errors=True)


def _make_private(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    there = folder.stat(follow_symlinks=False)
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid() or there.st_mode & 0o077:
        raise UserError(
            f"{folder} must be a folder that only you can open, for a run's key and weights: remove it, or chmod 700 it"
        )


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        there = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (opened.st_dev, opened.st_ino) == (there.st_dev, there.st_ino)
