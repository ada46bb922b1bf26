"""Sums of tensors' bits, as AsyncFlow's side has them (`asyncflow/bit_sums.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def normal(tensor: Tensor) -> Tensor:
    """The tensor, with 0 for -0 and for numbers so small that a product with 1 may lose them (`vllm/promised.py` does the same)."""
    return torch.where(tensor.abs() < torch.finfo(tensor.dtype).tiny, torch.zeros_like(tensor), tensor)


def is_exact(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether this dtype holds what the tensor has."""
    return tensor.dtype == dtype or torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def sum_of_bits(tensor: Tensor, dtype: Any = np.int32) -> int:
    """Sum of the bits of a tensor's elements as integers, of 64 bits as two of 32, modulo 2^32, or with int64 2^64
    (`asyncflow/bit_sums.py`)."""
    words = tensor.detach().reshape(-1).view(WORDS[tensor.element_size()])
    if words.device.type == "cpu":  # numpy adds up eight times as many a second
        return int(np.add.reduce(words.numpy(), dtype=dtype)) % (1 << 8 * np.dtype(dtype).itemsize)
    return int(sum_in_pieces(words)) % (1 << 8 * np.dtype(dtype).itemsize)


def sum_in_pieces(words: Tensor, size: int = 1 << 24) -> Tensor:
    """Sum of integers, modulo 2^64: torch makes a copy of what it sums up, with eight bytes for each."""
    return torch.stack([piece.sum(dtype=torch.int64) for piece in torch.split(words, size)]).sum()
