"""The ledger: what belongs to which step, and what is committed.

`Ledger` is pure; `LedgerService` is its face for the loops: it adds waiting, and decides nothing by itself.

A step is opened with its groups, its rows are generated, then consumed by training under leases that stay open, and it closes
when every member has been consumed or given up. The normaliser is an integer over the members that trained. Then the optimiser
steps, and the commit makes it final.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from asyncflow.transfer_queue.leases import DeadRow
from asyncflow.transport import remote
from asyncflow.types import GroupMeta
from asyncflow.workflows.schedule import Schedule
from asyncflow.workflows.signal import Signal


class Consumed(msgspec.Struct, frozen=True):
    """A group whose gradient has been added: R rows, the figures that metrics are made of, and its share of the normaliser."""

    rows: list[int]
    empty_rows: list[int]  # those of them without a token to train on: the mean over responses is not over these
    prompt_length: int
    rewards: np.ndarray  # float32 [R]
    response_lengths: np.ndarray  # int64 [R]
    truncated: np.ndarray  # uint8 [R]
    staleness: np.ndarray  # int64 [R], versions
    num_spans: np.ndarray  # int64 [R], policy versions that made the response
    loss_sum: float
    loss_tokens: int
    logical_tokens: int
    physical_tokens: int
    metrics: Mapping[str, float]
    is_finite: bool


class Update(msgspec.Struct, frozen=True):
    """One optimiser step. `is_skipped`: the gradient was not finite, the weights are as before."""

    grad_norm: float
    learning_rate: float
    normaliser: int
    is_skipped: bool


class StepTotals(msgspec.Struct, frozen=True):
    """A closed step: the integers that its gradient may be divided by, and how its rows ended."""

    step: int
    tokens: int
    sequences: int
    dead: int
    non_finite_rows: list[int]


@dataclass(slots=True)
class _Book:
    """One step, or one evaluation. `members`: rows not yet consumed or given up. `ungenerated`: rows without a response."""

    members: set[int] = field(default_factory=set)
    ungenerated: set[int] = field(default_factory=set)
    last_version: int = 0  # no later one may generate its rows
    tokens: int = 0
    sequences: int = 0
    dead: int = 0
    non_finite_rows: list[int] = field(default_factory=list)


class Ledger:
    """Pure: every method is a transition or a question."""

    def __init__(self, group_bits: int) -> None:
        self._group_bits = group_bits
        self._books: dict[tuple[str, int], _Book] = {}
        self._book_of_group: dict[int, tuple[str, int]] = {}
        self.committed = 0

    def open(self, metas: Iterable[GroupMeta]) -> None:
        """The groups of a training step, all at once, or of an evaluation. Opening one twice is a `ValueError`."""
        metas = list(metas)
        for key in sorted({(m.purpose, m.step) for m in metas}):
            if key in self._books:
                raise ValueError(f"{key[0]} step {key[1]} is open already")
            self._books[key] = _Book()
        for meta in metas:
            key = (meta.purpose, meta.step)
            first = meta.group << self._group_bits
            self._book_of_group[meta.group] = key
            book = self._books[key]
            book.members.update(range(first, first + meta.size))
            book.ungenerated.update(range(first, first + meta.size))
            book.last_version = max(book.last_version, meta.interval.high)

    def generated(self, rows: Iterable[int]) -> None:
        """These rows have their responses."""
        for row in rows:
            if (book := self._book(row)) is not None:
                book.ungenerated.discard(row)

    def give_up(self, dead: Iterable[DeadRow]) -> None:
        """These rows will never train: they leave their step, and are counted."""
        for letter in dead:
            book = self._book(letter.row)
            if book is not None and letter.row in book.members:
                book.members.discard(letter.row)
                book.ungenerated.discard(letter.row)
                book.dead += 1

    def consume(self, step: int, group: Consumed) -> None:
        """Training has added these rows' gradients. A row that is no open member of the step is a `ValueError`."""
        book = self._open_book("train", step)
        if foreign := set(group.rows) - book.members:
            raise ValueError(f"row {min(foreign)} is not an open member of step {step}")
        book.members.difference_update(group.rows)
        book.sequences += len(group.rows) - len(group.empty_rows)
        book.tokens += group.loss_tokens
        if not group.is_finite:
            book.non_finite_rows.extend(group.rows)

    def consume_evaluation(self, version: int, rows: Iterable[int]) -> None:
        """An evaluation has read these rows; with the last of them nothing of it is kept."""
        self._open_book("eval", version).members.difference_update(rows)

    def totals(self, step: int) -> StepTotals:
        """The figures of a closed step; a `ValueError` while members are missing."""
        book = self._open_book("train", step)
        if book.members:
            raise ValueError(f"step {step} still waits for {len(book.members)} rows, the first of them {min(book.members)}")
        return StepTotals(step, book.tokens, book.sequences, book.dead, book.non_finite_rows)

    def commit(self, step: int) -> StepTotals:
        """The step is final. Steps commit in order; anything else is a `ValueError`."""
        totals = self.totals(step)
        if step != self.committed:
            raise ValueError(f"step {step} cannot be committed after {self.committed} steps")
        self.committed += 1
        self.forget("train", step)
        return totals

    def is_open(self, step: int) -> bool:
        return ("train", step) in self._books

    def closed(self) -> list[tuple[str, int]]:
        """(purpose, step) of what is closed (every member has been consumed or given up) and not yet committed or forgotten."""
        return [key for key, book in self._books.items() if not book.members]

    def is_generated(self, step: int) -> bool:
        return self.is_open(step) and not self._books["train", step].ungenerated

    def unfinished(self, version: int) -> int:
        """Rows without a response that no version after `version` may generate."""
        return sum(len(book.ungenerated) for book in self._books.values() if book.last_version <= version)

    def missing(self) -> list[str]:
        """What every open step and evaluation waits for, in words."""
        return [
            f"{purpose} step {step}: {len(book.ungenerated)} rows without a response, {len(book.members)} not consumed"
            f" (first: {min(book.members)})"
            for (purpose, step), book in self._books.items()
            if book.members
        ]

    def _book(self, row: int) -> _Book | None:
        key = self._book_of_group.get(row >> self._group_bits)
        return self._books.get(key) if key is not None else None

    def _open_book(self, purpose: str, step: int) -> _Book:
        if (purpose, step) not in self._books:
            raise ValueError(f"{purpose} step {step} is not open")
        return self._books[purpose, step]

    def forget(self, purpose: str, step: int) -> None:
        """Keep nothing of it."""
        self._books.pop((purpose, step), None)
        for group in [g for g, key in self._book_of_group.items() if key == (purpose, step)]:
            del self._book_of_group[group]


class LedgerService:
    """The ledger for loops in any process. `limit`: how many steps may be opened; raising it lets a driver step by hand."""

    def __init__(self, ledger: Ledger, schedule: Schedule, signal: Signal, end_step: Callable[[str, int], None]) -> None:
        """`end_step(purpose, step)` is told that a step has closed: nobody is to wait for more of its rows."""
        self.ledger = ledger
        self.limit = 0
        self.is_stopping = False
        self.on_opened: Callable[[int], None] = lambda step: None
        self.on_consumed: Callable[[int, Consumed], None] = lambda step, group: None
        self.on_committed: Callable[[StepTotals, Update], None] = lambda totals, update: None
        self._schedule, self._signal, self._end_step = schedule, signal, end_step
        self._ended: set[tuple[str, int]] = set()

    @remote
    async def open(self, metas: list[GroupMeta]) -> None:
        """Groups enter their step or evaluation."""
        self.ledger.open(metas)
        for step in {meta.step for meta in metas if meta.purpose == "train"}:
            self.on_opened(step)
        self.changed()

    @remote
    async def may_admit(self, step: int) -> bool:
        """Wait until the step's prompts may enter the queue. False: the run is stopping."""
        return await self._until(lambda: step < self.limit and self._schedule.may_admit(step, self.ledger))

    @remote
    async def may_train(self, step: int) -> bool:
        """Wait until training on the step may start. False: the run is stopping."""
        return await self._until(lambda: self.ledger.is_open(step) and self._schedule.may_train(step, self.ledger))

    @remote
    async def consume(self, step: int, group: Consumed) -> None:
        """Training has added a group's gradient."""
        self.ledger.consume(step, group)
        self.on_consumed(step, group)
        self.changed()

    @remote
    async def consume_evaluation(self, version: int, rows: list[int]) -> None:
        """An evaluation has read these rows."""
        self.ledger.consume_evaluation(version, rows)
        self.changed()

    @remote
    async def totals(self, step: int) -> StepTotals | None:
        """The figures of a closed step. None: the run is stopping, the step will never close."""
        return None if self.is_stopping else self.ledger.totals(step)

    @remote
    async def commit(self, step: int, update: Update) -> None:
        """The optimiser has stepped: the step is final."""
        self.on_committed(self.ledger.commit(step), update)
        self.changed()

    def generated(self, rows: list[int]) -> None:
        """Told by the rollout task's controller."""
        self.ledger.generated(rows)
        self.changed()

    def give_up(self, dead: list[DeadRow]) -> None:
        """Told by the rollout task's controller."""
        self.ledger.give_up(dead)
        self.changed()

    def stop(self) -> None:
        """Nothing more is opened or begun."""
        self.is_stopping = True
        self.changed()

    def changed(self) -> None:
        """End the steps that have closed, and wake whoever waits for what is true now."""
        for purpose, step in self.ledger.closed():
            if (purpose, step) not in self._ended:
                self._ended.add((purpose, step))
                self._end_step(purpose, step)
                if purpose == "eval":
                    self.ledger.forget(purpose, step)
        self._signal.notify()

    async def _until(self, condition: Callable[[], bool]) -> bool:
        await self._signal.until(lambda: self.is_stopping or condition())
        return not self.is_stopping
