"""Casting, copying and hashing weights on their way, and a worker's copy of them in host memory.

Bytes are hashed as they are copied, while they are in the processor's cache. A receiver hashes its own copy: what was verified is
what is used.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import xxhash
from torch import Tensor

from asyncflow.types import Array
from asyncflow.weight_sync.base import Manifest, TensorSpec, WeightSyncError
from asyncflow.weight_sync.layout import Layout

_ALIGNMENT = 64
# Copied and hashed at once: fits the second-level cache, and is large against the cost of a call.
_CHUNK_BYTES = 1 << 20


def wire_specs(tensors: Mapping[str, Tensor], dtype: str | None) -> dict[str, TensorSpec]:
    """What travels: floating-point tensors that are wider than `dtype` (torch's name) as that, all others as they are."""
    narrow = None if dtype is None else getattr(torch, dtype)
    specs = {}
    for name, tensor in tensors.items():
        is_cast = narrow is not None and tensor.is_floating_point() and tensor.element_size() > narrow.itemsize
        specs[name] = TensorSpec(tuple(tensor.shape), str(narrow if is_cast else tensor.dtype).removeprefix("torch."))
    return specs


def write_version(file: Array, layout: Layout, tensors: Mapping[str, Tensor]) -> str:
    """Fill a file's bytes (uint8 [num_bytes]), casting to the layout's dtypes; their xxh3_128 in hexadecimal."""
    digest = xxhash.xxh3_128()
    copy_and_hash(file[: len(layout.head)], np.frombuffer(layout.head, np.uint8), digest)
    for name, (begin, end) in layout.spans.items():
        source, dtype = tensors[name].detach().cpu().reshape(-1), getattr(torch, layout.specs[name].dtype)
        if source.dtype == dtype:
            copy_and_hash(file[begin:end], source.view(torch.uint8).numpy(), digest)
        else:
            _cast_and_hash(file[begin:end], source, dtype, digest)
    return digest.hexdigest()


def copy_and_hash(target: Array, source: Array, digest: xxhash.xxh3_128) -> None:
    """Copy uint8 [n], and hash the copy."""
    for begin in range(0, len(source), _CHUNK_BYTES):
        chunk = target[begin : begin + _CHUNK_BYTES]
        np.copyto(chunk, source[begin : begin + _CHUNK_BYTES])
        digest.update(chunk.data)


def _cast_and_hash(target: Array, source: Tensor, dtype: torch.dtype, digest: xxhash.xxh3_128) -> None:
    cast = torch.from_numpy(target).view(dtype)
    step = _CHUNK_BYTES // source.element_size()
    for begin in range(0, len(source), step):
        cast[begin : begin + step].copy_(source[begin : begin + step])
        digest.update(target[begin * dtype.itemsize : (begin + step) * dtype.itemsize].data)


class Staging:
    """The tensors of one version in one buffer, allocated once, each 64-byte aligned: matmul kernels give other bits for others."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._tensors: dict[str, Tensor] = {}

    def begin(self, manifest: Manifest) -> Arriving:
        """What takes the bytes of a version. Raises `WeightSyncError` when its tensors are not those fetched before it."""
        layout = self._layout
        if layout is None or layout.specs != manifest.tensors:
            if layout is not None:
                raise WeightSyncError(f"version {manifest.version} has other tensors than those fetched before it")
            layout = Layout(manifest.tensors)
        if layout.num_bytes != manifest.num_bytes:
            raise WeightSyncError(f"the tensors of version {manifest.version} have not the number of bytes of its manifest")
        return Arriving(self, layout, manifest)

    def buffers(self, layout: Layout) -> dict[str, Tensor]:
        """The tensors, by name."""
        if self._layout is None:
            self._tensors = _aligned(layout)
            self._layout = layout
        return self._tensors


class Arriving:
    """A version on its way: `write` the bytes of its file in order, then `finish`."""

    def __init__(self, staging: Staging, layout: Layout, manifest: Manifest) -> None:
        self._staging, self._layout, self._manifest = staging, layout, manifest
        self._digest = xxhash.xxh3_128()
        self._head = np.empty(len(layout.head), np.uint8)
        self._targets = [self._head]  # what is to be filled next comes last
        self._at = 0  # in that

    def write(self, piece: Array) -> None:
        """The next bytes of the file: uint8 [n], n above 0. Raises `WeightSyncError` when it begins as another's."""
        while len(piece):
            target = self._targets[-1]
            count = min(len(piece), len(target) - self._at)
            copy_and_hash(target[self._at : self._at + count], piece[:count], self._digest)
            piece, self._at = piece[count:], self._at + count
            if self._at == len(target):
                self._targets.pop()
                self._at = 0
                if target is self._head:
                    self._begin_tensors()

    def _begin_tensors(self) -> None:
        if self._head.tobytes() != self._layout.head:
            raise WeightSyncError(f"{self._manifest.address} does not hold the names, shapes and dtypes of its manifest")
        tensors = self._staging.buffers(self._layout)
        self._targets = [tensors[name].view(-1).view(torch.uint8).numpy() for name in reversed(self._layout.spans)]
        self._targets = [target for target in self._targets if len(target)]

    def finish(self) -> dict[str, Tensor]:
        """The tensors, when all bytes are there. Raises `WeightSyncError` when their hash is not the manifest's."""
        if self._targets or self._digest.hexdigest() != self._manifest.hash:
            raise WeightSyncError(
                f"what arrived of {self._manifest.address} does not have the hash of its manifest: it is damaged, or no longer "
                f"kept and written over"
            )
        return dict(self._staging.buffers(self._layout))


def _aligned(layout: Layout) -> dict[str, Tensor]:
    """Uninitialised tensors in one buffer."""
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
