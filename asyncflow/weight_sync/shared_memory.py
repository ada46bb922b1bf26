"""Weights through files that live in memory: for a trainer and rollout workers on one machine.

    <directory>/weights-7.safetensors        the last `keep` versions, each a plain safetensors file
                weights-8.safetensors
                weights-6.safetensors.tmp    the version before them, whose pages the next publish writes over

A new file in /dev/shm costs ten times the copy into it, since the kernel must find and clear every page. So the sender keeps
`keep` + 1 files mapped and moves them in a circle by renaming, and the receiver keeps its mappings of them. A reader that is
too slow finds a file written over under its hands; the hash tells.

The bytes are hashed as they are copied, while they are in the processor's cache, and the receiver hashes its own copy: what
was verified is what is used.

Left out: other machines, and weights on a device (they are fetched to host memory and installed from there).
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from asyncflow.threads import ComputeThread
from asyncflow.types import Array, UserError
from asyncflow.weight_sync.base import Manifest, TensorSpec, WeightSyncError
from asyncflow.weight_sync.layout import Layout

_ALIGNMENT = 64
# Copied and hashed at once: fits the second-level cache, and is large against the cost of a call.
_CHUNK_BYTES = 1 << 20


class SharedMemory:
    """Both ends, see the module's head."""

    def __init__(self, *, directory: Path | str, keep: int = 2) -> None:
        """`directory` belongs to one sender alone, usually under /dev/shm; its owner removes it when the run ends.

        `keep` versions stay available: as many as a redelivered group may still need.

        Raises:
            UserError: `keep` is below 1.
        """
        if keep < 1:
            raise UserError(f"weight_sync.keep must be at least 1, but is {keep}.")
        self.directory = Path(directory)
        self.keep = keep

    def sender(self, incarnation: str) -> SharedMemorySender:
        """The trainer's end; makes the directory (mode 0700) and clears it of an earlier sender's files."""
        return SharedMemorySender(self.directory, incarnation, keep=self.keep)

    def receiver(self) -> SharedMemoryReceiver:
        """A rollout worker's end: the manifests say where the files are."""
        return SharedMemoryReceiver()


class SharedMemorySender:
    """Implements `WeightSender`."""

    def __init__(self, directory: Path, incarnation: str, *, keep: int) -> None:
        """Raises `UserError` when the directory is not this user's alone."""
        _make_private(directory)
        for stale in directory.glob("weights-*.safetensors*"):
            stale.unlink()
        self._directory = directory
        self._incarnation = incarnation
        self._keep = keep
        self._layout: Layout | None = None
        self._kept: dict[Path, Array] = {}  # oldest first; the mapped bytes of each file
        self._spare: tuple[Path, Array] | None = None
        self._thread = ComputeThread("weight-sender")

    async def publish(self, version: int, tensors: Mapping[str, Tensor]) -> Manifest:
        """See `WeightSender.publish`."""
        return await self._thread.run(self._publish, version, dict(tensors))

    async def close(self) -> None:
        """See `WeightSender.close`."""
        self._thread.close()

    def _publish(self, version: int, tensors: dict[str, Tensor]) -> Manifest:
        specs = {name: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
        if self._layout is None:
            self._layout = Layout(specs)
        elif specs != self._layout.specs:
            raise WeightSyncError(f"version {version} has other tensors than those published before it")
        path = self._directory / f"weights-{version}.safetensors"
        if self._spare is None:
            self._spare = self._new_file(path.with_name(path.name + ".tmp"), self._layout.num_bytes)
        temporary, mapped = self._spare
        digest = _write(mapped, self._layout, tensors)
        temporary.rename(path)
        self._spare = None
        self._kept.pop(path, None)  # published again: the rename has replaced it
        self._kept[path] = mapped
        if len(self._kept) > self._keep:
            oldest = next(iter(self._kept))
            self._spare = oldest.rename(oldest.with_name(oldest.name + ".tmp")), self._kept.pop(oldest)
        return Manifest(self._incarnation, version, str(path), digest, self._layout.num_bytes, self._layout.specs)

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


class SharedMemoryReceiver:
    """Implements `WeightReceiver`."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._staging: dict[str, Tensor] = {}
        self._incarnation = ""
        self._mappings: dict[tuple[int, int], Array] = {}  # by device and inode: a file keeps them when it is renamed
        self._thread = ComputeThread("weight-receiver")

    async def fetch(self, manifest: Manifest) -> Mapping[str, Tensor]:
        """See `WeightReceiver.fetch`."""
        return await self._thread.run(self._fetch, manifest)

    async def close(self) -> None:
        """See `WeightReceiver.close`."""
        self._thread.close()

    def _fetch(self, manifest: Manifest) -> Mapping[str, Tensor]:
        mapped = self._map(manifest)
        layout = self._layout
        if layout is None or layout.specs != manifest.tensors:
            if layout is not None:
                raise WeightSyncError(f"version {manifest.version} has other tensors than those fetched before it")
            layout = Layout(manifest.tensors)
        head = bytes(mapped[: len(layout.head)])
        if head != layout.head or layout.num_bytes != manifest.num_bytes:
            raise WeightSyncError(f"{manifest.address} does not hold the names, shapes and dtypes of its manifest")
        if self._layout is None:
            self._staging = _staging(layout)
            self._layout = layout
        digest = xxhash.xxh3_128(head)
        for name, (begin, end) in layout.spans.items():
            _copy_and_hash(_bytes_of(self._staging[name]), mapped[begin:end], digest)
        if digest.hexdigest() != manifest.hash:
            raise WeightSyncError(
                f"{manifest.address} does not have the hash of its manifest: it is damaged, or no longer kept and written over"
            )
        return dict(self._staging)

    def _map(self, manifest: Manifest) -> Array:
        """The file's bytes, uint8 [num_bytes], read-only."""
        if manifest.incarnation != self._incarnation:  # another sender writes other files; those of the last may be deleted
            self._mappings.clear()
            self._incarnation = manifest.incarnation
        try:
            fd = os.open(manifest.address, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise WeightSyncError(f"version {manifest.version} is not at {manifest.address}: {error.strerror}") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                raise WeightSyncError(f"{manifest.address} is not a file of this user's own")
            if status.st_size != manifest.num_bytes:
                raise WeightSyncError(f"{manifest.address} has {status.st_size:,} bytes, its manifest {manifest.num_bytes:,}")
            key = status.st_dev, status.st_ino
            if key not in self._mappings:
                self._mappings[key] = np.frombuffer(mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ), np.uint8)
            return self._mappings[key]
        finally:
            os.close(fd)


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat(follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(f"The weight directory {directory} must be a folder that only you can open: remove it, or chmod 700 it.")


def _write(mapped: Array, layout: Layout, tensors: Mapping[str, Tensor]) -> str:
    """Fill a file's bytes; their xxh3_128 in hexadecimal."""
    digest = xxhash.xxh3_128(layout.head)
    mapped[: len(layout.head)] = np.frombuffer(layout.head, np.uint8)
    for name, (begin, end) in layout.spans.items():
        _copy_and_hash(mapped[begin:end], _bytes_of(tensors[name]), digest)
    return digest.hexdigest()


def _copy_and_hash(target: Array, source: Array, digest: xxhash.xxh3_128) -> None:
    for begin in range(0, len(source), _CHUNK_BYTES):
        chunk = target[begin : begin + _CHUNK_BYTES]
        np.copyto(chunk, source[begin : begin + _CHUNK_BYTES])
        digest.update(chunk.data)


def _bytes_of(tensor: Tensor) -> Array:
    """uint8 [bytes]: a view when the tensor is contiguous and on the CPU."""
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()


def _staging(layout: Layout) -> dict[str, Tensor]:
    """Uninitialised tensors in one buffer, each 64-byte aligned: matmul kernels give other bits for other alignments."""
    starts: dict[str, int] = {}
    total = 0
    for name, (begin, end) in layout.spans.items():
        starts[name] = total
        total += -(-(end - begin) // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(total + _ALIGNMENT, dtype=torch.uint8)
    first = -buffer.data_ptr() % _ALIGNMENT
    tensors = {}
    for name, (begin, end) in layout.spans.items():
        start = first + starts[name]
        spec = layout.specs[name]
        tensors[name] = buffer[start : start + end - begin].view(getattr(torch, spec.dtype)).view(spec.shape)
    return tensors
