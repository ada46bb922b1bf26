"""The ledger: what belongs to which step, and when it is over."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.control import SCHEDULES
from asyncflow.control.ledger import (
    Consumed,
    Ledger,
    LedgerService,
    RoundGroup,
    StepTotals,
    TaskPlan,
    TrainedGroup,
    Update,
    UpdatePlan,
)
from asyncflow.control.ledger.step_tasks import ONE_MODEL
from asyncflow.control.modes import Periodic, Synchronous
from asyncflow.control.progress_view import ProgressView
from asyncflow.control.signal import Signal
from asyncflow.registry import build
from asyncflow.transfer_queue.controller import Handed
from asyncflow.transfer_queue.leases import DeadRow, Lease, Token
from asyncflow.types import CheckpointPlace, GroupMeta, Interval
from tests.builders import meta
from tests.depth import few

BITS = 2
UPDATE = Update(1.0, 1e-3, 10, False)


def consumed(*rows: int, tokens: int = 5, is_finite: bool = True, empty: Iterable[int] = ()) -> Consumed:
    return Consumed(list(rows), list(empty), tokens, is_finite)


NO_FIGURES: Any = None


def dead(*rows: int) -> list[DeadRow]:
    return [DeadRow(row >> BITS, row, "why") for row in rows]


def test_a_step_closes_when_every_member_was_consumed_or_has_failed() -> None:
    ledger = Ledger(BITS)
    ledger.open([meta(0), meta(1)])
    assert ledger.is_open(0) and not ledger.is_consumed(0)
    ledger.step_state(0).consume(consumed(0, 1, tokens=7))
    ledger.fail(dead(4))
    with pytest.raises(ValueError, match="step 0 still waits for 1 rows, the first of them 5"):
        ledger.totals(0)
    assert not ledger.is_consumed(0)
    ledger.step_state(0).consume(consumed(5, tokens=4))
    assert ledger.is_consumed(0)
    assert ledger.totals(0) == StepTotals(0, tokens=11, sequences=3, dead=1, non_finite_rows=[])


def test_totals_tell_that_nothing_of_an_update_was_computed() -> None:
    ledger = Ledger(BITS)
    ledger.open([meta(0), meta(1)])
    ledger.step_state(0).consume(msgspec.structs.replace(consumed(0, 1), is_left_out=True))
    ledger.step_state(0).consume(msgspec.structs.replace(consumed(4, 5), is_left_out=True))
    assert ledger.totals(0).is_left_out
    for step, is_left_out in enumerate(((True, False), (False, True)), 1):
        ledger.open([meta(2 * step, step=step), meta(2 * step + 1, step=step)])
        for group, each in zip((2 * step, 2 * step + 1), is_left_out, strict=True):
            rows = (group << BITS, group << BITS | 1)
            ledger.step_state(step).consume(msgspec.structs.replace(consumed(*rows), is_left_out=each))
        assert not ledger.totals(step).is_left_out


def test_a_row_counts_once_however_often_it_is_failed_or_consumed() -> None:
    ledger = Ledger(BITS)
    ledger.open([meta(0, size=3)])
    ledger.step_state(0).consume(consumed(0))
    ledger.fail(dead(0, 1, 1))
    with pytest.raises(ValueError, match="row 0 is not an open member of step 0"):
        ledger.step_state(0).consume(consumed(0, 2))
    with pytest.raises(ValueError, match="row 1 is not"):
        ledger.step_state(0).consume(consumed(1))
    ledger.step_state(0).consume(consumed(2))
    assert ledger.totals(0) == StepTotals(0, 10, 2, 1, [])


def test_rows_of_another_step_and_of_no_step_are_refused() -> None:
    ledger = Ledger(BITS)
    ledger.open([meta(0)])
    ledger.open([meta(1, step=1)])
    with pytest.raises(ValueError, match="row 4 is not an open member of step 0"):
        ledger.step_state(0).consume(consumed(4))
    for question in (
        lambda: ledger.step_state(7).consume(consumed(0)),
        lambda: ledger.totals(7),
        lambda: ledger.step_state(0, "eval").consume_evaluation([0]),
    ):
        with pytest.raises(ValueError, match="is not open"):
            question()
    ledger.done("rollout", [999])
    ledger.fail(dead(999))
    assert ledger.unfinished(9) == 4


def test_a_step_is_opened_once() -> None:
    ledger = Ledger(BITS)
    ledger.open([meta(0), meta(9, topic="eval")])
    with pytest.raises(ValueError, match="train step 0 is open already"):
        ledger.open([meta(1)])
    with pytest.raises(ValueError, match="eval step 0 is open already"):
        ledger.open([meta(8, topic="eval")])


def test_rows_whose_loss_was_not_finite_are_named() -> None:
    ledger = Ledger(BITS)
    ledger.open([meta(0), meta(1)])
    ledger.step_state(0).consume(consumed(0, 1, is_finite=False))
    ledger.step_state(0).consume(consumed(4, 5))
    assert ledger.totals(0).non_finite_rows == [0, 1]


def test_a_row_without_a_token_to_train_on_is_no_response_of_the_mean() -> None:
    ledger = Ledger(BITS)
    ledger.open([meta(0)])
    ledger.step_state(0).consume(consumed(0, 1, empty=[1]))
    assert ledger.totals(0).sequences == 1


def test_steps_commit_in_order_and_once_closed() -> None:
    ledger = Ledger(BITS)
    for step in (0, 1):
        ledger.open([meta(step, step=step)])
    ledger.step_state(1).consume(consumed(4, 5))
    with pytest.raises(ValueError, match="step 1 cannot be committed after 0 steps"):
        ledger.commit(1)
    with pytest.raises(ValueError, match="still waits"):
        ledger.commit(0)
    ledger.step_state(0).consume(consumed(0, 1))
    assert ledger.commit(0)[0].sequences == 2 and ledger.committed == 1
    assert not ledger.is_open(0)
    assert ledger.is_consumed(0) and ledger.totals(0).sequences == 2  # for a rank that asks when the first one has committed
    ledger.commit(1)
    assert ledger.committed == 2 and ledger.missing() == [] and ledger._step_of_group == {}


def test_what_has_no_response_yet_is_known_by_the_last_version_that_may_make_it() -> None:
    ledger = Ledger(BITS)
    ledger.open([meta(0)])
    ledger.open([meta(1, step=1, size=3)])
    ledger.open([GroupMeta(2, 1, 0, Interval(0, 2), "eval")])
    assert [ledger.unfinished(version) for version in (-1, 0, 1, 2)] == [0, 2, 5, 6]
    ledger.done("rollout", [0, 0])
    assert not ledger.is_done("rollout", 0)
    ledger.fail(dead(1))
    assert ledger.is_done("rollout", 0) and ledger.unfinished(0) == 0 and ledger.unfinished(2) == 4
    assert not ledger.is_done("rollout", 5)


def test_every_task_has_its_own_rows_left_and_follows_another() -> None:
    ledger = Ledger(BITS, TaskPlan(("rollout", "reward", "reference")))
    assert [ledger.tasks.task_before(task) for task in ("reward", "reference", "train")] == ["rollout", "reward", "reference"]
    assert Ledger(BITS).tasks.task_before("train") == "rollout"
    ledger.open([meta(0, size=3)])
    for task, rows in (("rollout", [0, 1]), ("reward", [0])):
        ledger.done(task, rows)
    ledger.fail(dead(2))
    assert [ledger.is_done(task, 0) for task in ledger.tasks.before] == [True, False, False]
    ledger.done("reward", [1])
    assert [ledger.is_done(task, 0) for task in ledger.tasks.before] == [True, True, False]
    ledger.step_state(0).consume(consumed(0, 1))
    ledger.commit(0)
    assert all(ledger.is_done(task, 0) for task in ledger.tasks.before)


def test_what_is_waited_for_is_said_in_words() -> None:
    ledger = Ledger(BITS)
    ledger.open([meta(0), meta(9, topic="eval")])
    ledger.done("rollout", [0])
    assert ledger.missing() == [
        "eval step 0: 2 rows without a response, 2 not consumed (first: 36)",
        "train step 0: 1 rows without a response, 2 not consumed (first: 0)",
    ]


# -- first_come: who is trained when ---------------------------------------------------------------------------------------------


def two_steps(max_staleness: int = 2) -> Ledger:
    """Groups 0 and 1 in step 0, 2 and 3 in step 1; all begun by version 0, in this order of completion: none."""
    ledger = Ledger(BITS, TaskPlan(("rollout", "reward")), max_staleness=max_staleness)
    ledger.open([meta(0), meta(1), meta(2, step=1), meta(3, step=1)])
    ledger.begun(range(4), 0)
    return ledger


def complete(ledger: Ledger, group: int) -> None:
    for task in ledger.tasks.before:
        ledger.done(task, [group << BITS, (group << BITS) + 1])


def test_a_group_of_the_step_is_its_member_and_one_of_an_earlier_step_is_not() -> None:
    ledger = two_steps()
    complete(ledger, 0)
    assert ledger.claim(0, 0) == 0 and ledger.claim(1, 0) is None


def test_a_complete_group_of_a_later_step_changes_places_with_the_one_begun_last() -> None:
    ledger = Ledger(BITS, max_staleness=2)
    ledger.open([*(meta(g) for g in range(3)), *(meta(g, step=1) for g in (3, 4, 5))])
    for group, version in ((0, 1), (1, 0), (2, 0), (3, 0)):
        ledger.begun([group], version)
    complete(ledger, 3)
    complete(ledger, 2)
    assert ledger.claim(0, 3) not in (None, 3)
    ledger.step_state(0).consume(consumed(12, 13))
    assert ledger.claim(1, 0) == 0 and ledger.claim(0, 1) is not None  # the later step has group 0 now
    ledger.step_state(0).consume(consumed(8, 9))
    assert not ledger.is_consumed(0)  # group 1 remains
    ledger.step_state(0).consume(consumed(4, 5))
    assert ledger.is_consumed(0) and ledger.totals(0).sequences == 6
    assert ledger.commit(0) and ledger.missing() == ["train step 1: 6 rows without a response, 6 not consumed (first: 0)"]


def test_all_of_what_a_task_has_yet_to_do_moves_along() -> None:
    ledger = two_steps()
    complete(ledger, 0)
    ledger.done("rollout", [4, 5])  # of group 1, which has no reward yet
    complete(ledger, 2)
    assert [ledger.is_done("rollout", step) for step in (0, 1)] == [True, False]
    assert ledger.claim(0, 2) is not None
    assert [ledger.is_done(task, 0) for task in ledger.tasks.before] == [True, True]
    ledger.step_state(0).consume(consumed(0, 1))
    ledger.step_state(0).consume(consumed(8, 9))
    ledger.commit(0)
    complete(ledger, 3)
    assert [ledger.is_done(task, 1) for task in ledger.tasks.before] == [True, False]  # it waits for the rewards of group 1
    ledger.done("reward", [4, 5])
    assert ledger.is_done("reward", 1)


@pytest.mark.parametrize(
    ("max_staleness", "begun", "is_granted"),
    [(1, {0: 0, 1: 0}, True), (0, {0: 0, 1: 0}, False), (1, {}, False), (1, {1: 0}, True)],
    ids=["in time", "too late for the next step", "not begun", "one is"],
)
def test_it_takes_the_place_only_of_a_begun_group_that_the_later_step_is_not_too_late_for(
    max_staleness: int, begun: dict[int, int], is_granted: bool
) -> None:
    ledger = Ledger(BITS, max_staleness=max_staleness)
    ledger.open([meta(0), meta(1), meta(2, step=1)])
    for group, version in {2: 0, **begun}.items():
        ledger.begun([group], version)
    complete(ledger, 2)
    assert (ledger.claim(0, 2) is not None) is is_granted


def test_a_group_that_has_been_begun_anew_is_as_old_as_its_first_beginning() -> None:
    ledger = Ledger(BITS, max_staleness=1)
    ledger.open([meta(0), meta(1, step=1), meta(2, step=2)])
    ledger.begun([0], 0)
    ledger.begun([0, 2], 1)  # a worker had died
    complete(ledger, 2)
    assert ledger.claim(0, 2) is None  # step 2 would be too late for group 0
    complete(ledger, 1)
    assert ledger.claim(0, 1) is not None


def test_a_step_that_waits_for_nothing_takes_nobody_in() -> None:
    ledger = two_steps()
    for group in (0, 1, 2):
        complete(ledger, group)
    assert ledger.claim(0, 2) is None


class FirstCome:
    """Workers of any speed and version, and a trainer that trains what comes first, as `members` has it."""

    def __init__(self, chance: random.Random, max_staleness: int, num_steps: int, num_groups: int) -> None:
        self.chance, self.max_staleness, self.num_steps, self.num_groups = chance, max_staleness, num_steps, num_groups
        self.ledger = Ledger(BITS, max_staleness=max_staleness)
        self.opened = 0
        self.to_begin: list[int] = []
        self.under_way: list[int] = []
        self.oldest: dict[int, int] = {}  # by group, the version that began it
        self.complete: list[int] = []
        self.alive: dict[int, list[int]] = {}  # by group, the rows that are not dead
        self.trained: dict[int, tuple[int, int]] = {}  # by group, the step and how stale it was

    def run(self) -> None:
        put_aside: list[int] = []
        for step in range(self.num_steps):
            candidates, put_aside = put_aside, []
            while not self.ledger.is_open(step) or not self.ledger.is_consumed(step):
                group = candidates.pop(0) if candidates else self.next_complete()
                if group is None:
                    continue
                if self.ledger.claim(step, group) is not None:
                    self.ledger.step_state(step).consume(consumed(*self.alive[group]))
                    assert group not in self.trained
                    self.trained[group] = step, step - self.oldest[group]
                else:
                    put_aside.append(group)
            self.ledger.commit(step)
            put_aside += candidates

    def next_complete(self) -> int | None:
        """What lies ready, after a while in which anything may happen."""
        for _ in range(self.chance.randrange(1, 4)):
            self.chance.choice([self.open, self.begin, self.begin, self.begin_anew, self.end, self.end])()
        return self.complete.pop(0) if self.complete and self.chance.random() < 0.8 else None

    def open(self) -> None:
        if self.opened < min(self.num_steps, self.ledger.committed + self.max_staleness + 2):
            first = self.opened * self.num_groups
            groups = range(first, first + self.num_groups)
            self.ledger.open([meta(group, step=self.opened) for group in groups])
            self.to_begin += groups
            self.opened += 1

    def begin(self) -> None:
        """By a worker that is as far behind as its group's interval lets it."""
        if not self.to_begin:
            return
        group = self.to_begin[min(self.chance.randrange(3), len(self.to_begin) - 1)]
        lowest = max(0, group // self.num_groups - self.max_staleness)
        if lowest <= self.ledger.committed:
            self.to_begin.remove(group)
            self.under_way.append(group)
            self.oldest[group] = self.chance.randint(lowest, self.ledger.committed)
            self.ledger.begun([group], self.oldest[group])

    def begin_anew(self) -> None:
        if self.under_way:
            self.ledger.begun([self.chance.choice(self.under_way)], self.ledger.committed)

    def end(self) -> None:
        if not self.under_way:
            return
        group = self.under_way.pop(self.chance.randrange(len(self.under_way)))
        rows = [group << BITS, (group << BITS) + 1]
        gone = [row for row in rows if self.chance.random() < 0.1]
        self.alive[group] = [row for row in rows if row not in gone]
        self.ledger.done("rollout", self.alive[group])
        self.ledger.fail(dead(*gone))
        if self.alive[group]:
            self.complete.append(group)


@settings(max_examples=few(60, 300), deadline=None)
@given(st.randoms(use_true_random=True), st.integers(0, 4), st.integers(1, 4))
def test_first_come_trains_every_group_once_in_time_and_as_many_in_each_step(
    chance: random.Random, max_staleness: int, num_groups: int
) -> None:
    num_steps = 6
    world = FirstCome(chance, max_staleness, num_steps, num_groups)
    world.run()
    assert world.opened == num_steps and world.ledger.missing() == []
    assert world.trained.keys() == {group for group, alive in world.alive.items() if alive}
    assert len(world.alive) == num_steps * num_groups  # nothing was begun in vain, and nothing left out
    assert all(0 <= staleness <= max_staleness for _, staleness in world.trained.values())
    lost = num_steps * num_groups - len(world.trained)
    of_steps = [sum(step == s for step, _ in world.trained.values()) for s in range(num_steps)]
    assert max(of_steps) <= num_groups and sum(num_groups - n for n in of_steps) == lost


def test_first_come_lets_others_pass_a_slow_group() -> None:
    """The property above would hold as well if nothing ever changed places."""
    passed = 0
    for seed in range(20):
        world = FirstCome(random.Random(seed), 3, 6, 3)
        world.run()
        passed += sum(step != group // 3 for group, (step, _) in world.trained.items())
    assert passed > 40


TWO_MODELS = TaskPlan(trained=("train", "critic"))


class Service:
    """A ledger service, and what it told."""

    def __init__(self, schedule: Any = None, tasks: TaskPlan = ONE_MODEL, **updates: int) -> None:
        self.told: list[Any] = []
        self.ledger = Ledger(BITS, tasks, UpdatePlan(**updates))
        progress = ProgressView(self.ledger, {})
        self.service = LedgerService(
            self.ledger, schedule or Periodic(), progress, Signal(), lambda *step: self.told.append(("end", *step))
        )
        self.told_of: list[asyncio.Task[Any]] = []
        self.service.on_opened = lambda step: self.told.append(("opened", step))
        self.service.on_consumed = lambda task, step, update, group, figures: self.told.append(("consumed", step, group.rows))
        self.service.on_committed = lambda task, totals, updates: self.told.append(("committed", totals[0].step, *updates))

    async def consume(self, step: int, group: Consumed, task: str = "train", update: int = 0) -> None:
        """A rank has trained a group, and asks for the update's first round, for which it does not wait."""
        trained = [TrainedGroup(group, NO_FIGURES)]
        self.told_of.append(asyncio.create_task(self.service.next_round(step, 0, 0, trained, task, update)))
        await settled(self.told_of[-1])

    def offer(self, group: int, tokens: int = 9, task: str = "train") -> None:
        """A complete group of step 0 has been leased."""
        lease = Lease(Token(task, "", group), [meta(group)], [rows_of(group)], [[0, 0]], [0])
        self.service.offer(0, task, Handed(lease, None), tokens)

    async def round_of(self, rank: int, number: int, task: str = "train", update: int = 0) -> list[int] | None:
        """A rank's groups of a round of step 0."""
        groups = await self.service.next_round(0, rank, number, [], task, update)
        return None if groups is None else [each.group for each in groups]


async def settled(task: asyncio.Task[Any]) -> bool:
    for _ in range(3):
        await asyncio.sleep(0)
    return task.done()


async def test_the_ledger_is_told_in_order() -> None:
    made = Service()
    await made.service.open([meta(0), meta(9, topic="eval")])
    made.service.done("rollout", [0, 1, 36, 37])
    await made.consume(0, consumed(0, 1))
    made.service.changed()
    assert await made.service.totals(0) == StepTotals(0, 5, 2, 0, [])
    await made.service.commit(0, [UPDATE])
    assert made.told == [("opened", 0), ("consumed", 0, [0, 1]), ("committed", 0, UPDATE)]


@pytest.mark.parametrize("first", ["train", "critic"])
async def test_a_checkpoint_that_is_asked_for_is_of_a_step_that_no_model_has_committed(first: str) -> None:
    made = Service(tasks=TWO_MODELS)
    (second,) = set(TWO_MODELS.trained) - {first}
    await made.service.open([meta(step, step) for step in range(3)])
    made.service.fail(dead(0, 1, 4, 5, 8, 9))
    assert made.service.ask_for_checkpoint() == 1
    assert await made.service.commit(0, [UPDATE], first) == "disk"
    assert made.service.ask_for_checkpoint() == 2  # one model has committed step 0 without it
    assert await made.service.commit(0, [UPDATE], second) == "disk"
    assert [await made.service.commit(1, [UPDATE], task) for task in (second, first)] == ["disk", "disk"]
    assert [await made.service.commit(2, [UPDATE], task) for task in (first, second)] == [None, None]


async def test_a_step_of_which_nothing_is_left_ends_too() -> None:
    made = Service()
    await made.service.open([meta(0)])
    made.service.fail(dead(0, 1))
    assert made.told == [("opened", 0)] and made.ledger.is_consumed(0)
    assert await made.service.totals(0) == StepTotals(0, 0, 0, 2, [])


async def test_a_step_waits_for_evaluations_whose_weights_its_own_would_displace() -> None:
    made = Service()
    await made.service.open([meta(0), meta(9, topic="eval")])
    made.service.done("rollout", [0, 1, 36])
    await made.consume(0, consumed(0, 1))
    waiting = asyncio.create_task(made.service.totals(0))
    assert not await settled(waiting)
    made.service.done("rollout", [37])
    assert await waiting == StepTotals(0, 5, 2, 0, [])


async def test_rounds_are_given_out_when_every_rank_has_a_group_or_nothing_is_left_to_wait_for() -> None:
    made = Service(num_ranks=2)
    await made.service.open([meta(group) for group in range(3)])
    first = [asyncio.create_task(made.round_of(rank, 0)) for rank in range(2)]
    made.offer(0)
    assert not await settled(first[0]) and not await settled(first[1])
    made.offer(1)
    assert [await current for current in first] == [[0], [1]]
    second = asyncio.create_task(made.round_of(0, 1))
    made.offer(2)
    assert not await settled(second)  # group 2 is all that is left, but rank 1 is not there yet
    assert await asyncio.wait_for(made.round_of(1, 1), 1) == []
    assert await second == [2]
    assert [await asyncio.wait_for(made.round_of(rank, 2), 1) for rank in range(2)] == [None, None]


async def test_a_rank_may_ask_for_the_round_after_the_next_and_is_handed_each_group_once() -> None:
    made = Service()
    await made.service.open([meta(group) for group in range(2)])
    asked = [asyncio.create_task(made.service.next_round(0, 0, number, [])) for number in range(3)]
    for group, task in enumerate(asked[:2]):
        assert not await settled(task)
        made.offer(group)
        (given,) = await task or ()
        assert given.group == group and given.handed is not None and given.handed.lease.groups == [meta(group)]
        assert await made.service.next_round(0, 0, group, []) == [RoundGroup(group, None)]
    assert await asked[2] is None and not made.ledger.is_consumed(0)
    assert made.told == [("opened", 0)]


async def test_a_group_that_has_failed_is_not_waited_for() -> None:
    made = Service(num_ranks=2)
    await made.service.open([meta(0), meta(1)])
    rounds = [asyncio.create_task(made.round_of(rank, 0)) for rank in range(2)]
    made.offer(0)
    assert not await settled(rounds[0])
    made.service.fail(dead(4, 5))
    assert [await asyncio.wait_for(current, 1) for current in rounds] == [[0], []]


async def test_a_pipeline_takes_several_groups_at_a_time() -> None:
    made = Service(groups_per_round=2)
    await made.service.open([meta(group) for group in range(3)])
    current = asyncio.create_task(made.round_of(0, 0))
    made.offer(1)
    assert not await settled(current)
    made.offer(2)
    assert await current == [1, 2]
    made.offer(0)
    assert await made.round_of(0, 1) == [0]


async def test_a_round_takes_the_groups_that_are_there_up_to_its_tokens_and_waits_for_none() -> None:
    made = Service(tokens_per_round=30)
    await made.service.open([meta(group) for group in range(9)])
    first, second = (asyncio.create_task(made.round_of(0, number)) for number in range(2))
    assert not await settled(first)
    made.offer(0, 10)  # the rank has nothing else to do
    assert await asyncio.wait_for(first, 1) == [0]
    made.offer(1, 10)
    assert not await settled(second)  # it trains its first round: more may come
    made.offer(2, 10)
    assert not await settled(second)
    made.offer(3, 10)  # the round is full
    assert await asyncio.wait_for(second, 1) == [1, 2, 3]
    third = asyncio.create_task(made.round_of(0, 2))
    made.offer(4, 10)
    made.offer(5, 25)  # has no room beside the other
    assert await asyncio.wait_for(third, 1) == [4]
    fourth = asyncio.create_task(made.round_of(0, 3))
    assert not await settled(fourth)
    fifth = asyncio.create_task(made.round_of(0, 4))  # it has trained the third round
    assert await asyncio.wait_for(fourth, 1) == [5]
    made.offer(6, 40)  # a group that is more than a round has one for itself
    assert await asyncio.wait_for(fifth, 1) == [6]
    last = asyncio.create_task(made.round_of(0, 5))
    made.offer(7, 10)
    assert not await settled(last)
    made.offer(8, 10)  # nothing is left
    assert await asyncio.wait_for(last, 1) == [7, 8]
    assert await asyncio.wait_for(made.round_of(0, 6), 1) is None


async def test_ranks_that_wait_for_a_round_each_get_what_they_have() -> None:
    made = Service(num_ranks=2, tokens_per_round=30)
    await made.service.open([meta(group) for group in range(8)])
    for group in range(3):
        made.offer(group, 10)  # of rank 0, 1 and 0
    asked = [[asyncio.create_task(made.round_of(rank, number)) for number in range(2)] for rank in range(2)]
    assert [await asyncio.wait_for(of_rank[0], 1) for of_rank in asked] == [[0, 2], [1]]
    made.offer(3, 10)  # of rank 1, which has fewer
    made.offer(4, 10)
    third = asyncio.create_task(made.round_of(0, 2))
    assert not await settled(asked[0][1])  # rank 1 still trains
    third_of_other = asyncio.create_task(made.round_of(1, 2))
    assert [await asyncio.wait_for(of_rank[1], 1) for of_rank in asked] == [[4], [3]]
    for task in (third, third_of_other):
        task.cancel()


def test_as_many_groups_are_taken_as_fill_the_rounds_that_were_asked_for() -> None:
    ledger = Ledger(BITS, updates=UpdatePlan(tokens_per_round=30))
    ledger.open([meta(group) for group in range(9)])
    state = ledger.step_state(0)
    assert not state.may_take()
    state.updates["train"][0].ask(0, 1)
    taken = 0
    while state.may_take():
        state.offer(taken, 9)
        taken += 1
    assert taken == 7  # 63 tokens for two rounds of 30
    assert ledger.offered("train") == 14 and ledger.offered("rollout") == 0
    state.give_out()
    assert ledger.offered("train") == 2  # three groups in each round


def test_a_step_is_under_way_from_its_first_round_until_it_is_trained_and_from_its_last_until_the_commit() -> None:
    ledger = Ledger(BITS)
    ledger.open([meta(0), meta(1)])
    state, seen = ledger.step_state(0), list[bool]()
    state.updates["train"][0].ask(0, 1)
    for group in range(2):
        seen.append(state.is_under_way("train"))  # it waits for a group
        state.offer(group, 9)
        state.give_out()
        seen.append(state.is_under_way("train"))
        state.consume(consumed(4 * group, 4 * group + 1))
    assert seen == [False, True, False, True] and state.is_under_way("train")


async def test_what_one_rank_was_told_all_are_also_when_the_run_stops() -> None:
    made = Service(num_ranks=2)
    await made.service.open([meta(0)])
    made.offer(0)
    first = asyncio.create_task(made.round_of(0, 0))
    assert not await settled(first)
    assert await made.round_of(1, 0) == []
    made.service.stop()
    assert await first == [0]
    assert await made.round_of(0, 1) is None
    made.service.done("rollout", [0, 1])
    await made.consume(0, consumed(0, 1))
    assert await made.service.totals(0) is None and await made.service.totals(0) is None

    made = Service(num_ranks=2)
    await made.service.open([meta(0)])
    made.service.done("rollout", [0, 1])
    await made.consume(0, consumed(0, 1))
    told = await made.service.totals(0)
    made.service.stop()
    assert told is not None and await made.service.totals(0) == told


async def test_the_groups_of_a_round_are_of_about_one_length() -> None:
    made = Service(num_ranks=2)
    await made.service.open([meta(group) for group in range(6)])
    for group, tokens in enumerate((100, 12, 10, 9, 11, 99)):  # of either rank in turn
        made.offer(group, tokens)
    rounds = []
    for number in range(3):
        rounds.append(await asyncio.gather(*(made.round_of(rank, number) for rank in range(2))))
    assert rounds == [[[0], [5]], [[4], [1]], [[2], [3]]]


async def test_a_group_that_is_delivered_again_is_not_trained_again() -> None:
    made = Service(num_ranks=2)
    await made.service.open([meta(0), meta(1)])
    state = made.ledger.step_state(0)
    assert state.offer(0, 9) is True and state.offer(0, 9) is False
    assert state.offer(7, 9) is False  # nobody knows it
    await made.consume(0, consumed(4, 5))
    assert state.offer(1, 9) is False  # it is in the sum already
    made.service.offer(3, "train", Handed(Lease(Token("train", "", 1), [meta(1)], [[4, 5]], [[1, 1]], [0]), None), 9)  # too late
    assert made.service._handed == {}


async def test_whether_a_step_is_trained_is_told_to_all_ranks_alike() -> None:
    made = Service(num_ranks=2)
    made.service.allow(2, 2)
    await made.service.open([meta(0)])
    assert await made.service.may_start("train", 0) is True
    late = asyncio.create_task(made.service.may_start("train", 1))
    assert not await settled(late)
    made.service.stop()
    assert await made.service.may_start("train", 0) is True  # the other rank
    assert await late is False
    await made.service.open([meta(1, step=1)])
    assert await made.service.may_start("train", 1) is False


async def test_an_evaluation_ends_with_its_last_row_and_is_forgotten() -> None:
    made = Service()
    await made.service.open([meta(9, topic="eval")])
    await made.service.consume_evaluation(0, [36])
    assert made.told == []
    made.service.fail(dead(37))
    assert made.told == [("end", "eval", 0)] and made.ledger._steps == {} and made.ledger._step_of_group == {}


async def test_prompts_are_admitted_up_to_the_limit_and_as_far_ahead_as_the_schedule_lets() -> None:
    made = Service()
    waiting = asyncio.create_task(made.service.may_admit(0))
    assert not await settled(waiting)
    made.service.allow(3, 3)
    assert await waiting is True
    assert await made.service.may_admit(1) is True
    ahead = asyncio.create_task(made.service.may_admit(2))
    assert not await settled(ahead)
    await made.service.open([meta(0)])
    await made.consume(0, consumed(0, 1))
    assert not await settled(ahead)
    await made.service.commit(0, [UPDATE])
    assert await ahead is True


async def test_a_run_that_is_driven_by_hand_generates_ahead_as_far_as_its_staleness_reaches() -> None:
    periodic, delayed = Service(), Service(build("schedule", "delayed", {}, SCHEDULES))
    for made in (periodic, delayed):
        assert not made.service.is_held  # nothing more is to come
        made.service.allow(1, 3)
        await made.service.open([meta(0)])
        made.service.done("rollout", [0, 1])
        ahead = asyncio.create_task(made.service.may_admit(1))
        assert await settled(ahead) == (made is delayed)
        await made.service.open([meta(1, step=1)])
        assert await made.service.may_start("train", 0) is True
        assert not made.service.is_held
        await made.consume(0, consumed(0, 1))
        await made.service.commit(0, [UPDATE])
        assert made.service.is_held
        held = asyncio.create_task(made.service.may_start("train", 1))
        assert not await settled(held)
        made.service.allow(2, 3)
        assert await settled(held) and not made.service.is_held
        made.service.stop()


async def test_a_group_that_changes_its_step_is_made_by_no_version_too_old_for_it() -> None:
    told: list[tuple[int, int]] = []
    made = Service(build("schedule", "bounded", {"max_staleness": 1, "membership": "first_come"}, SCHEDULES))
    made.ledger._max_staleness = 1
    made.service.on_displaced = lambda group, version: told.append((group, version))
    await made.service.open([meta(0), meta(1)])
    await made.service.open([meta(2, step=1), meta(3, step=1)])
    made.ledger.begun([0], 0)
    assert made.service.claim(0, 1) and told == []  # its own step's
    assert made.service.claim(0, 2) and told == [(0, 0)]  # step 1 takes what version 0 has made
    assert not made.service.claim(0, 3) and told == [(0, 0)]


async def test_training_starts_when_the_schedule_lets_it() -> None:
    periodic, synchronous = Service(), Service(Synchronous())
    for made in (periodic, synchronous):
        made.service.allow(1, 1)
        waiting = asyncio.create_task(made.service.may_start("train", 0))
        assert not await settled(waiting)
        await made.service.open([meta(0)])
        made.service.done("rollout", [0])
        assert await settled(waiting) == (made is periodic)
        made.service.done("rollout", [1])
        assert await settled(waiting) and waiting.result() is True


async def test_a_task_may_work_on_a_group_whose_step_is_over() -> None:
    """Where membership is first_come, a later step may have taken it."""
    made = Service()
    await made.service.open([meta(0)])
    await made.consume(0, consumed(0, 1))
    await made.service.commit(0, [UPDATE])
    assert await asyncio.wait_for(made.service.may_start("reward", 0), 1) is True
    ahead = asyncio.create_task(made.service.may_start("reward", 1))
    assert not await settled(ahead)
    await made.service.open([meta(1, step=1)])
    assert await ahead is True


async def test_stopping_answers_everybody_who_waits_with_no() -> None:
    made = Service()
    asked = [made.service.may_admit(0), made.service.may_start("train", 0)]
    waiting = [asyncio.create_task(question) for question in asked]
    assert not await settled(waiting[0])
    made.service.stop()
    assert await asyncio.gather(*waiting) == [False] * len(asked)
    assert await made.service.may_start("train", 0) is False
    assert await made.service.totals(0) is None


def test_a_ledger_that_begins_later_knows_what_its_open_steps_have_and_lack() -> None:
    ledger = Ledger(BITS, TaskPlan(("rollout", "reward")), first=3)
    assert ledger.committed == 3 and ledger.is_done("rollout", 2) and not ledger.is_done("rollout", 3)
    ledger.open([meta(7, step=3), meta(6, step=3)])
    ledger.open([meta(8, step=4)])
    ledger.open([meta(1 << 40, step=3, topic="eval")])
    assert ledger.groups() == {3: [6, 7], 4: [8]}
    rows = {group: range(group << BITS, (group << BITS) + 2) for group in (6, 7, 8)}
    ledger.done("rollout", rows[6])
    assert ledger.not_generated() == {*rows[6], *rows[7], *rows[8]}  # they are complete when they have a reward
    ledger.done("reward", rows[6])
    ledger.fail(dead(rows[7][0]))
    assert ledger.not_generated() == {rows[7][1], *rows[8]}
    ledger.step_state(3).consume(consumed(*rows[6], rows[7][1]))
    with pytest.raises(ValueError, match=r"is not open|cannot be committed"):
        ledger.commit(2)
    ledger.commit(3)
    assert ledger.committed == 4 and ledger.groups() == {4: [8]}


# -- several updates, several models ------------------------------------------------------------------------------------------


def rows_of(*groups: int) -> list[int]:
    return [row for group in groups for row in (group << BITS, (group << BITS) + 1)]


def test_a_step_is_cut_into_mini_batches_by_the_numbers_of_its_groups() -> None:
    ledger = Ledger(BITS, updates=UpdatePlan(epochs=2, mini_batches=2))
    ledger.open([meta(group) for group in (3, 0, 2, 1)])
    ledger.step_state(0).consume(consumed(*rows_of(0), tokens=3))
    with pytest.raises(ValueError, match="row 8 is not an open member"):
        ledger.step_state(0).consume(consumed(*rows_of(2)))  # of the second mini-batch
    ledger.step_state(0).consume(consumed(*rows_of(1), tokens=4))
    assert ledger.is_consumed(0) and not ledger.is_consumed(0, "train", 1)
    assert ledger.totals(0) == StepTotals(0, 7, 4, 0, [])
    for update, groups in ((1, (2, 3)), (2, (0, 1)), (3, (2, 3))):
        assert not ledger.is_consumed(0, "train", update)
        ledger.step_state(0).consume(consumed(*rows_of(*groups), tokens=10 * update), update=update)
    assert ledger.is_consumed(0, "train", 3)
    assert [totals.tokens for totals in ledger.commit(0)] == [7, 10, 20, 30] and ledger.committed == 1


def test_rows_that_have_failed_leave_every_update() -> None:
    ledger = Ledger(BITS, TaskPlan(trained=("train", "critic")), UpdatePlan(epochs=2))
    ledger.open([meta(0), meta(1)])
    ledger.fail(dead(0, 4, 5))
    for task in ("train", "critic"):
        for update in range(2):
            ledger.step_state(0).consume(consumed(1), task, update)
            assert ledger.totals(0, task, update) == StepTotals(0, 5, 1, 3, [])
    assert all(ledger.is_consumed(0, task, update) for task in ("train", "critic") for update in range(2))


def test_a_group_that_changes_its_step_changes_its_mini_batch() -> None:
    ledger = Ledger(BITS, updates=UpdatePlan(mini_batches=2, epochs=2), max_staleness=2)
    ledger.open([meta(0), meta(1)])
    ledger.open([meta(2, step=1), meta(3, step=1)])
    ledger.begun([1], 0)
    ledger.done("rollout", rows_of(2))
    assert ledger.claim(0, 2) == 1  # which was of step 0's second mini-batch, and is of step 1's first now
    for update in (1, 3):
        ledger.step_state(0).consume(consumed(*rows_of(2)), update=update)
    for update in (0, 2):
        ledger.step_state(1).consume(consumed(*rows_of(1)), update=update)
        ledger.step_state(0).consume(consumed(*rows_of(0)), update=update)
    assert ledger.is_consumed(0, "train", 3) and ledger.missing() == [
        "train step 1: 4 rows without a response, 2 not consumed (first: 12)"
    ]


def test_the_rows_of_several_models_are_kept_until_all_have_committed() -> None:
    ledger = Ledger(BITS, TaskPlan(("rollout", "values"), trained=("train", "critic"), by_step=("values",)))
    ledger.open([meta(0)])
    ledger.done("rollout", rows_of(0))
    assert ledger.not_generated() == set() and ledger.tasks.kept == ("rollout",)  # values are made again
    chosen = Ledger(BITS, TaskPlan(("rollout", "select", "reference"), chosen_by="select", num_members=1))
    assert chosen.tasks.kept == ("rollout", "reference")  # and members are chosen again
    assert ledger.ended() == []
    ledger.done("values", rows_of(0))
    assert ledger.ended() == [("values", 0)] and not ledger.is_consumed(0)
    ledger.step_state(0).consume(consumed(*rows_of(0)))
    assert ledger.ended() == [("values", 0)] and ledger.is_consumed(0)
    ledger.commit(0)
    assert ledger.committed == 1 and ledger.committed_by("critic") == 0 and ledger.is_open(0)
    with pytest.raises(ValueError, match="still waits for 2 rows"):
        ledger.commit(0, "critic")
    ledger.step_state(0).consume(consumed(*rows_of(0)), "critic")
    ledger.commit(0, "critic")
    assert ledger.committed_by("critic") == 1 and not ledger.is_open(0)


async def test_an_update_takes_turns_of_its_own_mini_batch_and_later_epochs_take_them_again() -> None:
    made = Service(epochs=2, mini_batches=2)
    await made.service.open([meta(group) for group in range(2)])
    made.service.done("rollout", rows_of(0, 1))
    made.offer(1)
    early = asyncio.create_task(made.round_of(0, 0))
    assert not await settled(early)  # group 1 is of the second mini-batch
    made.offer(0)
    assert await early == [0]
    for update, group in enumerate((0, 1, 0, 1)):
        if update:
            assert await made.round_of(0, 0, "train", update) == [group]
        await made.consume(0, consumed(*rows_of(group)), "train", update)
        assert await made.round_of(0, 1, "train", update) is None
        assert await made.service.totals(0, "train", update) is not None
    assert made.ledger.is_consumed(0, "train", 3)


async def test_a_step_is_not_updated_before_all_of_it_is_there() -> None:
    """So that a run which stops has made all of a step's updates, or none."""
    for is_stopped in (False, True):
        made = Service(mini_batches=2)
        await made.service.open([meta(0), meta(1)])
        made.service.done("rollout", rows_of(0, 1))
        made.offer(0)
        await made.consume(0, consumed(*rows_of(0)))
        first = asyncio.create_task(made.service.totals(0))
        assert not await settled(first)
        if is_stopped:
            made.service.stop()
            assert await first is None
            assert await made.round_of(0, 0, "train", 1) is None
            continue
        made.offer(1)
        assert not made.service.is_finishing
        assert await first is not None
        made.service.stop()  # too late: the step is made to its end
        finished = asyncio.create_task(made.service.finished())
        assert made.service.is_finishing and not await settled(finished)
        assert await made.round_of(0, 0, "train", 1) == [1]
        await made.consume(0, consumed(*rows_of(1)), "train", 1)
        assert await made.service.totals(0, "train", 1) is not None
        await made.service.commit(0, [UPDATE, UPDATE])
        await asyncio.wait_for(finished, 1)
        assert await made.service.totals(1) is None and not made.service.is_finishing


async def test_of_two_models_both_are_updated_or_none() -> None:
    made = Service(tasks=TWO_MODELS)
    await made.service.open([meta(0), meta(1, step=1)])
    made.service.done("rollout", rows_of(0, 1))
    made.offer(0)
    await made.consume(0, consumed(*rows_of(0)))
    policy = asyncio.create_task(made.service.totals(0))
    assert not await settled(policy)  # the critic has not got it
    made.offer(0, task="critic")
    assert await policy is not None
    await made.service.commit(0, [UPDATE])
    released = asyncio.create_task(made.service.released(0))
    assert not await settled(released)
    made.service.stop()
    assert await made.service.totals(1) is None  # the policy's next step is not made, but the critic ends this one
    assert await made.round_of(0, 0, "critic", 0) == [0]
    await made.consume(0, consumed(*rows_of(0)), "critic", 0)
    assert await made.service.totals(0, "critic", 0) is not None and made.service.is_finishing
    await made.service.commit(0, [UPDATE], "critic")
    await asyncio.wait_for(released, 1)
    assert not made.service.is_finishing
    assert await made.service.totals(1, "critic", 0) is None
    assert not [told for told in made.told if told[0] == "end"], "who trains hears of it from the rounds"


async def test_a_checkpoint_that_is_due_by_the_clock_is_of_one_step_for_all_models_and_ranks() -> None:
    """It is decided when the step's updates may be made, before any model has committed it."""
    made = Service(tasks=TWO_MODELS)
    due: CheckpointPlace | None = None
    made.service.checkpoint_due = lambda: due
    places: tuple[CheckpointPlace | None, ...] = (None, "disk", None, "memory", None)
    for step, due_at_first in enumerate(places):
        await made.service.open([meta(step, step=step)])
        made.service.done("rollout", rows_of(step))
        for task in ("train", "critic"):
            assert made.ledger.step_state(step).offer(step, 1, task)
            await made.consume(step, consumed(*rows_of(step)), task, 0)
        due = due_at_first
        assert await made.service.totals(step, "critic") is not None
        due = None if due else "disk"  # what the clock says later is of the next step
        assert await made.service.totals(step) is not None
        assert await made.service.commit(step, [UPDATE], "critic") == due_at_first
        assert await made.service.commit(step, [UPDATE]) == due_at_first
        assert await made.service.released(step) == await made.service.released(step) == due_at_first
        due = None


async def test_a_statistic_of_the_step_is_of_all_its_groups_and_knows_no_order() -> None:
    numbers = [[0.1, 1e16], [0.2, 1.0], [0.3, -1e16]]
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        made = Service(num_ranks=3)
        await made.service.open([meta(group) for group in range(4)])
        asked = []
        for group in order:
            asked.append(asyncio.create_task(made.service.statistics(0, "train", {group: numbers[group]})))
            assert not await settled(asked[0])
        made.service.fail(dead(*rows_of(3)))
        assert await asyncio.gather(*asked) == [[math.fsum([0.1, 0.2, 0.3]), 1.0]] * 3
    made = Service()
    await made.service.open([meta(0)])
    waiting = asyncio.create_task(made.service.statistics(0, "train", {}))
    made.service.stop()
    assert await waiting is None


async def test_what_is_read_before_it_is_trained_is_dealt_out_to_the_ranks_as_it_comes() -> None:
    made = Service(num_ranks=2)
    await made.service.open([meta(group) for group in range(3)])
    assert not made.ledger.step_state(0).may_take()
    first = asyncio.create_task(made.service.next_read(0, 0, 0, "train"))
    assert not await settled(first) and made.ledger.step_state(0).may_take()  # all of the step
    for group in (2, 0, 1):
        made.offer(group)
    assert not made.ledger.step_state(0).may_take()
    read = [await first, *(await asyncio.gather(*(made.service.next_read(0, *which, "train") for which in ((0, 1), (1, 0)))))]
    assert [handed.lease.groups[0].group for handed in read if handed is not None] == [2, 1, 0]
    assert [await asyncio.wait_for(made.service.next_read(0, *which, "train"), 1) for which in ((0, 2), (1, 1))] == [None] * 2
    assert await asyncio.gather(*(made.service.next_round(0, rank, 0, []) for rank in range(2))) == [
        [RoundGroup(2, None)], [RoundGroup(0, None)]
    ]  # fmt: skip
    made.service.stop()
    assert await made.service.next_read(5, 0, 0, "train") is None


async def test_what_one_rank_was_told_of_a_statistic_all_are_also_when_the_run_stops() -> None:
    async def begun(num_groups: int) -> Service:
        made = Service(num_ranks=2)
        await made.service.open([meta(group) for group in range(num_groups)])
        for group in range(2):
            made.offer(group)
        assert await asyncio.gather(*(made.round_of(rank, 0) for rank in range(2))) == [[0], [1]]
        return made

    made = await begun(2)
    first = asyncio.create_task(made.service.statistics(0, "train", {0: [1.0]}))
    assert not await settled(first)
    assert await made.service.statistics(0, "train", {1: [1.0]}) == [2.0]
    made.service.stop()
    assert await first == [2.0]  # the other rank, which would be waited for for ever

    made = await begun(3)
    first = asyncio.create_task(made.service.statistics(0, "train", {0: [1.0], 2: [1.0]}))
    assert not await settled(first)
    made.service.stop()
    assert await first is None
    assert await made.service.statistics(0, "train", {1: [1.0]}) is None  # it was on its way

    made = Service(tasks=TWO_MODELS)  # one model has begun its updates, so the other begins them, too
    await made.service.open([meta(0)])
    made.service.done("rollout", rows_of(0))
    for task in ("train", "critic"):
        made.offer(0, task=task)
    await made.consume(0, consumed(*rows_of(0)))
    assert await made.service.totals(0) is not None
    made.service.stop()
    assert await made.service.statistics(0, "critic", {0: [3.0]}) == [3.0]


async def test_no_more_is_taken_than_ranks_have_asked_for_but_where_a_step_has_several_updates() -> None:
    for num_ranks, epochs, expected in ((1, 1, [False, True, False]), (2, 1, [False, True, True]), (1, 2, [False, True, True])):
        made = Service(num_ranks=num_ranks, epochs=epochs)
        await made.service.open([meta(group) for group in range(9)])
        state, seen = made.ledger.step_state(0), []
        seen.append(state.may_take())
        for rank in range(num_ranks):
            state.updates["train"][0].ask(rank, 0)
        seen.append(state.may_take())
        made.offer(0)
        assert [*seen, state.may_take()] == expected
        taking = asyncio.create_task(made.service.may_take(0, "train"))
        assert await settled(taking) is expected[2]
        taking.cancel()
    ahead = asyncio.create_task(made.service.may_take(5, "train"))
    assert not await settled(ahead)  # of a step that is not open nothing is taken
    ahead.cancel()
