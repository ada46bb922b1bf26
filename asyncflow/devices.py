"""Names of devices: in PyTorch, in clusters that count them, and in the variables that make them visible. Only this file, and what
Megatron-Core is told of its devices, names accelerators.

Code that computes is handed a device, and asks at most whether it is the CPU. What differs between accelerators is looked up
here, by kind, or in `engines/devices.py`, from PyTorch. No torch here: configurations name devices where nothing computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CPU: Final = "cpu"
CUDA: Final = "cuda"
"""A GPU, as PyTorch calls one, an AMD GPU too."""
NPU: Final = "npu"
KINDS: Final = (CPU, CUDA, NPU)
ONE_OF_KINDS: Final = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}"
"""Names of the kinds, for a sentence."""
PATTERN: Final = rf"^({'|'.join(KINDS)})(:\d+)?$"
"""Pattern of a device in a configuration: a kind, perhaps with a number (`cuda:1`)."""
RANGE_PATTERN: Final = rf"^({'|'.join(KINDS)})(:\d+(-\d+)?)?$"
"""Pattern of devices in a configuration: as one device, or of a kind from a number to another one (`cuda:1-3`)."""
COUNTED_AS: Final[Mapping[str, str]] = {CUDA: "GPU", NPU: "NPU"}
"""The names by which clusters count accelerators of a kind."""
SHOWN_BY: Final[Mapping[str, str]] = {CUDA: "CUDA_VISIBLE_DEVICES", NPU: "ASCEND_RT_VISIBLE_DEVICES"}
"""The environment variables that say which accelerators of a kind a process sees."""
VISIBLE: Final = (*SHOWN_BY.values(), "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that limit the visible devices, AMD's further ones included."""


def devices_of(text: str) -> list[str]:
    """Devices that a text of `RANGE_PATTERN` names: `cuda:1` and `cuda:2` for `cuda:1-2`; none if the second number is the less."""
    kind, _, numbers = text.partition(":")
    first, _, last = numbers.partition("-")
    return [f"{kind}:{number}" for number in range(int(first), int(last) + 1)] if last else [text]


def kind_of(device: str) -> str:
    """Kind of a device: `cuda` for `cuda:1`."""
    return device.partition(":")[0]
