"""The books: what belongs to which step, and when it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from asyncflow.transfer_queue.leases import DeadRow
from asyncflow.types import GroupMeta, Interval
from asyncflow.workflows.ledger import Consumed, Ledger, LedgerService, StepTotals, Update
from asyncflow.workflows.periodic import Periodic
from asyncflow.workflows.signal import Signal
from asyncflow.workflows.synchronous import Synchronous

BITS = 2
UPDATE = Update(1.0, 1e-3, 10, False)


def meta(group: int, *, step: int = 0, size: int = 2, purpose: str = "train") -> GroupMeta:
    return GroupMeta(group, size, step, Interval(step, step), purpose)


def consumed(*rows: int, tokens: int = 5, is_finite: bool = True, empty: Iterable[int] = ()) -> Consumed:
    n = len(rows)
    counts = np.zeros(n, np.int64)
    rewards, truncated = np.zeros(n, np.float32), np.zeros(n, np.uint8)
    return Consumed(list(rows), list(empty), 3, rewards, counts, truncated, counts, counts, 0.5, tokens, 9, 9, {}, is_finite)


def dead(*rows: int) -> list[DeadRow]:
    return [DeadRow(row >> BITS, row, "why") for row in rows]


def test_a_step_closes_when_every_member_was_consumed_or_given_up() -> None:
    ledger = Ledger(BITS)
    ledger.open([meta(0), meta(1)])
    assert ledger.is_open(0) and ledger.closed() == []
    ledger.consume(0, consumed(0, 1, tokens=7))
    ledger.give_up(dead(4))
    with pytest.raises(ValueError, match="step 0 still waits for 1 rows, the first of them 5"):
        ledger.totals(0)
    assert ledger.closed() == []
    ledger.consume(0, consumed(5, tokens=4))
    assert ledger.closed() == [("train", 0)]
    assert ledger.totals(0) == StepTotals(0, tokens=11, sequences=3, dead=1, non_finite_rows=[])


def test_a_row_counts_once_however_often_it_is_given_up_or_consumed() -> None:
    ledger = Ledger(BITS)
    ledger.open([meta(0, size=3)])
    ledger.consume(0, consumed(0))
    ledger.give_up(dead(0, 1, 1))
    with pytest.raises(ValueError, match="row 0 is not an open member of step 0"):
        ledger.consume(0, consumed(0, 2))
    with pytest.raises(ValueError, match="row 1 is not"):
        ledger.consume(0, consumed(1))
    ledger.consume(0, consumed(2))
    assert ledger.totals(0) == StepTotals(0, 10, 2, 1, [])


def test_rows_of_another_step_and_of_no_step_are_refused() -> None:
    ledger = Ledger(BITS)
    ledger.open([meta(0)])
    ledger.open([meta(1, step=1)])
    with pytest.raises(ValueError, match="row 4 is not an open member of step 0"):
        ledger.consume(0, consumed(4))
    for question in (lambda: ledger.consume(7, consumed(0)), lambda: ledger.totals(7), lambda: ledger.consume_evaluation(0, [0])):
        with pytest.raises(ValueError, match="is not open"):
            question()
    ledger.generated([999])
    ledger.give_up(dead(999))
    assert ledger.unfinished(9) == 4


def test_a_step_is_opened_once() -> None:
    ledger = Ledger(BITS)
    ledger.open([meta(0), meta(9, purpose="eval")])
    with pytest.raises(ValueError, match="train step 0 is open already"):
        ledger.open([meta(1)])
    with pytest.raises(ValueError, match="eval step 0 is open already"):
        ledger.open([meta(8, purpose="eval")])


def test_rows_whose_loss_was_not_finite_are_named() -> None:
    ledger = Ledger(BITS)
    ledger.open([meta(0), meta(1)])
    ledger.consume(0, consumed(0, 1, is_finite=False))
    ledger.consume(0, consumed(4, 5))
    assert ledger.totals(0).non_finite_rows == [0, 1]


def test_a_row_without_a_token_to_train_on_is_no_response_of_the_mean() -> None:
    ledger = Ledger(BITS)
    ledger.open([meta(0)])
    ledger.consume(0, consumed(0, 1, empty=[1]))
    assert ledger.totals(0).sequences == 1


def test_steps_commit_in_order_and_once_closed() -> None:
    ledger = Ledger(BITS)
    for step in (0, 1):
        ledger.open([meta(step, step=step)])
    ledger.consume(1, consumed(4, 5))
    with pytest.raises(ValueError, match="step 1 cannot be committed after 0 steps"):
        ledger.commit(1)
    with pytest.raises(ValueError, match="still waits"):
        ledger.commit(0)
    ledger.consume(0, consumed(0, 1))
    assert ledger.commit(0).sequences == 2 and ledger.committed == 1
    assert not ledger.is_open(0)
    ledger.commit(1)
    assert ledger.committed == 2 and ledger.missing() == [] and ledger._book_of_group == {}


def test_what_has_no_response_yet_is_known_by_the_last_version_that_may_make_it() -> None:
    ledger = Ledger(BITS)
    ledger.open([meta(0)])
    ledger.open([meta(1, step=1, size=3)])
    ledger.open([GroupMeta(2, 1, 0, Interval(0, 2), "eval")])
    assert [ledger.unfinished(version) for version in (-1, 0, 1, 2)] == [0, 2, 5, 6]
    ledger.generated([0, 0])
    assert not ledger.is_generated(0)
    ledger.give_up(dead(1))
    assert ledger.is_generated(0) and ledger.unfinished(0) == 0 and ledger.unfinished(2) == 4
    assert not ledger.is_generated(5)


def test_what_is_waited_for_is_said_in_words() -> None:
    ledger = Ledger(BITS)
    ledger.open([meta(0), meta(9, purpose="eval")])
    ledger.generated([0])
    assert ledger.missing() == [
        "eval step 0: 2 rows without a response, 2 not consumed (first: 36)",
        "train step 0: 1 rows without a response, 2 not consumed (first: 0)",
    ]


class Service:
    """A ledger service, and what it told."""

    def __init__(self, schedule: Any = None) -> None:
        self.told: list[Any] = []
        self.ledger = Ledger(BITS)
        self.service = LedgerService(self.ledger, schedule or Periodic(), Signal(), lambda *step: self.told.append(("end", *step)))
        self.service.on_opened = lambda step: self.told.append(("opened", step))
        self.service.on_consumed = lambda step, group: self.told.append(("consumed", step, group.rows))
        self.service.on_committed = lambda totals, update: self.told.append(("committed", totals.step, update))


async def settled(task: asyncio.Task[Any]) -> bool:
    for _ in range(3):
        await asyncio.sleep(0)
    return task.done()


async def test_the_books_are_told_in_order_and_a_step_ends_once() -> None:
    books = Service()
    await books.service.open([meta(0), meta(9, purpose="eval")])
    await books.service.consume(0, consumed(0, 1))
    books.service.changed()
    assert await books.service.totals(0) == StepTotals(0, 5, 2, 0, [])
    await books.service.commit(0, UPDATE)
    assert books.told == [("opened", 0), ("consumed", 0, [0, 1]), ("end", "train", 0), ("committed", 0, UPDATE)]


async def test_a_step_of_which_nothing_is_left_ends_too() -> None:
    books = Service()
    await books.service.open([meta(0)])
    books.service.give_up(dead(0, 1))
    assert books.told == [("opened", 0), ("end", "train", 0)]
    assert await books.service.totals(0) == StepTotals(0, 0, 0, 2, [])


async def test_an_evaluation_ends_with_its_last_row_and_is_forgotten() -> None:
    books = Service()
    await books.service.open([meta(9, purpose="eval")])
    await books.service.consume_evaluation(0, [36])
    assert books.told == []
    books.service.give_up(dead(37))
    assert books.told == [("end", "eval", 0)] and books.ledger._books == {} and books.ledger._book_of_group == {}


async def test_prompts_are_admitted_up_to_the_limit_and_as_far_ahead_as_the_schedule_lets() -> None:
    books = Service()
    waiting = asyncio.create_task(books.service.may_admit(0))
    assert not await settled(waiting)
    books.service.limit = 3
    books.service.changed()
    assert await waiting is True
    assert await books.service.may_admit(1) is True
    ahead = asyncio.create_task(books.service.may_admit(2))
    assert not await settled(ahead)
    await books.service.open([meta(0)])
    await books.service.consume(0, consumed(0, 1))
    assert not await settled(ahead)
    await books.service.commit(0, UPDATE)
    assert await ahead is True


async def test_training_starts_when_the_schedule_lets_it() -> None:
    periodic, synchronous = Service(), Service(Synchronous())
    for books in (periodic, synchronous):
        waiting = asyncio.create_task(books.service.may_train(0))
        assert not await settled(waiting)
        await books.service.open([meta(0)])
        books.service.generated([0])
        assert await settled(waiting) == (books is periodic)
        books.service.generated([1])
        assert await settled(waiting) and waiting.result() is True


async def test_stopping_answers_everybody_who_waits_with_no() -> None:
    books = Service()
    asked = [books.service.may_admit(0), books.service.may_train(0)]
    waiting = [asyncio.create_task(question) for question in asked]
    assert not await settled(waiting[0])
    books.service.stop()
    assert await asyncio.gather(*waiting) == [False] * len(asked)
    assert await books.service.may_train(0) is False
    assert await books.service.totals(0) is None
