"""Work on shared cores takes as long as the contention says, whenever other work begins and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from asyncflow.cluster.clock import VirtualLoop
from asyncflow.engines.cores import Contention, Cores, SharedDevices

TWO = Contention(cores=2, slowdown={"rollout": 0.5, "train": 0.25})


def run(main: Coroutine[Any, Any, Any]) -> Any:
    loop = VirtualLoop()
    found = loop.run_until_complete(loop.create_task(main, name="test"))
    assert not loop.errors
    loop.finish()
    return found


async def ends(cores: Cores, *work: tuple[str, float, float]) -> list[float]:
    """When each piece of work, given by pool, beginning and seconds alone, is done."""

    async def one(pool: str, begins: float, seconds: float) -> float:
        await asyncio.sleep(begins)
        await cores.compute(pool, seconds)
        return asyncio.get_running_loop().time()

    return list(await asyncio.gather(*(one(*piece) for piece in work)))


def test_without_contention_work_takes_its_seconds() -> None:
    assert run(ends(Cores(), ("rollout", 0, 3.0), ("train", 1, 4.0), ("train", 0, 0.0))) == [3.0, 5.0, 0.0]


def test_work_is_slower_only_while_other_work_is_done() -> None:
    # Rollout: 1 s alone, then 2 s of its 3 beside the trainer at 1 / 1.5. The trainer: 3 s beside it at 1 / 1.25, the rest alone.
    rollout, trainer = run(ends(Cores(TWO), ("rollout", 0, 3.0), ("train", 1, 4.0)))
    assert rollout == pytest.approx(1.0 + 2.0 * 1.5)
    assert trainer == pytest.approx(4.0 + (4.0 - 3.0 / 1.25))


def test_more_workers_than_cores_take_turns() -> None:
    assert run(ends(Cores(TWO), *[("rollout", 0, 1.0)] * 4)) == pytest.approx([1.0 * 1.5 * 2] * 4)
    assert TWO.among("other", ["other"] * 2) == 1.0
    assert Contention(cores=4, slowdown={"rollout": 0.6}).among("rollout", ["rollout"] * 2) == pytest.approx(1.2)
    assert Contention(cores=1).among("rollout", ["rollout"] * 3) == 3.0


def test_work_may_end_before_it_was_said_to() -> None:
    async def main() -> tuple[float, float]:
        cores, loop = Cores(TWO), asyncio.get_running_loop()
        work = cores.begin("rollout", 10.0, lambda: None)
        beside = asyncio.create_task(cores.compute("train", 8.0))
        await asyncio.sleep(3.0)
        done = work.done()
        await cores.end(work, 3.0)  # one second more of what it takes alone
        at = loop.time()
        beside.cancel()
        return done, at

    done, at = run(main())
    assert done == pytest.approx(2.0) and at == pytest.approx(4.5)


def test_what_was_cancelled_slows_nobody_down() -> None:
    async def main() -> float:
        cores = Cores(TWO)
        other = asyncio.create_task(cores.compute("train", 100.0))
        await asyncio.sleep(0)
        other.cancel()
        await cores.compute("rollout", 2.0)
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(2.0)


def test_workers_take_turns_on_a_device_that_they_share_and_on_no_other() -> None:
    devices = SharedDevices({
        "trainer/0": frozenset({"a", "b"}), "reference/0": frozenset({"a"}), "reference/1": frozenset({"b"}),
        "critic": frozenset({"c"}),
    })  # fmt: skip
    work = [("trainer/0", 0, 4.0), ("reference/0", 0, 1.0), ("reference/1", 0, 2.0), ("critic", 0, 3.0)]
    # The trainer has a half of its slower device until the second reference is done, and then all.
    assert run(ends(Cores(devices), *work)) == pytest.approx([6.0, 2.0, 4.0, 3.0])
