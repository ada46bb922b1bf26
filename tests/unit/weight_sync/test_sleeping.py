"""The weight sync of a simulated cluster: it takes its time, and what is not kept cannot be had."""

from __future__ import annotations

import asyncio

import pytest

from asyncflow.cluster.clock import VirtualLoop
from asyncflow.types import HeldWeights
from asyncflow.weight_sync.base import WeightSyncError
from asyncflow.weight_sync.sleeping import SleepingWeightSync


def test_the_last_versions_are_kept_and_a_slow_reader_loses_the_race() -> None:
    loop = VirtualLoop()

    async def main() -> None:
        sync = SleepingWeightSync(keep=2, num_bytes=5, publish_seconds=1.0, fetch_seconds=10.0, fails=lambda name: name == "b")
        sender, receiver = sync.sender("first"), sync.receiver("a")
        manifests = [await sender.publish(version, HeldWeights({})) for version in (1, 2, 3)]
        assert [(m.version, m.num_bytes) for m in manifests] == [(1, 5), (2, 5), (3, 5)]
        assert loop.time() == 3.0
        with pytest.raises(WeightSyncError, match="version 1 is no longer kept"):
            await receiver.fetch(manifests[0])
        fetched = await receiver.fetch(manifests[1])
        assert (fetched, loop.time()) == ({}, 23.0)
        late = asyncio.create_task(receiver.fetch(manifests[1]))
        await asyncio.sleep(9.5)
        await sender.publish(4, HeldWeights({}))  # its file is written over while it is read
        with pytest.raises(WeightSyncError, match="version 2 is no longer kept"):
            await late
        with pytest.raises(WeightSyncError, match="version 4 did not arrive whole"):
            await sync.receiver("b").fetch(await sender.publish(4, HeldWeights({})))

    loop.run_until_complete(main())
    loop.finish()


def test_a_fetch_that_hangs_is_in_vain_after_a_while() -> None:
    loop, hangs = VirtualLoop(), iter((60.0, 0.0))

    async def main() -> None:
        sync = SleepingWeightSync(keep=2, num_bytes=5, publish_seconds=0.0, fetch_seconds=1.0, hangs=lambda name: next(hangs))
        manifest = await sync.sender("first").publish(1, HeldWeights({}))
        with pytest.raises(WeightSyncError, match="version 1 did not come: no answer within 60 s"):
            await sync.receiver("a").fetch(manifest)
        assert loop.time() == 60.0
        await sync.receiver("a").fetch(manifest)
        assert loop.time() == 61.0

    loop.run_until_complete(main())
    loop.finish()
