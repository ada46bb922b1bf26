"""Weights that are copied from a device: what is on its way, what is used, and what may be written over. No device takes part."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncflow.engines.train.device_weights import DeviceWeights
from asyncflow.types import HeldWeights, TensorSpec
from asyncflow.weight_sync.base import WeightSyncOptions
from asyncflow.weight_sync.shared_memory import SharedMemorySender
from asyncflow.weight_sync.staging import wire_specs


class Fake:
    """`Copies` that are there as soon as they may be, or, if they are `late`, when they have been waited for."""

    def __init__(self, is_late: bool) -> None:
        self._is_late = is_late
        self.memories: list[Tensor] = []
        self.num_begun, self.waited_in = 0, list[int]()

    def memory(self, num_bytes: int) -> Tensor:
        self.memories.append(torch.full((num_bytes,), 255, dtype=torch.uint8))
        return self.memories[-1]

    def begin(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        self.num_begun += 1
        if not self._is_late:
            target.copy_(source)

        def wait() -> None:
            self.waited_in.append(threading.get_ident())
            if self._is_late:
                target.copy_(source)

        return wait


def weights(count: int) -> dict[str, Tensor]:
    """Of several shapes and dtypes."""
    kinds = [((3, 5), torch.float32), ((), torch.float32), ((7,), torch.bfloat16), ((2, 2, 2), torch.int64)]
    chosen = [(f"w{n}", *kinds[n % 4], n) for n in reversed(range(count))]
    return {name: torch.full(shape, n, dtype=dtype) for name, shape, dtype, n in chosen}


@pytest.mark.parametrize("is_late", [True, False])
async def test_each_tensor_is_whole_when_it_comes_and_while_it_is_used_and_the_next_one_is_on_its_way(
    is_late: bool,
) -> None:
    for count in (1, 2, 3, 9):
        tensors, copies, names = weights(count), Fake(is_late), list[str]()
        source = DeviceWeights(tensors, copies)
        async for name, copy in source.tensors():
            names.append(name)
            assert copies.num_begun == min(count, len(names) + 1)
            assert copy.equal(tensors[name]) and copy.dtype == tensors[name].dtype and copy.is_contiguous()
            assert (source.specs[name].shape, len(copies.memories)) == (tuple(copy.shape), 2)
        assert names == list(source.specs) == sorted(tensors)
        assert len(copies.waited_in) == count and threading.get_ident() not in copies.waited_in
        await source.gathered()


async def test_they_come_in_the_dtypes_that_were_asked_for_and_take_no_more_memory_than_those() -> None:
    tensors, copies = weights(9), Fake(is_late=True)
    whole = DeviceWeights(tensors, copies)
    source = whole.cast(wire_specs(whole.specs, "bfloat16"))
    found = {name: copy.clone() async for name, copy in source.tensors()}
    assert {str(copy.dtype) for copy in found.values()} == {"torch.bfloat16", "torch.int64"}
    assert all(copy.equal(tensors[name].to(copy.dtype)) for name, copy in found.items()) and len(found) == 9
    assert {spec.dtype for spec in source.specs.values()} == {"bfloat16", "int64"}
    assert [len(memory) for memory in copies.memories] == [64, 64]


async def test_a_version_is_published_with_what_was_cast_on_the_device(tmp_path: Path) -> None:
    """Its file is that of weights which the host casts."""
    tensors = {f"w{n}": torch.randn(300, 7) for n in range(3)}

    class Source(HeldWeights):
        were_cast = False

        def cast(self, specs: Mapping[str, TensorSpec]) -> HeldWeights:
            self.were_cast = True
            return HeldWeights({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})

    digests, sums = [], []
    for number, source in enumerate((Source(tensors), HeldWeights(tensors))):
        options = WeightSyncOptions(directory=tmp_path / str(number), dtype="bfloat16", attested_dtype="bfloat16")
        sender = SharedMemorySender(options, "one")
        manifest = await sender.publish(1, source)
        digests.append(manifest.hash)
        sums.append(manifest.sums)
        await sender.close()
        assert isinstance(source, Source) is getattr(source, "were_cast", False)
    assert len({*digests}) == 1 and sums[0] == sums[1]
