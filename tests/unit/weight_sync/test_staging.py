"""Casting and hashing on the way, and bytes that arrive in pieces of any size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import xxhash

from asyncflow.types import Array, TensorSpec
from asyncflow.weight_sync.base import Manifest, WeightSyncError
from asyncflow.weight_sync.layout import FileLayout
from asyncflow.weight_sync.staging import Arriving, Filling, expected, verified, wire_specs

TENSORS = {
    "wide": torch.randn(700_001),  # casts in several chunks, the last one short
    "double": torch.randn(33, 7, dtype=torch.float64).t(),
    "half": torch.randn(5).half(),
    "count": torch.arange(9),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(1.0e-40),  # denormal
}


SPECS = {name: TensorSpec.of(tensor) for name, tensor in TENSORS.items()}


def published(
    dtype: str | None, order: Sequence[str] = tuple(TENSORS), num_written: int = 3, num_copied: int = 0
) -> tuple[Array, Manifest]:
    """A file whose tensors come in this order: some are written, then some copied, and the rest comes at the end."""
    layout = FileLayout(wire_specs(SPECS, dtype))
    file = np.zeros(layout.num_bytes, np.uint8)
    filling, tensors = Filling(file, layout, SPECS, "bfloat16"), [(name, TENSORS[name].contiguous()) for name in order]
    filling.write(tensors[:num_written])
    filling.copy(tensors[num_written : num_written + num_copied])
    digest = filling.finish(tensors[num_written + num_copied :])
    assert digest == xxhash.xxh3_128(file.data).hexdigest()
    return file, Manifest("first", 0, "file", digest, layout.num_bytes, layout.specs, sums=filling.sums)


def begun(manifest: Manifest) -> Arriving:
    return Arriving(np.empty(manifest.num_bytes, np.uint8), expected(manifest, None), manifest)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_file_does_not_know_in_which_order_its_tensors_came_and_when_they_were_hashed(dtype: str | None) -> None:
    file, manifest = published(dtype)
    for number, order in enumerate(itertools.islice(itertools.permutations(TENSORS), 0, None, 11)):
        again, its_manifest = published(dtype, order, number % 4, 6 - number % 7)
        assert its_manifest == manifest and np.array_equal(again, file)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_only_wider_floats_are_cast_and_as_torch_does_it(dtype: str | None) -> None:
    file, manifest = published(dtype)
    arriving = begun(manifest)
    arriving.write(file)
    for name, tensor in arriving.finish().items():
        original = TENSORS[name]
        is_cast = dtype is not None and name in ("wide", "double", "empty", "scalar")
        wanted = original.to(getattr(torch, dtype)) if is_cast and dtype else original
        assert tensor.dtype == wanted.dtype and torch.equal(tensor, wanted)


@pytest.mark.parametrize("sizes", [[1], [63, 64, 65], [4096], [1 << 22]])
def test_pieces_of_any_size_make_the_same_tensors(sizes: list[int]) -> None:
    file, manifest = published("bfloat16")
    small = file[:60_000] if sizes == [1] else file
    arriving, at, turn = begun(manifest), 0, 0
    while at < len(small):
        arriving.write(file[at : at + sizes[turn % len(sizes)]])
        at, turn = at + sizes[turn % len(sizes)], turn + 1
    arriving.write(file[at:])
    assert torch.equal(arriving.finish()["wide"], TENSORS["wide"].bfloat16())


def test_bytes_that_are_missing_or_wrong_are_refused() -> None:
    file, manifest = published(None)
    short = begun(manifest)
    short.write(file[:-1])
    with pytest.raises(WeightSyncError, match="hash"):
        short.finish()
    other = file.copy()
    other[12] ^= 1
    with pytest.raises(WeightSyncError, match="names, shapes and dtypes"):
        begun(manifest).write(other)


@pytest.mark.parametrize("at", [-1, 1 << 20])
def test_a_single_bit_that_is_another_is_refused_on_its_way_and_where_the_file_is(at: int) -> None:
    file, manifest = published(None)
    layout = FileLayout(manifest.tensors)
    assert torch.equal(verified(file, layout, manifest)["wide"], TENSORS["wide"])
    file[at] ^= 1
    with pytest.raises(WeightSyncError, match="hash"):
        verified(file, layout, manifest)
    arriving = begun(manifest)
    arriving.write(file)
    with pytest.raises(WeightSyncError, match="hash"):
        arriving.finish()


def test_a_refused_version_leaves_the_memory_to_the_next() -> None:
    file, manifest = published(None)
    memory, layout = np.empty(manifest.num_bytes, np.uint8), expected(manifest, None)
    other = file.copy()
    other[12] ^= 1
    with pytest.raises(WeightSyncError):
        Arriving(memory, layout, manifest).write(other)
    arriving = Arriving(memory, layout, manifest)
    arriving.write(file)
    first = arriving.finish()
    _, narrow = published("bfloat16")
    with pytest.raises(WeightSyncError, match="other tensors"):
        expected(narrow, layout)
    assert torch.equal(first["wide"], TENSORS["wide"])
