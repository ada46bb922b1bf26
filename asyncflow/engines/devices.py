"""Checks that a configured device is there, and facts about it from PyTorch. The names of devices: `asyncflow/devices.py`."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from asyncflow.devices import CPU, CUDA, KINDS, NPU, ONE_OF_KINDS, kind_of
from asyncflow.types import UserError
from asyncflow.user_file import status_of


def check_device(device: str, key: str) -> None:
    """Check that a device (cpu, cuda or npu, perhaps with a number: `cuda:1`) is there.

    Raises `UserError`, which names the configuration's `key`, if it is not.
    """
    kind = kind_of(device)
    if kind not in KINDS:
        raise UserError(f"{key} must be {ONE_OF_KINDS}, perhaps with a number ({CUDA}:1), but is {device!r}.")
    if kind == CUDA and not has_kind(CUDA):
        raise UserError(f"{key} is {device!r}, but PyTorch sees no GPU here: set it to cpu.")
    if kind == NPU and importlib.util.find_spec("torch_npu") is None:
        raise UserError(f"{key} is {device!r}, and torch_npu, which drives NPUs, is not installed: set it to cpu.")
    number = torch.device(device).index
    if kind != CPU and number is not None and number >= (count := torch.get_device_module(kind).device_count()):
        raise UserError(f"{key} is {device!r}, and PyTorch sees {count} of them here: they are numbered from 0.")


def own_device(device: str, local_rank: int, key: str) -> torch.device:
    """Device of one of several ranks on this machine: for `cuda` and `npu`, the one whose number is `local_rank`.

    Also makes it the current device. Raises `UserError`, which names the configuration's `key`, if there is no such device, or if
    `device` has a number, so that all ranks would share one device.
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


def has_kind(kind: str) -> bool:
    """Whether PyTorch can compute on an accelerator of this kind here. NPUs have a driver of their own, which may be missing."""
    is_known = kind != NPU or importlib.util.find_spec("torch_npu") is not None
    return is_known and bool(torch.get_device_module(kind).is_available())


def accelerators() -> list[tuple[str, str]]:
    """Accelerators that PyTorch sees here, as pairs of the device name (`cuda:0`) and the maker's name."""
    drivers = [(kind, torch.get_device_module(kind)) for kind in KINDS if kind != CPU and has_kind(kind)]
    return [(f"{kind}:{i}", driver.get_device_name(i)) for kind, driver in drivers for i in range(driver.device_count())]


def memory_of_accelerator() -> float | None:
    """Bytes of the first accelerator that PyTorch sees here; None: it sees none."""
    found = accelerators()
    return float(torch.get_device_module(kind_of(found[0][0])).get_device_properties(0).total_memory) if found else None


def has_flash_attention(gpu: torch.device) -> bool:
    """Whether PyTorch's flash attention was built in and runs on this GPU; it needs compute capability 8.0."""
    backend, driver = getattr(torch.backends, gpu.type), torch.get_device_module(gpu.type)
    return bool(backend.is_flash_attention_available() and driver.get_device_capability(gpu) >= (8, 0))


def use_device(device: torch.device) -> None:
    """Make a device with a number the calling thread's own: streams, and what records launches, are of that one."""
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)


_RECORDING = threading.Lock()  # of all threads one at a time can


class LaunchRecorder:
    """Records what a thread launches on its own device, to be launched again at once. Recordings are replayed one at a time: they
    share their memory, and what libraries keep for a stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._driver = device, torch.get_device_module(device)
        self._pool, self._stream = self._driver.graph_pool_handle(), self._driver.Stream(device)

    @contextmanager
    def recorded(self) -> Iterator[Any]:
        """A recording, which has `replay`, of the block. Raises `RuntimeError` where something in it cannot be recorded."""
        recording, before = self._driver.CUDAGraph(), torch.accelerator.current_stream(self._device)
        how = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        try:
            with _RECORDING, self._driver.graph(recording, **how):
                yield recording
        finally:
            torch.accelerator.set_stream(before)  # a recording that has failed leaves its own behind


def recorder_of(device: torch.device) -> LaunchRecorder | None:
    """Recorder for a device; None where nothing is recorded: on NPUs it was never tried."""
    return LaunchRecorder(device) if device.type == CUDA else None


def main() -> None:
    """`python -m asyncflow.engines.devices KEY=DEVICE=COUNT ...`: exit 2, with a sentence, for devices that are not here."""
    for asked in sys.argv[1:]:
        key, device, count = asked.split("=")
        try:
            check_device(device, key)
        except UserError as error:
            print(error, file=sys.stderr)
            sys.exit(status_of(error))
        there, number = torch.get_device_module(kind_of(device)).device_count(), torch.device(device).index
        if (number or 0) + (int(count) if number is None else 1) > there:
            wanted = f"{count} of them are wanted" if number is None else "that number is not among them"
            print(f"{key} is {device!r}, and PyTorch sees {there} here: {wanted}", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main()
