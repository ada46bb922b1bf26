"""Rollout workers that join and leave: what is refused, who is started and ended, and what the devices add up to."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from asyncflow.cluster.base import WorkerSpec
from asyncflow.config import parse
from asyncflow.control import SCHEDULES
from asyncflow.control.policy_versions import PolicyVersions
from asyncflow.control.signal import Signal
from asyncflow.control.worker_pool import WorkerPool
from asyncflow.registry import build
from asyncflow.run.services.scaling import Devices, Scaling
from asyncflow.types import RunError, UserError
from tests.builders import loop_turns
from tests.patience import patience


class Cluster:
    """Starts what it can, and ends a worker when the test says so."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.lacks_room_for: set[str] = set()
        self.error: Exception = OSError()
        self.ending: dict[str, asyncio.Future[bool]] = {}
        self.graces: dict[str, float] = {}
        self.may_start = asyncio.Event()
        self.may_start.set()

    async def start(self, workers: Sequence[WorkerSpec]) -> None:
        await self.may_start.wait()
        for spec in workers:
            if spec.name in self.lacks_room_for:
                raise self.error
            self.started.append(spec.name)

    async def end(self, name: str, grace_seconds: float) -> bool:
        assert name in {*self.started, "rollout/0", "rollout/1"}
        self.graces[name] = grace_seconds
        self.ending[name] = asyncio.get_running_loop().create_future()
        return await self.ending[name]


class World:
    def __init__(self, workers: int = 2, **weight_sync: Any) -> None:
        tree = {"model": {"path": "none"}, "data": {"path": "none"}, "rollout": {"num_workers": workers}}
        config = parse({**tree, "train": {"prompts_per_step": 12}, "weight_sync": weight_sync})
        schedule = build("schedule", "periodic", {}, SCHEDULES)
        self.now, self.said, self.cluster, self.background = 0.0, list[str](), Cluster(), list["asyncio.Task[None]"]()
        self.versions = PolicyVersions(schedule, object(), Signal(), lambda: self.now, WorkerPool(workers))  # type: ignore[arg-type]
        self.devices = Devices(workers + 1, lambda: self.now)
        self.scaling = Scaling(
            config,
            self.versions,
            self.cluster,  # type: ignore[arg-type]
            self.devices,
            start=self._start,
            log=self.said.append,
        )
        self.scaling.begin()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self.background.append(asyncio.ensure_future(work))

    async def scale(self, size: int, grace_seconds: float = 5.0) -> str:
        return await self.scaling.scale("rollout", size, grace_seconds)


async def test_joiners_are_started_and_leavers_are_waited_for() -> None:
    world = World()
    assert await world.scale(4) == "rollout workers: from 2 to 4; rollout/2 and rollout/3 join"
    assert world.cluster.started == ["rollout/2", "rollout/3"]
    assert await world.scale(4) == "the run has 4 rollout workers already" and world.devices.mean(1.0, 2.0) == 5
    assert await world.scale(1, 7.5) == "rollout workers: from 4 to 1; rollout/1, rollout/2 and rollout/3 leave, within 7.5 s"
    await loop_turns()
    assert world.cluster.graces == {f"rollout/{i}": 7.5 for i in (1, 2, 3)}
    assert world.versions.workers.leaving == set(world.cluster.ending) and world.devices.mean(1.0, 2.0) == 5
    world.cluster.ending["rollout/1"].set_result(True)
    world.cluster.ending["rollout/2"].set_result(False)
    await loop_turns()
    assert world.versions.workers.leaving == {"rollout/3"} and world.devices.mean(1.0, 2.0) == 3
    assert world.said[-2:] == [
        "worker rollout/1 has left",
        "worker rollout/2 did not end what it held within 7.5 s and was killed: others make it again",
    ]
    assert await world.scale(2) == "rollout workers: from 1 to 2; rollout/1 joins"


@pytest.mark.parametrize(
    ("pool", "size", "grace", "words"),
    [
        ("rollout", 0, 1, "a run needs a rollout worker, so it cannot have 0: to end it, send it SIGINT or SIGTERM"),
        ("rollout", -3, 1, "cannot have -3"),
        ("rollout", 1, 1, "weight_sync.min_healthy_workers=2 is more than rollout=1: take 2 or more"),
        ("rollout", 13, 1, "=13 is more than train.prompts_per_step=12, so 1 of them would have nothing .*: take 12 or fewer"),
        ("rollout", 24, 1, "so 12 of them would have nothing"),
        ("trainer", 3, 1, "only rollout workers may join and leave a run, by rollout=NUMBER: 'trainer' stays"),
        ("", 3, 1, "only rollout workers"),
        ("rollout", 3, -1, "take 0 or more"),
    ],
)
async def test_what_a_run_cannot_have_is_refused(pool: str, size: int, grace: float, words: str) -> None:
    world = World(min_healthy_workers=2)
    with pytest.raises(UserError, match=words):
        await world.scaling.scale(pool, size, grace)
    assert world.versions.workers.members == ["rollout/0", "rollout/1"] and world.said == []


async def test_a_run_that_is_ending_is_left_as_it_is() -> None:
    world = World()
    world.versions.stop()
    with pytest.raises(RunError, match="this run is ending"):
        await world.scale(3)
    assert world.cluster.started == []


async def test_before_the_first_workers_are_started_nobody_joins_or_leaves() -> None:
    world = World()
    world.scaling = Scaling(
        world.scaling._config,
        world.versions,
        world.cluster,  # type: ignore[arg-type]
        world.devices,
        start=world._start,
        log=world.said.append,
    )
    for size in (1, 3):
        with pytest.raises(RunError, match="still starting its workers"):
            await world.scale(size)
    assert world.versions.workers.members == ["rollout/0", "rollout/1"] and not world.cluster.started and not world.background
    world.scaling.begin()
    assert "rollout/2 joins" in await world.scale(3)


async def test_who_waits_for_room_when_the_run_ends_waits_no_longer() -> None:
    world = World()
    world.cluster.may_start.clear()
    asked = [asyncio.ensure_future(world.scale(size)) for size in (3, 4)]
    await loop_turns()
    world.versions.stop()
    await asyncio.wait_for(world.scaling.stop(), patience(5.0))
    for each in asked:
        with pytest.raises(RunError, match="this run is ending"):
            await asyncio.wait_for(each, patience(5.0))
    world.cluster.may_start.set()
    await loop_turns()
    assert world.cluster.started == [] and world.said == []


async def test_whoever_waits_for_all_workers_is_told_of_one_that_never_came() -> None:
    world = World()
    world.versions.published = 1
    for name in world.versions.workers.members:
        world.versions._serving[name] = 1
    world.cluster.may_start.clear()
    world.cluster.lacks_room_for = {"rollout/2"}
    asked = asyncio.ensure_future(world.scale(3))
    await loop_turns()
    served = asyncio.ensure_future(world.versions.all_serve(1))
    await loop_turns()
    assert not served.done()
    world.cluster.may_start.set()
    with pytest.raises(RunError, match="rollout/2 could not be started"):
        await asked
    await asyncio.wait_for(served, patience(1.0))


@pytest.mark.parametrize("size", [5, 12])
async def test_there_may_be_as_many_as_a_step_has_prompts_whether_these_divide_by_them_or_not(size: int) -> None:
    world = World()
    await world.scale(size)
    assert world.cluster.started == [f"rollout/{i}" for i in range(2, size)]


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), UserError("the cluster has no room")])
async def test_who_cannot_be_started_is_not_counted_on(error: Exception) -> None:
    world = World()
    world.cluster.lacks_room_for, world.cluster.error = {"rollout/3"}, error
    with pytest.raises(RunError, match=r"worker rollout/3 could not be started: (Cannot allocate memory|the cluster has no room)$"):
        await world.scale(6)
    assert world.versions.workers.working == ["rollout/0", "rollout/1", "rollout/2"] and world.devices.mean(0.0, 1.0) == 4
    world.cluster.lacks_room_for = set()
    assert "rollout/3 joins" in await world.scale(4)


async def test_one_after_the_other_although_whoever_asked_has_gone() -> None:
    world = World()
    world.cluster.may_start.clear()
    first, second = (asyncio.ensure_future(world.scale(size)) for size in (3, 1))
    await loop_turns()
    first.cancel()
    await loop_turns()
    world.cluster.may_start.set()
    assert "rollout/1 and rollout/2 leave" in await second
    assert world.cluster.started == ["rollout/2"]


@pytest.mark.parametrize(
    ("start", "end", "mean"),
    [(0.0, 4.0, 3), (4.0, 6.0, 4.0), (5.0, 7.0, 5), (4.0, 10.0, 4.0), (0.0, 10.0, 3.6), (7.0, 7.0, 5), (8.0, 20.0, 3)],
)
def test_devices_are_counted_by_the_time_that_they_were_there(start: float, end: float, mean: float) -> None:
    now = 0.0
    devices = Devices(3, lambda: now)
    for now, by in ((5.0, 1), (5.0, 1), (8.0, -2)):  # noqa: B007
        devices.change(by)
    assert devices.mean(start, end) == pytest.approx(mean)
    assert _is_whole(start, end) == isinstance(devices.mean(start, end), int)


def _is_whole(start: float, end: float) -> bool:
    """Nothing changed meanwhile: the very number, whatever the clock shows."""
    return not any(start < moment < end for moment in (5.0, 8.0))
