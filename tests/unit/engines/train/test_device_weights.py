"""Weights that are copied from a device: what is on its way, what is used, and what may be written over. No device takes part."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from asyncflow.engines.train.device_weights import DeviceWeights


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
