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

    async def publish(self, manifest: Manifest) -> None:
        self.versions.append(manifest.version)


async def test_one_sends_and_the_others_help_to_gather_every_tensor() -> None:
    sync = SleepingWeightSync(keep=1, num_bytes=1, publish_seconds=0.0, fetch_seconds=0.0)
    for sender, versions in ((sync.sender("first"), [3]), (None, [])):
        source, board = Gathered({"a": torch.ones(2), "b": torch.ones(3)}), Noted()
        await publish(3, source, sender, cast(Board, board))
        assert (source.num_made, source.num_alive, board.versions) == (2, 0, versions)
