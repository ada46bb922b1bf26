"""The event loop of tests that have all ends of their connections in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.unhurried import UnhurriedLoop


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=UnhurriedLoop) as runner:
        return runner.run(work)


def test_nobody_sleeps_and_timers_come_in_their_order() -> None:
    async def work() -> list[float]:
        ended: list[float] = []

        async def sleeps(seconds: float) -> None:
            await asyncio.sleep(seconds)
            ended.append(asyncio.get_running_loop().time())

        await asyncio.gather(*(sleeps(seconds) for seconds in (9000.0, 500.0, 0.25)))
        return ended

    began = time.monotonic()
    assert run(work()) == [0.25, 500.0, 9000.0]
    assert time.monotonic() - began < 200.0


@pytest.mark.parametrize("work_in", ["the loop", "a thread"])
def test_no_deadline_is_missed_by_work_that_takes_its_time(work_in: str) -> None:
    async def work() -> None:
        async with asyncio.timeout(0.01):
            if work_in == "a thread":
                await asyncio.to_thread(time.sleep, 0.1)
            else:
                time.sleep(0.1)
                await asyncio.sleep(0)

    run(work())


def test_what_is_on_its_way_comes_before_any_timer() -> None:
    async def work() -> bytes:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while word := await reader.read(1):
                writer.write(word)

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        heard = b""
        async with server, asyncio.timeout(0.001):
            for word in b"a hundred times" * 7:
                writer.write(bytes([word]))
                heard += await reader.read(1)
            writer.close()
        return heard

    assert run(work()) == b"a hundred times" * 7


def test_a_deadline_without_anything_to_come_is_over_at_once() -> None:
    async def work() -> None:
        async with asyncio.timeout(3600.0):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        run(work())
