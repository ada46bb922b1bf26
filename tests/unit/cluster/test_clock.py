"""The virtual clock: what is slow takes no time, what never comes is found, and the dead do nothing."""

from __future__ import annotations

import asyncio

import pytest

from asyncflow.cluster.clock import Deadlock, Process, VirtualLoop


def test_a_day_takes_no_time_and_order_is_that_of_the_clock() -> None:
    loop, seen = VirtualLoop(), []

    async def sleeper(seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((seconds, loop.time()))

    async def main() -> None:
        await asyncio.gather(*(sleeper(seconds) for seconds in (86400.0, 3.0, 60.0)))

    loop.run_until_complete(main())
    loop.finish()
    assert seen == [(3.0, 3.0), (60.0, 60.0), (86400.0, 86400.0)]


def test_a_wait_for_nothing_is_a_deadlock_that_says_who_waits() -> None:
    loop = VirtualLoop()

    async def waits_for_nobody() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"the waiter: test_clock\.py:\d+"):
        loop.run_until_complete(loop.create_task(waits_for_nobody(), name="the waiter"))
    loop.finish()


def test_a_clock_that_stands_still_is_one_too() -> None:
    loop = VirtualLoop()

    async def spins() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Deadlock, match="stands still"):
        loop.run_until_complete(spins())
    loop.finish()


def test_the_dead_run_not_one_more_line_and_the_paused_go_on_where_they_were() -> None:
    loop, seen = VirtualLoop(), []

    async def works(name: str) -> None:
        try:
            while True:
                await asyncio.sleep(1.0)
                seen.append((name, loop.time()))
        finally:
            seen.append((name, -1.0))

    async def main() -> None:
        killed, paused = Process(loop, "killed"), Process(loop, "paused")
        killed.on_death.append(lambda: seen.append(("told", loop.time())))
        killed.start(works("killed"), "killed")
        task = paused.start(works("paused"), "paused")
        await asyncio.sleep(1.5)
        killed.kill()
        paused.pause()
        await asyncio.sleep(10.0)
        assert [each.get_name() for each in loop.living()] == ["main", "paused"]
        paused.resume()
        await asyncio.sleep(0.5)
        task.cancel()

    loop.run_until_complete(loop.create_task(main(), name="main"))
    assert seen == [("killed", 1.0), ("paused", 1.0), ("told", 1.5), ("paused", 11.5), ("paused", -1.0)]
    loop.finish()
    assert seen[-1] == ("killed", -1.0)  # at the very end every task ends, the dead ones' too


def test_an_exception_that_nobody_took_is_an_error_of_the_loop() -> None:
    loop = VirtualLoop()

    async def fails() -> None:
        raise LookupError("lost")

    async def main() -> None:
        failing = asyncio.create_task(fails())
        await asyncio.sleep(1.0)
        del failing

    loop.run_until_complete(main())
    assert [type(error["exception"]) for error in loop.errors] == [LookupError]
    loop.finish()


def test_tasks_of_a_group_are_cancelled_in_the_order_in_which_they_began() -> None:
    """And not in that of their addresses, which is another one in every process."""
    loop, seen = VirtualLoop(), []

    async def waits(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(number)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0), asyncio.TaskGroup() as group:
                for number in range(12):
                    group.create_task(waits(number))

    loop.run_until_complete(main())
    loop.finish()
    assert seen == list(range(12))
