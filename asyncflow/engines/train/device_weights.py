"""Weights on an accelerator, copied to the host beside the computation that reads them.

    compute stream  ... update |- forward and backward passes of the next step ------| update
    copy stream                |- w0 -|- w1 -|     |- w2 -| ...
    consumer                          |- w0 ------|- w1 -| ...     from pinned host memory

The weights do not change until the last one has been copied. Two tensors are in host memory at a time: the one that is used, and
the next one, which is being copied.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from itertools import cycle, pairwise

import torch
from torch import Tensor

from asyncflow.devices import CPU
from asyncflow.types import TensorSpec, WeightSource


def pinned(num_bytes: int) -> Tensor:
    """Pinned host memory: uint8 [num_bytes]."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class HostCopies:
    """Copies on the host of weights that have been gathered, one after another: two at a time lie in pinned memory."""

    def __init__(self, specs: Mapping[str, TensorSpec], memory: Callable[[int], Tensor] = pinned) -> None:
        """`specs`: of all weights, which are float32."""
        self._num_bytes = max(4 * math.prod(spec.shape) for spec in specs.values())
        self._memory = memory
        self._buffers: Iterator[Tensor] | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """A tensor on the CPU as it is, contiguous; of one on a device a copy, which lasts until the one after the next."""
        if tensor.device.type == CPU:
            return tensor.contiguous()
        if self._buffers is None:
            self._buffers = cycle([self._memory(self._num_bytes), self._memory(self._num_bytes)])
        return next(self._buffers)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


class CopyStream:
    """Copies of tensors to the host, on a separate stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        """Make the stream. Its copies wait for all work that is on the calling thread's stream at this moment."""
        self._stream = torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream(device))

    def memory(self, num_bytes: int) -> Tensor:
        """Pinned host memory to copy to: uint8 [num_bytes]."""
        return pinned(num_bytes)

    def begin(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Begin to copy `source` to `target`. Returns a function that waits until the copy is complete."""
        with self._stream:
            target.copy_(source, non_blocking=True)
        return self._stream.record_event().synchronize


class DeviceWeights(WeightSource):
    """`WeightSource` of tensors on an accelerator. The tensors may change after `tensors` has come to its end."""

    are_lasting = are_gathered = False

    def __init__(self, tensors: Mapping[str, Tensor], copies: CopyStream) -> None:
        self._tensors = {name: tensor.detach() for name, tensor in sorted(tensors.items())}
        self.specs: Mapping[str, TensorSpec] = {name: TensorSpec.of(tensor) for name, tensor in self._tensors.items()}
        self._copies = copies

    async def tensors(self) -> AsyncIterator[tuple[str, Tensor]]:
        largest = max(tensor.nbytes for tensor in self._tensors.values())
        used, free = self._copies.memory(largest), self._copies.memory(largest)
        copy, is_there = self._begin(next(iter(self._tensors)), used)
        for name, following in pairwise([*self._tensors, ""]):
            ahead = self._begin(following, free) if following else None
            await asyncio.to_thread(is_there)
            yield name, copy
            if ahead is not None:
                (copy, is_there), used, free = ahead, free, used

    async def gathered(self) -> None:
        """Return at once: nothing is gathered."""

    def _begin(self, name: str, memory: Tensor) -> tuple[Tensor, Callable[[], None]]:
        source = self._tensors[name]
        target = memory[: source.nbytes].view(source.dtype).view(source.shape)
        return target, self._copies.begin(target, source)
