"""Waiting for a condition, without polling."""

from __future__ import annotations

import asyncio

from asyncflow.control.signal import Signal
from asyncflow.transport import client_name
from asyncflow.waits import EVALUATION_DUE, ROUND
from tests.builders import loop_turns


async def test_a_condition_that_holds_is_not_waited_for() -> None:
    await asyncio.wait_for(Signal().until(lambda: True, EVALUATION_DUE), 1)


async def test_a_condition_is_looked_at_after_every_notice_and_at_no_other_time() -> None:
    signal, looked, value = Signal(), 0, 0

    def condition() -> bool:
        nonlocal looked
        looked += 1
        return value == 2

    waiting = asyncio.create_task(signal.until(condition, EVALUATION_DUE))
    await loop_turns()
    assert looked == 1
    value = 1
    signal.notify()
    await loop_turns()
    assert looked == 2 and not waiting.done()
    value = 2
    await loop_turns()
    assert looked == 2 and not waiting.done()
    signal.notify()
    await asyncio.wait_for(waiting, 1)


async def test_one_notice_wakes_all_whose_condition_holds() -> None:
    signal, open_for = Signal(), set[int]()
    waiting = [asyncio.create_task(signal.until(lambda i=i: i in open_for, EVALUATION_DUE)) for i in range(4)]
    await loop_turns()
    open_for |= {0, 2}
    signal.notify()
    await loop_turns()
    assert [task.done() for task in waiting] == [True, False, True, False]
    open_for |= {1, 3}
    signal.notify()
    await asyncio.gather(*waiting)


async def test_who_is_woken_looks_again_since_another_may_have_been_quicker() -> None:
    signal, tickets, served = Signal(), 0, list[int]()

    async def take(number: int) -> None:
        nonlocal tickets
        await signal.until(lambda: tickets > 0, EVALUATION_DUE)
        tickets -= 1
        served.append(number)

    waiting = [asyncio.create_task(take(i)) for i in range(2)]
    await loop_turns()
    tickets = 1
    signal.notify()
    await loop_turns()
    assert served == [0] and tickets == 0
    tickets = 1
    signal.notify()
    await asyncio.gather(*waiting)
    assert served == [0, 1]


async def test_who_stops_waiting_leaves_nothing_behind() -> None:
    signal = Signal()
    waiting = asyncio.create_task(signal.until(lambda: False, EVALUATION_DUE))
    await loop_turns()
    assert len(signal._waiting) == 1
    waiting.cancel()
    signal.notify()
    await loop_turns()
    assert waiting.cancelled() and signal._waiting == []


async def test_an_open_wait_says_who_waits_for_what_and_since_when() -> None:
    signal, now = Signal(), asyncio.get_running_loop().time()
    client_name.set("trainer/0")
    waiting = asyncio.create_task(signal.until(lambda: False, ROUND, step=7, number=2))
    await loop_turns()
    (wait,) = signal.open_waits(now + 5.0)
    assert (wait.worker, wait.words) == ("trainer/0", "round 2 of step 7") and 4.0 < wait.seconds <= 5.0
    signal.notify()
    await loop_turns()
    assert len(signal.open_waits(now)) == 1
    waiting.cancel()
    await loop_turns()
    assert signal.open_waits(now) == []


async def test_who_is_woken_in_vain_has_waited_since_it_began() -> None:
    signal, tickets = Signal(), 0

    async def take() -> None:
        nonlocal tickets
        await signal.until(lambda: tickets > 0, ROUND, step=1, number=0)
        tickets -= 1

    waiting = [asyncio.create_task(take()) for _ in range(2)]
    await asyncio.sleep(0.05)
    tickets = 1
    signal.notify()
    await loop_turns()
    (left,) = signal.open_waits(asyncio.get_running_loop().time())
    assert left.seconds >= 0.04
    for task in waiting:
        task.cancel()
