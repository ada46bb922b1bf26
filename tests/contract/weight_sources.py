"""Weights that are gathered: each tensor is made when it is asked for, and gone when the next one is."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from asyncflow.types import TensorSpec


class Gathered:
    """`WeightSource` of copies, one at a time. `num_made` have been made, and `most_alive` were there at once."""

    are_lasting, are_gathered = False, True

    def __init__(self, tensors: Mapping[str, Tensor], order: Sequence[str] = ()) -> None:
        self._tensors = tensors
        self.specs: Mapping[str, TensorSpec] = {name: TensorSpec.of(tensors[name]) for name in order or sorted(tensors)}
        self.num_made = self.most_alive = self.num_alive = 0

    async def tensors(self) -> AsyncIterator[tuple[str, Tensor]]:
        """See `WeightSource.tensors`. What is still held of the last one is overwritten."""
        for name in self.specs:
            memory = np.empty(self._tensors[name].nbytes + 1, np.uint8)
            self.num_made += 1
            self.num_alive += 1
            self.most_alive = max(self.most_alive, self.num_alive)
            last = weakref.ref(memory)
            weakref.finalize(memory, self._gone)
            yield name, filled(memory[:-1], self._tensors[name])
            del memory
            if (held := last()) is not None:
                held.fill(255)
            del held

    async def gathered(self) -> None:
        """See `WeightSource.gathered`: nobody else is to be called."""

    def _gone(self) -> None:
        self.num_alive -= 1


def filled(memory: np.ndarray, tensor: Tensor) -> Tensor:
    """A copy of a tensor in memory, uint8 [nbytes], that lives as long as the copy does."""
    copy = torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    return copy
