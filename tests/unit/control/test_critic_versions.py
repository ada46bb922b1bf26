"""`CriticVersions`: who waits for which version of the critic, and what ends the waiting."""

from __future__ import annotations

import asyncio

import pytest

from asyncflow.control.critic_versions import CriticVersions
from asyncflow.control.policy_versions import Target
from asyncflow.control.signal import Signal
from asyncflow.weight_sync.base import Manifest
from tests.builders import loop_turns


def manifest(version: int) -> Manifest:
    return Manifest("critic", version, f"/dev/shm/{version}", "", 8, {})


async def test_version_0_is_there_and_a_later_one_when_it_is_published() -> None:
    versions = CriticVersions(Signal())
    assert await versions.reaches(0) == Target(0, None)
    waiting = [asyncio.create_task(versions.reaches(step)) for step in (1, 1, 2)]
    await loop_turns()
    assert not any(task.done() for task in waiting)
    await versions.publish(1, manifest(1))
    await loop_turns()
    assert [task.result() for task in waiting[:2]] == [Target(1, manifest(1))] * 2 and not waiting[2].done()
    await versions.publish(2, None)
    await loop_turns()
    assert waiting[2].result() == Target(2, None)


async def test_who_is_late_gets_the_newest() -> None:
    versions = CriticVersions(Signal())
    await versions.publish(3, manifest(3))
    assert await versions.reaches(1) == Target(3, manifest(3))


async def test_a_resumed_run_has_no_version_until_the_critic_has_read_its_checkpoint() -> None:
    versions = CriticVersions(Signal(), first=5)
    waiting = asyncio.create_task(versions.reaches(0))
    await loop_turns()
    assert not waiting.done()
    await versions.publish(5, manifest(5))
    assert await waiting == Target(5, manifest(5))


async def test_versions_only_rise() -> None:
    versions = CriticVersions(Signal())
    await versions.publish(2, manifest(2))
    for version in (1, 2):
        with pytest.raises(ValueError, match=f"version {version} of the critic was published after version 2"):
            await versions.publish(version, manifest(version))
    assert versions.newest == Target(2, manifest(2))


async def test_the_stop_ends_the_waiting_and_nothing_begins_after_it() -> None:
    versions = CriticVersions(Signal())
    waiting = asyncio.create_task(versions.reaches(1))
    await loop_turns()
    versions.stop()
    await loop_turns()
    assert waiting.result() is None and await versions.reaches(0) is None
