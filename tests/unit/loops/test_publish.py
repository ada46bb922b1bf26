"""Weights are gathered from everybody who has a part of them, and sent by one."""

from __future__ import annotations

from typing import cast

import torch

from asyncflow.control.policy_versions import PolicyVersions
from asyncflow.loops.algorithm1 import publish
from asyncflow.weight_sync.base import Manifest
from asyncflow.weight_sync.sleeping import SleepingWeightSync
from tests.contract.weight_sources import Gathered


class Noted:
    """In place of policy versions."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def retained(self) -> list[int]:
        return [version for version in self.versions if version % 2 == 0]

    async def publish(self, manifest: Manifest) -> None:
        self.versions.append(manifest.version)


async def test_one_sends_and_the_others_help_to_gather_every_tensor() -> None:
    sync = SleepingWeightSync(keep=1, num_bytes=1, publish_seconds=0.0, fetch_seconds=0.0)
    for sender, published in ((sync.sender("first"), [3]), (None, [])):
        source, versions = Gathered({"a": torch.ones(2), "b": torch.ones(3)}), Noted()
        await publish(3, source, sender, cast(PolicyVersions, versions))
        assert (source.num_made, source.num_alive, versions.versions) == (2, 0, published)


async def test_what_is_not_needed_any_more_goes_with_the_next_publication() -> None:
    """It is asked before one is written over, and not at the publication before."""
    sync, versions = SleepingWeightSync(keep=1, num_bytes=1, publish_seconds=0.0, fetch_seconds=0.0), Noted()
    sender = sync.sender("first")
    for version in (2, 3):
        await publish(version, Gathered({"a": torch.ones(2)}), sender, cast(PolicyVersions, versions))
    assert [version for _, version in sync.kept] == [2, 3]
    versions.versions.clear()
    await publish(4, Gathered({"a": torch.ones(2)}), sender, cast(PolicyVersions, versions))
    assert [version for _, version in sync.kept] == [4]


async def test_what_policy_versions_want_to_stay_stays_with_the_sender() -> None:
    sync, versions = SleepingWeightSync(keep=1, num_bytes=1, publish_seconds=0.0, fetch_seconds=0.0), Noted()
    sender = sync.sender("first")
    for version in range(1, 6):
        await publish(version, Gathered({"a": torch.ones(2)}), sender, cast(PolicyVersions, versions))
    assert [version for _, version in sync.kept] == [2, 4, 5]
