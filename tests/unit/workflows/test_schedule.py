"""Every mode, as a table of what it lets happen when."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from asyncflow.registry import build
from asyncflow.types import Interval
from asyncflow.workflows import SCHEDULES
from asyncflow.workflows.schedule import Schedule


@dataclass
class Moment:
    """A progress that says what it was told to say."""

    committed: int = 0
    generated: frozenset[int] = frozenset()
    waiting: int = 0

    def is_generated(self, step: int) -> bool:
        return step in self.generated

    def unfinished(self, version: int) -> int:
        return self.waiting if version >= 3 else 0


@pytest.fixture(params=sorted(SCHEDULES))
def schedule(request: pytest.FixtureRequest) -> Schedule:
    made: Schedule = build("schedule", request.param, {}, SCHEDULES)
    return made


def named(name: str) -> Schedule:
    made: Schedule = build("schedule", name, {}, SCHEDULES)
    return made


def test_no_version_is_older_than_the_schedule_says_and_none_is_from_the_future(schedule: Schedule) -> None:
    for step in range(20):
        interval = schedule.interval(step)
        assert max(0, step - schedule.max_staleness) <= interval.low <= interval.high <= step


@pytest.mark.parametrize("name", ["periodic", "synchronous"])
def test_a_step_is_generated_by_its_own_version(name: str) -> None:
    assert [named(name).interval(step) for step in (0, 1, 7)] == [Interval(0, 0), Interval(1, 1), Interval(7, 7)]
    assert named(name).max_staleness == 0


@pytest.mark.parametrize("name", ["periodic", "synchronous"])
def test_prompts_lie_ready_one_step_ahead(name: str) -> None:
    assert [named(name).may_admit(step, Moment(committed=3)) for step in (3, 4, 5)] == [True, True, False]


def test_training_starts_with_the_first_group_or_with_the_whole_batch() -> None:
    empty, complete = Moment(generated=frozenset({1})), Moment(generated=frozenset({2}))
    assert named("periodic").may_train(2, empty)
    assert not named("synchronous").may_train(2, empty)
    assert named("synchronous").may_train(2, complete)


@pytest.mark.parametrize("name", ["periodic", "synchronous"])
def test_new_weights_wait_for_the_responses_that_they_may_not_make(name: str) -> None:
    assert not named(name).may_install(4, Moment(waiting=1))
    assert named(name).may_install(4, Moment(waiting=0))
    assert named(name).may_install(3, Moment(waiting=1))  # what waits may be made by version 3
