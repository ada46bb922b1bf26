"""The tasks between rollout and training, over a real queue and ledger: reward and reference."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from asyncflow.control.ledger import Ledger, LedgerService, TaskPlan
from asyncflow.control.modes import Periodic, Synchronous
from asyncflow.control.progress_view import ProgressView
from asyncflow.control.schedule import Schedule
from asyncflow.control.signal import Signal
from asyncflow.engines.base import Response
from asyncflow.loops.context import LoopContext, ResponseScoring
from asyncflow.loops.samples import Prompt, Shape, admission, outputs, schema
from asyncflow.loops.tasks import TaskWork, reference, reward, serve
from asyncflow.rewards.base import RewardFailure, Sample, Score
from asyncflow.telemetry.spans import Recorder, Span
from asyncflow.transfer_queue.client import Leased
from asyncflow.transfer_queue.controller import TaskEvents
from asyncflow.transfer_queue.leases import DeadRow, Want
from asyncflow.transfer_queue.queue import TransferQueue
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.types import Array, Batch, GroupMeta, Ragged
from tests import builders
from tests.builders import loop_turns

meta = partial(builders.meta, size=3)

BITS = 2
SHAPE = Shape(2, 3, BITS, 0, 1.0, 8, 2)


class World:
    """A queue in which rollout is done by hand."""

    def __init__(self, schedule: Schedule, task: str, *behind: str) -> None:
        self.schedule, self.task, self.dead, self.spans = schedule, task, list[DeadRow](), list[Span]()
        self.ledger = Ledger(BITS, TaskPlan(("rollout", task)))
        events = {each: TaskEvents(on_done=partial(self._done, each)) for each in ("rollout", task)}
        events[task] = replace(events[task], on_dead=self._rows_failed)
        self.queue = TransferQueue(schema(BITS, 30.0, 2, ("rollout", task, *behind)), [MemoryStorage()], events=events)
        signal, progress = Signal(), ProgressView(self.ledger, self.queue.controllers)
        self.service = LedgerService(self.ledger, schedule, progress, signal, lambda task, step: None)
        self.client = self.queue.client()
        self.recorder = Recorder(task, partial(next, itertools.count(0.0)), self.spans.append)

    def context(self) -> LoopContext:
        nobodys: Any = None
        return LoopContext(self.client, self.service, nobodys, self.schedule, SHAPE, self.recorder)

    def _done(self, task: str, rows: list[int]) -> None:
        self.service.done(task, rows)

    def _rows_failed(self, dead: list[DeadRow]) -> None:
        self.dead += dead
        self.service.fail(dead)

    async def admit(self, *metas: GroupMeta) -> None:
        await self.service.open(list(metas))
        prompts = [Prompt(np.arange(m.group + 1), {"answer": str(m.group)}) for m in metas]
        await self.client.put(list(metas), admission(metas, prompts, [1.0] * len(metas)))

    async def generate(self, *rows: int) -> None:
        leased = await self.client.lease("rollout", Want(groups=99))
        assert leased is not None
        for row in rows:
            spans = np.array([(0, 0)], np.int64)
            response = Response(row % 4, np.arange(1 + row % 4) + row, -np.ones(1 + row % 4, np.float32), spans, "stop")
            score = None if self.task == "reward" else 0.0
            await self.client.complete(leased.lease, outputs(row >> BITS, [builders.scored(row, response, score)]))
        await self.client.fail(leased.lease, [row for row in leased.lease.indices if row not in rows], "later")
        await loop_turns()

    async def column(self, name: str, *rows: int) -> Any:
        (batch,) = await self.client.read({0: np.array(rows)}, [name])
        return batch.columns[name]


@contextlib.asynccontextmanager
async def serving(
    task: str, work: TaskWork, schedule: Schedule | None = None, at_once: int = 1, behind: Sequence[str] = ()
) -> AsyncIterator[World]:
    world = World(schedule or Periodic(), task, *behind)
    async with world.queue.running():
        running = asyncio.create_task(serve(task, world.context(), work, at_once=at_once))
        await loop_turns()
        yield world
        assert not running.done()
        await world.client.close(task)
        world.service.stop()
        await asyncio.wait_for(running, 5)  # ends when the task is closed, or the run is stopping


def scored(kept: list[Mapping[str, Any]], fails: Mapping[str, int] | None = None) -> TaskWork:
    """The reward of a response is its length, after a number of failures by the response's text."""
    left = dict(fails or {})

    async def score(sample: Sample) -> Score:
        if left.get(sample.response, 0):
            left[sample.response] -= 1
            raise RewardFailure("raised", f"the grader's own bug with {sample.response}")
        return Score(float(len(sample.response.split())), ())

    return reward(ResponseScoring(score, decode, kept.append), SHAPE)


def decode(ids: Array) -> str:
    return " ".join(map(str, ids))


async def test_rewards_are_added_to_training_and_evaluation_row_by_row() -> None:
    kept: list[Mapping[str, Any]] = []
    async with serving("reward", scored(kept)) as world:
        await world.admit(meta(0), meta(7, size=2, topic="eval"))
        await world.generate(0, 1, 28)
        assert (await world.column("reward", 0, 1, 28)).tolist() == [1.0, 2.0, 1.0]
        assert not world.ledger.is_done("reward", 0)
        await world.generate(2, 29)
        assert (await world.column("reward", 2)).tolist() == [3.0] and world.ledger.is_done("reward", 0)
        for task, group in (("train", 0), ("eval", 7)):
            leased = await world.client.lease(task)
            assert leased is not None and leased.lease.groups[0].group == group
    lines = [line for line in kept if line["purpose"] == "train"]
    assert sorted((line["row"], line["prompt"], line["response"], line["reward"]) for line in lines) == [
        (0, "0", "0", 1.0), (1, "0", "1 2", 2.0), (2, "0", "2 3 4", 3.0),
    ]  # fmt: skip
    done = [span for span in world.spans if span.task == "reward"]
    assert sum(span.rows for span in done) == 5 and sum(span.tokens for span in done) == 1 + 2 + 3 + 1 + 2


async def test_a_reward_that_fails_fails_its_row_alone_after_it_was_tried_again() -> None:
    kept: list[Mapping[str, Any]] = []
    async with serving("reward", scored(kept, {"0": 1, "1 2": 2})) as world:
        await world.admit(meta(0))
        await world.generate(0, 1, 2)
        assert (await world.column("reward", 0, 2)).tolist() == [1.0, 3.0]
        assert world.dead == [DeadRow(0, 1, "no reward: the grader's own bug with 1 2")]
        assert world.ledger.is_done("reward", 0)
        leased = await world.client.lease("train")
        assert leased is not None and leased.lease.indices == [0, 2]
    assert sorted(line["row"] for line in kept) == [0, 2]


async def test_what_no_scorer_has_anything_to_say_about_is_left_out_and_not_tried_again() -> None:
    asked: list[str] = []

    async def score(sample: Sample) -> Score:
        asked.append(sample.response)
        if sample.response == "1 2":
            raise RewardFailure("skipped", "nothing to say")
        return Score(1.0, ())

    async with serving("reward", reward(ResponseScoring(score, decode, lambda line: None), SHAPE)) as world:
        await world.admit(meta(0))
        await world.generate(0, 1, 2)
        assert world.dead == [DeadRow(0, 1, "skipped: nothing to say")] and asked.count("1 2") == 1
        leased = await world.client.lease("train")
        assert leased is not None and leased.lease.indices == [0, 2]


@pytest.mark.parametrize("task", ["reference", "values"])
async def test_whoever_computes_a_group_in_pieces_sees_the_rows_that_training_will_see(task: str) -> None:
    may_skip = asyncio.Event()

    async def score(sample: Sample) -> Score:
        if sample.response == "1 2":
            await may_skip.wait()
            raise RewardFailure("skipped", "nothing to say")
        return Score(1.0, ())

    work = reward(ResponseScoring(score, decode, lambda line: None), SHAPE)
    async with serving("reward", work, behind=[task]) as world:
        await world.admit(meta(0))
        await world.generate(0, 1, 2)
        lease = asyncio.create_task(world.client.lease(task, Want(partition=0)))
        await loop_turns()
        assert not lease.done()  # its responses are there, and row 1 may leave it yet
        may_skip.set()
        leased = await asyncio.wait_for(lease, 5)
        assert leased is not None and leased.lease.indices == [0, 2]


@pytest.mark.parametrize("at_once", [1, 2, 3])
async def test_so_many_leases_are_worked_on_side_by_side(at_once: int) -> None:
    under_way: list[int] = []
    may_end = asyncio.Event()
    score = scored([])

    async def work(leased: Leased) -> tuple[Batch | None, Mapping[int, Exception]]:
        under_way.append(len(under_way) + 1)
        await may_end.wait()
        return await score(leased)

    async with serving("reward", work, at_once=at_once) as world:
        await world.admit(*(meta(group, size=2) for group in range(4)))
        rows = [group * 4 + sample for group in range(4) for sample in range(2)]
        await world.generate(*rows)
        assert under_way == list(range(1, at_once + 1))
        assert world.recorder.state[0] == "reward"
        may_end.set()
        await loop_turns()
        assert (await world.column("reward", *rows)).tolist() == [1.0, 2.0] * 4
        assert world.recorder.state[:2] == ("wait", "rows")
    lane = [span for span in world.spans if span.is_lane and span.task == "reward"]
    assert sum(span.rows for span in lane) == 8


async def test_a_group_of_which_all_rewards_fail_adds_nothing() -> None:
    async with serving("reward", scored([], {"0": 9, "1 2": 9, "2 3 4": 9})) as world:
        await world.admit(meta(0))
        await world.generate(0, 1, 2)
        assert sorted(letter.row for letter in world.dead) == [0, 1, 2]
        assert world.ledger.is_consumed(0)


@pytest.mark.parametrize("schedule", [Periodic(), Synchronous()], ids=["periodic", "synchronous"])
async def test_where_one_task_runs_at_a_time_it_waits_for_the_whole_step(schedule: Schedule) -> None:
    kept: list[Mapping[str, Any]] = []
    async with serving("reward", scored(kept), schedule) as world:
        await world.admit(meta(0))
        await world.generate(0)
        assert len(kept) == (0 if isinstance(schedule, Synchronous) else 1)
        await world.generate(1, 2)
        assert len(kept) == 3


async def test_an_evaluation_waits_for_nobody() -> None:
    kept: list[Mapping[str, Any]] = []
    async with serving("reward", scored(kept), Synchronous()) as world:
        await world.admit(meta(7, topic="eval"))
        await world.generate(28)
        assert len(kept) == 1


class Frozen:
    """Log-probs that tell which piece they were computed in."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []

    async def log_probs(self, prompt_ids: Array, response_ids: Ragged, target_ids: Ragged | None = None) -> Ragged:
        self.pieces.append([int(ids[0]) for ids in response_ids])
        return Ragged((response_ids.values + 100 * len(prompt_ids)).astype(np.float32), response_ids.offsets)

    async def close(self) -> None:
        pass


async def test_the_reference_is_computed_for_complete_training_groups_in_the_pieces_of_training() -> None:
    engine = Frozen()
    async with serving("reference", reference(engine, SHAPE)) as world:
        await world.admit(meta(1), meta(7, topic="eval"))
        await world.generate(4, 5)
        assert engine.pieces == []  # it takes whole groups
        await world.generate(6, 28, 29, 30)
        assert engine.pieces == [[4, 5], [6]]
        found = await world.column("ref_logprobs", 4, 5, 6)
        assert [row.tolist() for row in found] == [[204.0], [205.0, 206.0], [206.0, 207.0, 208.0]]
        assert world.ledger.is_done("reference", 0)
