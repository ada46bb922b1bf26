"""Casting, copying and hashing weights on their way, and the copy of a worker whose machine has no file of them.

Bytes are hashed as they are copied, while they are in the processor's cache; those that ranks gather afterwards, in the file, since
ranks wait for the copy. What a receiver has verified, in a copy of its own or in a file that it holds, is what is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
import xxhash
from torch import Tensor

from asyncflow.attestation import modulus_of
from asyncflow.bit_sums import sum_of
from asyncflow.types import Array, TensorSpec
from asyncflow.weight_sync.base import Manifest, WeightSyncError
from asyncflow.weight_sync.layout import FileLayout

# Copied and hashed at once: fits the second-level cache, and is large against the cost of a call.
_CHUNK_BYTES = 1 << 20


def wire_specs(source: Mapping[str, TensorSpec], dtype: str | None) -> dict[str, TensorSpec]:
    """Tensors as they travel: floating-point ones that are wider than `dtype` (torch's name) as that, all others as they are."""
    narrow = None if dtype is None else _torch_dtype(dtype)
    specs = {}
    for name, spec in source.items():
        own = _torch_dtype(spec.dtype)
        is_cast = narrow is not None and own.is_floating_point and own.itemsize > narrow.itemsize
        specs[name] = TensorSpec(spec.shape, dtype) if is_cast and dtype is not None else spec
    return specs


class Filling:
    """A version's file as its tensors come: `write` or `copy` them, then `finish`.

    A tensor that is written is hashed as it is copied, if it is its turn in the file. What came too early, and what was only
    copied, is hashed from the file when its turn has come.
    """

    def __init__(
        self, file: Array, layout: FileLayout, source: Mapping[str, TensorSpec], attested_dtype: str | None = None
    ) -> None:
        """`file`: uint8 [num_bytes]. `source`: what the tensors are before they are cast to the layout's dtypes.

        `attested_dtype`: dtype that sums are taken of them in; None: none are taken.
        """
        self.layout = layout
        self.sums: dict[str, int] = {}
        """Sums of the bits of the tensors that have been hashed, in `attested_dtype`; see attestation.py."""
        self._attested = None if attested_dtype is None else _torch_dtype(attested_dtype)
        self._file, self._source = file, source
        self._digest = xxhash.xxh3_128()
        self._waiting = deque(layout.spans)  # names that are not hashed, in the file's order
        self._missing = set(layout.spans)
        copy_and_hash(file[: len(layout.head)], np.frombuffer(layout.head, np.uint8), self._digest)

    def write(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Copy and hash tensors (CPU, contiguous) by their names, and empty the list, so that nothing keeps them any longer.

        Raises `WeightSyncError` for one that is not as the source said.
        """
        tensors.reverse()
        while tensors:
            self._write(*tensors.pop())

    def copy(self, tensors: list[tuple[str, Tensor]]) -> None:
        """`write` without the hash and the sums, which `finish` takes then."""
        tensors.reverse()
        while tensors:
            name, tensor = tensors.pop()
            self._expect(name, tensor)
            torch.from_numpy(self._bytes_of(name)).view(self._dtype_of(name)).copy_(tensor.reshape(-1))

    def finish(self, tensors: list[tuple[str, Tensor]]) -> str:
        """`write`, then the xxh3_128 of the whole file in hexadecimal. Raises `WeightSyncError` when a tensor has not come."""
        self.write(tensors)
        if self._missing:
            raise WeightSyncError(f"the weights ended before {min(self._missing)!r} came ({len(self._missing)} are missing)")
        self._hash_those_there()
        return self._digest.hexdigest()

    def _write(self, name: str, tensor: Tensor) -> None:
        self._expect(name, tensor)
        copied = _copied(self._bytes_of(name), tensor.reshape(-1), self._dtype_of(name))
        if name != self._waiting[0]:
            self._sum(name, copied)
            return
        self._waiting.popleft()
        self._sum(name, self._hashed(copied))
        self._hash_those_there()

    def _expect(self, name: str, tensor: Tensor) -> None:
        if name not in self._missing:
            raise WeightSyncError(f"the weights brought {name!r}, which is not one of their specs, or has come before")
        if TensorSpec.of(tensor) != self._source[name]:
            raise WeightSyncError(f"the weights brought {name!r} as {TensorSpec.of(tensor)}, and had said {self._source[name]}")
        self._missing.remove(name)

    def _hash_those_there(self) -> None:
        while self._waiting and self._waiting[0] not in self._missing:
            name = self._waiting.popleft()
            chunks = self._hashed(_chunks(self._bytes_of(name)))
            if name in self.sums:
                deque(chunks, maxlen=0)
            else:
                self._sum(name, chunks)

    def _hashed(self, chunks: Iterable[Array]) -> Iterator[Array]:
        for chunk in chunks:
            self._digest.update(chunk.data)
            yield chunk

    def _sum(self, name: str, chunks: Iterable[Array]) -> None:
        """Go through a tensor's bytes, and take their sum if one is wanted."""
        dtype, total = self._dtype_of(name), 0
        for chunk in chunks:
            if self._attested is not None:
                sent = torch.from_numpy(chunk).view(dtype)
                total += sum_of(name, sent.to(self._attested) if dtype.is_floating_point else sent)
        if self._attested is not None:
            self.sums[name] = total % modulus_of(name)

    def _bytes_of(self, name: str) -> Array:
        begin, end = self.layout.spans[name]
        return self._file[begin:end]

    def _dtype_of(self, name: str) -> torch.dtype:
        return _torch_dtype(self.layout.specs[name].dtype)


def copy_and_hash(target: Array, source: Array, digest: xxhash.xxh3_128) -> None:
    """Copy uint8 [n], and hash the copy."""
    for begin in range(0, len(source), _CHUNK_BYTES):
        chunk = target[begin : begin + _CHUNK_BYTES]
        np.copyto(chunk, source[begin : begin + _CHUNK_BYTES])
        digest.update(chunk.data)


def expected(manifest: Manifest, before: FileLayout | None) -> FileLayout:
    """The layout of a version's file. Raises `WeightSyncError` when its tensors are not those of the versions `before` it."""
    if before is not None and before.specs != manifest.tensors:
        raise WeightSyncError(f"version {manifest.version} has other tensors than those fetched before it")
    layout = before or FileLayout(manifest.tensors)
    if layout.num_bytes != manifest.num_bytes:
        raise WeightSyncError(f"the tensors of version {manifest.version} have not the number of bytes of its manifest")
    return layout


def verified(file: Array, layout: FileLayout, manifest: Manifest) -> dict[str, Tensor]:
    """The tensors in a version's file (uint8 [num_bytes]), not copied. Raises `WeightSyncError` when it is not the manifest's."""
    check_head(file, layout, manifest)
    digest = xxhash.xxh3_128()
    for chunk in _chunks(file):
        digest.update(chunk.data)
    check_hash(digest.hexdigest(), manifest)
    return tensors_in(file, layout)


def tensors_in(file: Array, layout: FileLayout) -> dict[str, Tensor]:
    """The tensors in a file (uint8 [num_bytes]), not copied."""
    whole, tensors = torch.from_numpy(file), {}
    for name, (begin, end) in layout.spans.items():
        spec = layout.specs[name]
        tensors[name] = whole[begin:end].view(_torch_dtype(spec.dtype)).view(spec.shape)
    return tensors


def check_head(file: Array, layout: FileLayout, manifest: Manifest) -> None:
    """Raises `WeightSyncError` when a file begins as another's."""
    if file[: len(layout.head)].tobytes() != layout.head:
        raise WeightSyncError(f"{manifest.address} does not hold the names, shapes and dtypes of its manifest")


def check_hash(digest: str, manifest: Manifest) -> None:
    """Raises `WeightSyncError` when it is not the manifest's."""
    if digest != manifest.hash:
        raise WeightSyncError(
            f"what arrived of {manifest.address} does not have the hash of its manifest: it is damaged, or no longer "
            f"kept and written over"
        )


def _chunks(file: Array) -> Iterator[Array]:
    for begin in range(0, len(file), _CHUNK_BYTES):
        yield file[begin : begin + _CHUNK_BYTES]


def _copied(target: Array, source: Tensor, dtype: torch.dtype) -> Iterator[Array]:
    """Each chunk of `target` (uint8 [n]) when it has been filled from `source` (of one dimension), cast to `dtype`."""
    cast, step = torch.from_numpy(target).view(dtype), _CHUNK_BYTES // source.element_size()
    for begin in range(0, len(source), step):
        cast[begin : begin + step].copy_(source[begin : begin + step])
        yield target[begin * dtype.itemsize : (begin + step) * dtype.itemsize]


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class Arriving:
    """A version on its way: `write` the bytes of its file in order, then `finish`."""

    def __init__(self, file: Array, layout: FileLayout, manifest: Manifest) -> None:
        """`file`: memory for it, uint8 [num_bytes]."""
        self._file, self._layout, self._manifest = file, layout, manifest
        self._digest = xxhash.xxh3_128()
        self._at = 0  # bytes that are there

    def write(self, piece: Array) -> None:
        """The next bytes of the file: uint8 [n], n above 0. Raises `WeightSyncError` when it begins as another's."""
        before, self._at = self._at, self._at + len(piece)
        copy_and_hash(self._file[before : self._at], piece, self._digest)
        if before < len(self._layout.head) <= self._at:
            check_head(self._file, self._layout, self._manifest)

    def finish(self) -> dict[str, Tensor]:
        """The tensors, not copied, when all bytes are there. Raises `WeightSyncError` when their hash is not the manifest's."""
        check_hash(self._digest.hexdigest(), self._manifest)
        return tensors_in(self._file, self._layout)
