"""Which groups are trained, over a real queue and ledger: those whose rewards vary, the first ones by their numbers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import numpy as np
import pytest

from asyncflow.control.ledger import Decided, Ledger, LedgerService, TaskPlan, UpdatePlan
from asyncflow.control.modes import Periodic
from asyncflow.control.progress_view import ProgressView
from asyncflow.control.signal import Signal
from asyncflow.engines.base import Response
from asyncflow.loops.samples import SELECT_TASK, Prompt, admission, outputs, schema
from asyncflow.loops.selection import Selection, is_varied
from asyncflow.transfer_queue.controller import TaskEvents
from asyncflow.transfer_queue.leases import Want
from asyncflow.transfer_queue.queue import TransferQueue
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from tests import builders
from tests.builders import loop_turns, meta

BITS = 1


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1, 1, 1], False), ([0, 0], False), ([0, 1], True), ([0.5, 0.5, 0.25], True), ([0.3], False), ([-0.0, 0.0], False)],
)
def test_rewards_vary_if_not_all_of_them_are_the_same(rewards: list[float], expected: bool) -> None:
    assert is_varied(np.array(rewards, np.float32)) is expected


class World:
    """A queue in which rollout is done by hand, and the selection of two groups a step."""

    def __init__(self, lease_seconds: float = 30.0, **options: Any) -> None:
        self.ledger = Ledger(BITS, TaskPlan(("rollout", SELECT_TASK), chosen_by=SELECT_TASK, num_members=2), UpdatePlan(**options))
        signal = Signal()
        events = {
            task: TaskEvents(on_done=lambda rows, task=task: self.service.done(task, rows)) for task in self.ledger.tasks.before
        }
        self.queue = TransferQueue(schema(BITS, lease_seconds, 2, ("rollout", SELECT_TASK)), [MemoryStorage()], events=events)
        progress = ProgressView(self.ledger, self.queue.controllers)
        self.service = LedgerService(self.ledger, Periodic(), progress, signal, lambda task, step: None)
        self.client = self.queue.client()
        self.background: list[asyncio.Task[None]] = []
        self.held_back: list[Coroutine[Any, Any, None]] | None = None
        self.selection = Selection(self.queue.client(), self.service, self._start)
        self.service.on_decided = self._decided
        self.decided: list[Decided] = []

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        if self.held_back is None:
            self.background.append(asyncio.create_task(work))
        else:
            self.held_back.append(work)

    def _decided(self, step: int, decided: Decided) -> None:
        self.decided.append(decided)
        self.selection.decided(decided)

    async def admit(self, *groups: int) -> None:
        metas = [meta(group) for group in groups]
        await (self.service.add_candidates(metas) if self.ledger.is_open(0) else self.service.open(metas))
        await self.client.put(metas, admission(metas, [Prompt(np.arange(3), {})] * len(metas), [1.0] * len(metas)))

    async def score(self, group: int, *rewards: float) -> None:
        """The responses of a group, which have these rewards."""
        leased = await self.client.lease("rollout", Want(groups=1))
        assert leased is not None and leased.lease.groups[0].group == group
        for sample, reward in enumerate(rewards):
            response = Response(sample, np.arange(2), -np.ones(2, np.float32), np.array([(0, 0)], np.int64), "stop")
            await self.client.complete(leased.lease, outputs(group, [builders.scored((group << BITS) + sample, response, reward)]))
        await loop_turns(20)

    async def trained(self) -> list[int]:
        """The groups that lie ready for training."""
        groups = []
        while self.queue.controllers["train"].table.counts()["ready"]:
            leased = await self.client.lease("train")
            assert leased is not None and leased.batch.dense("member").tolist() == [1, 1]
            groups.append(leased.lease.groups[0].group)
        return groups

    async def present(self, *groups: int) -> list[int]:
        (unit,) = (self.queue.services[next(n for n in self.queue.services if n.startswith("unit/"))],)
        rows = np.array([row for group in groups for row in (group << BITS, (group << BITS) + 1)])
        return sorted({row >> BITS for row in (await unit.present(rows)).tolist()})


@contextlib.asynccontextmanager
async def selecting(**options: Any) -> AsyncIterator[World]:
    world = World(**options)
    async with world.queue.running():
        running = asyncio.create_task(world.selection.run())
        await loop_turns()
        yield world
        assert not running.done()
        await world.client.close(SELECT_TASK)
        await asyncio.wait_for(running, 5)
        await asyncio.gather(*world.background)
        assert world.selection._held == {}


async def test_members_reach_training_and_nothing_else_stays() -> None:
    async with selecting() as world:
        await world.admit(0, 1, 2, 3)
        await world.score(0, 1.0, 1.0)
        await world.score(1, 0.0, 1.0)
        assert await world.trained() == [1] and await world.present(0, 1, 2, 3) == [1, 2, 3]
        await world.score(2, 0.0, 0.0)
        assert await world.trained() == [] and world.ledger.lacking(0) is None
        await world.score(3, 1.0, 0.0)
        assert await world.trained() == [3] and await world.present(0, 1, 2, 3) == [1, 3]
        assert world.decided[-1].is_settled and world.decided[-1].num_degenerate_rows == 4
        assert world.ledger.is_done(SELECT_TASK, 0)


async def test_surplus_is_dropped_whether_it_is_scored_or_not() -> None:
    async with selecting() as world:
        await world.admit(0, 1, 2, 3)
        for group in range(2):
            await world.score(group, 0.0, 1.0)
        assert await world.trained() == [0, 1] and await world.present(0, 1, 2, 3) == [0, 1]
        assert world.decided[-1].surplus == [2, 3]


async def test_a_group_whose_lease_ends_before_it_is_decided_is_told_of_once_it_is() -> None:
    async with selecting(lease_seconds=0.2, mini_batches=2) as world:
        await world.admit(0, 1)
        leased = await world.client.lease("rollout", Want(groups=1))  # group 0 stays undecided
        assert leased is not None
        await world.score(1, 0.0, 1.0)
        first = world.selection._held[1]
        async with asyncio.timeout(5):
            while world.selection._held[1] is first:
                await asyncio.sleep(0.02)
        assert world.decided == [] and await world.trained() == []
        await world.score(0, 0.0, 1.0)
        assert sorted(await world.trained()) == [0, 1]


async def test_a_member_whose_lease_ends_before_it_is_told_so_is_told_again() -> None:
    async with selecting(lease_seconds=0.2) as world:
        world.held_back = []
        await world.admit(0, 1)
        await world.score(0, 0.0, 1.0)
        await world.score(1, 0.0, 1.0)
        first, world.held_back = world.held_back, None
        assert len(first) == 2
        async with asyncio.timeout(5):
            while len(world.background) < 2:
                await asyncio.sleep(0.02)
        assert sorted(await world.trained()) == [0, 1]
        for late in first:
            await late  # a lease that is over: nothing comes of it
        await loop_turns()
        assert await world.trained() == []
