"""The contract of a weight sync: a sender at the trainer, a receiver at each rollout worker, and the manifest between them.

This file imports no torch: manifests pass through the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from asyncflow.types import RunError

if TYPE_CHECKING:
    from torch import Tensor


class WeightSyncError(RunError):
    """Weights could not be published, or what was fetched is not what its manifest says. One sentence."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """`dtype` is torch's name for it without `torch.`, such as `bfloat16`."""

    shape: tuple[int, ...]
    dtype: str


class Manifest(msgspec.Struct, frozen=True):
    """What was published. (incarnation, version) is unique: a restarted trainer may publish a version again.

    `address` is where the bytes lie, in the implementation's own terms; `num_bytes` is all of them and `hash` their
    xxh3_128 in hexadecimal; `tensors` is keyed by Hugging Face names.
    """

    incarnation: str
    version: int
    address: str
    hash: str
    num_bytes: int
    tensors: dict[str, TensorSpec]


class WeightSender(Protocol):
    """Publishes the weights of one model."""

    async def publish(self, version: int, tensors: Mapping[str, Tensor]) -> Manifest:
        """Make `tensors` (Hugging Face names, CPU) available as `version`; they may change once this returns.

        The last few versions stay available, as many as the sender was told to keep. Every version has the names, shapes and
        dtypes of the first. Raises `WeightSyncError` if not, or if there is no room; earlier versions stay as they are.
        """
        ...

    async def close(self) -> None:
        """Stop the sender's thread. What was published stays until the owner of the place removes it."""
        ...


class WeightReceiver(Protocol):
    """Fetches versions one at a time into host memory that is allocated once."""

    async def fetch(self, manifest: Manifest) -> Mapping[str, Tensor]:
        """The tensors of `manifest` on the CPU, 64-byte aligned, valid until the next `fetch` begins.

        Runs in the receiver's own thread. Raises `WeightSyncError` when the version is no longer kept, or when hash, names,
        shapes or dtypes are not the manifest's or not those of the first fetch.
        """
        ...

    async def close(self) -> None:
        """Stop the receiver's thread."""
        ...


class WeightSync(Protocol):
    """Built with the same options at both ends."""

    def sender(self, incarnation: str) -> WeightSender:
        """The trainer's end. `incarnation` is unique to this start of the trainer."""
        ...

    def receiver(self) -> WeightReceiver:
        """A rollout worker's end."""
        ...
