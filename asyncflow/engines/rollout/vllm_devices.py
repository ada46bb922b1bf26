"""What is known of vLLM's rollout workers before one starts, without vLLM or torch: their devices, and what cannot go together."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from asyncflow.types import UserError


def num_devices(*, instances: int = 1, tensor_parallel: int = 1, addresses: Sequence[str] = (), **_others: object) -> int:
    """Of all its servers together. The arguments are `VllmEngine`'s."""
    return (len(addresses) or instances) * tensor_parallel


def num_own_devices(
    *,
    instances: int = 1,
    tensor_parallel: int = 1,
    addresses: Sequence[str] = (),
    transfer: str = "shared_memory",
    **_others: object,
) -> int:
    """Of the servers that it starts itself; where others have started them, of what sends them weights, if that is on a device."""
    if addresses:
        return int(transfer == "nccl")
    return num_devices(instances=instances, tensor_parallel=tensor_parallel)


def check(
    *,
    num_workers: int,
    cluster: str,
    device: str,
    installs_in_flight: bool,
    addresses: Sequence[str] = (),
    pause_mode: str = "keep",
    **_others: object,
) -> None:
    """That so many workers can have such engines: the first four are the run's, the others `VllmEngine`'s. Raises `UserError`."""
    check_addresses(addresses)
    if addresses and num_workers > 1:
        raise UserError(
            f"rollout.engine.addresses: {num_workers} rollout workers would install their weights in the same servers, each "
            f"under the other's responses; take one worker with all the addresses (asyncflow verify takes two: let it start "
            f"servers of its own)"
        )
    if cluster == "local" and num_workers > 1 and not device.startswith("cpu"):
        raise UserError(
            f"{num_workers} rollout workers of vLLM's under cluster=local would start their servers on the same devices: take one "
            f"worker with rollout.engine.instances={num_workers}, or cluster=ray, which gives each worker devices of its own"
        )
    if installs_in_flight and pause_mode == "wait":
        raise UserError(
            "rollout.engine.pause_mode=wait ends all responses before weights are installed, and this schedule is there to install "
            "them in the middle of responses: take pause_mode=keep, or schedule=delayed"
        )


def check_numbers(instances: int, tensor_parallel: int, devices: Sequence[Sequence[int]] | None) -> None:
    """That they go together. Raises `UserError`."""
    if instances < 1 or tensor_parallel < 1 or (devices is not None and len(devices) != instances):
        raise UserError(
            f"rollout.engine: instances={instances}, tensor_parallel={tensor_parallel} and devices={devices} do not go "
            f"together: both numbers are at least 1, and devices has a list for each instance"
        )


def check_addresses(addresses: Sequence[str]) -> None:
    """That servers are on this machine, and each is named once. Raises `UserError`."""
    for address in addresses:
        if not _is_here(address):
            raise UserError(
                f"rollout.engine.addresses: {address!r} is neither http://127.0.0.1:PORT nor unix:PATH; a server is on its "
                f"worker's machine, for its key travels in the clear and the weights are read from the worker's memory"
            )
    if len({address.rstrip("/") for address in addresses}) < len(addresses):
        raise UserError(f"rollout.engine.addresses names a server twice: {', '.join(addresses)}")


def _is_here(address: str) -> bool:
    if address.startswith("unix:"):
        return len(address) > len("unix:")
    try:
        parts = urlsplit(address)
        if parts.scheme != "http" or parts.port is None or parts.username is not None or parts.path not in ("", "/"):
            return False
        return parts.hostname == "localhost" or ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False
