"""The board: versions rise, and are installed when the schedule grants it."""

from __future__ import annotations

import asyncio

import pytest

from asyncflow.transport import client_name
from asyncflow.types import GroupMeta, Interval
from asyncflow.weight_sync.base import Manifest
from asyncflow.workflows.board import Board
from asyncflow.workflows.ledger import Ledger
from asyncflow.workflows.periodic import Periodic
from asyncflow.workflows.signal import Signal


def manifest(version: int) -> Manifest:
    return Manifest("incarnation", version, "nowhere", "hash", 0, {})


def board_of(ledger: Ledger | None = None, signal: Signal | None = None) -> Board:
    return Board(Periodic(), ledger or Ledger(1), signal or Signal())


async def waits(task: asyncio.Task[object]) -> bool:
    for _ in range(3):
        await asyncio.sleep(0)
    return not task.done()


async def test_a_worker_waits_for_a_version_above_its_own() -> None:
    board = board_of()
    behind, level = (asyncio.create_task(board.newer_than(version)) for version in (0, 1))
    assert await waits(behind)
    await board.publish(manifest(1))
    assert await behind == manifest(1)
    assert await waits(level)
    await board.publish(manifest(2))
    assert await level == manifest(2)
    assert await board.newer_than(0) == manifest(2)


@pytest.mark.parametrize("version", [1, 2])
async def test_versions_only_rise(version: int) -> None:
    board = board_of()
    await board.publish(manifest(2))
    with pytest.raises(ValueError, match=f"version {version} was published after version 2"):
        await board.publish(manifest(version))
    assert board.published == manifest(2)


async def test_an_installation_waits_for_the_responses_that_only_older_versions_may_make() -> None:
    ledger, signal = Ledger(1), Signal()
    board = board_of(ledger, signal)
    ledger.open([GroupMeta(0, 2, 0, Interval(0, 0)), GroupMeta(1, 2, 1, Interval(1, 1))])
    granted = asyncio.create_task(board.may_install(1))
    ledger.generated([0])
    signal.notify()
    assert await waits(granted)
    ledger.generated([1])
    signal.notify()
    assert await granted is True


async def test_what_is_installed_is_kept_by_worker_and_told() -> None:
    board, told = board_of(), list[int]()
    board.on_installed = told.append
    for name, version in (("rollout/0", 0), ("rollout/1", 0), ("rollout/0", 1)):
        client_name.set(name)
        await board.installed(version)
    assert board.versions == {"rollout/0": 1, "rollout/1": 0} and told == [0, 0, 1]


async def test_stopping_answers_everybody_who_waits() -> None:
    ledger = Ledger(1)
    ledger.open([GroupMeta(0, 2, 0, Interval(0, 0))])
    board = board_of(ledger)
    newer, grant = asyncio.create_task(board.newer_than(0)), asyncio.create_task(board.may_install(1))
    assert await waits(newer) and await waits(grant)
    board.stop()
    assert await newer is None and await grant is False
    await board.publish(manifest(1))
    assert await board.newer_than(0) is None
