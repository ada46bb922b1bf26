"""Sums of tensors' bits, which do not know the order of elements: see attestation.py, which needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from asyncflow.attestation import MODULUS
from asyncflow.types import Array

_PIECE: Final = 1 << 16  # so that a sum of as many halves of 32 bits fits into 32 bits
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_of_bits(tensor: Tensor) -> int:
    """Sum of the bits of a tensor's elements as integers, modulo 2^64 (0 to 2^64 - 1)."""
    words = tensor.detach().reshape(-1).view(_WORDS[tensor.element_size()])
    total = _sum_on_cpu(words.numpy()) if words.device.type == "cpu" else int(words.sum(dtype=torch.int64))
    return total % MODULUS


def sum_over(tensors: Iterable[Tensor], dtype: torch.dtype) -> int:
    """Sum over several tensors, each cast to `dtype` if it is a floating-point one."""
    return sum(sum_of_bits(t.to(dtype) if t.is_floating_point() else t) for t in tensors) % MODULUS


def _sum_on_cpu(words: Array) -> int:
    """Sum of integers [n]; modulo 2^64 of those of 64 bits.

    Numpy adds up 32 bits twice as fast as it widens them to 64, so pieces are short enough for that: half of each word's bits, and
    the rest from the sum that has wrapped around.
    """
    if words.itemsize == 8:
        return int(np.add.reduce(words))
    total = 0
    for begin in range(0, len(words), _PIECE):
        piece = words[begin : begin + _PIECE]
        if words.itemsize < 4:
            total += int(np.add.reduce(piece, dtype=np.int32))
        else:
            upper = int(np.add.reduce(piece >> 16, dtype=np.int32)) << 16
            total += upper + (int(np.add.reduce(piece, dtype=np.int32)) - upper) % (1 << 32)
    return total
