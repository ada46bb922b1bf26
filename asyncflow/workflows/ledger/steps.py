"""What belongs to which step, and what is committed: a pure state machine. No I/O, no clock, no event loop.

A step is opened with its groups, its rows are generated, perhaps scored and referred, then consumed by training under leases that
stay open, and it closes when every member has been consumed or given up. The normaliser is an integer over the members that
trained. Then the optimiser steps, and the commit makes it final.

A step may have several updates: its groups are cut into mini-batches by their numbers, and each epoch goes through all of them.
Each update has its own members, turns and normaliser; a group stays with the rank that has it, which trains it again in later
epochs. Several models may be trained on the same rows (policy and critic), each by a task of its own, which has its own updates and
commits.

Trainers of several data-parallel groups step together, so they train in turns: a turn is given out when every one has a group to
train in it, or when nothing is left that they could wait for. The groups of a turn are as nearly of one length as may be.

Where membership is `first_come`, a complete group may take the place of an incomplete one in an earlier step (`claim`): the two
change steps, so that each step keeps as many groups, and the other one only if it will not be too old by then.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
    reward_parts: np.ndarray = msgspec.field(default_factory=partial(np.empty, 0, np.float32))  # [R * parts], where they are kept


class Update(msgspec.Struct, frozen=True):
    """One optimiser step. `is_skipped`: it could not be made, the weights are as before. `fill_tokens`: as `OptimResult` has it."""

    grad_norm: float
    learning_rate: float
    normaliser: int
    is_skipped: bool
    fill_tokens: int = 0


class StepTotals(msgspec.Struct, frozen=True):
    """A closed step, or one of its updates: the integers that the gradient may be divided by, and how its rows ended."""

    step: int
    tokens: int
    sequences: int
    dead: int
    non_finite_rows: list[int]


@dataclass(slots=True)
class _Pass:
    """One update of one task: who has consumed what of its mini-batch.

    `members`: rows not yet consumed or given up, by group. `offered`: the groups that each rank has ready to train, with their
    tokens, in order; `order`: which of them came first; `asked`: how many turns each rank has asked for; `turns`: what all ranks
    train at the same time; `given`: the groups in them.
    """

    offered: list[dict[int, int]]
    asked: list[int]
    members: dict[int, set[int]] = field(default_factory=dict)
    order: dict[int, int] = field(default_factory=dict)
    turns: list[list[list[int]]] = field(default_factory=list)
    given: set[int] = field(default_factory=set)
    tokens: int = 0
    sequences: int = 0
    non_finite_rows: list[int] = field(default_factory=list)

    def remove(self, group: int, rows: Iterable[int]) -> None:
        """These rows are members no longer, nor is a group without any."""
        if group in self.members:
            self.members[group].difference_update(rows)
            if not self.members[group]:
                del self.members[group]


@dataclass(slots=True)
class _Book:
    """One step, or one evaluation. `passes`: by task, its updates in order. `part`: the mini-batch of each group. `todo`: the rows
    that each task has yet to do. `statistics`: of the groups that were offered, by task and group. `taken`: how many each rank has
    offered, by task."""

    passes: dict[str, list[_Pass]]
    part: dict[int, int] = field(default_factory=dict)
    todo: dict[str, set[int]] = field(default_factory=dict)
    last_version: int = 0  # no later one may generate its rows
    statistics: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    taken: dict[str, Counter[int]] = field(default_factory=dict)
    dead: int = 0

    @property
    def members(self) -> dict[int, set[int]]:
        """Rows that some update has yet to consume, by group."""
        open_rows: dict[int, set[int]] = {}
        for one in chain(*self.passes.values()):
            for group, rows in one.members.items():
                open_rows.setdefault(group, set()).update(rows)
        return open_rows


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
        *,
        trained: Sequence[str] = ("train",),
        by_step: Sequence[str] = (),
        epochs: int = 1,
        mini_batches: int = 1,
    ) -> None:
        """`tasks`: those that a row passes before training, in order; the first makes responses. `num_ranks` data-parallel groups
        train, each of them up to `groups_per_turn` groups of rows in a turn.

        `trained`: the tasks that train a model each, the policy's first; the others have one rank. `by_step`: those of `tasks`,
        the last ones, that such a model does under the version of each step: they end with a step, and a run that is gone on with
        does them again. A step is `epochs` times `mini_batches` updates of each model."""
        self.tasks, self.trained, self._by_step = tuple(tasks), tuple(trained), tuple(by_step)
        self._last_kept = next(task for task in reversed(self.tasks) if task not in self._by_step)
        self._epochs, self._mini_batches = epochs, mini_batches
        self._num_ranks, self._groups_per_turn = num_ranks, groups_per_turn
        self._group_bits, self._max_staleness = group_bits, max_staleness
        self._books: dict[tuple[str, int], _Book] = {}
        self._book_of_group: dict[int, tuple[str, int]] = {}
        self._begun: dict[int, int] = {}  # by group, the oldest version that has begun it
        self._committed = dict.fromkeys(self.trained, first)
        self._last_totals: dict[str, list[StepTotals]] = {task: [] for task in self.trained}

    @property
    def committed(self) -> int:
        """Steps that the policy has committed: its version."""
        return self._committed[self.trained[0]]

    def committed_by(self, task: str) -> int:
        """Steps that a task has committed: its model's version."""
        return self._committed[task]

    @property
    def kept(self) -> tuple[str, ...]:
        """The tasks whose outputs a run that is gone on with keeps."""
        return self.tasks[: self.tasks.index(self._last_kept) + 1]

    @property
    def num_updates(self) -> int:
        """Of a step, by each task that trains."""
        return self._epochs * self._mini_batches

    def open(self, metas: Iterable[GroupMeta]) -> None:
        """The groups of a training step, all at once, or of an evaluation. Opening one twice is a `ValueError`."""
        metas = list(metas)
        for key in sorted({(m.purpose, m.step) for m in metas}):
            if key in self._books:
                raise ValueError(f"{key[0]} step {key[1]} is open already")
            self._books[key] = self._new_book(key[0])
        for meta in metas:
            key = (meta.purpose, meta.step)
            rows = self._rows(meta)
            self._book_of_group[meta.group] = key
            book = self._books[key]
            for task in self.tasks:
                book.todo.setdefault(task, set()).update(rows)
            book.last_version = max(book.last_version, meta.interval.high)
        for (purpose, step), of_book in _by_book(metas).items():
            self._cut(self._books[purpose, step], of_book)

    def _new_book(self, purpose: str) -> _Book:
        updates = dict.fromkeys(self.trained, self.num_updates) if purpose == "train" else {purpose: 1}
        ranks = {task: self._num_ranks if task == self.trained[0] else 1 for task in updates}
        return _Book({t: [_Pass([{} for _ in range(ranks[t])], [0] * ranks[t]) for _ in range(n)] for t, n in updates.items()})

    def _cut(self, book: _Book, metas: Sequence[GroupMeta]) -> None:
        """Mini-batches are neighbours in the order of their numbers, which is that of the data."""
        parts = self._mini_batches if metas[0].purpose == "train" else 1
        for position, meta in enumerate(sorted(metas, key=lambda meta: meta.group)):
            book.part[meta.group] = part = position * parts // len(metas)
            for passes in book.passes.values():
                for one in passes[part::parts]:
                    one.members[meta.group] = self._rows(meta)

    def _rows(self, meta: GroupMeta) -> set[int]:
        first = meta.group << self._group_bits
        return set(range(first, first + meta.size))

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
        self._exchange(group, later, other, step)
        return other

    def _exchange(self, group: int, of_step: int, other: int, to_step: int) -> None:
        """The two change steps, and mini-batches."""
        source, target = self._books["train", of_step], self._books["train", to_step]
        part_of = {group: target.part[other], other: source.part[group]}
        for moved, left, entered, to in ((group, source, target, to_step), (other, target, source, of_step)):
            rows: set[int] = set()
            for task, passes in left.passes.items():
                theirs = entered.passes[task][part_of[moved] :: self._mini_batches]
                for one, other_one in zip(passes[left.part[moved] :: self._mini_batches], theirs, strict=True):
                    other_one.members[moved] = rows = one.members.pop(moved)
            for task in self.tasks:
                entered.todo[task] |= left.todo[task] & rows
                left.todo[task] -= rows
            self._book_of_group[moved] = ("train", to)
        source.part[other], target.part[group] = source.part.pop(group), target.part.pop(other)

    def give_up(self, dead: Iterable[DeadRow]) -> None:
        """These rows will never train: they leave their step, and are counted."""
        for letter in dead:
            book, group = self._book(letter.row), letter.row >> self._group_bits
            if book is None or not any(letter.row in one.members.get(group, ()) for one in chain(*book.passes.values())):
                continue
            for one in chain(*book.passes.values()):
                one.remove(group, [letter.row])
            for rows in book.todo.values():
                rows.discard(letter.row)
            book.dead += 1

    def offer(self, step: int, rank: int, group: int, tokens: int, statistics: Sequence[float] = (), task: str = "train") -> bool:
        """This rank has a complete group of the step ready to train. False: another had it first, whose lease has expired since."""
        book = self._open_book("train", step)
        if group not in book.part:
            return False
        mine = book.passes[task][book.part[group] :: self._mini_batches]
        if group not in mine[0].members or group in mine[0].order:
            return False
        for one in mine:
            one.offered[rank][group], one.order[group] = tokens, len(one.order)
        book.statistics.setdefault(task, {})[group] = list(statistics)
        book.taken.setdefault(task, Counter())[rank] += 1
        return True

    def may_take(self, step: int, rank: int, ahead: int, task: str = "train") -> bool:
        """Whether a rank may have one more group of the step: its part is not full, nor has it so many more than any other. Who
        keeps what it takes would have most of the step if it were there first, and the others would wait for it in every turn."""
        book = self._open_book("train", step)
        ranks, taken = range(len(book.passes[task][0].offered)), book.taken.get(task, Counter[int]())
        return taken[rank] * len(ranks) < len(book.part) and taken[rank] < min(taken[each] for each in ranks) + ahead

    def is_taken(self, step: int, task: str = "train") -> bool:
        """Whether every group that is left of the step is in the hands of those who train it, or has been."""
        return all(one.members.keys() <= one.order.keys() for one in self._open_book("train", step).passes[task])

    def statistics(self, step: int, task: str = "train") -> list[float]:
        """The sums, over the groups of the step, of what they were offered with: exact, but for one rounding."""
        of_groups = self._open_book("train", step).statistics.get(task, {})
        return [math.fsum(each) for each in zip(*of_groups.values(), strict=True)]

    def ask_turn(self, step: int, rank: int, number: int, task: str = "train", update: int = 0) -> None:
        """This rank would take its part of the update's turn of this number. When all would, and it is full, it is given out."""
        one = self._pass(step, task, update)
        one.asked[rank] = number + 1
        if min(one.asked) == len(one.turns) + 1 and self._is_turn_full(one):
            one.turns.append([self._alike(one, offered) for offered in one.offered])
            for offered, given in zip(one.offered, one.turns[-1], strict=True):
                one.given.update(given)
                for group in given:
                    del offered[group]

    def turn(self, step: int, rank: int, number: int, task: str = "train", update: int = 0) -> list[int] | None:
        """The groups that this rank trains in a turn, none perhaps. None: it has not been given out."""
        turns = self._pass(step, task, update).turns
        return turns[number][rank] if number < len(turns) else None

    def _alike(self, one: _Pass, offered: Mapping[int, int]) -> list[int]:
        """A rank's part of a turn, which lasts as long as the longest part: the groups whose tokens are nearest to those of the
        group that was offered first of all that are left."""
        first = min((next(iter(each)) for each in one.offered if each), key=lambda group: one.order[group])
        tokens = next(each[first] for each in one.offered if first in each)
        return sorted(offered, key=lambda group: (abs(offered[group] - tokens), one.order[group]))[: self._groups_per_turn]

    def _is_turn_full(self, one: _Pass) -> bool:
        """Whether every rank has what it can train in a turn, or what they have is all that is left."""
        if all(len(groups) >= self._groups_per_turn for groups in one.offered):
            return True
        offered = set(chain(*one.offered))
        return bool(offered) and one.members.keys() - one.given == offered

    def consume(self, step: int, group: Consumed, task: str = "train", update: int = 0) -> None:
        """Training has added these rows' gradients. A row that is no open member of the step is a `ValueError`."""
        one = self._pass(step, task, update)
        if foreign := set(group.rows).difference(*one.members.values()):
            raise ValueError(f"row {min(foreign)} is not an open member of step {step}")
        self._remove(one, group.rows)
        one.sequences += len(group.rows) - len(group.empty_rows)
        one.tokens += group.loss_tokens
        if not group.is_finite:
            one.non_finite_rows.extend(group.rows)

    def is_consumed(self, step: int, task: str = "train", update: int = 0) -> bool:
        """Whether nothing of the update is left to consume."""
        return step < self._committed[task] or not self._pass(step, task, update).members

    def consume_evaluation(self, version: int, rows: Iterable[int]) -> None:
        """An evaluation has read these rows; with the last of them nothing of it is kept."""
        self._remove(self._open_book("eval", version).passes["eval"][0], rows)

    def totals(self, step: int, task: str = "train", update: int = 0) -> StepTotals:
        """The figures of an update that is closed; a `ValueError` while members are missing.

        Those of the step that the task committed last are kept: ranks that make no update together (a held step) may ask later.
        """
        if self._last_totals[task] and self._last_totals[task][0].step == step:
            return self._last_totals[task][update]
        book, one = self._open_book("train", step), self._pass(step, task, update)
        if one.members:
            rows = sorted(chain(*one.members.values()))
            raise ValueError(f"step {step} still waits for {len(rows)} rows, the first of them {rows[0]}")
        return StepTotals(step, one.tokens, one.sequences, book.dead, one.non_finite_rows)

    def commit(self, step: int, task: str = "train") -> list[StepTotals]:
        """The step is final for a task: the figures of its updates. Steps commit in order; anything else is a `ValueError`."""
        totals = [self.totals(step, task, update) for update in range(self.num_updates)]
        if step != self._committed[task]:
            raise ValueError(f"step {step} cannot be committed after {self._committed[task]} steps")
        self._committed[task] += 1
        self._last_totals[task] = totals
        if all(committed > step for committed in self._committed.values()):
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
        """Rows of open steps that lack something that comes before training, and that a run that is gone on with keeps."""
        return {row for (purpose, _), book in self._books.items() if purpose == "train" for row in book.todo[self._last_kept]}

    def is_open(self, step: int) -> bool:
        return ("train", step) in self._books

    def closed(self) -> list[tuple[str, int]]:
        """(task, step) of what is closed (every member has been consumed or given up, or has what a task gives it step by step)
        and not yet committed or forgotten."""
        consumed = [
            (task, step)
            for (_, step), book in self._books.items()
            for task, passes in book.passes.items()
            if not any(one.members for one in passes)
        ]
        steps = [(step, book) for (purpose, step), book in self._books.items() if purpose == "train"]
        return consumed + [(task, step) for task in self._by_step for step, book in steps if not book.todo[task]]

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

    def _remove(self, one: _Pass, rows: Iterable[int]) -> None:
        for row in rows:
            one.remove(row >> self._group_bits, [row])

    def _pass(self, step: int, task: str, update: int) -> _Pass:
        return self._open_book("train", step).passes[task][update]

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


def _by_book(metas: Iterable[GroupMeta]) -> dict[tuple[str, int], list[GroupMeta]]:
    books: dict[tuple[str, int], list[GroupMeta]] = {}
    for meta in metas:
        books.setdefault((meta.purpose, meta.step), []).append(meta)
    return books
