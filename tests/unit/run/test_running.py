"""What ends a wait of a run besides what it waits for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asyncflow.run.running import Running
from asyncflow.types import RunError
from tests.patience import patience


class NoRoom:
    """Cluster whose workers find no room, until they may start."""

    def __init__(self) -> None:
        self.has_room, self.was_given_up = asyncio.Event(), False

    async def start(self, fleet: list[Any]) -> None:
        try:
            await self.has_room.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.0)  # a worker that is being started ends first
            self.was_given_up = True
            raise


def running_over(cluster: NoRoom) -> tuple[Running, asyncio.Future[None], asyncio.Event]:
    failure, interrupted = asyncio.get_running_loop().create_future(), asyncio.Event()
    driver: Any = SimpleNamespace(background=SimpleNamespace(failure=failure))
    clustered: Any = cluster
    return Running(driver, clustered, interrupted, lambda line: None), failure, interrupted


@pytest.mark.parametrize("fails", ["loop", "background"])
async def test_what_fails_in_the_driver_while_workers_wait_for_room_ends_their_start(fails: str) -> None:
    cluster = NoRoom()
    running, failure, _ = running_over(cluster)

    async def loop() -> None:
        await asyncio.sleep(0.0)
        if fails == "loop":
            raise MemoryError("no room for a situation")
        failure.set_exception(RunError("a disk is gone"))

    running.begin([loop()])
    async with asyncio.timeout(patience(5.0)):
        with pytest.raises((MemoryError, RunError)) as caught:
            await running.start([])
    assert running.failure is caught.value
    assert cluster.was_given_up, "a worker would be started into a run that is over"


async def test_an_interrupt_ends_a_start_that_waits_for_room() -> None:
    cluster = NoRoom()
    running, _, interrupted = running_over(cluster)
    asyncio.get_running_loop().call_soon(interrupted.set)
    async with asyncio.timeout(patience(5.0)):
        assert await running.start([]) is False
    assert (cluster.was_given_up, running.failure) == (True, None)


async def test_a_start_that_finds_room_is_made_to_its_end() -> None:
    cluster = NoRoom()
    running, _, _ = running_over(cluster)
    asyncio.get_running_loop().call_soon(cluster.has_room.set)
    async with asyncio.timeout(patience(5.0)):
        assert await running.start([]) is True
    assert not cluster.was_given_up


@pytest.mark.parametrize("is_interrupted", [False, True])
async def test_one_who_waits_no_longer_is_no_failure_of_the_run_unless_it_is_interrupted_anew(*, is_interrupted: bool) -> None:
    """A client that gives up, after its own deadline say, leaves a run that goes on, and that ends in order later."""
    running, _, interrupted = running_over(NoRoom())
    waiting = asyncio.create_task(running.start([]))
    await asyncio.sleep(0)
    if is_interrupted:
        interrupted.set()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (running.failure is not None) is is_interrupted
