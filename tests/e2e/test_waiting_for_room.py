"""Runs whose cluster has no room for a while: they may be interrupted, do not count as stalled, and nobody joins them yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from asyncflow.cluster.base import BadEnd, Cluster, Settle, WorkerSpec
from asyncflow.cluster.inline import InlineCluster
from asyncflow.config import parse
from asyncflow.run.driver import Driver
from asyncflow.run.job import Job
from asyncflow.telemetry.situation import read_situation
from asyncflow.telemetry.why import sentence
from asyncflow.transport import Server
from asyncflow.types import RunError
from tests.patience import patience

Small = Callable[..., dict[str, Any]]


class FullCluster(InlineCluster):
    """Has room when the test says so."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.has_room, self.is_asked = asyncio.Event(), asyncio.Event()
        self.started: list[str] = []
        self.was_called_back = False
        self.was_stopped = False

    async def start(self, workers: list[WorkerSpec]) -> None:  # type: ignore[override]
        assert not self.was_stopped
        self.is_asked.set()
        try:
            await self.has_room.wait()
        except asyncio.CancelledError:
            self.was_called_back = True
            raise
        self.started += [spec.name for spec in workers]
        await super().start(workers)

    async def stop(self, grace_seconds: float, settle: Settle | None = None, keep: Collection[str] = ()) -> dict[str, BadEnd]:
        self.was_stopped = True
        return await super().stop(grace_seconds, settle, keep)


class WaitingJob(Job):
    def _place(self, driver: Driver, weights_dir: Path) -> tuple[Server, Cluster]:
        server, _ = super()._place(driver, weights_dir)
        self.full = FullCluster(self.config.run_dir)
        return server, self.full


async def waiting(small: Small, **run: Any) -> tuple[WaitingJob, asyncio.Task[bool]]:
    """A run that waits for room."""
    job = WaitingJob(parse(small(run={"stop_grace_seconds": 5, **run}, cluster="inline")))
    running = asyncio.create_task(job.run())
    async with asyncio.timeout(patience(60.0)):
        while not hasattr(job, "full") or not job.full.is_asked.is_set():
            assert not running.done(), running.result()
            await asyncio.sleep(0.02)
    return job, running


async def test_a_run_that_waits_for_room_ends_when_it_is_told_to(small: Small) -> None:
    job, running = await waiting(small)
    job.interrupt()
    assert await asyncio.wait_for(running, patience(20.0)) is False
    assert job.full.was_called_back and job.full.was_stopped and job.full.started == []
    assert (job.config.run_dir / "report.html").exists()


async def test_waiting_for_room_is_no_stall_and_nobody_joins_meanwhile(small: Small) -> None:
    limit = 60.0
    job, running = await waiting(small, stall_timeout_seconds=limit)
    assert job.attempt is not None and job.driver is not None
    with pytest.raises(RunError, match="this run is still starting its workers"):
        await asyncio.wait_for(job.attempt.scaling.scale("rollout", 2, 1.0), patience(10.0))
    last = job.driver.last_progress = asyncio.get_running_loop().time() - 10 * limit  # so long there was no room
    seen, begin = list[float](), job.attempt.scaling.begin

    def begun() -> None:
        assert job.driver is not None
        seen.append(job.driver.last_progress)  # the watchdog begins next
        begin()

    job.attempt.scaling.begin = begun  # type: ignore[method-assign]
    job.full.has_room.set()
    assert await asyncio.wait_for(running, patience(60.0))
    assert seen[0] > last + limit


async def test_a_run_that_waits_for_room_says_so(small: Small) -> None:
    job, running = await waiting(small)
    assert job.attempt is not None
    assert sentence(job.attempt.watch.situations.now()).startswith("the driver waits for the cluster to start 2 workers, since ")
    job.interrupt()
    await asyncio.wait_for(running, patience(20.0))
    assert read_situation(job.config.run_dir).ended == "it was interrupted"


async def test_prompts_are_there_before_any_worker_is(small: Small) -> None:
    """So the first worker begins at once, whoever else is still to start."""
    job, running = await waiting(small)
    assert job.driver is not None and job.full.started == []
    async with asyncio.timeout(patience(20.0)):
        while not job.driver.ledger.ledger.is_open(0):
            await asyncio.sleep(0.01)
    job.full.has_room.set()
    assert await asyncio.wait_for(running, patience(60.0))


async def test_a_run_that_ends_while_one_waits_to_join_does_not_wait_for_room(small: Small) -> None:
    job, running = await waiting(small, steps=5000)
    job.full.has_room.set()
    async with asyncio.timeout(patience(60.0)):
        while not job.rows:
            await asyncio.sleep(0.01)
    job.full.has_room.clear()
    job.full.is_asked.clear()
    assert job.attempt is not None
    joining = asyncio.create_task(job.attempt.scaling.scale("rollout", 2, 1.0))
    await asyncio.wait_for(job.full.is_asked.wait(), patience(20.0))
    job.interrupt()
    with pytest.raises(RunError, match="this run is ending"):
        await asyncio.wait_for(joining, patience(20.0))
    assert job.full.was_called_back and await asyncio.wait_for(running, patience(30.0)) is False
    assert "rollout/1" not in job.full.started
