"""What belongs to which step, and what is committed: a pure state machine. No I/O, no clock, no event loop.

A step is opened with its groups, its rows are generated, perhaps scored and referred, then consumed by training under leases that
stay open, and it closes when every member has been consumed or given up. The normaliser is an integer over the members that
trained. Then the optimiser steps, and the commit makes it final.

Trainers of several data-parallel groups step together, so they train in turns: a turn is given out when every one has a group to
train in it, or when nothing is left that they could wait for. The groups of a turn are as nearly of one length as may be.

Where membership is `first_come`, a complete group may take the place of an incomplete one in an earlier step (`claim`): the two
change steps, so that each step keeps as many groups, and the other one only if it will not be too old by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec
import numpy as np

from asyncflow.transfer_queue.leases import DeadRow
from asyncflow.types import GroupMeta


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
    """One optimiser step. `is_skipped`: it could not be made, the weights are as before. `fill_tokens`: as `OptimResult` has it."""

    grad_norm: float
    learning_rate: float
    normaliser: int
    is_skipped: bool
    fill_tokens: int = 0


class StepTotals(msgspec.Struct, frozen=True):
    """A closed step: the integers that its gradient may be divided by, and how its rows ended."""

    step: int
    tokens: int
    sequences: int
    dead: int
    non_finite_rows: list[int]


@dataclass(slots=True)
class _Book:
    """One step, or one evaluation. `members`: rows not yet consumed or given up, by group. `todo`: those that each task has yet to
    do. `offered`: the groups that each rank has ready to train, with their tokens, in order; `order`:
    which of them came first; `asked`: how many turns each rank has asked for; `turns`: what all ranks train at the same time."""

    members: dict[int, set[int]] = field(default_factory=dict)
    todo: dict[str, set[int]] = field(default_factory=dict)
    last_version: int = 0  # no later one may generate its rows
    offered: list[dict[int, int]] = field(default_factory=list)
    order: dict[int, int] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    turns: list[list[list[int]]] = field(default_factory=list)
    tokens: int = 0
    sequences: int = 0
    dead: int = 0
    non_finite_rows: list[int] = field(default_factory=list)


class Ledger:
    """Pure: every method is a transition or a question."""

    def __init__(
        self,
        group_bits: int,
        tasks: Sequence[str] = ("rollout",),
        max_staleness: int = 0,
        num_ranks: int = 1,
        groups_per_turn: int = 1,
        first: int = 0,
    ) -> None:
        """`tasks`: those that a row passes before training, in order; the first makes responses. `num_ranks` data-parallel groups
        train, each of them up to `groups_per_turn` groups of rows in a turn."""
        self.tasks = tuple(tasks)
        self._num_ranks, self._groups_per_turn = num_ranks, groups_per_turn
        self._group_bits, self._max_staleness = group_bits, max_staleness
        self._books: dict[tuple[str, int], _Book] = {}
        self._book_of_group: dict[int, tuple[str, int]] = {}
        self._begun: dict[int, int] = {}  # by group, the oldest version that has begun it
        self.committed = first

    def open(self, metas: Iterable[GroupMeta]) -> None:
        """The groups of a training step, all at once, or of an evaluation. Opening one twice is a `ValueError`."""
        metas = list(metas)
        for key in sorted({(m.purpose, m.step) for m in metas}):
            if key in self._books:
                raise ValueError(f"{key[0]} step {key[1]} is open already")
            self._books[key] = _Book(offered=[{} for _ in range(self._num_ranks)], asked=[0] * self._num_ranks)
        for meta in metas:
            key = (meta.purpose, meta.step)
            first = meta.group << self._group_bits
            self._book_of_group[meta.group] = key
            book = self._books[key]
            book.members[meta.group] = set(range(first, first + meta.size))
            for task in self.tasks:
                book.todo.setdefault(task, set()).update(range(first, first + meta.size))
            book.last_version = max(book.last_version, meta.interval.high)

    def begun(self, groups: Iterable[int], version: int) -> None:
        """Some of these groups' rows are being generated by this version from now on."""
        for group in groups:
            self._begun[group] = min(version, self._begun.get(group, version))

    def done(self, task: str, rows: Iterable[int]) -> None:
        """These rows have what a task gives them."""
        for row in rows:
            if (book := self._book(row)) is not None:
                book.todo[task].discard(row)

    def step_of(self, group: int) -> int:
        """The step that a group is a member of."""
        return self._book_of_group[group][1]

    def claim(self, step: int, group: int) -> int | None:
        """Have this complete group trained in this step, a member of which it becomes if it was one of a later step.

        It takes the place of an incomplete group there that the later step is not too late for: of the one begun last, which is
        returned. The group itself is, if it was the step's already; None if it may not be trained in it.
        """
        later = self.step_of(group)
        if later <= step:
            return group if later == step else None
        book = self._books["train", step]
        waiting = {row >> self._group_bits for row in book.todo[self.tasks[-1]]}
        movable = [g for g in waiting if g in self._begun and self._begun[g] + self._max_staleness >= later]
        if not movable:
            return None
        other = max(movable, key=lambda g: (self._begun[g], g))
        self._move(group, later, step)
        self._move(other, step, later)
        return other

    def _move(self, group: int, of_step: int, to_step: int) -> None:
        source, target = self._books["train", of_step], self._books["train", to_step]
        target.members[group] = rows = source.members.pop(group)
        for task in self.tasks:
            target.todo[task] |= source.todo[task] & rows
            source.todo[task] -= rows
        self._book_of_group[group] = ("train", to_step)

    def give_up(self, dead: Iterable[DeadRow]) -> None:
        """These rows will never train: they leave their step, and are counted."""
        for letter in dead:
            book = self._book(letter.row)
            if book is not None and letter.row in book.members.get(letter.row >> self._group_bits, ()):
                self._remove(book, [letter.row])
                for rows in book.todo.values():
                    rows.discard(letter.row)
                book.dead += 1

    def offer(self, step: int, rank: int, group: int, tokens: int) -> bool:
        """This rank has a complete group of the step ready to train. False: another had it first, whose lease has expired since."""
        book = self._open_book("train", step)
        if group not in book.members or group in book.order:
            return False
        book.offered[rank][group], book.order[group] = tokens, len(book.order)
        return True

    def ask_turn(self, step: int, rank: int, number: int) -> None:
        """This rank would take its part of the step's turn of this number. When all would, and it is full, it is given out."""
        book = self._open_book("train", step)
        book.asked[rank] = number + 1
        if min(book.asked) == len(book.turns) + 1 and self._is_turn_full(book):
            book.turns.append([self._alike(book, offered) for offered in book.offered])
            for offered, given in zip(book.offered, book.turns[-1], strict=True):
                for group in given:
                    del offered[group]

    def turn(self, step: int, rank: int, number: int) -> list[int] | None:
        """The groups that this rank trains in a turn, none perhaps. None: it has not been given out."""
        turns = self._open_book("train", step).turns
        return turns[number][rank] if number < len(turns) else None

    def _alike(self, book: _Book, offered: Mapping[int, int]) -> list[int]:
        """A rank's part of a turn, which lasts as long as the longest part: the groups whose tokens are nearest to those of the
        group that was offered first of all that are left."""
        first = min((next(iter(each)) for each in book.offered if each), key=lambda group: book.order[group])
        tokens = next(each[first] for each in book.offered if first in each)
        return sorted(offered, key=lambda group: (abs(offered[group] - tokens), book.order[group]))[: self._groups_per_turn]

    def _is_turn_full(self, book: _Book) -> bool:
        """Whether every rank has what it can train in a turn, or what they have is all that is left."""
        if all(len(groups) >= self._groups_per_turn for groups in book.offered):
            return True
        offered = set(chain(*book.offered))
        return bool(offered) and book.members.keys() - set(chain(*chain(*book.turns))) == offered

    def consume(self, step: int, group: Consumed) -> None:
        """Training has added these rows' gradients. A row that is no open member of the step is a `ValueError`."""
        book = self._open_book("train", step)
        if foreign := set(group.rows).difference(*book.members.values()):
            raise ValueError(f"row {min(foreign)} is not an open member of step {step}")
        self._remove(book, group.rows)
        book.sequences += len(group.rows) - len(group.empty_rows)
        book.tokens += group.loss_tokens
        if not group.is_finite:
            book.non_finite_rows.extend(group.rows)

    def consume_evaluation(self, version: int, rows: Iterable[int]) -> None:
        """An evaluation has read these rows; with the last of them nothing of it is kept."""
        self._remove(self._open_book("eval", version), rows)

    def totals(self, step: int) -> StepTotals:
        """The figures of a closed step; a `ValueError` while members are missing."""
        book = self._open_book("train", step)
        if book.members:
            rows = sorted(chain(*book.members.values()))
            raise ValueError(f"step {step} still waits for {len(rows)} rows, the first of them {rows[0]}")
        return StepTotals(step, book.tokens, book.sequences, book.dead, book.non_finite_rows)

    def commit(self, step: int) -> StepTotals:
        """The step is final. Steps commit in order; anything else is a `ValueError`."""
        totals = self.totals(step)
        if step != self.committed:
            raise ValueError(f"step {step} cannot be committed after {self.committed} steps")
        self.committed += 1
        self.forget("train", step)
        return totals

    def groups(self) -> dict[int, list[int]]:
        """By open step, the groups that it has had as members, in the order of their numbers."""
        steps: dict[int, list[int]] = {}
        for group, (purpose, step) in sorted(self._book_of_group.items()):
            if purpose == "train":
                steps.setdefault(step, []).append(group)
        return steps

    def not_generated(self) -> set[int]:
        """Rows of open steps that lack something that comes before training."""
        return {row for (purpose, _), book in self._books.items() if purpose == "train" for row in book.todo[self.tasks[-1]]}

    def is_open(self, step: int) -> bool:
        return ("train", step) in self._books

    def closed(self) -> list[tuple[str, int]]:
        """(purpose, step) of what is closed (every member has been consumed or given up) and not yet committed or forgotten."""
        return [key for key, book in self._books.items() if not book.members]

    def is_done(self, task: str, step: int) -> bool:
        """Every row of the step has what the task gives it, or will never have it."""
        return step < self.committed or (self.is_open(step) and not self._books["train", step].todo[task])

    def task_before(self, task: str) -> str:
        """The task whose outputs this one takes."""
        return self.tasks[self.tasks.index(task) - 1] if task in self.tasks else self.tasks[-1]

    def unfinished(self, version: int) -> int:
        """Rows without a response that no version after `version` may generate."""
        return sum(len(book.todo[self.tasks[0]]) for book in self._books.values() if book.last_version <= version)

    def missing(self) -> list[str]:
        """What every open step and evaluation waits for, in words."""
        return [
            f"{purpose} step {step}: {len(book.todo[self.tasks[0]])} rows without a response, {len(rows)} not consumed"
            f" (first: {min(rows)})"
            for (purpose, step), book in self._books.items()
            if (rows := list(chain(*book.members.values())))
        ]

    def _remove(self, book: _Book, rows: Iterable[int]) -> None:
        """These rows are members no longer, nor is a group without any."""
        for row in rows:
            group = row >> self._group_bits
            if group in book.members:
                book.members[group].discard(row)
                if not book.members[group]:
                    del book.members[group]

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
            self._begun.pop(group, None)
