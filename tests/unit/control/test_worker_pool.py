"""Who joins a run and who leaves it."""

from __future__ import annotations

import pytest

from asyncflow.control.worker_pool import WorkerPool


def names(*numbers: int) -> list[str]:
    return [f"rollout/{number}" for number in numbers]


def test_those_that_came_last_leave_and_the_first_stay() -> None:
    workers = WorkerPool(1)
    assert workers.resize(4) == (names(1, 2, 3), [])
    assert workers.resize(2) == ([], names(2, 3))
    assert workers.members == workers.working == names(0, 1) and workers.leaving == set(names(2, 3))
    assert workers.resize(2) == ([], [])


def test_a_name_is_free_when_who_had_it_has_left() -> None:
    workers = WorkerPool(3)
    workers.resize(1)
    assert workers.resize(2) == (names(3), [])
    workers.left("rollout/1")
    assert workers.resize(4) == (names(1, 4), [])
    assert workers.members == names(0, 3, 1, 4)
    assert workers.resize(3) == ([], names(4))  # by when they came, not by name


@pytest.mark.parametrize(("size", "coming", "going"), [(3, names(3), names(1)), (2, [], names(1)), (1, [], names(1, 2))])
def test_a_worker_that_has_failed_does_not_count_and_leaves(size: int, coming: list[str], going: list[str]) -> None:
    workers = WorkerPool(3)
    workers.failed.add("rollout/1")
    assert workers.working == names(0, 2)
    assert workers.resize(size) == (coming, going)
    assert workers.failed == set() and len(workers.working) == size and workers.leaving == set(going)


def test_those_that_work_have_places_in_the_order_in_which_they_came() -> None:
    workers = WorkerPool(3)
    workers.failed.add("rollout/1")
    workers.resize(3)
    assert workers.members == names(0, 2, 3) and [workers.place(name) for name in workers.members] == [0, 1, 2]
    workers.failed.add("rollout/0")
    assert [workers.place(name) for name in names(2, 3)] == [0, 1]
    workers.resize(1)
    assert workers.place("rollout/2") == 0 and workers.place("rollout/3") == 1  # it leaves, and may still ask


def test_who_could_not_be_started_is_no_member() -> None:
    workers = WorkerPool(1)
    coming, _ = workers.resize(3)
    workers.never_came(coming[1:])
    assert workers.members == names(0, 1)
    assert workers.resize(3) == (names(2), [])


def test_guests_work_beside_the_members_and_are_not_resized() -> None:
    pool = WorkerPool(1)
    assert [pool.admit(), pool.admit()] == ["rollout/outside-0", "rollout/outside-1"]
    assert pool.working == ["rollout/0", "rollout/outside-0", "rollout/outside-1"]
    assert [pool.place(name) for name in pool.working] == [0, 1, 2]
    assert pool.resize(2) == (["rollout/1"], []) and pool.place("rollout/outside-0") == 2
    pool.dismiss("rollout/outside-0")
    assert pool.admit() == "rollout/outside-0" and pool.resize(1) == ([], ["rollout/1"])
