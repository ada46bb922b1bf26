"""Weights that take their time and are not there: the weight sync of a simulated cluster.

consumes: versions to publish; manifests to fetch
waits for: the clock
is unblocked by: its timers

What can go wrong with real ones is kept: a version is there until the `keep`th one after it begins to be published, and fetching
another one fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asyncflow.types import WeightSource
from asyncflow.weight_sync.base import Manifest, WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class SleepingWeightSync:
    """`WeightSync` of one process. `fails(worker)` and `hangs(worker)` are asked at every fetch: whether it is in vain, and for
    how many seconds it hangs before it is in vain (0: it does not hang)."""

    keep: int
    num_bytes: int
    publish_seconds: float
    fetch_seconds: float
    fails: Callable[[str], bool] = lambda worker: False
    hangs: Callable[[str], float] = lambda worker: 0.0
    kept: list[tuple[str, int]] = field(default_factory=list)  # (incarnation, version), oldest first

    def sender(self, incarnation: str) -> SleepingSender:
        """See `WeightSync`. What the sender of an earlier attempt has published is gone with it."""
        self.kept.clear()
        return SleepingSender(self, incarnation)

    def receiver(self, name: str) -> SleepingReceiver:
        """See `WeightSync`."""
        return SleepingReceiver(self, name)


class SleepingSender:
    """Implements `WeightSender`: sleeps as long as its bytes would take."""

    def __init__(self, sync: SleepingWeightSync, incarnation: str) -> None:
        self._sync, self._incarnation = sync, incarnation
        self._retained: frozenset[int] = frozenset()

    def retain(self, versions: Collection[int]) -> None:
        """See `WeightSender`."""
        self._retained = frozenset(versions)

    async def publish(self, version: int, source: WeightSource) -> Manifest:
        """See `WeightSender`."""
        sync = self._sync
        older = sync.kept[: max(0, len(sync.kept) + 1 - sync.keep)]  # the oldest one is written over
        sync.kept = [each for each in sync.kept if each not in older or each[1] in self._retained]
        async for _ in source.tensors():
            pass
        await asyncio.sleep(sync.publish_seconds)
        sync.kept.append((self._incarnation, version))
        return Manifest(self._incarnation, version, "", "", sync.num_bytes, {})

    async def close(self) -> None:
        """See `WeightSender`."""


class SleepingReceiver:
    """Implements `WeightReceiver`: sleeps as long as its bytes would take."""

    def __init__(self, sync: SleepingWeightSync, name: str) -> None:
        self._sync, self._name = sync, name

    async def fetch(self, manifest: Manifest) -> Mapping[str, Tensor]:
        """See `WeightReceiver`."""
        if seconds := self._sync.hangs(self._name):
            await asyncio.sleep(seconds)
            raise WeightSyncError(f"version {manifest.version} did not come: no answer within {seconds:g} s")
        await asyncio.sleep(self._sync.fetch_seconds)
        if (manifest.incarnation, manifest.version) not in self._sync.kept:
            raise WeightSyncError(f"version {manifest.version} is no longer kept")
        if self._sync.fails(self._name):
            raise WeightSyncError(f"version {manifest.version} did not arrive whole")
        return {}

    async def release(self) -> None:
        """See `WeightReceiver`."""

    async def close(self) -> None:
        """See `WeightReceiver`."""
