"""A run that is driven step by step, through the ends of its attempts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncflow.cluster.base import WorkerDied
from asyncflow.config import parse
from asyncflow.run.stepwise import StepwiseRun
from tests.patience import patience


class DyingJob:
    """Job whose first attempt ends with a trainer's death. `error`: why no other one can be begun."""

    def __init__(self, error: Exception | None) -> None:
        self.asked = list[tuple[int, int]]()  # checkpoints: how many attempts there had been, and of which version at least
        ledger = SimpleNamespace(limit=0, ask_for_checkpoint=self.ask, allow=lambda *_: None, ledger=SimpleNamespace(committed=0))
        self.attempt: Any = SimpleNamespace(driver=SimpleNamespace(ledger=ledger, saves=SimpleNamespace(newest=0)))
        self.error, self.num_restarts, self.may_restart = error, 0, asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> bool:
        if not self.num_restarts:
            raise WorkerDied("worker trainer/0 died", "trainer/0", has_failed=False)
        return condition()

    async def restart_after(self, death: WorkerDied) -> None:
        await self.may_restart.wait()
        self.num_restarts, driver = self.num_restarts + 1, self.attempt.driver
        self.attempt = None
        if self.error is not None:
            raise self.error
        self.attempt = SimpleNamespace(driver=driver)

    async def start(self) -> None: ...

    def ask(self, version: int = 0) -> int:
        self.asked.append((self.num_restarts, version))
        return 3


def run_of(folder: Path, job: DyingJob, seen: list[str]) -> StepwiseRun:
    @contextlib.asynccontextmanager
    async def between() -> AsyncIterator[None]:
        seen.append("entered")
        yield
        seen.append("left")

    config = parse({"run": {"dir": str(folder)}, "model": {"path": "none"}, "data": {"path": "none"}})
    run = StepwiseRun(config, between=between)
    run.job = job  # type: ignore[assignment]
    return run


async def test_of_several_calls_one_resumes_the_run_and_those_that_come_meanwhile_may_wait(tmp_path: Path) -> None:
    job, seen = DyingJob(None), list[str]()
    run = run_of(tmp_path, job, seen)
    calls = [asyncio.create_task(run.until(lambda: True)) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert run.is_resuming and seen == ["entered"]
    waiting = asyncio.create_task(run.under_way())
    await asyncio.sleep(0.02)
    assert not waiting.done()
    job.may_restart.set()
    assert await asyncio.wait_for(asyncio.gather(*calls), patience(5)) == [True] * 3
    await asyncio.wait_for(waiting, patience(5))
    assert (job.num_restarts, seen, run.is_resuming) == (1, ["entered", "left"], False)


async def test_a_wait_for_this_attempt_alone_ends_with_it_once_another_one_is_under_way(tmp_path: Path) -> None:
    job = DyingJob(None)
    job.may_restart.set()
    run = run_of(tmp_path, job, [])
    with pytest.raises(WorkerDied):
        await run.until_here(lambda: True)
    assert job.num_restarts == 1 and await run.until_here(lambda: True)


async def test_all_calls_raise_why_a_run_could_not_be_resumed(tmp_path: Path) -> None:
    """On a full disk, say. The context that is between attempts is not left in order."""
    job, seen = DyingJob(OSError(errno.ENOSPC, "No space left on device")), list[str]()
    run = run_of(tmp_path, job, seen)
    calls = [asyncio.create_task(call(lambda: True)) for call in (run.until, run.until_here, run.until)]
    await asyncio.sleep(0.02)
    job.may_restart.set()
    found = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), patience(5))
    assert [type(each) for each in found] == [OSError] * 3 and seen == ["entered"] and job.num_restarts == 1


@pytest.mark.parametrize(("newest", "asked"), [(2, [(0, 0), (1, 3)]), (3, [(0, 0)])])
async def test_a_checkpoint_that_was_asked_for_is_asked_for_again_unless_it_is_there(
    tmp_path: Path, newest: int, asked: list[tuple[int, int]]
) -> None:
    """Its step may have been committed before the trainer died, and its files not written."""
    job = DyingJob(None)
    job.may_restart.set()
    run = run_of(tmp_path, job, [])
    assert await run.checkpoint() == 3
    job.attempt.driver.saves.newest = newest
    assert await run.until(lambda: True) and job.asked == asked
