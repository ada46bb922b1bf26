"""How many devices a rollout worker of vLLM's has: known before it starts, without vLLM or torch."""

from __future__ import annotations

from collections.abc import Sequence


def num_devices(*, instances: int = 1, tensor_parallel: int = 1, addresses: Sequence[str] = (), **_others: object) -> int:
    """Of all its servers together. The arguments are `VllmEngine`'s."""
    return (len(addresses) or instances) * tensor_parallel
