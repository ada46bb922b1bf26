"""The versions that an end retains: plain safetensors files in memory.

    <directory>/weights-7.safetensors        the last `keep` versions
                weights-8.safetensors
                weights-6.safetensors.tmp    the file that is being written

A new file in /dev/shm costs ten times the copy into it, since the kernel must find and clear every page. So a version is written
over the oldest one, whose pages are there: there are `keep` files, and never fewer than two, as one must be whole while another
is written. A reader that is too slow finds a file written over under its hands; the hash tells.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import numpy as np

from asyncflow.types import Array, UserError
from asyncflow.weight_sync.base import Manifest, WeightSyncError

PATTERN = "weights-*.safetensors*"


class VersionFiles:
    """Written by one process alone. `begin` a version, write its bytes, `commit` it."""

    def __init__(self, directory: Path, keep: int) -> None:
        """Makes the directory (mode 0700) and clears it of an earlier process's files. Raises `UserError` if others may open it."""
        make_private(directory)
        for stale in directory.glob(PATTERN):
            stale.unlink()
        self._directory = directory
        self._keep = keep
        self._kept: dict[int, Array] = {}  # by version, oldest first; the mapped bytes
        self._spare: tuple[Path, Array] | None = None

    def begin(self, version: int, num_bytes: int) -> Array:
        """Where the version's bytes belong: uint8 [num_bytes], of unspecified content; all versions have one size.

        Raises `WeightSyncError` if there is no room.
        """
        if self._spare is None and version in self._kept:  # what is published again is over
            self._spare = self._retire(version)
        elif self._spare is None and len(self._kept) >= max(self._keep, 2):
            self._spare = self._retire(next(iter(self._kept)))
        elif self._spare is None:
            self._spare = self._new_file(self._path(version).with_suffix(".safetensors.tmp"), num_bytes)
        return self._spare[1]

    def commit(self, version: int) -> Path:
        """The bytes of the version that has begun are all there. Returns its file."""
        assert self._spare is not None, "`begin` first"
        temporary, mapped = self._spare
        temporary.rename(self._path(version))
        self._spare = None
        self._kept.pop(version, None)  # published again: the rename has replaced it
        self._kept[version] = mapped
        if len(self._kept) > self._keep:
            self._spare = self._retire(next(iter(self._kept)))
        return self._path(version)

    def get(self, version: int) -> Array | None:
        """The bytes of a version that is retained: uint8 [num_bytes]."""
        return self._kept.get(version)

    def _path(self, version: int) -> Path:
        return self._directory / f"weights-{version}.safetensors"

    def _retire(self, version: int) -> tuple[Path, Array]:
        path = self._path(version)
        return path.rename(path.with_name(path.name + ".tmp")), self._kept.pop(version)

    def _new_file(self, path: Path, num_bytes: int) -> tuple[Path, Array]:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # A store into a mapped page that has no room left would kill the process; here it is an error.
            os.posix_fallocate(fd, 0, num_bytes)
            return path, np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8)
        except OSError as error:
            path.unlink()
            raise WeightSyncError(f"no room for {num_bytes:,} bytes of weights in {self._directory}: {error.strerror}") from error
        finally:
            os.close(fd)


class FileReader:
    """Maps the files that another process writes, each once."""

    def __init__(self) -> None:
        self._source = ("", Path())
        self._mappings: dict[tuple[int, int], Array] = {}  # by device and inode: a file keeps them when it is renamed

    def map(self, manifest: Manifest) -> Array:
        """The bytes of the manifest's file: uint8 [num_bytes], read-only. Raises `WeightSyncError` if it is not there."""
        path = Path(manifest.address)
        if (manifest.incarnation, path.parent) != self._source:  # another writer has other files; those of the last may be deleted
            self._mappings.clear()
            self._source = manifest.incarnation, path.parent
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
            if key not in self._mappings:
                self._mappings[key] = np.frombuffer(mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ), np.uint8)
            return self._mappings[key]
        finally:
            os.close(fd)


def make_private(directory: Path) -> None:
    """A folder that only this user can open. Raises `UserError` when it is there and is not."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat(follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(f"The weight directory {directory} must be a folder that only you can open: remove it, or chmod 700 it.")
