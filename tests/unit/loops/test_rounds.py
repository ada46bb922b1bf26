"""What a trainer works on, by a real queue and ledger: the groups of its step, or those that come first, in rounds."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncflow.algorithms.grpo import GRPO
from asyncflow.control.ledger import Consumed, Ledger, LedgerService, TrainedGroup, Update, UpdatePlan
from asyncflow.control.modes import NEVER, Bounded, Synchronous
from asyncflow.control.progress_view import ProgressView
from asyncflow.control.schedule import Schedule
from asyncflow.control.signal import Signal
from asyncflow.engines.base import MicroBatch, MicroBatchResult, OptimResult, Response
from asyncflow.loops.algorithm1 import update
from asyncflow.loops.context import LoopContext
from asyncflow.loops.rounds import PreparedGroup, Round, Rounds
from asyncflow.loops.samples import Prompt, Shape, admission, outputs, schema
from asyncflow.loops.taking import Taking
from asyncflow.loops.training_batches import left_out
from asyncflow.telemetry.batches import StepLogs
from asyncflow.telemetry.metrics import GroupFigures
from asyncflow.telemetry.spans import Recorder, Span
from asyncflow.telemetry.tokens import TokenLog, TrainedTokens
from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.controller import TaskEvents
from asyncflow.transfer_queue.leases import Want
from asyncflow.transfer_queue.queue import TransferQueue
from asyncflow.transfer_queue.schema import Schema
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.types import Advantages, GroupMeta, Ragged, RunError, ScoredGroup
from tests.builders import loop_turns, scored

BITS = 1


class World:
    """Steps of two groups of one row, begun by version 0; rollout is done by hand."""

    def __init__(self, schedule: Schedule, lease_seconds: float, **ranks: Any) -> None:
        self.schedule, self.ledger = schedule, Ledger(BITS, updates=UpdatePlan(**ranks), max_staleness=schedule.max_staleness)
        events = {"rollout": TaskEvents(on_done=self._done)}
        self.queue = TransferQueue(self._schema(lease_seconds), [MemoryStorage()], events=events)
        progress = ProgressView(self.ledger, self.queue.controllers)
        self.service = LedgerService(self.ledger, schedule, progress, Signal(), self._end_step)
        self.client = self.queue.client()
        self.taking = Taking("train", self.queue.client(), self.service, schedule, lambda handed: len(handed.lease.indices))
        self.put_aside = self.taking._put_aside
        self.taker: asyncio.Task[None]

    def context(self, shape: Shape | None = None, client: TransferQueueClient | None = None) -> LoopContext:
        """A trainer's, without versions."""
        nobodys: Any = None
        recorder = Recorder("trainer/0", lambda: 0.0, lambda span: None)
        return LoopContext(client or self.client, self.service, nobodys, self.schedule, shape or SHAPE, recorder)

    def _schema(self, lease_seconds: float) -> Schema:
        """Only training's leases expire."""
        declared = schema(BITS, 30.0, 2)
        tasks = (msgspec.structs.replace(t, lease_seconds=lease_seconds if t.name == "train" else 30.0) for t in declared.tasks)
        return Schema(declared.declared, tuple(tasks), BITS)

    def _done(self, rows: list[int]) -> None:
        self.service.done("rollout", rows)

    def _end_step(self, task: str, step: int) -> None:
        self.ending = asyncio.ensure_future(self.queue.client().end_partition(task, step))

    async def admit(self, num_steps: int, begun: Mapping[int, int] | None = None, each: int = 2) -> None:
        """`begun`: groups that an older version has begun, or none (NEVER). `each`: groups of a step."""
        metas = [GroupMeta(group, 1, group // each, self.schedule.interval(group // each)) for group in range(each * num_steps)]
        await self.service.open(metas)
        await self.client.put(metas, admission(metas, [Prompt(np.arange(2), {})] * len(metas), [1.0] * len(metas)))
        leased = await self.client.lease("rollout", Want(groups=99))
        assert leased is not None
        self.rollout = leased.lease
        for group in range(each * num_steps):
            if (version := (begun or {}).get(group, 0)) != NEVER:
                self.ledger.begun([group], version)

    async def complete(self, *groups: int) -> None:
        for group in groups:
            response = Response(0, np.arange(2), -np.ones(2, np.float32), np.array([(0, 0)], np.int64), "stop")
            (is_stored,) = await self.client.complete(self.rollout, outputs(group, [scored(group << BITS, response, 0.0)]))
            assert is_stored
            await loop_turns()

    async def commit(self) -> dict[str, int]:
        """Commit step 0. Returns the states of the rows for training, when what was trained has been dropped."""
        await self.service.commit(0, [Update(1.0, 1.0, 1, False)] * self.ledger._updates.num_updates)
        await loop_turns(20)
        return self.queue.controllers["train"].table.counts()

    def training(self, step: int, order: list[int]) -> asyncio.Task[None]:
        """Consumes what it is given until the step is over, notes it, and commits."""

        async def run() -> None:
            trained: list[TrainedGroup] = []
            for number in itertools.count():
                groups = await self.service.next_round(step, 0, number, trained)
                if groups is None:
                    break
                order.extend(each.group for each in groups)
                trained = [TrainedGroup(*consumed(each.group << BITS)) for each in groups]
            await self.service.commit(step, [Update(1.0, 1.0, 1, False)])

        return asyncio.create_task(run())


@contextlib.asynccontextmanager
async def a_world(schedule: Schedule, *, lease_seconds: float = 30.0, **ranks: Any) -> AsyncIterator[World]:
    world = World(schedule, lease_seconds, **ranks)
    async with world.queue.running():
        await loop_turns()
        world.taker = asyncio.create_task(world.taking.run())
        yield world
        world.taker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await world.taker


def consumed(row: int) -> tuple[Consumed, GroupFigures]:
    ones = np.ones(1, np.int64)
    return Consumed([row], [], 2, True), GroupFigures(
        2, ones.astype(np.float32), ones, ones.astype(np.uint8), ones, ones, 0.5, 2, 4, 4, {}
    )


async def test_strictly_a_step_is_given_its_own_groups_as_they_come() -> None:
    async with a_world(Bounded(max_staleness=2)) as world:
        await world.admit(2)
        order: list[int] = []
        training = world.training(0, order)
        await world.complete(3, 1)
        assert order == [1]
        await world.complete(0)
        await asyncio.wait_for(training, 5)
        assert order == [1, 0] and world.put_aside == {}
        world.training(1, order)
        await loop_turns()
        assert order == [1, 0, 3]


async def test_where_the_first_may_come_first_a_later_group_takes_the_place_of_a_slow_one() -> None:
    async with a_world(Bounded(max_staleness=2, membership="first_come")) as world:
        await world.admit(3)
        orders: list[list[int]] = [[], [], []]
        training = world.training(0, orders[0])
        await world.complete(0, 5)  # 5, of step 2, is due with 1 by then: neither may wait longer
        assert orders[0] == [0, 5]
        await asyncio.wait_for(training, 5)
        training = world.training(1, orders[1])
        await world.complete(4)
        assert orders[1] == [4]
        await world.complete(2)
        await asyncio.wait_for(training, 5)
        training = world.training(2, orders[2])
        await world.complete(1, 3)
        await asyncio.wait_for(training, 5)
        assert orders[1:] == [[4, 2], [1, 3]] and world.ledger.missing() == [] and world.put_aside == {}


async def test_one_that_comes_too_early_is_put_aside_and_is_first_in_its_own_step() -> None:
    async with a_world(Bounded(max_staleness=1, membership="first_come")) as world:
        await world.admit(2, begun={0: -1, 1: -1})  # step 1 would be too late for them
        orders: list[list[int]] = [[], []]
        training = world.training(0, orders[0])
        await world.complete(2)
        assert orders[0] == [] and [*world.put_aside] == [2]
        await world.complete(0, 1)
        await asyncio.wait_for(training, 5)
        assert orders[0] == [0, 1] and [*world.put_aside] == [2]
        training = world.training(1, orders[1])
        await world.complete(3)
        await asyncio.wait_for(training, 5)
        assert orders[1] == [2, 3] and world.put_aside == {}


@pytest.mark.parametrize("times", [1, 2])
async def test_one_that_was_put_aside_and_delivered_again_is_trained_once_under_its_last_lease(times: int) -> None:
    """Nobody renews here, so that what was put aside expires."""
    async with a_world(Bounded(max_staleness=1, membership="first_come"), lease_seconds=0.3) as world:
        await world.admit(2, begun={0: -1, 1: -1})
        orders: list[list[int]] = [[], []]
        training = world.training(0, orders[0])
        await world.complete(2)
        leases = {world.put_aside[2].lease.token}
        for _ in range(times):
            await asyncio.sleep(0.35)
            leases.add(world.put_aside[2].lease.token)
        assert len(leases) == times + 1
        await world.complete(0, 1)
        await asyncio.wait_for(training, 5)
        training = world.training(1, orders[1])
        await loop_turns()
        assert orders[1] == [2]
        await world.complete(3)
        await asyncio.wait_for(training, 5)  # which acknowledges the leases: under an earlier one it could not
        assert orders == [[0, 1], [2, 3]] and world.put_aside == {}


async def test_one_that_is_delivered_again_when_it_may_come_first_is_no_longer_put_aside() -> None:
    async with a_world(Bounded(max_staleness=1, membership="first_come"), lease_seconds=0.3) as world:
        await world.admit(2, begun={0: NEVER, 1: -1})
        orders: list[list[int]] = [[], []]
        training = world.training(0, orders[0])
        await world.complete(2)
        assert orders[0] == [] and [*world.put_aside] == [2]
        world.ledger.begun([0], 0)
        await asyncio.sleep(0.35)
        assert orders[0] == [2] and world.put_aside == {}
        await world.complete(1)
        await asyncio.wait_for(training, 5)
        training = world.training(1, orders[1])
        await world.complete(0, 3)
        await asyncio.wait_for(training, 5)
        assert orders == [[2, 1], [0, 3]]


SHAPE = Shape(2, 1, BITS, 0, 1.0, 8, rows_per_micro_batch=1)


class Ranks:
    """Data-parallel ranks that train a step of two groups of one row; what each of them has trained, round by round."""

    def __init__(self, world: World, count: int, shape: Shape = SHAPE) -> None:
        self.world, self.shape, self.trained = world, shape, [list[list[int]]() for _ in range(count)]
        self.clients = [world.queue.client() for _ in range(count)]
        self.ranks = [asyncio.create_task(self._train(rank)) for rank in range(count)]
        self.barrier = asyncio.Barrier(count)
        self.told: list[Span] = []
        clock = partial(next, itertools.count(0.0))  # the loop's stands still while something is done
        self.spans = Recorder("trainer/0", clock, self.told.append, "cpu")

    async def _train(self, rank: int) -> None:
        rounds = Rounds(replace(self.world.context(self.shape, self.clients[rank]), spans=self.spans), GRPO(), rank, 0)
        async with rounds:
            async for current in rounds.of(0):
                with rounds.computing(current):
                    await self.barrier.wait()  # as a collective would make them
                self.trained[rank].append([work.leased.lease.groups[0].group for work in current.works])
                assert len(current.micro_batches) == len(current.works)
                rounds.trained(current, [MicroBatchResult(0.5, 2, 4) for _ in current.micro_batches], StepLogs())


async def test_ranks_train_at_the_same_time_and_one_without_data_takes_part_with_nothing() -> None:
    async with a_world(Bounded(max_staleness=2), num_ranks=2) as world:
        await world.admit(2)
        ranks = Ranks(world, 2)
        await world.complete(0)
        assert ranks.trained == [[], []]  # the other one could still get group 1
        await world.complete(1)
        await asyncio.wait_for(asyncio.gather(*ranks.ranks), 5)
        assert sorted(group for rank in ranks.trained for current in rank for group in current) == [0, 1]
        assert [len(rank) for rank in ranks.trained] == [1, 1]
        assert world.ledger.totals(0).sequences == 2 and (await world.commit())["leased"] == 0


async def test_what_is_left_of_a_step_is_trained_although_it_does_not_fill_a_round() -> None:
    async with a_world(Bounded(max_staleness=2), num_ranks=3) as world:
        await world.admit(1)
        ranks = Ranks(world, 3)
        await world.complete(1, 0)
        await asyncio.wait_for(asyncio.gather(*ranks.ranks), 5)
        assert sorted(map(len, (current for rank in ranks.trained for current in rank))) == [0, 1, 1]


async def test_no_more_is_taken_than_ranks_have_asked_for_and_may_choose_from() -> None:
    """What is not taken lies ready: schedules look at how much that is."""
    for num_ranks, taken in ((1, 2), (2, 8)):  # two rounds; for several ranks two more, to choose among
        async with a_world(Bounded(max_staleness=2), num_ranks=num_ranks) as world:
            await world.admit(1, each=12)
            await world.complete(*range(12))
            counts = world.queue.controllers["train"].table.counts
            assert counts()["leased"] == 0
            rounds = [[world.service.next_round(0, rank, number, []) for number in range(2)] for rank in range(num_ranks)]
            given = await asyncio.wait_for(asyncio.gather(*(each for of_rank in rounds for each in of_rank)), 5)
            assert sorted(one.group for groups in given for one in groups or ()) == list(range(2 * num_ranks))
            await loop_turns()
            assert counts()["leased"] == taken


async def test_a_group_that_is_delivered_again_is_trained_once() -> None:
    """Nobody renews here, so that the lease expires while the first rank waits for the other's group."""
    async with a_world(Bounded(max_staleness=2), num_ranks=2, lease_seconds=0.3) as world:
        await world.admit(1)
        ranks = Ranks(world, 2)
        await world.complete(0)
        await asyncio.sleep(0.8)
        assert ranks.trained == [[], []] and world.queue.controllers["train"].table.counts()["redelivered"] >= 1
        await world.complete(1)
        await asyncio.wait_for(asyncio.gather(*ranks.ranks), 5)
        assert sorted(group for rank in ranks.trained for current in rank for group in current) == [0, 1]
        assert world.ledger.totals(0).sequences == 2
        table = await world.commit()
        assert (table["ready"], table["leased"]) == (0, 0)


async def test_a_group_of_a_round_that_is_not_full_is_trained_once_under_its_last_lease() -> None:
    async with a_world(Bounded(max_staleness=2), groups_per_round=2, lease_seconds=0.3) as world:
        await world.admit(1)
        ranks = Ranks(world, 1)
        await world.complete(0)
        await asyncio.sleep(0.8)
        assert ranks.trained == [[]] and world.queue.controllers["train"].table.counts()["redelivered"] >= 1
        await world.complete(1)
        await asyncio.wait_for(asyncio.gather(*ranks.ranks), 5)
        assert ranks.trained == [[[0, 1]]] and world.ledger.totals(0).sequences == 2
        table = await world.commit()
        assert (table["ready"], table["leased"]) == (0, 0)


async def test_a_pipeline_is_given_several_groups_in_a_round() -> None:
    async with a_world(Bounded(max_staleness=2), groups_per_round=2) as world:
        await world.admit(1)
        ranks = Ranks(world, 1)
        await world.complete(1)
        assert ranks.trained == [[]]
        await world.complete(0)
        await asyncio.wait_for(asyncio.gather(*ranks.ranks), 5)
        assert ranks.trained == [[[1, 0]]]
        (current,) = [span for span in ranks.told if span.task == "forward_backward"]
        assert (current.rows, current.group, current.is_lane) == (2, -1, True)
        assert [(s.group, s.rows, s.is_lane) for s in ranks.told if s.task == "train_group"] == [(1, 1, False), (0, 1, False)]


def a_work(group: int, *advantages: float) -> PreparedGroup:
    """A group whose rows are micro-batches of their own, of a prompt of two tokens and a response of two, one of them masked."""
    tokens, mask = Ragged.from_arrays([np.arange(2)], "int64"), Ragged.from_arrays([np.array([1, 0], np.uint8)], "uint8")
    log_probs, no_lag = Ragged.from_arrays([-np.ones(2, np.float32)], "float32"), np.zeros(1, np.int64)
    pieces = [
        MicroBatch(np.array([group << BITS | i]), np.arange(2), tokens, mask, log_probs, np.array([each], np.float32), no_lag)
        for i, each in enumerate(advantages)
    ]
    return PreparedGroup(None, np.array(advantages, np.float32), pieces, {})  # type: ignore[arg-type]


def test_a_turn_leaves_out_what_has_no_advantages() -> None:
    works = [a_work(0, 0.0, 0.5), a_work(1, 0.0, 0.0), a_work(2, -0.5, float("nan"))]
    computed = [piece.indices[0] for piece in Round.of(works, skips=False, is_checked=True).micro_batches]
    assert computed == [0, 1, 2, 3, 4, 5]
    for is_checked in (False, True):
        current = Round.of(works, skips=True, is_checked=is_checked)
        assert [piece.indices[0] for piece in current.micro_batches] == [1, 4, 5]
        results = current.results([MicroBatchResult(loss, 1, 4) for loss in (0.1, 0.4, 0.5)])
        assert [[result.loss_sum for result in of_work] for of_work in results] == [[0.0, 0.1], [0.0, 0.0], [0.4, 0.5]]
        assert [[result.is_computed for result in of_work] for of_work in results] == [[False, True], [False] * 2, [True] * 2]
        assert all(result.loss_tokens == 1 for of_work in results for result in of_work)  # all count in the normaliser


def test_of_a_run_without_advantages_one_is_computed_and_told_of_as_if_it_had_not_been() -> None:
    works = [a_work(1, 0.0, 0.0)]
    assert Round.of(works, skips=True, is_checked=False).micro_batches == []
    current = Round.of(works, skips=True, is_checked=True)
    assert current.micro_batches == works[0].micro_batches[:1]
    assert current.results([MicroBatchResult(-0.0, 1, 4, {"policy/entropy": 3.0})]) == [[left_out(works[0].micro_batches[0])] * 2]
    assert Round.of([], skips=True, is_checked=True).micro_batches == []  # a rank without data
    with pytest.raises(RunError, match=r"a loss of 0\.25, so leaving such rows out changes"):
        current.results([MicroBatchResult(0.25, 1, 4)])


class ScriptedAdvantages(GRPO):
    """The advantages of its rows, a row a group, in the order in which groups come."""

    def __init__(self, *advantages: float) -> None:
        super().__init__()
        self.left = iter(advantages)

    def advantages(self, group: ScoredGroup) -> Advantages:
        return np.full(1, next(self.left), np.float32)


class Computing:
    """An engine that says which rows it was given in each call."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.updates: list[int] = []

    async def forward_backward(self, pieces: Sequence[MicroBatch]) -> list[MicroBatchResult]:
        self.calls.append([int(index) >> BITS for piece in pieces for index in piece.indices])
        return [MicroBatchResult(0.0, 2, 4) for _ in pieces]

    async def optim_step(self, normaliser: int) -> OptimResult:
        self.updates.append(normaliser)
        return OptimResult(1.0, 0.5)

    async def discard(self) -> None: ...


@pytest.mark.parametrize(
    ("step", "advantages", "computed"),
    [
        (1, (1, 1, 1, 1), [[2], [3]]),
        (1, (1, 1, 0, 1), [[], [3]]),
        (1, (1, 1, 0, 0), [[], [], [2]]),  # the engine is to have a gradient
        (0, (0, 1), [[0], [1]]),  # of a run's first one a loss is looked for
    ],
)
async def test_what_is_left_out_is_computed_where_an_update_has_nothing_else(
    step: int, advantages: tuple[float, ...], computed: list[list[int]]
) -> None:
    shape = replace(SHAPE, skips_zero_advantages=True)
    async with a_world(Bounded(max_staleness=2)) as world:
        await world.admit(2)
        world.service.allow(2, 2)
        engine, objective = Computing(), ScriptedAdvantages(*advantages)
        await world.complete(*range(4))
        for each in range(step + 1):
            engine.calls.clear()
            async with Rounds(world.context(shape), objective, 0, each) as rounds:
                made = await update(rounds, engine, objective, engine.forward_backward, StepLogs())
            assert [one.normaliser for one in made] == [4]
            if each < step:
                await world.commit()
        assert engine.calls == computed and engine.updates == [4] * (step + 1)


async def test_a_group_that_is_too_old_ends_training_with_its_name() -> None:
    async with a_world(Bounded(max_staleness=2)) as world:
        await world.admit(2)
        await world.complete(0, 1)
        await asyncio.wait_for(world.training(0, []), 5)
        rounds = Rounds(replace(world.context(), schedule=Synchronous()), GRPO(), 0, 1)

        async def train() -> None:
            async with rounds:
                async for _ in rounds.of(0):
                    raise AssertionError("it was given out")

        training = asyncio.create_task(train())
        await world.complete(2)  # made by version 0, and step 1 is trained by a schedule that promises version 1
        with pytest.raises(ExceptionGroup) as failure:
            await asyncio.wait_for(training, 5)
        assert "row 4" in str(failure.value.exceptions[0])


async def test_when_the_run_stops_no_turn_is_waited_for() -> None:
    async with a_world(Bounded(max_staleness=2), num_ranks=2) as world:
        await world.admit(1)
        ranks = Ranks(world, 2)
        await world.complete(0)
        world.service.stop()
        world.queue.stop()
        await asyncio.wait_for(asyncio.gather(*ranks.ranks), 5)
        assert ranks.trained == [[], []]


@pytest.mark.parametrize("is_queue_first", [True, False])
async def test_taking_ends_when_the_run_stops_whichever_hears_of_it_first(is_queue_first: bool) -> None:
    async with a_world(Bounded(max_staleness=2)) as world:
        await world.admit(1)
        asking = asyncio.create_task(world.service.next_round(0, 0, 0, []))
        await loop_turns()
        if is_queue_first:
            world.queue.stop()
            await loop_turns()
            assert not world.taker.done()
        world.service.stop()
        await asyncio.wait_for(world.taker, 5)
        assert await asking is None


class Counted(GRPO):
    """Advantages that are made from the whole step: what each group has over the sum of all."""

    waits_for_batch = True

    def advantages(self, group: ScoredGroup) -> np.ndarray:
        return group.rewards + np.float32(1)

    def statistics(self, group: ScoredGroup, advantages: Advantages) -> list[float]:
        assert isinstance(advantages, np.ndarray)
        return [float(advantages.sum()), 1.0]

    def normalised(self, advantages: Advantages, sums: Sequence[float]) -> np.ndarray:
        assert isinstance(advantages, np.ndarray)
        return (advantages / sums[0] + sums[1]).astype(np.float32)


async def test_advantages_of_the_whole_batch_wait_for_its_last_group() -> None:
    async with a_world(Bounded(max_staleness=2)) as world:
        await world.admit(1)
        turns_of = Rounds(world.context(), Counted(), 0, 0)
        trained: list[float] = []
        told: list[TrainedTokens] = []
        log = TokenLog(told.append, lambda row: True)

        async def train() -> None:
            async with turns_of:
                async for current in turns_of.of(0):
                    trained.extend(current.micro_batches[0].advantages.tolist())
                    turns_of.trained(current, [MicroBatchResult(0.5, 2, 4)], log)

        training = asyncio.create_task(train())
        await world.complete(1)
        assert trained == []
        await world.complete(0)
        await asyncio.wait_for(training, 5)
        assert trained == [2.5, 2.5]  # 1 / (1 + 1) + 2 groups
        nobodys: Any = None
        await log.step(0, nobodys)
        assert [row.advantage for row in told] == [2.5, 2.5]  # as they were trained
        assert world.ledger.step_state(0).sums() == [2.0, 2.0]


async def test_each_epoch_trains_each_mini_batch_once_from_what_is_held() -> None:
    shape = replace(SHAPE, epochs=2, mini_batches=2)
    async with a_world(Bounded(max_staleness=2), epochs=2, mini_batches=2) as world:
        await world.admit(1)
        turns_of = Rounds(world.context(shape), GRPO(), 0, 0)
        trained: list[list[int]] = [[], [], [], []]
        asked: list[str] = []

        async def train() -> None:
            async with turns_of:
                for number in range(4):
                    async for current in turns_of.of(number):
                        trained[number] += [work.leased.lease.groups[0].group for work in current.works]
                        result = MicroBatchResult(0.5, 2, 4, {"mismatch/kl": 1.0, "policy/kl": 1.0})
                        turns_of.trained(current, [result], StepLogs())
                    assert await world.service.totals(0, "train", number) is not None

        world.service.on_consumed = lambda task, step, update, group, figures: asked.extend(sorted(figures.metrics))
        training = asyncio.create_task(train())
        await world.complete(1)  # of the second mini-batch: it is held, and others may be
        assert trained == [[], [], [], []]
        await world.complete(0)
        await asyncio.wait_for(training, 5)
        assert trained == [[0], [1], [0], [1]] and world.ledger.is_consumed(0, "train", 3)
        assert asked == ["mismatch/kl", *["policy/kl"] * 4]  # engines are compared under the version's own weights alone
        counts = await world.commit()
        assert counts["ready"] == counts["leased"] == 0  # dropped


@pytest.mark.parametrize("late", [0.0, 0.05])
async def test_of_a_step_that_is_kept_every_rank_takes_its_part(late: float) -> None:
    """All of it is there already, and the second rank comes to it later."""
    shape = replace(SHAPE, epochs=2)
    async with a_world(Bounded(max_staleness=2), num_ranks=2, epochs=2) as world:
        await world.admit(1, each=12)
        await world.complete(*range(12))
        trained: list[list[list[int]]] = [[], []]

        async def train(rank: int) -> None:
            await asyncio.sleep(rank * late)
            client = world.queue.client()
            turns_of = Rounds(world.context(shape, client), GRPO(), rank, 0)
            async with turns_of:
                for number in range(2):
                    async for current in turns_of.of(number):
                        trained[rank].append([work.leased.lease.groups[0].group for work in current.works])
                        turns_of.trained(current, [MicroBatchResult(0.5, 2, 4) for _ in current.works], StepLogs())
                    assert await world.service.totals(0, "train", number) is not None

        await asyncio.wait_for(asyncio.gather(*(train(rank) for rank in range(2))), 5)
        assert [len(of_rank) for of_rank in trained] == [12, 12]  # 6 rounds an epoch, each of a group of either rank
        assert all(len(current) == 1 for of_rank in trained for current in of_rank)


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_a_group_costs_one_message(num_ranks: int) -> None:
    """A rank and the driver exchange one for each round, and two more for each update: two rounds are asked for at the start, and
    two are answered with none at the end. The lease, and the report that a group is trained, are part of it."""
    calls: Counter[str] = Counter()
    async with a_world(Bounded(max_staleness=2), num_ranks=num_ranks) as world:
        await world.admit(1, each=12)
        for name in (name for name in dir(LedgerService) if getattr(getattr(LedgerService, name), "__remote__", False)):
            setattr(world.service, name, counted(calls, name, getattr(world.service, name)))
        ranks = Ranks(world, num_ranks)
        for rank in ranks.clients:
            for name in ("lease", "fetch", "read", "mark", "complete", "drop", "renew", "give_back"):
                setattr(rank, name, counted(calls, name, getattr(rank, name, None)))
        for group in range(12):
            await world.complete(group)
        await asyncio.wait_for(asyncio.gather(*ranks.ranks), 5)
    num_rounds = 12 // num_ranks
    assert [len(of_rank) for of_rank in ranks.trained] == [num_rounds] * num_ranks
    assert calls == {"next_round": num_ranks * (num_rounds + 2)}


def counted(calls: Counter[str], name: str, method: Any) -> Any:
    """The method, whose calls are counted."""

    def call(*arguments: Any, **named: Any) -> Any:
        calls[name] += 1
        return method(*arguments, **named)

    return call
