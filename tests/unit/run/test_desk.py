"""The desk between the train engine and trainers outside."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncflow.engines.train.experience import Experience, Published
from asyncflow.run.services.desk import TrainDesk
from asyncflow.types import RunError
from tests.patience import patience


def experience(row: int, tokens: int = 4) -> Experience:
    one, ids = np.array([row], np.int64), np.arange(tokens, dtype=np.int64)
    ones = np.ones(tokens, np.float32)
    return Experience(one, ids[:0], np.array([tokens]), ids, ones.astype(np.uint8), -ones, ones, ones[:1], one)


async def desk_with(*rows: int, step: int = 0) -> TrainDesk:
    desk = TrainDesk(lambda: None)
    await desk.begin(step)
    await desk.offer([experience(row) for row in rows])
    return desk


def rows_of(groups: list) -> list[int]:  # type: ignore[type-arg]
    return [int(group.experience.indices[0]) for group in groups]


async def test_each_group_goes_to_one_trainer_by_number_or_by_tokens() -> None:
    desk = await desk_with(0, 1, 2, 3)
    a = await desk.take("a", groups=1, tokens=0, timeout_seconds=1)
    b = await desk.take("b", groups=0, tokens=9, timeout_seconds=1)
    c = await desk.take("c", groups=0, tokens=1, timeout_seconds=1)  # one at least
    assert [rows_of(taken.groups) for taken in (a, b, c)] == [[0], [1, 2], [3]] and not c.is_complete
    assert (await desk.take("a", groups=0, tokens=0, timeout_seconds=0.01)).groups == []


async def test_a_step_is_complete_when_the_engine_waits_for_weights_and_all_is_handed_out() -> None:
    desk = await desk_with(0, 1)
    updating = asyncio.create_task(desk.update(64))
    await asyncio.sleep(0)
    first = await desk.take("a", groups=1, tokens=0, timeout_seconds=1)
    last = await desk.take("a", groups=1, tokens=0, timeout_seconds=1)
    assert first.normaliser is None and last.normaliser == 64 and last.step == 0
    with pytest.raises(RunError, match="2 groups of step 0 are not acknowledged"):
        await desk.publish(0, Published("w"))
    desk.acknowledge("a", [group.number for group in [*first.groups, *last.groups]])
    with pytest.raises(RunError, match="step 1 makes cannot be published: step 0"):
        await desk.publish(1, Published("w"))
    publishing = asyncio.create_task(desk.publish(0, Published("w", 0.5)))
    assert (await updating) == Published("w", 0.5)
    await desk.report_taken("")
    await publishing


async def test_weights_that_the_engine_does_not_take_may_be_published_anew() -> None:
    desk = await desk_with(0)
    updating = asyncio.create_task(desk.update(4))
    await asyncio.sleep(0)
    desk.acknowledge("a", [(await desk.take("a", groups=0, tokens=0, timeout_seconds=1)).groups[0].number])
    publishing = asyncio.create_task(desk.publish(0, Published("bad")))
    await updating
    await desk.report_taken("it is bad")
    with pytest.raises(RunError, match="it is bad"):
        await publishing
    publishing = asyncio.create_task(desk.publish(0, Published("good")))  # before the engine asks again, even
    assert (await desk.update(4)).path == "good"
    await desk.report_taken("")
    await publishing


async def test_what_a_trainer_that_is_gone_had_not_acknowledged_is_for_others() -> None:
    desk = await desk_with(0, 1, 2)
    taken = await desk.take("a", groups=2, tokens=0, timeout_seconds=1)
    desk.acknowledge("a", [taken.groups[0].number])
    desk.leave("a")
    assert rows_of((await desk.take("b", groups=0, tokens=0, timeout_seconds=1)).groups) == [1, 2]
    with pytest.raises(RunError, match="is not this trainer's"):
        desk.acknowledge("a", [taken.groups[1].number])
    desk.restart()
    assert rows_of((await desk.take("c", groups=0, tokens=0, timeout_seconds=1)).groups) == [0, 1, 2]


async def test_a_new_step_forgets_the_old_one_and_the_end_of_the_run_is_told() -> None:
    desk = await desk_with(0)
    old = (await desk.take("a", groups=0, tokens=0, timeout_seconds=1)).groups[0].number
    await desk.begin(1)
    with pytest.raises(RunError, match="is not this trainer's"):
        desk.acknowledge("a", [old])
    waiting = asyncio.create_task(desk.take("a", groups=0, tokens=0, timeout_seconds=5))
    await asyncio.sleep(0)
    desk.stop()
    with pytest.raises(RunError, match="the run is stopping"):
        await waiting


@pytest.mark.parametrize("first", ["stop", "update"])
async def test_an_engine_is_stranded_that_waits_when_the_run_stops_or_later(first: str) -> None:
    desk = await desk_with(0)
    stranded = asyncio.create_task(desk.stranded())
    updating = None
    for what in (first, "stop" if first == "update" else "update"):
        await asyncio.sleep(0.01)
        assert not stranded.done()
        if what == "stop":
            desk.stop()
        else:
            updating = asyncio.create_task(desk.update(64))
    await asyncio.wait_for(stranded, patience(10))
    with pytest.raises(RunError, match="the weights of step 0 come too late: the run is stopping"):
        await desk.publish(0, Published("w"))
    assert updating is not None and not updating.done()
    updating.cancel()


async def test_an_engine_whose_weights_were_published_before_the_stop_is_not_stranded() -> None:
    desk = await desk_with(0)
    updating = asyncio.create_task(desk.update(64))
    desk.acknowledge("a", [group.number for group in (await desk.take("a", groups=1, tokens=0, timeout_seconds=1)).groups])
    publishing, stranded = asyncio.create_task(desk.publish(0, Published("w"))), asyncio.create_task(desk.stranded())
    await asyncio.sleep(0)
    desk.stop()
    assert await updating == Published("w")
    await asyncio.sleep(0.01)
    assert not stranded.done()
    stranded.cancel()
    with pytest.raises(RunError, match="the step is not committed"):
        await publishing
