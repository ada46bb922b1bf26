"""Sessions of clients that work for a run: when one is over, by a clock that is not the machine's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from asyncflow.cluster.clock import VirtualLoop
from asyncflow.engines.train.experience import Experience
from asyncflow.run.driver import Driver
from asyncflow.run.services.desk import TrainDesk
from asyncflow.service.generation import OutsideEngine, PublishedFiles
from asyncflow.service.workers import BROKEN_SECONDS, GeneratorSession, OutsideWorkers
from asyncflow.types import RunError
from tests.soak.modes import ROOT

LEASE_SECONDS = 40.0


class Resting(OutsideWorkers):
    """Sessions whose rollout loops have nothing to do."""

    async def _roll_out(self, name: str, engine: OutsideEngine, files: PublishedFiles, has_joined: asyncio.Event) -> None:
        has_joined.set()
        await asyncio.Event().wait()


def with_session(test: Callable[[OutsideWorkers, GeneratorSession], Awaitable[None]]) -> None:
    """Run a test in virtual time, with the session of a client that generates."""
    loop = VirtualLoop()

    async def main() -> None:
        config = SimpleNamespace(queue=SimpleNamespace(lease_seconds=LEASE_SECONDS), environment=None)
        versions = SimpleNamespace(admit=lambda: "rollout/outside-0", dismiss=lambda guest: None)
        shape, desk = SimpleNamespace(group_bits=2), TrainDesk(lambda: None)
        driver: Any = SimpleNamespace(config=config, versions=versions, shape=shape, desk=desk)
        workers = Resting(cast(Driver, driver), ROOT / "recipes" / "models" / "tiny-arithmetic", 64, lambda rows, hashes: None)
        await test(workers, await workers.join(num_slots=4))
        await workers.close()

    loop.run_until_complete(main())
    loop.finish()


async def until_broken() -> None:
    """A connection that breaks after a second."""
    await asyncio.sleep(1.0)


def test_a_client_whose_held_heartbeat_breaks_off_has_gone_long_before_its_leases_are_over() -> None:
    async def test(workers: OutsideWorkers, session: GeneratorSession) -> None:
        with pytest.raises(RunError, match="broken"):
            await workers.hold(session, 20.0, until_broken)
        await asyncio.sleep(BROKEN_SECONDS - 0.1)
        assert len(workers.last_requests) == 1
        await asyncio.sleep(0.2)
        assert len(workers.last_requests) == 0
        assert asyncio.get_running_loop().time() < LEASE_SECONDS / 4
        with pytest.raises(RunError, match="silent for too long"):
            workers.generator(session.id)

    with_session(test)


def test_nobody_takes_the_place_of_one_who_has_gone() -> None:
    """Its name is another one's by then, who has other weights."""

    async def test(workers: OutsideWorkers, session: GeneratorSession) -> None:
        await workers.leave(session.id)
        other = await workers.join(num_slots=4)
        assert other.name == session.name and workers.generator(other.id) is other
        with pytest.raises(RunError, match=f"there is no worker '{session.id}'"):
            workers.generator(session.id)

    with_session(test)


def test_one_that_has_lost_its_connection_alone_goes_on() -> None:
    async def test(workers: OutsideWorkers, session: GeneratorSession) -> None:
        with pytest.raises(RunError, match="broken"):
            await workers.hold(session, 20.0, until_broken)
        await asyncio.sleep(BROKEN_SECONDS - 0.1)
        workers.generator(session.id)
        await asyncio.sleep(LEASE_SECONDS - 1.0)
        assert workers.generator(session.id) is session
        await asyncio.sleep(LEASE_SECONDS * 1.5)  # silent for good: that ends it as before
        assert len(workers.last_requests) == 0

    with_session(test)


def test_a_heartbeat_is_held_for_its_time_and_not_longer_than_its_session() -> None:
    async def test(workers: OutsideWorkers, session: GeneratorSession) -> None:
        now, never = asyncio.get_running_loop().time, asyncio.Event().wait
        await workers.hold(session, LEASE_SECONDS / 4, never)
        assert now() == LEASE_SECONDS / 4 and len(workers.last_requests) == 1
        await workers.hold(session, 3600.0, never)  # not so long that it is taken for silence
        assert now() == LEASE_SECONDS * 3 / 4 and workers.generator(session.id) is session
        holding, before = asyncio.create_task(workers.hold(session, 10.0, never)), now()
        await asyncio.sleep(1.0)
        await workers.leave(session.id)
        await holding
        assert now() == before + 1.0

    with_session(test)


def test_a_trainer_that_leaves_while_it_asks_for_groups_is_handed_none() -> None:
    """Nobody would give them back: the step would wait for them for ever."""
    one = np.ones(1, np.int64)
    group = Experience(one, one, one, one, one.astype(np.uint8), *[one.astype(np.float32)] * 3, one)

    async def test(workers: OutsideWorkers, session: GeneratorSession) -> None:
        desk = workers._driver.desk
        await desk.begin(0)
        name = workers.begin_training(is_fresh=True).name
        asking = asyncio.create_task(workers.take_groups(name, groups=0, tokens=0, timeout_seconds=20.0))
        await asyncio.sleep(1.0)
        workers.end_training(name)
        await desk.offer([group])
        with pytest.raises(RunError, match=f"there is no trainer '{name}'"):
            await asking
        other = workers.begin_training(is_fresh=False).name
        assert len((await workers.take_groups(other, groups=0, tokens=0, timeout_seconds=20.0)).groups) == 1

    with_session(test)


def test_a_trainer_is_not_silent_while_a_request_of_it_is_under_way() -> None:
    """As an upload of many weights is, and the step's commit after it."""

    async def test(workers: OutsideWorkers, session: GeneratorSession) -> None:
        name = workers.begin_training(is_fresh=True).name
        for _ in range(2):
            with workers.trainer(name):
                await asyncio.sleep(LEASE_SECONDS * 3)
            await asyncio.sleep(LEASE_SECONDS * 0.9)
        await asyncio.sleep(LEASE_SECONDS * 0.5)
        with pytest.raises(RunError, match="silent for too long"), workers.trainer(name):
            pass

    with_session(test)
