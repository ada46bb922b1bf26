"""The loops that use the queue in a simulation: they put, generate, train, filter and drop, and note what is to be expected."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from asyncflow.cluster.clock import current_process
from asyncflow.transfer_queue.client import Leased, TransferQueueClient
from asyncflow.transfer_queue.leases import StaleToken, Want
from asyncflow.types import Batch, GroupMeta, Interval, Ragged, RunError

if TYPE_CHECKING:
    from tests.sim.world import World

T = TypeVar("T")


class Loop:
    """A process that is a client of the queue."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.facts, self.plan, self.name = world, world.facts, world.plan, name
        self.rng = random.Random(f"{world.plan.seed}/{name}/{world.starts[name]}")
        self.start_number = world.next_start()

    async def main(self) -> None:
        self.queue = await TransferQueueClient.connect("hub", self.name)
        await self.queue.wait_for_units(len(self.plan.units))
        self.start(self.queue.renew_held, "renews")
        await self.run()

    async def run(self) -> None:
        raise NotImplementedError

    def start(self, loop: Callable[[], Awaitable[None]], what: str) -> None:
        """Start a loop in the background. An error of it ends the process."""

        async def guarded() -> None:
            try:
                await loop()
            except (RunError, LookupError) as error:
                self.world.has_failed(process, error)

        process = current_process()
        asyncio.ensure_future(guarded()).set_name(f"{self.name} {what}")

    async def insist(self, request: Callable[[], Awaitable[T]]) -> T:
        """Again and again while a storage does not answer."""
        while True:
            try:
                return await request()
            except RunError as error:
                if type(error) is not RunError:  # a kind of its own means something else
                    raise
            await asyncio.sleep(0.1)

    async def think(self, most: float) -> None:
        await asyncio.sleep(self.rng.random() * most)


class Feeder(Loop):
    """Puts the groups of one step after the other, each again until it is acknowledged."""

    async def run(self) -> None:
        plan, facts = self.plan, self.facts
        for step in range(plan.steps):
            while step > self.world.version + 1:  # at most one step ahead
                await asyncio.sleep(0.1)
            metas = [GroupMeta(g, size, step, Interval(*plan.interval(step))) for g, size in plan.groups_of(step)]
            facts.metas.update({meta.group: meta for meta in metas})
            missing = [meta for meta in metas if meta.group not in facts.acknowledged]
            together = 1 if plan.capacity_rows is not None else self.rng.choice([1, 2, len(metas)])
            for start in range(0, len(missing), together):
                await self._put(missing[start : start + together])
                await self.think(0.2)
        self.world.has_fed = True

    async def _put(self, metas: list[GroupMeta]) -> None:
        groups = np.array([meta.group for meta in metas], np.int64)
        columns = {"prompt": Ragged.from_arrays([np.full(1 + g % 3, g) for g in groups.tolist()], "int64")}
        indices = np.empty(0, np.int64)
        if self.plan.has_tags:
            indices = self.queue.schema.rows_of(metas)
            columns["tag"] = indices.astype(np.int32)
        batch = Batch(indices, groups, columns)
        await self.insist(lambda: self.queue.put(metas, batch, row_bytes=self.plan.row_bytes))
        self.facts.acknowledged.update(groups.tolist())


class Roller(Loop):
    """Writes the outputs of rows, well or badly."""

    async def run(self) -> None:
        rng, self.lease_number = self.rng, 0
        if self.plan.follows_versions:
            self.start(self._install, "installs")
        while True:
            kind = rng.random()
            at_least = 1
            if kind < 0.5:
                want = {"groups": rng.randint(1, 3)}
            elif kind < 0.75:
                want = {"rows": rng.randint(1, 5)}
            else:
                want = {"tokens": rng.randint(1, 12)}
            if self.name == "rollout-1" and rng.random() < 0.3:
                at_least = 2
            installed = self.world.version if self.plan.follows_versions else None
            try:
                leased = await self.queue.lease("rollout", Want(at_least=at_least, installed=installed, **want))
            except RunError as error:
                if type(error) is not RunError:
                    raise
                await asyncio.sleep(0.1)
                continue
            if leased is None:
                if self.world.is_closed:
                    return
                continue
            self.world.check_lease("rollout", leased, installed, want)
            await self._work(leased)

    async def _install(self) -> None:
        """Whenever there is a new version nothing may be generated by the old one any more: parked requests are withdrawn."""
        seen = self.world.version
        while True:
            await asyncio.sleep(0.1)
            if self.world.version != seen:
                seen = self.world.version
                await self.queue.withdraw("rollout")

    async def _work(self, leased: Leased) -> None:
        rng, rows = self.rng, list(leased.lease.indices)
        self.lease_number += 1  # its controller's number may come again under another incarnation
        for i, meta in enumerate(leased.batch.groups.tolist()):
            if leased.batch.ragged("prompt")[i].tolist() != [meta] * (1 + meta % 3):
                self.facts.violated(f"the prompt of group {meta} was read as {leased.batch.ragged('prompt')[i].tolist()}")
        if self.plan.has_tags and leased.batch.dense("tag").tolist() != rows:
            self.facts.violated(f"the tags of rows {rows} were read as {leased.batch.dense('tag').tolist()}")
        fate = rng.random()
        if fate < self.plan.forgetting:  # hangs: the lease runs out
            self.queue.leases.held.pop(leased.lease.token, None)
            await asyncio.sleep(self.plan.lease_seconds * (0.5 + rng.random()))
        rng.shuffle(rows)
        while rows:
            part = rows[: 1 if rng.random() < 0.7 else len(rows)]
            del rows[: len(part)]
            await self.think(0.15)
            if rng.random() < self.plan.failing:
                await self._fail(leased, part)
            else:
                await self._complete(leased, sorted(part))

    async def _fail(self, leased: Leased, rows: list[int]) -> None:
        error = f"{self.name} could not, in its start {self.start_number}"
        for row in rows:
            self.facts.failures[row] += 1
            self.facts.errors[row].add(error)
        await self.insist(lambda: self.queue.fail(leased.lease, rows, error))

    async def _complete(self, leased: Leased, rows: list[int]) -> None:
        value = (self.start_number, self.lease_number)
        ids = Ragged.from_arrays([np.array([*value, row]) for row in rows], "int64")
        indices = np.array(rows, np.int64)
        outputs = Batch(indices, np.unique(indices >> self.plan.group_bits), {"ids": ids, "reward": indices.astype(np.float32)})
        stored = await self.insist(lambda: self.queue.complete(leased.lease, outputs))
        for row, is_kept in zip(rows, stored.tolist(), strict=True):
            if is_kept:
                self.facts.told_kept(row, (*value, row))
            else:
                self.world.counts["completion refused"] += 1
                if self.facts.values.get((row, "ids")) == (*value, row) and not self.world.counts["restart of a unit"]:
                    self.facts.violated(f"the writer of row {row} was told that its outputs are not kept, and they are")


class Trainer(Loop):
    """Whole groups: looks at what it is given, filters some, and has the rest take effect."""

    def look_at(self, leased: Leased) -> None:
        ids = leased.batch.ragged("ids")
        for i, row in enumerate(leased.lease.indices):
            value = tuple(ids[i].tolist())
            if row in self.facts.kept and self.facts.kept[row] != value:
                self.facts.violated(f"row {row} was completed with {self.facts.kept[row]} and is read as {value}")
            if leased.batch.dense("reward")[i] != np.float32(row):
                self.facts.violated(f"the reward of row {row} was read as {leased.batch.dense('reward')[i]}")

    async def filter_some(self, rows: list[int]) -> None:
        if self.rng.random() < self.plan.filtering:
            out = [row for row in rows if self.rng.random() < 0.5]
            self.facts.to_filter.update(out)
            await self.insist(lambda: self.queue.filter(out, "too easy"))


class StepTrainer(Trainer):
    """As `workflows.loop.train`: the leases of a step are held until its update is committed, then acknowledged and dropped.

    When started again it does not ask by step: the step may have ended in the queue, and its rows were given back since.
    """

    async def run(self) -> None:
        self.is_first = self.world.starts[self.name] == 1
        self.held: dict[int, Leased] = {}
        while (step := self.world.version) < self.plan.steps:
            self.world.consumed = set()
            for past in range(step):  # what it had committed at an earlier start and not dropped
                await self._drop(past)
            for leased in [leased for leased in self.held.values() if leased.lease.groups[0].partition == step]:
                self.world.consumed.update(leased.lease.indices)
            await self._consume(step)
            if self.world.is_closed:
                return
            await self.think(0.2)
            self.world.commit(step)
            await self.think(0.1)
            leases = [leased.lease for leased in self.held.values() if leased.lease.groups[0].partition == step]
            try:
                await self.insist(lambda done=leases: self.queue.complete_marks(done))
            except StaleToken:
                self.world.counts["marks refused"] += 1
            await self._drop(step)

    async def _consume(self, step: int) -> None:
        """Until all rows of the step have come to an end or are held here."""
        closing = asyncio.ensure_future(self.world.closed(step))
        while not closing.done():
            wanted = step if self.is_first else None
            leasing = asyncio.ensure_future(self.insist(lambda s=wanted: self.queue.lease("train", Want(partition=s))))
            waiting = [leasing] if self.is_first else [leasing, closing]  # the queue says when a step that it is asked for is over
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not leasing.done():
                leasing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await leasing
            elif (leased := leasing.result()) is None:
                self.is_first = False  # the step has ended: nothing more comes, unless it had been given back
                if self.world.is_closed:
                    return
            else:
                self.world.check_lease("train", leased, None, {"groups": 1})
                self.look_at(leased)
                await self._take(step, leased)
        self.is_first = True

    async def _take(self, step: int, leased: Leased) -> None:
        meta = leased.lease.groups[0]
        if meta.partition < step:
            await self._drop(meta.partition)
            return
        await self.filter_some(leased.lease.indices)
        if meta.group not in self.held:
            await self.think(0.1)
        if meta.partition == step:  # once more is no more, but a row of the group may have been lost with its unit, and be back
            self.world.consumed.update(leased.lease.indices)
        self.held[meta.group] = leased

    async def _drop(self, step: int) -> None:
        rows = [row for group, _ in self.plan.groups_of(step) if group in self.facts.metas for row in self.facts.rows(group)]
        self.facts.dropped.update(rows)
        await self.insist(lambda: self.queue.drop(rows))


class StreamTrainer(Trainer):
    """Acknowledges group by group: what was kept takes effect."""

    async def run(self) -> None:
        plan, rng = self.plan, self.rng
        while True:
            kind = rng.random()
            if plan.is_balanced:  # a round needs requests of all ranks, and enough for all, until the step has ended
                want = {"groups": rng.randint(1, 2), "partition": 0, "rank": int(self.name[-1])}
            elif kind < 0.6:
                want = {"groups": 1}
            elif kind < 0.8:
                want = {"rows": rng.randint(1, 6)}
            else:
                want = {"tokens": rng.randint(1, 30)}
            leased = await self.insist(lambda w=want: self.queue.lease("train", Want(**w)))
            if leased is None:
                if self.world.is_closed:
                    return
                await asyncio.sleep(0.1)
                continue
            self.world.check_lease("train", leased, None, want)
            self.look_at(leased)
            if rng.random() < plan.forgetting:
                self.queue.leases.held.pop(leased.lease.token, None)
                await asyncio.sleep(plan.lease_seconds * (0.5 + rng.random()))
            await self.think(0.2)
            await self.filter_some(leased.lease.indices)
            if rng.random() < plan.failing / 4:
                await self._give_back(leased)
                continue
            indices = np.array(leased.lease.indices, np.int64)
            stored = await self.insist(lambda at=leased.lease: self.queue.mark([at]))
            self.facts.train(indices[stored].tolist())

    async def _give_back(self, leased: Leased) -> None:
        error = f"{self.name} ran out of memory in its start {self.start_number}"
        for row in leased.lease.indices:
            self.facts.failures[row] += 1
            self.facts.errors[row].add(error)
        await self.insist(lambda: self.queue.fail(leased.lease, leased.lease.indices, error))


class Keeper(Loop):
    """Closes steps when the last row of theirs has come to an end, and drops what nobody wants any more."""

    async def run(self) -> None:
        world, facts = self.world, self.facts
        ended: set[int] = set()
        while True:
            await asyncio.sleep(0.2)
            ended = {step for step in ended if world.is_known_to_have_ended(step)}  # units without a disk may have died with it
            for step in range(min(self.plan.steps, world.version + 1)):
                if step not in ended and world.is_accounted(step):
                    world.close_step(step)
                    ended.add(step)
                    await self.insist(lambda s=step: self.queue.end_partition("train", s))
            if self.plan.is_balanced and world.has_fed and 0 not in ended:
                ended.add(0)
                await self.insist(lambda: self.queue.end_partition("train", 0))
            over = [g for g in sorted(facts.acknowledged) if g not in world.swept and all(map(world.has_ended, facts.rows(g)))]
            for group in over:
                if self.rng.random() < 0.8:
                    rows = facts.rows(group)
                    facts.dropped.update(rows)
                    await self.insist(lambda r=rows: self.queue.drop(r))
                    world.swept.add(group)
            await self._drop_some()
            if world.may_close and not world.is_closed and self.rng.random() < 0.5:
                await self.insist(self.queue.close)
                world.is_closed = True

    async def _drop_some(self) -> None:
        """Rows that have failed, out of groups that are still in use."""
        facts = self.facts
        out = [row for row in sorted({*facts.dead, *facts.filtered}) if row not in facts.dropped and self.rng.random() < 0.2]
        if out:
            facts.dropped.update(out)
            await self.insist(lambda: self.queue.drop(out))
