"""Weights are gathered from everybody who has a part of them, and sent by one."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast
from unittest.mock import AsyncMock

import pytest
import torch

from asyncflow.control.policy_versions import PolicyVersions
from asyncflow.loops.algorithm1 import publish
from asyncflow.weight_sync.base import Manifest, NoRoom, WeightSender
from asyncflow.weight_sync.sleeping import SleepingWeightSync
from tests.contract.weight_sources import Gathered


class Noted:
    """In place of policy versions."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def publish(self, manifest: Manifest) -> list[int]:
        self.versions.append(manifest.version)
        return [version for version in self.versions if version % 2 == 0]


async def test_one_sends_and_the_others_help_to_gather_every_tensor() -> None:
    sync = SleepingWeightSync(keep=1, num_bytes=1, publish_seconds=0.0, fetch_seconds=0.0)
    for sender, published in ((sync.sender("first"), [3]), (None, [])):
        source, versions = Gathered({"a": torch.ones(2), "b": torch.ones(3)}), Noted()
        await publish(3, source, sender, cast(PolicyVersions, versions))
        assert (source.num_made, source.num_alive, versions.versions) == (2, 0, published)


async def test_what_the_board_wants_to_stay_stays_with_the_sender() -> None:
    sync, versions = SleepingWeightSync(keep=1, num_bytes=1, publish_seconds=0.0, fetch_seconds=0.0), Noted()
    sender = sync.sender("first")
    for version in range(1, 6):
        await publish(version, Gathered({"a": torch.ones(2)}), sender, cast(PolicyVersions, versions))
    assert [version for _, version in sync.kept] == [2, 4, 5]


class Full:
    """In place of a sender: it has room for the last version, and so many that are retained."""

    def __init__(self, room: int, retained: set[int]) -> None:
        self.room, self.retained = room, retained

    async def publish(self, version: int, source: Gathered) -> Manifest:
        if len(self.retained) > self.room:
            raise NoRoom("no room")
        async for _ in source.tensors():
            pass
        return Manifest("first", version, "", "", 1, {})

    def retain(self, versions: Collection[int]) -> None:
        self.retained = set(versions)


async def test_what_may_go_makes_room_and_the_weights_are_gathered_once() -> None:
    for room in (2, 1, 0):
        source, sender, versions = Gathered({"a": torch.ones(2)}), Full(room, {2, 4, 6}), Noted()
        gone: list[list[int] | None] = [[2, 4], [2], None]
        versions.no_room = AsyncMock(side_effect=gone)  # type: ignore[attr-defined]
        if not room:
            with pytest.raises(NoRoom):
                await publish(8, source, cast(WeightSender, sender), cast(PolicyVersions, versions))
            assert (source.num_made, versions.versions) == (0, [])
            continue
        await publish(8, source, cast(WeightSender, sender), cast(PolicyVersions, versions))
        assert (source.num_made, versions.versions, sender.retained) == (1, [8], {8})
