"""What a worker has that is not on its driver's machine: folders of its own machine, which all workers of the run there share.

It reaches the driver by the run's TLS door and not by the private socket. Whoever places workers says so in their environment.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_VARIABLES: Final = ("ASYNCFLOW_NODE_MEMORY", "ASYNCFLOW_NODE_FILES")
_PREFIX: Final = "asyncflow-node-"  # not what a driver sweeps: its folders go by process ids, and these are of another machine's
SHARED_MEMORY = Path("/dev/shm")
_LOCK_FILE: Final = "held.lock"
_MAKING_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Abroad:
    """`memory`: for weights that are fetched, best under /dev/shm; `files`: for the model. Both are this user's alone."""

    memory: Path
    files: Path

    def environment(self) -> Mapping[str, str]:
        """What tells a worker."""
        return dict(zip(_VARIABLES, (str(self.memory), str(self.files)), strict=True))


def abroad() -> Abroad | None:
    """What this worker was told; None on its driver's machine."""
    memory, files = (os.environ.get(name) for name in _VARIABLES)
    return Abroad(Path(memory), Path(files)) if memory and files else None


def own_address(door: str) -> str:
    """The address of this machine by which it reaches the driver's door, `tls:HOST:PORT`: others of the run reach it there, too.

    An IPv6 one is in brackets. Nothing is sent.
    """
    host, _, port = door.removeprefix("tls:").rpartition(":")
    family, kind, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        found = str(probe.getsockname()[0])
    return f"[{found}]" if ":" in found else found


class NodeFolders:
    """A run's folders on this machine, held by whoever places workers here; they go with the last one that holds them.

    What is held is locked, and the kernel lets go of it when its holder ends. Folders of runs that nobody holds any more, since
    all were killed, are swept by the next run that comes here.
    """

    def __init__(self, run_id: str) -> None:
        files = Path(tempfile.gettempdir())
        memory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else files
        self._parents = list(dict.fromkeys([memory, files]))  # what is removed last has the lock
        self.places = Abroad(memory / f"{_PREFIX}{run_id}" / "weights", files / f"{_PREFIX}{run_id}" / "files")
        self._lock = files / f"{_PREFIX}{run_id}" / _LOCK_FILE
        self._fd = -1

    def hold(self) -> None:
        """Make them, or share them."""
        while self._fd < 0:
            try:
                for place in (self.places.memory, self.places.files):
                    place.parent.mkdir(mode=0o700, exist_ok=True)
                    place.mkdir(mode=0o700, exist_ok=True)
                fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except FileNotFoundError:  # as below
                continue
            fcntl.flock(fd, fcntl.LOCK_SH)
            if _is_at(fd, self._lock):
                self._fd = fd
            else:  # the last holder has removed it in this very moment
                os.close(fd)

    def release(self) -> None:
        """Hold them no more, and remove them if nobody else does."""
        if self._fd >= 0:
            _remove_if_free(self._fd, self._lock.parent, self._parents)
            os.close(self._fd)
            self._fd = -1

    def sweep(self) -> None:
        """Remove what killed runs have left."""
        for parent in self._parents:
            for folder in parent.glob(f"{_PREFIX}*"):
                try:
                    there = folder.stat(follow_symlinks=False)
                except FileNotFoundError:  # another has swept it meanwhile
                    continue
                if there.st_uid != os.getuid():
                    continue
                try:
                    fd = os.open(self._lock.parent.parent / folder.name / _LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                except OSError:
                    if time.time() - there.st_mtime > _MAKING_SECONDS:  # half of it went otherwise
                        shutil.rmtree(folder, ignore_errors=True)
                    continue
                _remove_if_free(fd, self._lock.parent.parent / folder.name, self._parents)
                os.close(fd)


def _remove_if_free(fd: int, folder: Path, parents: Sequence[Path]) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    if _is_at(fd, folder / _LOCK_FILE):
        for parent in parents:
            shutil.rmtree(parent / folder.name, ignore_errors=True)


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (opened.st_dev, opened.st_ino) == (there.st_dev, there.st_ino)
