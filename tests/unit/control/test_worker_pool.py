"""Who joins a run and who leaves it."""

from __future__ import annotations

import pytest

from asyncflow.control.worker_pool import WorkerPool


def names(*numbers: int) -> list[str]:
    return [f"rollout/{number}" for number in numbers]


def test_those_that_came_last_leave_and_the_first_stay() -> None:
    crew = WorkerPool(1)
    assert crew.resize(4) == (names(1, 2, 3), [])
    assert crew.resize(2) == ([], names(2, 3))
    assert crew.members == crew.working == names(0, 1) and crew.leaving == set(names(2, 3))
    assert crew.resize(2) == ([], [])


def test_a_name_is_free_when_who_had_it_has_left() -> None:
    crew = WorkerPool(3)
    crew.resize(1)
    assert crew.resize(2) == (names(3), [])
    crew.left("rollout/1")
    assert crew.resize(4) == (names(1, 4), [])
    assert crew.members == names(0, 3, 1, 4)
    assert crew.resize(3) == ([], names(4))  # by when they came, not by name


@pytest.mark.parametrize(("size", "coming", "going"), [(3, names(3), names(1)), (2, [], names(1)), (1, [], names(1, 2))])
def test_who_was_given_up_does_not_count_and_leaves(size: int, coming: list[str], going: list[str]) -> None:
    crew = WorkerPool(3)
    crew.given_up.add("rollout/1")
    assert crew.working == names(0, 2)
    assert crew.resize(size) == (coming, going)
    assert crew.given_up == set() and len(crew.working) == size and crew.leaving == set(going)


def test_those_that_work_have_places_in_the_order_in_which_they_came() -> None:
    crew = WorkerPool(3)
    crew.given_up.add("rollout/1")
    crew.resize(3)
    assert crew.members == names(0, 2, 3) and [crew.place(name) for name in crew.members] == [0, 1, 2]
    crew.given_up.add("rollout/0")
    assert [crew.place(name) for name in names(2, 3)] == [0, 1]
    crew.resize(1)
    assert crew.place("rollout/2") == 0 and crew.place("rollout/3") == 1  # it leaves, and may still ask


def test_who_could_not_be_started_is_no_member() -> None:
    crew = WorkerPool(1)
    coming, _ = crew.resize(3)
    crew.never_came(coming[1:])
    assert crew.members == names(0, 1)
    assert crew.resize(3) == (names(2), [])
