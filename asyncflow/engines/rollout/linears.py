"""Linear layers of the decoder, plain and in the order that a CPU's kernels read, and the numbers of rows that they are given.

A row's bits do not depend on the others, given one thread and rows that `padded` makes. Adapters are added behind the product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from asyncflow.engines.rollout.low_rank import AdapterRows, LowRank

MIN_ROWS = 4
PACKED_ROWS = 64  # the number of rows for which oneDNN chooses the order of a packed weight; any number may come


class Linear:
    """`x @ weight.T + bias`. weight [outputs, inputs] is a buffer that installs write."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.lora: dict[int, LowRank] = {}  # by the numbers of adapters

    def __call__(self, x: Tensor, adapted: Sequence[AdapterRows] = ()) -> Tensor:
        """[rows, inputs] -> [rows, outputs]. `rows` should be a number that `padded` makes; `adapted`: those that have adapters."""
        output = F.linear(x, self.weight, self.bias)
        for rows in adapted:
            if (low_rank := self.lora.get(rows.number)) is not None:
                low_rank.add_to(output, x, rows)
        return output


class PackedLinear:
    """Linear layer on an x86 CPU, with the weight in the order that oneDNN's kernels read ("packed"), and in no other.

    MKL reorders a plain weight in every call, which makes it 1.1 times slower at 512 rows, 1.4 at 36 and 2 at 4. Packing costs ten
    times a memcpy, so it can be done ahead of an install (`pack`).
    """

    def __init__(self, names: Sequence[str], dtype: torch.dtype, bias: Tensor | None) -> None:
        """`names`: the checkpoint's tensors that the weight's rows are, in order."""
        self.names, self.bias = names, bias
        self.weight: Tensor | None = None  # before the first install
        self.lora: dict[int, LowRank] = {}
        self._dtype = dtype

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The packed weight of a version that may be installed."""
        pieces = [tensors[name].to(self._dtype) for name in self.names]
        fused = torch.cat(pieces) if len(pieces) > 1 else pieces[0].contiguous()
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(fused, PACKED_ROWS)
        return packed

    def install(self, packed: Tensor) -> None:
        """Copy what `pack` made into the weight, in place."""
        if self.weight is None:
            self.weight = packed
        else:
            self.weight.copy_(packed)

    def unpacked(self) -> Tensor:
        """The weight [outputs, inputs] in plain order, to the bit what was packed."""
        assert self.weight is not None, "`install` first"
        return self.weight.to_dense()

    def bits(self) -> Tensor:
        """The packed memory, in an order of its own, and with zeros where it is filled up: a view [elements]."""
        address, num_bytes = torch.ops.mkldnn.data_ptr(self.weight), torch.ops.mkldnn._nbytes(self.weight)
        return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=self._dtype)

    def __call__(self, x: Tensor, adapted: Sequence[AdapterRows] = ()) -> Tensor:
        """See `Linear`."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        for rows in adapted:
            if (low_rank := self.lora.get(rows.number)) is not None:
                low_rank.add_to(output, x, rows)
        return output


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build and device have oneDNN's packed product for `dtype` (what torch.compile's inference mode uses)."""
    if device.type != "cpu" or not torch._C._has_mkldnn or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


AnyLinear = Linear | PackedLinear


def padded(rows: int) -> int:
    """The rows of a pass over `rows` tokens or prompts: a multiple of `MIN_ROWS` up to 64, then one of 4 between powers of 2.

    oneDNN keeps 0.6 MB of code for every product and number of rows that it has seen, so they must be few.
    """
    step = MIN_ROWS if rows <= 64 else 1 << (rows - 1).bit_length() >> 3
    return rows + -rows % step
