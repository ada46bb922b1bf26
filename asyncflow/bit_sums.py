"""Sums of tensors' bits, which do not know the order of elements: see attestation.py, which needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from asyncflow.attestation import ADAPTER_MODULUS, MODULUS, modulus_of

_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # of 64 bits both halves count


def sum_of_bits(tensor: Tensor, modulus: int = MODULUS) -> int:
    """Sum of the bits of a tensor's elements as integers, of 64 bits as two of 32: 0 to `modulus` - 1, which is 2^32 or 2^64."""
    words = tensor.detach().reshape(-1).view(_WORDS[tensor.element_size()])
    if words.device.type != "cpu":
        return int(sum_in_pieces(words)) % modulus
    dtype = np.int64 if modulus == ADAPTER_MODULUS else np.int32
    return int(np.add.reduce(words.numpy(), dtype=dtype)) % modulus  # eight times as many a second as torch


def sum_in_pieces(words: Tensor, size: int = 1 << 24) -> Tensor:
    """Sum of integers, modulo 2^64: torch makes a copy of what it sums up, with eight bytes for each."""
    return torch.stack([piece.sum(dtype=torch.int64) for piece in torch.split(words, size)]).sum()


def sum_of(name: str, tensor: Tensor) -> int:
    """Sum over the tensor of this name."""
    return sum_of_bits(tensor, modulus_of(name))


def sum_over(tensors: Iterable[Tensor], dtype: torch.dtype) -> int:
    """Sum over several tensors, each cast to `dtype` if it is a floating-point one."""
    return sum(sum_of_bits(t.to(dtype) if t.is_floating_point() else t) for t in tensors) % MODULUS
