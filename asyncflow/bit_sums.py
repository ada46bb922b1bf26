"""Sums of tensors' bits, which do not know the order of elements: see attestation.py, which needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from asyncflow.attestation import MODULUS

_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_of_bits(tensor: Tensor) -> int:
    """Sum of the bits of a tensor's elements as integers, modulo 2^64 (0 to 2^64 - 1)."""
    words = tensor.detach().reshape(-1).view(_WORDS[tensor.element_size()])
    if words.device.type == "cpu":  # numpy adds up eight times as many a second
        return int(np.add.reduce(words.numpy(), dtype=np.int64)) % MODULUS
    return int(words.sum(dtype=torch.int64)) % MODULUS


def sum_over(tensors: Iterable[Tensor], dtype: torch.dtype) -> int:
    """Sum over several tensors, each cast to `dtype` if it is a floating-point one."""
    return sum(sum_of_bits(t.to(dtype) if t.is_floating_point() else t) for t in tensors) % MODULUS
