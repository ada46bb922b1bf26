"""Whether a device that a configuration names is there."""

from __future__ import annotations

import importlib.util

import torch

from asyncflow.types import UserError


def check_device(device: str, key: str) -> None:
    """Raises `UserError`, naming the configuration's `key`, if a device (cpu, cuda or npu, perhaps `cuda:1`) is not there."""
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda", "npu"):
        raise UserError(f"{key} must be cpu, cuda or npu, perhaps with a number (cuda:1), but is {device!r}.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{key} is {device!r}, but PyTorch sees no GPU here: set it to cpu.")
    if kind == "npu" and importlib.util.find_spec("torch_npu") is None:
        raise UserError(f"{key} is {device!r}, and torch_npu, which drives NPUs, is not installed: set it to cpu.")


def own_device(device: str, local_rank: int, key: str) -> torch.device:
    """The device of one of several ranks on this machine: `cuda` is the one that has its number.

    Raises `UserError`, naming the configuration's `key`, if there is no such device, or `device` names one for all of them.
    """
    check_device(device, key)
    kind = torch.device(device)
    if kind.type == "cpu":
        return kind
    if kind.index is not None:
        raise UserError(f"{key} is {device!r}, one device, and several ranks are to compute: set it to {kind.type}.")
    if local_rank >= (count := torch.accelerator.device_count()):
        raise UserError(f"{key} is {device!r}, and rank {local_rank} of this machine finds {count} of them: plan for so many.")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind.type, local_rank)
