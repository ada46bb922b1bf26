"""The versions that an end retains: plain safetensors files in memory.

    <directory>/weights-7.safetensors        the last `keep` versions
                weights-8.safetensors
                weights-6.safetensors.tmp    the file that is being written

A new file in /dev/shm costs ten times the copy into it, since the kernel must find and clear every page. So a version is written
over the oldest one, whose pages are there: there are `keep` files. By then no reader may need the oldest. A run's sender keeps
one more than its schedule needs, so that the newest version is whole while the next one is written. Older versions that are
`retained` are passed over; the files that this takes are reserved when the first one is made.

Readers use the files where they are. A reader locks the one that it reads (flock, shared) until it needs it no more; the writer
locks a file (exclusively) before it writes over it. Where a reader is so late that it still has the file whose turn it is, the
writer leaves the file to it, and makes another; without room for that it waits. The kernel lets go of the locks of a process that
dies.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from asyncflow.types import Array, UserError
from asyncflow.weight_sync.base import Manifest, WeightSyncError

PATTERN = "weights-*.safetensors*"
_RETRY_SECONDS = 0.05


@dataclass(frozen=True)
class _File:
    fd: int  # what the lock belongs to
    mapped: Array  # uint8 [bytes]

    @property
    def is_deleted(self) -> bool:
        """Whether the file has no name any more."""
        return os.fstat(self.fd).st_nlink == 0

    def lock(self, kind: int) -> bool:
        """Whether nobody else has a lock that this one (fcntl's `LOCK_SH` or `LOCK_EX`) does not go with. Waits for nobody."""
        try:
            fcntl.flock(self.fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """Give up the lock."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file, which unlocks it; what is mapped stays while a process has it."""
        os.close(self.fd)


class VersionFiles:
    """Written by one process alone. `begin` a version, write its bytes, `commit` it."""

    def __init__(self, directory: Path, keep: int, deadline_seconds: float, max_retained: int = 0) -> None:
        """Makes the directory (mode 0700) and clears it of an earlier process's files. Raises `UserError` if others may open it.

        `deadline_seconds`: of waiting for a reader, where there is no room beside what it reads. `max_retained`: versions beside
        the last `keep` that may be retained at once.
        """
        make_private(directory)
        for stale in directory.glob(PATTERN):
            stale.unlink()
        self._directory = directory
        self._keep, self._deadline_seconds, self._max_retained = keep, deadline_seconds, max_retained
        self.retained: Collection[int] = ()
        self._kept: dict[int, _File] = {}  # by version, oldest first
        self._spare: tuple[Path, _File] | None = None  # what is written
        self._reserved: list[tuple[Path, _File]] | None = None

    def begin(self, version: int, num_bytes: int) -> Array:
        """Memory for the version's bytes: uint8 [num_bytes], of unspecified content; all versions have one size.

        Raises `WeightSyncError` if there is no room, or if a reader was waited for in vain; nothing has changed then.
        """
        if self._reserved is None:
            self._reserve(num_bytes)
        if self._spare is None:
            if version in self._kept:  # what is published again is over
                self._spare = self._take(version)
            elif (over := self._over()) is not None:
                self._spare = self._take(over)
            elif self._reserved and len(self._kept) >= self._keep:
                self._spare = self._reserved.pop()
            else:
                self._spare = self._new_file(self._path(version).with_suffix(".safetensors.tmp"), num_bytes)
        return self._spare[1].mapped

    def commit(self, version: int) -> Path:
        """The bytes of the version that has begun are all there. Returns its file."""
        assert self._spare is not None, "`begin` first"
        temporary, file = self._spare
        temporary.rename(self._path(version))
        file.unlock()
        self._spare = None
        if (replaced := self._kept.pop(version, None)) is not None:  # published again: the rename has taken its name
            replaced.close()
        self._kept[version] = file
        return self._path(version)

    def get(self, version: int) -> Array | None:
        """The bytes of a version that is retained: uint8 [num_bytes]."""
        file = self._kept.get(version)
        return None if file is None else file.mapped

    def close(self) -> None:
        """Close all files, which unlocks them; what is mapped stays while a process has it."""
        unused = [*(self._reserved or ()), *([self._spare] if self._spare else ())]
        for file in [*self._kept.values(), *(file for _, file in unused)]:
            file.close()
        self._kept, self._spare, self._reserved = {}, None, None

    def _reserve(self, num_bytes: int) -> None:
        """Make the files for versions that are retained, or none of them."""
        reserved: list[tuple[Path, _File]] = []
        try:
            for number in range(self._max_retained):
                reserved.append(self._new_file(self._directory / f"weights-reserved-{number}.safetensors.tmp", num_bytes))
        except WeightSyncError as error:
            for path, file in reserved:
                path.unlink()
                file.close()
            raise WeightSyncError(
                f"{error}; evaluators need {self._max_retained} older versions there: have more room, or set eval.num_workers=0"
            ) from error
        self._reserved = reserved

    def _path(self, version: int) -> Path:
        return self._directory / f"weights-{version}.safetensors"

    def _over(self) -> int | None:
        """Oldest version that is not needed when one more is there."""
        older = list(self._kept)[: max(0, len(self._kept) + 1 - self._keep)]
        return next((version for version in older if version not in self.retained), None)

    def _take(self, version: int) -> tuple[Path, _File]:
        """A version's file, which is over. Or another in its place, if it is being read; or itself when that has ended, if there is
        no room for both."""
        path, file = self._path(version), self._kept[version]
        temporary, another = path.with_name(f"{path.name}.tmp"), None
        if not file.lock(fcntl.LOCK_EX):
            try:
                another = self._new_file(temporary, len(file.mapped))
            except WeightSyncError as error:
                self._wait_for_readers(path, file, error)
        del self._kept[version]
        if another is None:
            return path.rename(temporary), file
        path.unlink()
        file.close()
        return another

    def _wait_for_readers(self, path: Path, file: _File, no_room: WeightSyncError) -> None:
        """Returns with the file locked. Raises `WeightSyncError` at the deadline."""
        until = time.monotonic() + self._deadline_seconds
        while not file.lock(fcntl.LOCK_EX):
            if time.monotonic() > until:
                raise WeightSyncError(f"{no_room}; a worker has been reading {path} for {self._deadline_seconds:g} s") from no_room
            time.sleep(_RETRY_SECONDS)

    def _new_file(self, path: Path, num_bytes: int) -> tuple[Path, _File]:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # A store into a mapped page that has no room left would kill the process; here it is an error.
            os.posix_fallocate(fd, 0, num_bytes)
            file = _File(fd, np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8))
        except OSError as error:
            path.unlink()
            os.close(fd)
            raise WeightSyncError(f"no room for {num_bytes:,} bytes of weights in {self._directory}: {error.strerror}") from error
        file.lock(fcntl.LOCK_EX)
        return path, file


class FileReader:
    """Maps the files that another process writes, each once, and holds one at a time."""

    def __init__(self) -> None:
        self._source = ("", Path())
        self._files: dict[tuple[int, int], _File] = {}  # by device and inode: a file keeps them when it is renamed
        self._held: _File | None = None

    def hold(self, manifest: Manifest) -> Array:
        """The bytes of the manifest's file, and nobody writes there until `release`: uint8 [num_bytes].

        What is stored into them is this process's alone, and spoils its copy of the versions to come: see `forget`. Raises
        `WeightSyncError` if the file is not there, or is being written over.
        """
        self.release()
        path = Path(manifest.address)
        if (manifest.incarnation, path.parent) != self._source:  # another writer has other files; those of the last may be deleted
            self.forget()
            self._source = manifest.incarnation, path.parent
        for key in [key for key, file in self._files.items() if file.is_deleted]:  # it was left to this reader
            self._files.pop(key).close()
        file = self._opened(path, manifest)
        if not file.lock(fcntl.LOCK_SH):
            raise WeightSyncError(f"version {manifest.version} is no longer kept: {path} is being written over")
        self._held = file
        return file.mapped

    def release(self) -> None:
        """Let the writer write over the file that is held. Does nothing if none is."""
        if self._held is not None:
            self._held.unlock()
            self._held = None

    def forget(self) -> None:
        """Release, and map all files anew."""
        self._held = None
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _opened(self, path: Path, manifest: Manifest) -> _File:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise WeightSyncError(f"version {manifest.version} is not at {path}: {error.strerror}") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                raise WeightSyncError(f"{path} is not a file of this user's own")
            if status.st_size != manifest.num_bytes:
                raise WeightSyncError(f"{path} has {status.st_size:,} bytes, its manifest {manifest.num_bytes:,}")
            key = status.st_dev, status.st_ino
            if key not in self._files:
                # Pages are the writer's until somebody stores into one: torch wants tensors that can be written.
                mapped = np.frombuffer(mmap.mmap(fd, status.st_size, access=mmap.ACCESS_COPY), np.uint8)
                self._files[key], fd = _File(fd, mapped), -1
            return self._files[key]
        finally:
            if fd >= 0:
                os.close(fd)


def held(manifest: Manifest) -> BinaryIO | None:
    """A retained version's file, from its beginning, which nobody writes over until it is closed. None where weights are simulated.

    Raises `OSError` if it is not there, or is being written over.
    """
    if not manifest.address:
        return None
    file = Path(manifest.address).open("rb")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return file


def make_private(directory: Path) -> None:
    """A folder that only this user can open. Raises `UserError` when it is there and is not."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat(follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(f"The weight directory {directory} must be a folder that only you can open: remove it, or chmod 700 it.")
