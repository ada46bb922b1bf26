"""The contract of a weight sync: a sender at the trainer, a receiver at each rollout worker, and the manifest between them.

This file imports no torch: manifests pass through the driver.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from asyncflow.attestation import Probe
from asyncflow.types import RunError, TensorSpec, UserError, WeightSource, crosses

if TYPE_CHECKING:
    from torch import Tensor


@crosses
class WeightSyncError(RunError):
    """Weights could not be published, or what was fetched is not what its manifest says. One sentence."""


class Manifest(msgspec.Struct, frozen=True):
    """Published version: where it is and what it is. (incarnation, version) is unique: a restarted trainer may publish a version
    again.

    `address` is the safetensors file on the trainer's machine, `num_bytes` its size and `hash` its xxh3_128 in hexadecimal;
    `tensors` is keyed by Hugging Face names, with the dtypes that travel. `served_at` is the door of a sender that is asked for
    the bytes (see `transport`); empty where the file itself is read.

    `sums`: of the tensors as engines generate with them (asyncflow/attestation.py); empty where nothing is promised. `base`: None
    where the version is a whole model; where it is an adapter, the sum over the weights that it is for. `probe`: what the trainer
    makes of a short sequence with these weights; None: nobody is to compare that.
    """

    incarnation: str
    version: int
    address: str
    hash: str
    num_bytes: int
    tensors: dict[str, TensorSpec]
    served_at: str = ""
    sums: dict[str, int] = {}
    base: int | None = None
    probe: Probe | None = None


@dataclass(frozen=True, kw_only=True)
class WeightSyncOptions:
    """Options of a weight sync, the same at both ends. Raises `UserError` when `keep` is below 1."""

    directory: Path
    """Private to the run, on every machine of it, best under /dev/shm; its owner removes it when the run ends."""
    keep: int = 2
    """Versions that stay available: as many as a redelivered group may still need (the schedule's largest staleness + 1)."""
    max_retained: int = 0
    """Older versions that the sender may be told to retain: it reserves room for them."""
    dtype: str | None = None
    """Wider floating-point tensors travel as this one (torch's name); None: all travel as they are."""
    deadline_seconds: float = 60.0
    """An end that sends no byte and no answer for so long counts as lost, and is named."""
    num_receivers: int = 1
    """Rollout workers that the run begins with: so many are gathered for the first broadcast."""
    listen: str | None = None
    """Address where the sender listens, `tls:HOST:PORT` (port 0: any). None: where only this machine can reach it."""
    key: Path | None = None
    """The run's key, for an address by TLS: the file that `Credentials.create` writes."""
    attested_dtype: str | None = None
    """Dtype (torch's name) in which receivers sum up what they install, for the sender to promise it; None: it promises nothing."""
    base: int | None = None
    """Sum over the weights that adapters are for, where the sender sends adapters."""
    device: str = "cpu"
    """Device that broadcasts go through, and so by which library: gloo for the CPU, NCCL for CUDA."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise UserError(f"a weight sync must keep at least 1 version, not {self.keep}.")


class WeightSender(Protocol):
    """Publishes the weights of one model."""

    async def publish(self, version: int, source: WeightSource) -> Manifest:
        """Make the weights of `source` available as `version`; they may change once this returns.

        They are written as they come: of tensors that have to be gathered, one at a time is held. It waits for no receiver. The
        last `keep` versions stay available; the oldest of them may go as soon as the next publish begins. Every version has the
        names, shapes and dtypes of the first. Raises `WeightSyncError` if not, or when what comes is not what the
        source's specs say, or there is no room; earlier versions stay as they are, but for the oldest, which may have gone.
        """
        ...

    def retain(self, versions: Collection[int]) -> None:
        """Keep these of the versions that are available now (`max_retained` at most), until the next call names others: called
        before each `publish`, with what `PolicyVersions` needs still."""
        ...

    async def close(self) -> None:
        """Serve nobody any more and stop the thread. The files stay until the owner of the directory removes it."""
        ...


class WeightReceiver(Protocol):
    """Fetches versions one at a time."""

    async def fetch(self, manifest: Manifest) -> Mapping[str, Tensor]:
        """The tensors of `manifest` on the CPU, whole and verified, valid until `release`, or until the next `fetch` begins.

        Runs in the receiver's own thread, and may be repeated whatever has happened. Raises `WeightSyncError` when the version is
        no longer kept, when the end that has it does not answer in time, or when hash, names, shapes or dtypes are not the
        manifest's or not those of the first fetch.
        """
        ...

    async def release(self) -> None:
        """Free the version that was fetched last, as it is installed: the sender may write there."""
        ...

    async def close(self) -> None:
        """`release`, hang up and stop the receiver's thread."""
        ...


class WeightSyncFacts(NamedTuple):
    """Facts of a weight sync that a run needs before anything starts."""

    has_door: bool = False
    """Whether the sender listens, where `options.listen` says: receivers may be on other machines then."""
    needs_key: bool = False
    """Whether both ends need the run's key (`options.key`) in any case, and not only with `options.listen`."""
    is_broadcast: bool = False
    """Whether a version goes to all receivers at once: none may leave versions out, as evaluators do."""


class WeightSync(Protocol):
    """Built with `options: WeightSyncOptions`, and with `weight_sync.options` as keyword arguments.

    One that is not built in says its facts as `facts`, an attribute of the class; without it they are those of `WeightSyncFacts()`.
    The driver imports it to ask for them, so torch is best imported in the functions that need it.
    """

    def sender(self, incarnation: str) -> WeightSender:
        """The trainer's end. `incarnation` is unique to this start of the trainer."""
        ...

    def receiver(self, name: str) -> WeightReceiver:
        """A rollout worker's end; `name` is the worker's, no other's."""
        ...
