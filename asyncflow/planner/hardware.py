"""Hardware: peak rates, memory and links of a device. `devices/` has a few well-known ones, with their sources.

A device of one's own is a YAML file with the same keys: `asyncflow plan CONFIG --hardware my_device.yaml`.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from asyncflow.settings import Section, checked, read_yaml
from asyncflow.types import UserError

Share = Annotated[float, Field(gt=0, le=1)]
RESOURCES = ("flops", "memory_bytes", "link_bytes", "network_bytes", "host_bytes", "messages", "launches", "passes")
"""Kinds of work: floating-point operations, bytes of the device's memory, bytes over a node's links, between nodes, and to and
from host memory; calls of a collective, one for each hop of its ring; calls of an engine; passes of a micro-batch."""

Rates = dict[str, float]
"""Seconds of one unit of each of `RESOURCES`."""


class Efficiency(Section):
    """Shares of the peak rates that real work reaches. Assumptions, until a profile replaces them."""

    compute: Share
    memory: Share
    links: Share


class Hardware(Section):
    """Device, and the nodes that hold it. All rates are peaks, in one direction."""

    name: str
    memory_gib: PositiveFloat
    """Memory of one device, GiB."""
    peak_tflops: dict[Literal["float32", "bfloat16"], PositiveFloat] = Field(min_length=1)
    """Dense matrix products, 10^12 operations a second, by dtype."""
    memory_gb_per_second: PositiveFloat
    """Bandwidth of one device's memory."""
    link_gb_per_second: PositiveFloat
    """Bandwidth from one device to the others of its node."""
    network_gb_per_second: PositiveFloat
    """Bandwidth from one device to other nodes."""
    host_gb_per_second: PositiveFloat
    """Bandwidth between a device and its host's memory."""
    message_microseconds: PositiveFloat
    """Latency of one hop of a collective."""
    launch_microseconds: PositiveFloat
    """Fixed time of one call, such as a decode step."""
    pass_microseconds: PositiveFloat | None = None
    """Fixed time of one pass of a micro-batch, forward or backward, which starts each kernel by itself where a decode step has them
    as one graph. None: that of a call."""
    per_node: PositiveInt
    """Devices of a node."""
    usable_memory: Share = 0.9
    """Share of the memory that a plan may take: the rest is the backend's own."""
    efficiency: Efficiency
    sources: list[str] = Field(min_length=1)
    """Sources of the peaks."""

    @property
    def usable_bytes(self) -> float:
        """Bytes of a device that a plan may take."""
        return self.usable_memory * self.memory_gib * (1 << 30)

    def rates(self, dtype: str) -> Rates:
        """Seconds of each unit of work in this dtype. Raises `UserError` if the device has no peak for it."""
        peaks = {str(name): peak for name, peak in self.peak_tflops.items()}
        if dtype not in peaks:
            raise UserError(f"hardware {self.name} has no peak_tflops.{dtype}, which the run computes in: add it to its file")
        share = self.efficiency
        return {
            "flops": 1e-12 / (peaks[dtype] * share.compute),
            "memory_bytes": 1e-9 / (self.memory_gb_per_second * share.memory),
            "link_bytes": 1e-9 / (self.link_gb_per_second * share.links),
            "network_bytes": 1e-9 / (self.network_gb_per_second * share.links),
            "host_bytes": 1e-9 / (self.host_gb_per_second * share.links),
            "messages": 1e-6 * self.message_microseconds,
            "launches": 1e-6 * self.launch_microseconds,
            "passes": 1e-6 * (self.pass_microseconds or self.launch_microseconds),
        }


def known() -> list[str]:
    """Names of the devices that come with the package."""
    return sorted(file.name.removesuffix(".yaml") for file in resources.files(__package__).joinpath("devices").iterdir())


def find(name: str) -> Hardware:
    """Hardware of this name, or in the YAML file of this name. Raises `UserError` naming a field that is missing or wrong."""
    path = Path(str(resources.files(__package__).joinpath("devices", f"{name}.yaml"))) if name in known() else Path(name)
    if not path.is_file():
        raise UserError(
            f"hardware {name!r} is neither a file nor one of {', '.join(known())}: write its YAML file, or take one of them"
        )
    tree = read_yaml(path)
    fields = list(Hardware.model_fields)
    if len(strange := [key for key in map(str, tree) if key not in fields]) > len(tree) / 2:
        known_keys, odd = ", ".join(fields[:3]), ", ".join(strange[:3])
        raise UserError(
            f"{path} is no device's file: it has {odd}, and a device has {known_keys} and so on, as the files in "
            f"asyncflow/planner/devices show"
        )
    try:
        return checked(Hardware, tree)
    except UserError as error:
        raise UserError(f"hardware {name}: {error}") from error
