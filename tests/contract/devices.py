"""The devices that the contract suites run on, where they are there; elsewhere their cases are skipped, and say what is missing."""

from __future__ import annotations

import importlib.util
from typing import Any, Final

import numpy as np
import pytest
import torch

BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""By kind of device, what its ranks are to talk by."""
ROUNDING: Final = {"cpu": 0.0, "cuda": 1e-5, "npu": 1e-5}
"""By kind of device, how far numbers may be apart that are the same to the bit where bits are promised: relative, or in nats."""


def missing(device: str, number: int = 1) -> str:
    """What of `number` devices of a kind is not there, for a reason to skip; "" if nothing is."""
    if device == "cpu":
        return ""
    if device == "npu" and importlib.util.find_spec("torch_npu") is None:
        return "needs torch_npu, which is not installed"
    driver, called = torch.get_device_module(device), f"torch.{device}"
    if not driver.is_available():
        return f"needs {'a CUDA device' if device == 'cuda' else 'an NPU'}: {called}.is_available() is false"
    there = driver.device_count()
    return "" if there >= number else f"needs {number} devices of the kind {device}: {called}.device_count() is {there}"


def needed_devices(device: str, number: int = 1) -> None:
    """Skip where they are not there."""
    if why := missing(device, number):
        pytest.skip(why)


def alike(one: Any, other: Any, device: str) -> None:
    """Two numbers, arrays or tensors are the same: to the bit on a CPU, but for rounding elsewhere."""
    np.testing.assert_allclose(one, other, rtol=ROUNDING[device], atol=ROUNDING[device])
