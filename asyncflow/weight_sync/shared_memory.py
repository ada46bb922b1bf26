"""Weights through files that live in memory: for a trainer and rollout workers on one machine.

consumes: versions to publish; manifests to fetch
waits for: its own thread, nobody else
is unblocked by: a copy that ends

A worker has no copy of its own: it verifies the file where it is, holds it, and installs from there.

Left out: other machines, and weights on a device (they are installed from host memory).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from torch import Tensor

from asyncflow.threads import ComputeThread
from asyncflow.types import Array, TensorSpec, WeightSource
from asyncflow.weight_sync.base import Manifest, WeightSyncError, WeightSyncOptions
from asyncflow.weight_sync.files import FileReader, VersionFiles
from asyncflow.weight_sync.layout import FileLayout
from asyncflow.weight_sync.staging import Filling, expected, verified, wire_specs


class SharedMemory:
    """Weight sync by shared memory, both ends: see the module's head."""

    def __init__(self, options: WeightSyncOptions) -> None:
        self._options = options

    def sender(self, incarnation: str) -> SharedMemorySender:
        """The trainer's end; makes the directory (mode 0700) and clears it of an earlier sender's files."""
        return SharedMemorySender(self._options, incarnation)

    def receiver(self, name: str) -> SharedMemoryReceiver:
        """A rollout worker's end: the manifests say where the files are."""
        return SharedMemoryReceiver()


class SharedMemorySender:
    """Implements `WeightSender`."""

    def __init__(self, options: WeightSyncOptions, incarnation: str) -> None:
        """Raises `UserError` when the directory is not this user's alone."""
        self.incarnation = incarnation
        self._files = VersionFiles(options.directory, options.keep, options.deadline_seconds, options.max_retained)
        self._dtype, self._attested_dtype, self._base = options.dtype, options.attested_dtype, options.base
        self._layout: FileLayout | None = None
        self._one_by_one = asyncio.Lock()
        self._thread = ComputeThread("weight-sender")

    async def publish(self, version: int, source: WeightSource) -> Manifest:
        """See `WeightSender.publish`."""
        async with self._one_by_one:
            filling = await self._thread.run(self._begin, version, source.specs)
            arrived: list[tuple[str, Tensor]] = []
            async for named in source.tensors():
                arrived.append(named)
                del named  # the thread is to hold the last reference
                if source.are_gathered:
                    await self._thread.run(filling.copy, arrived)  # its ranks are held meanwhile, and not by the hash
                elif not source.are_lasting:
                    await self._thread.run(filling.write, arrived)
            digest = await self._thread.run(filling.finish, arrived)  # lasting ones in one call: one for each would cost time
            path = await self._thread.run(self._files.commit, version)
        layout = filling.layout
        return Manifest(
            self.incarnation, version, str(path), digest, layout.num_bytes, layout.specs, sums=filling.sums, base=self._base
        )

    def retain(self, versions: Collection[int]) -> None:
        """See `WeightSender.retain`."""
        self._files.retained = frozenset(versions)

    def file(self, incarnation: str, version: int) -> Array:
        """The bytes of a version that is retained: uint8 [num_bytes]. Raises `WeightSyncError` for any other."""
        file = self._files.get(version)
        if file is None or incarnation != self.incarnation:
            raise WeightSyncError(f"version {version} of sender {incarnation} is no longer kept")
        return file

    async def close(self) -> None:
        """See `WeightSender.close`."""
        await self._thread.run(self._files.close)
        self._thread.close()

    def _begin(self, version: int, source: Mapping[str, TensorSpec]) -> Filling:
        specs = wire_specs(source, self._dtype)
        if self._layout is None:
            self._layout = FileLayout(specs)
        elif specs != self._layout.specs:
            raise WeightSyncError(f"version {version} has other tensors than those published before it")
        return Filling(self._files.begin(version, self._layout.num_bytes), self._layout, source, self._attested_dtype)


class SharedMemoryReceiver:
    """Implements `WeightReceiver`."""

    def __init__(self) -> None:
        self._files = FileReader()
        self._layout: FileLayout | None = None
        self._thread = ComputeThread("weight-receiver")

    async def fetch(self, manifest: Manifest) -> Mapping[str, Tensor]:
        """See `WeightReceiver.fetch`."""
        return await self._thread.run(self._fetch, manifest)

    async def release(self) -> None:
        """See `WeightReceiver.release`."""
        await self._thread.run(self._files.release)

    async def close(self) -> None:
        """See `WeightReceiver.close`."""
        await self._thread.run(self._files.forget)
        self._thread.close()

    def _fetch(self, manifest: Manifest) -> Mapping[str, Tensor]:
        self._files.release()
        layout = expected(manifest, self._layout)
        try:
            tensors = verified(self._files.hold(manifest), layout, manifest)
        except WeightSyncError:
            self._files.forget()
            raise
        self._layout = layout
        return tensors
