"""Weights are gathered from everybody who has a part of them, and sent by one."""

from __future__ import annotations

from typing import cast

import torch

from asyncflow.weight_sync.base import Manifest
from asyncflow.weight_sync.sleeping import SleepingWeightSync
from asyncflow.workflows.board import Board
from asyncflow.workflows.loop import publish
from tests.contract.weight_sources import Gathered


class Noted:
    """In place of a board."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def publish(self, manifest: Manifest) -> list[int]:
        self.versions.append(manifest.version)
        return [version for version in self.versions if version % 2 == 0]


async def test_one_sends_and_the_others_help_to_gather_every_tensor() -> None:
    sync = SleepingWeightSync(keep=1, num_bytes=1, publish_seconds=0.0, fetch_seconds=0.0)
    for sender, versions in ((sync.sender("first"), [3]), (None, [])):
        source, board = Gathered({"a": torch.ones(2), "b": torch.ones(3)}), Noted()
        await publish(3, source, sender, cast(Board, board))
        assert (source.num_made, source.num_alive, board.versions) == (2, 0, versions)


async def test_what_the_board_wants_to_stay_stays_with_the_sender() -> None:
    sync, board = SleepingWeightSync(keep=1, num_bytes=1, publish_seconds=0.0, fetch_seconds=0.0), Noted()
    sender = sync.sender("first")
    for version in range(1, 6):
        await publish(version, Gathered({"a": torch.ones(2)}), sender, cast(Board, board))
    assert [version for _, version in sync.kept] == [2, 4, 5]
