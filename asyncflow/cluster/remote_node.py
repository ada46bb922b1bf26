"""A machine that is not the driver's, as its workers know it, and the addresses by which machines reach each other.

Its workers reach the driver by the run's TLS door and not by the private socket. The cluster that places them says so in their
environment.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_VARIABLES: Final = ("ASYNCFLOW_NODE_MEMORY", "ASYNCFLOW_NODE_FILES")


@dataclass(frozen=True, slots=True)
class RemoteNode:
    """Folders of a worker on another machine. `memory`: for weights that are fetched, best under /dev/shm; `files`: for the
    model. Both are this user's alone."""

    memory: Path
    files: Path

    def environment(self) -> Mapping[str, str]:
        """Variables by which a worker learns it."""
        return dict(zip(_VARIABLES, (str(self.memory), str(self.files)), strict=True))


def remote_node() -> RemoteNode | None:
    """Facts that this worker was given about its node; None on its driver's machine."""
    memory, files = (os.environ.get(name) for name in _VARIABLES)
    return RemoteNode(Path(memory), Path(files)) if memory and files else None


def own_address(door: str) -> str:
    """The address of this machine by which it reaches the driver's door, `tls:HOST:PORT`: others of the run reach it there, too.

    An IPv6 one is in brackets. Nothing is sent.
    """
    port = door.rpartition(":")[2]
    family, kind, _, _, place = socket.getaddrinfo(host_of(door), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        found = str(probe.getsockname()[0])
    return f"[{found}]" if ":" in found else found


def host_of(address: str) -> str:
    """`10.0.0.1` for `tls:10.0.0.1:7001` or `10.0.0.1:6379`; an IPv6 one without its brackets. Empty where none is named."""
    return address.removeprefix("tls:").rpartition(":")[0].strip("[]")


def is_any(host: str) -> bool:
    """Whether a host stands for all addresses of the machine that listens, and is no address to connect to: `0.0.0.0`, `::`."""
    address = _ip_address(host)
    return not host or (address is not None and address.is_unspecified)


def is_loopback(host: str) -> bool:
    """Whether every machine calls itself so: `127.0.0.1`, `::1`, `localhost`. Names are not looked up."""
    address = _ip_address(host)
    return host == "localhost" or host.endswith(".localhost") or (address is not None and address.is_loopback)


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            return ipaddress.IPv4Address(socket.inet_aton(host))  # 0 is 0.0.0.0, and 127.1 is 127.0.0.1
        except OSError:
            return None
    return getattr(address, "ipv4_mapped", None) or address
