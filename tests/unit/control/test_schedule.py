"""Every mode, as a table of what it lets happen when."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest

from asyncflow.control import SCHEDULES
from asyncflow.control.modes import NEVER, SubStep
from asyncflow.control.schedule import Schedule
from asyncflow.registry import build
from asyncflow.types import Interval, UserError
from tests.builders import Unmade


@dataclass
class Moment(Unmade):
    """A progress that says what it was told to say."""

    committed: int = 0
    done: frozenset[tuple[str, int]] = frozenset()
    waiting: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    num_ready: int = 0

    def is_done(self, task: str, step: int) -> bool:
        return (task, step) in self.done

    def task_before(self, task: str) -> str:
        return {"reference": "reward", "reward": "rollout"}.get(task, "reference")


@dataclass
class Workers:
    """A fleet: so many workers, so many of them changing, and some that have just begun."""

    count: int = 4
    num_installing: int = 0
    num_beginning: int = 0
    step_seconds: float | None = None
    install_seconds: float | None = None
    called_for: int = -1
    generating: dict[str, int] = field(init=False)
    installing: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.generating = {f"rollout/{i}": 0 for i in range(self.count)}
        beginning = range(self.count, self.count + self.num_beginning)
        self.installing = {f"rollout/{i}": 1 for i in (*range(self.num_installing), *beginning)}


MODES: list[tuple[str, dict[str, Any]]] = [
    ("synchronous", {}),
    ("periodic", {}),
    ("delayed", {}),
    ("sub_step", {}),
    ("bounded", {"max_staleness": 1}),
    ("bounded", {"max_staleness": 4}),
    ("bounded", {"max_staleness": 2, "membership": "first_come"}),
]
every_mode = pytest.mark.parametrize(
    ("name", "options"), MODES, ids=[f"{name}{'-'.join(map(str, o.values()))}" for name, o in MODES]
)


def named(name: str, **options: Any) -> Schedule:
    made: Schedule = build("schedule", name, options, SCHEDULES)
    return made


def test_every_mode_is_in_the_tables() -> None:
    assert {name for name, _ in MODES} == set(SCHEDULES)


@every_mode
def test_no_version_is_older_than_the_schedule_says_and_none_is_from_the_future(name: str, options: dict[str, Any]) -> None:
    schedule = named(name, **options)
    for step in range(20):
        interval = schedule.interval(step)
        assert max(0, step - schedule.max_staleness) <= interval.low <= min(interval.high, step)
        assert interval.high <= step or (schedule.membership == "first_come" and interval.high == NEVER)


@pytest.mark.parametrize(
    ("name", "options", "staleness", "in_flight", "of_steps_0_1_7"),
    [
        ("synchronous", {}, 0, False, [(0, 0), (1, 1), (7, 7)]),
        ("periodic", {}, 0, False, [(0, 0), (1, 1), (7, 7)]),
        ("delayed", {}, 1, False, [(0, 0), (0, 0), (6, 6)]),
        ("sub_step", {}, 1, False, [(0, 0), (0, 1), (6, 7)]),
        ("bounded", {}, 1, True, [(0, 0), (0, 1), (6, 7)]),
        ("bounded", {"max_staleness": 3}, 3, True, [(0, 0), (0, 1), (4, 7)]),
        ("bounded", {"max_staleness": 3, "membership": "first_come"}, 3, True, [(0, NEVER), (0, NEVER), (4, NEVER)]),
    ],
)
def test_the_versions_that_may_generate_a_step(
    name: str, options: dict[str, Any], staleness: int, in_flight: bool, of_steps_0_1_7: list[tuple[int, int]]
) -> None:
    schedule = named(name, **options)
    assert [schedule.interval(step) for step in (0, 1, 7)] == [Interval(*each) for each in of_steps_0_1_7]
    assert (schedule.max_staleness, schedule.installs_in_flight) == (staleness, in_flight)
    assert schedule.membership == options.get("membership", "strict")
    assert schedule.is_streamed == (name != "synchronous") == schedule.may_start("train", 1, Moment()), "with nothing done"


@every_mode
def test_prompts_lie_ready_one_step_ahead_of_those_that_may_be_generated(name: str, options: dict[str, Any]) -> None:
    schedule, progress = named(name, **options), Moment(committed=3)
    admitted = [step for step in range(20) if schedule.may_admit(step, progress)]
    may_be_generated = [step for step in range(20) if 3 in schedule.interval(step) or schedule.interval(step).high < 3]
    assert admitted == [*may_be_generated, may_be_generated[-1] + 1]


@every_mode
def test_a_task_starts_with_the_first_group_or_with_the_whole_batch(name: str, options: dict[str, Any]) -> None:
    schedule, is_synchronous = named(name, **options), name == "synchronous"
    tasks = ("reward", "reference", "train")
    none, generated = Moment(done=frozenset({("reference", 1)})), Moment(done=frozenset({("rollout", 2)}))
    scored, referred = (
        Moment(done=generated.done | {(task, 2) for task in more}) for more in (["reward"], ["reward", "reference"])
    )
    for moment, of_one_at_a_time in (
        (none, (False, False, False)),
        (generated, (True, False, False)),
        (scored, (True, True, False)),
        (referred, (True, True, True)),
    ):
        expected = of_one_at_a_time if is_synchronous else (True, True, True)
        assert tuple(schedule.may_start(task, 2, moment) for task in tasks) == expected


@pytest.mark.parametrize("name", ["periodic", "synchronous"])
@pytest.mark.parametrize("kind", ["waiting", "held"])
def test_new_weights_wait_for_the_responses_that_they_may_not_make(name: str, kind: str) -> None:
    moment = Moment(**{kind: (3, 4)})
    assert [named(name).may_install(version, moment, Workers()) for version in (3, 4, 5)] == [True, False, False]
    assert named(name).may_install(4, Moment(**{kind: (4,)}), Workers())


@pytest.mark.parametrize(("name", "options"), [mode for mode in MODES if mode[0] not in ("synchronous", "periodic")])
def test_elsewhere_a_worker_waits_only_until_nobody_else_need_take_them(name: str, options: dict[str, Any]) -> None:
    schedule = named(name, **options)
    for waiting, held, expected in (((), (3,), True), ((3,), (), False), ((4,), (3,), True), ((2, 9), (), False)):
        assert schedule.may_install(4, Moment(waiting=waiting, held=held), Workers()) is expected


# -- sub_step -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "step_seconds", "install_seconds", "k"),
    [
        (4, None, None, 1),
        (4, 10.0, None, 1),
        (4, None, 1.0, 1),
        (4, 10.0, 1.0, 1),  # 4 x 1 s fit into one step
        (4, 10.0, 2.5, 1),
        (4, 10.0, 2.6, 2),
        (4, 10.0, 6.0, 3),
        (4, 10.0, 60.0, 3),  # never all of them
        (64, 10.0, 1.0, 7),
        (2, 1.0, 60.0, 1),
        (1, 1.0, 60.0, 1),
        (0, 1.0, 60.0, 1),
    ],
)
def test_as_many_change_at_once_as_it_takes_for_all_to_change_within_a_step(
    count: int, step_seconds: float | None, install_seconds: float | None, k: int
) -> None:
    assert SubStep().at_once(Workers(count, step_seconds=step_seconds, install_seconds=install_seconds)) == k


@pytest.mark.parametrize(
    ("num_installing", "num_ready", "may"),
    [(0, 0, True), (0, 8, True), (1, 7, False), (1, 8, True), (2, 8, False), (3, 99, False)],
)
def test_workers_change_in_turn_while_the_others_keep_training_supplied(num_installing: int, num_ready: int, may: bool) -> None:
    schedule, fleet = SubStep(max_installing=2, watermark_rows=8), Workers(4, num_installing)
    assert schedule.may_install(1, Moment(num_ready=num_ready), fleet) is may
    assert not schedule.may_install(1, Moment(waiting=(0,), num_ready=num_ready), fleet)


@pytest.mark.parametrize(("called_for", "may"), [(0, False), (1, True), (2, False)])
def test_all_change_at_once_to_a_version_that_is_called_for(called_for: int, may: bool) -> None:
    schedule, fleet = SubStep(max_installing=1, watermark_rows=8), Workers(4, 3, called_for=called_for)
    assert schedule.may_install(1, Moment(), fleet) is may
    assert not schedule.may_install(1, Moment(waiting=(0,)), fleet)  # only version 0 may make them


@pytest.mark.parametrize(("num_installing", "may"), [(0, True), (1, True), (2, False)])
def test_those_that_have_just_begun_are_not_among_those_that_change(num_installing: int, may: bool) -> None:
    schedule, fleet = SubStep(max_installing=2), Workers(4, num_installing, num_beginning=3)
    assert schedule.may_install(1, Moment(num_ready=1 if num_installing else 0), fleet) is may


def test_a_k_that_starves_is_said_once_and_with_what_it_would_take(caplog: pytest.LogCaptureFixture) -> None:
    schedule = SubStep(max_installing=1)
    with caplog.at_level(logging.WARNING):
        assert schedule.at_once(Workers(step_seconds=10.0, install_seconds=2.5)) == 1 and not caplog.records
        assert schedule.at_once(Workers(step_seconds=10.0, install_seconds=6.0)) == 1
        assert schedule.at_once(Workers(step_seconds=10.0, install_seconds=7.0)) == 1
    (record,) = caplog.records
    for words in ("schedule.max_installing=1 starves", "6.00 s", "10.00 s", "3 of 4 workers"):
        assert words in record.getMessage()


@every_mode
def test_only_sub_step_keeps_groups_for_the_newest_version(name: str, options: dict[str, Any]) -> None:
    assert named(name, **options).num_newest(10, 4, Moment(committed=5)) == (4 if name == "sub_step" else 0)


def test_part_of_a_step_is_kept_while_rollout_is_a_step_ahead() -> None:
    schedule = SubStep(newest_share=0.4)
    kept = [
        schedule.num_newest(10, 2, moment)
        for moment in (
            Moment(),  # nothing has been trained: it is not known yet who waits for whom
            Moment(committed=1, held=(1,) * 9),  # most of the step before is there, but not enough of it
            Moment(committed=2, waiting=(2,) * 2, held=(2,) * 6),
            Moment(committed=3, waiting=(4,) * 20),  # that one is generated, and only the next is not
            Moment(committed=4, waiting=(3,) * 3, held=(4,) * 6),
        )
    ]
    assert kept == [0, 0, 4, 4, 0]


@pytest.mark.parametrize(("share", "groups", "count"), [(0.0, 10, 0), (0.1, 10, 1), (1 / 3, 128, 43), (0.9, 2, 1), (0.4, 1, 0)])
def test_at_least_the_share_is_kept_and_never_all(share: float, groups: int, count: int) -> None:
    assert SubStep(newest_share=share).num_newest(groups, 4, Moment(committed=1)) == count


# -- what is refused ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("sub_step", {"max_installing": 0}, "schedule.max_installing is 0, .*: set it to 1 or more"),
        ("sub_step", {"watermark_rows": -1}, "schedule.watermark_rows must be 0 or more"),
        ("sub_step", {"newest_share": 1.0}, "schedule.newest_share must be 0 or more and less than 1"),
        ("sub_step", {"newest_share": -0.1}, "schedule.newest_share must be 0 or more and less than 1"),
        ("bounded", {"max_staleness": 0}, "without any it is schedule=periodic"),
        ("bounded", {"membership": "fair"}, 'must be strict or first_come, not "fair"'),
    ],
)
def test_impossible_options_are_refused_in_a_sentence(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        named(name, **options)
