"""The order of the prompts: known from seed and position alone."""

from __future__ import annotations

import pytest

from asyncflow.data.order import SeededOrder

ITEMS = [f"item {i}" for i in range(7)]


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    taken = SeededOrder(ITEMS, seed=0).take(21)
    epochs = [taken[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(epoch) == ITEMS for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("position", [0, 1, 6, 7, 8, 20])
def test_a_run_resumes_from_its_position(position: int) -> None:
    whole = SeededOrder(ITEMS, seed=5).take(30)
    resumed = SeededOrder(ITEMS, seed=5, position=position)
    assert resumed.take(30 - position) == whole[position:]
    assert resumed.position == 30


def test_it_does_not_matter_how_many_are_taken_at_once() -> None:
    order = SeededOrder(ITEMS, seed=1)
    assert [item for count in (3, 0, 1, 9, 7) for item in order.take(count)] == SeededOrder(ITEMS, seed=1).take(20)


def test_the_seed_decides_the_order() -> None:
    assert SeededOrder(ITEMS, seed=1).take(7) == SeededOrder(ITEMS, seed=1).take(7)
    assert SeededOrder(ITEMS, seed=1).take(7) != SeededOrder(ITEMS, seed=2).take(7)


def test_what_is_pushed_comes_first_and_moves_nothing() -> None:
    order, plain = SeededOrder(ITEMS, seed=1), SeededOrder(ITEMS, seed=1).take(6)
    assert order.take(2) == plain[:2]
    order.push(["x", "y"])
    order.push(["z"])
    assert order.take(2) == ["x", "y"] and order.position == 2
    assert order.take(3) == ["z", *plain[2:4]]
    assert order.take(2) == plain[4:] and order.position == 6


def test_what_is_put_back_comes_before_what_was_pushed() -> None:
    order = SeededOrder([0, 1, 2], seed=1)
    first = order.take(2)
    order.push([8, 9])
    order.put_back(first)
    assert order.take(4) == [*first, 8, 9] and order.position == 2
    assert [*first, *order.take(1)] == SeededOrder([0, 1, 2], seed=1).take(3)


def test_without_items_of_its_own_an_order_has_what_was_pushed() -> None:
    order: SeededOrder[int] = SeededOrder([], 0)
    order.push([1, 2])
    assert order.has(2) and not order.has(3) and order.take(2) == [1, 2] and order.num_pushed == 2
    assert SeededOrder([1], 0).has(100)


@pytest.mark.parametrize("taken_before", [0, 2, 3, 5, 8])
def test_what_was_pushed_keeps_its_place_in_a_run_that_resumes_from_before(taken_before: int) -> None:
    """It is pushed again at the start, and comes where it came the first time, what was put back before it."""
    whole, placed = SeededOrder(ITEMS, seed=1), []
    expected = whole.take(3)
    for pushed in (["x", "y"], ["z"]):
        whole.put_back([expected.pop()])
        placed.append((pushed, whole.next_place))
        whole.push(*placed[-1])
        expected += whole.take(4)
    resumed = SeededOrder(ITEMS, seed=1)
    for pushed, after in placed:
        resumed.push(pushed, after)
    assert [*resumed.take(taken_before), *resumed.take(len(expected) - taken_before)] == expected
    assert [each for each in expected if each in "xyz"] == ["x", "y", "z"] and expected.index("x") == 3
