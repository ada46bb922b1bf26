"""One step of the ledger, or one evaluation: its members, what is left to do of them, and which rank trains them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from asyncflow.control.ledger.candidates import Candidates
from asyncflow.control.ledger.messages import Consumed, StepTotals
from asyncflow.control.ledger.step_tasks import UpdatePlan
from asyncflow.control.ledger.update_progress import UpdateProgress

_CHOICE: Final = 2
"""Number of rounds whose groups are taken beyond those that were asked for, where there are several ranks: so the groups of a round
can be of about one length."""


@dataclass(slots=True)
class StepState:
    """Members of a step, and how far each task is with them.

    `updates`: by task that trains, its updates in order: in each epoch `mini_batches` of them, which are the
    step's own or, of an evaluation, one. `todo`: rows that each task before training has yet to do. `candidates`: groups that
    members are chosen from, if they are. `part`: the mini-batch of each member. `taken`: by task, the groups that each rank has, in
    order. `read`: tasks whose ranks read all of the step before they train any of it. `statistics`: what they have found in it, by
    task and group.
    """

    step: int
    group_bits: int
    mini_batches: int
    plan: UpdatePlan
    updates: dict[str, list[UpdateProgress]]
    todo: dict[str, set[int]]
    candidates: Candidates | None = None
    part: dict[int, int] = field(init=False, default_factory=dict)
    last_version: int = field(init=False, default=0)  # no later one may generate its rows
    taken: dict[str, list[list[int]]] = field(init=False, default_factory=dict)
    read: set[str] = field(init=False, default_factory=set)
    statistics: dict[str, dict[int, list[float]]] = field(init=False, default_factory=dict)
    dead: int = field(init=False, default=0)

    @property
    def num_left(self) -> int:
        """Members that are not known yet."""
        return 0 if self.candidates is None else self.candidates.num_left

    @property
    def members(self) -> dict[int, set[int]]:
        """Rows that some update has yet to consume, by group."""
        open_rows: dict[int, set[int]] = {}
        for one in chain(*self.updates.values()):
            for group, rows in one.members.items():
                open_rows.setdefault(group, set()).update(rows)
        return open_rows

    # -- what belongs to it -----------------------------------------------------------------------------------------------

    def cut(self, groups: Mapping[int, Iterable[int]]) -> None:
        """Make these groups, with their rows, the members. Mini-batches are neighbours in the order of their numbers, which is that
        of the data."""
        for position, group in enumerate(sorted(groups)):
            self.join(group, position * self.mini_batches // len(groups), groups[group])

    def join(self, group: int, part: int, rows: Iterable[int]) -> None:
        """Make a group a member, in this mini-batch."""
        self.part[group] = part
        for updates in self.updates.values():
            for one in updates[part :: self.mini_batches]:
                one.members[group] = set(rows)

    def exchange(self, mine: int, other: StepState, theirs: int) -> None:
        """Exchange a member with one of another step: each takes the other's step and mini-batch."""
        my_part, their_part = self.part[mine], other.part[theirs]
        self._move(mine, other, their_part)
        other._move(theirs, self, my_part)

    def _move(self, group: int, to: StepState, part: int) -> None:
        rows: set[int] = set()
        for task, updates in to.updates.items():
            for one, entered in zip(self._updates(task, group), updates[part :: to.mini_batches], strict=True):
                entered.members[group] = rows = one.members.pop(group)
        for task, todo in self.todo.items():
            to.todo[task].update(todo & rows)
            todo.difference_update(rows)
        del self.part[group]
        to.part[group] = part

    def fail(self, row: int) -> None:
        """Take a row out of the step that will never train, and count it as dead."""
        group = row >> self.group_bits
        is_candidates = self.candidates is not None and self.candidates.fail(group, row)
        if not is_candidates and not any(row in one.members.get(group, ()) for one in chain(*self.updates.values())):
            return
        for one in chain(*self.updates.values()):
            one.remove(group, [row])
        for rows in self.todo.values():
            rows.discard(row)
        self.dead += 1

    # -- rounds that train it ---------------------------------------------------------------------------------------------

    def offer(self, group: int, tokens: int, task: str = "train") -> bool:
        """Give a complete group of the step, of so many tokens, to the rank that has fewest. False: it was given before, and has
        been delivered again."""
        if group not in self.part:
            return False
        mine = self._updates(task, group)
        if group not in mine[0].members or group in mine[0].order:
            return False
        taken = self.taken.setdefault(task, [[] for _ in mine[0].offered])
        rank = min(range(len(taken)), key=lambda rank: len(taken[rank]))
        taken[rank].append(group)
        for one in mine:
            one.offer(rank, group, tokens)
        return True

    def may_take(self, task: str = "train") -> bool:
        """Whether the ranks can use one more group. They can use as many as they have asked for; all of the step, if they read it
        first, or make several updates of it, the first of which waits for the last group."""
        first, *others = self.updates[task]
        if self.is_taken(task) or not (task in self.read or any(first.asked)):
            return False
        num_ranks = len(first.offered)
        spare = num_ranks * self.plan.groups_per_round * _CHOICE if num_ranks > 1 else 0
        return task in self.read or bool(others) or first.is_lacking(self.plan.groups_per_round, self.plan.tokens_per_round, spare)

    def taken_by(self, rank: int, task: str = "train") -> list[int]:
        """The groups that a rank has, in the order in which they came."""
        return self.taken[task][rank] if task in self.taken else []

    def is_taken(self, task: str = "train") -> bool:
        """Whether every group that is left of the step is in the hands of the ranks that train it, or has been."""
        return not self.num_left and all(one.members.keys() <= one.order.keys() for one in self.updates[task])

    def has_statistics(self, task: str) -> bool:
        """Whether there are those of every group that is left of the step."""
        members = chain(*(one.members for one in self.updates[task]))
        return not self.num_left and self.statistics.get(task, {}).keys() >= set(members)

    def sums(self, task: str = "train") -> list[float]:
        """Sums of the statistics over the groups of the step: exact, but for one rounding."""
        of_groups = self.statistics.get(task, {})
        return [math.fsum(each) for each in zip(*of_groups.values(), strict=True)]

    def round_of_rank(self, rank: int, number: int, task: str = "train", update: int = 0) -> list[int] | None:
        """The groups that this rank trains in the update's round of this number, none perhaps. None: it has not been given out."""
        rounds = self.updates[task][update].rounds
        return rounds[number][rank] if number < len(rounds) else None

    def give_out(self, task: str = "train", update: int = 0) -> None:
        """Give out the rounds of the update that every rank has asked for and that may begin."""
        self.updates[task][update].give_out(self.plan.groups_per_round, self.plan.tokens_per_round, is_all=not self.num_left)

    def is_under_way(self, task: str) -> bool:
        """Whether a round that was given out is not trained, or all of an update's are: then it is made, until the commit."""
        return any(one.given and (not one.members or not one.given.isdisjoint(one.members)) for one in self.updates[task])

    def is_given_out(self, task: str = "train", update: int = 0) -> bool:
        """Whether the update has no more rounds than were given out."""
        return not self.num_left and self.updates[task][update].is_given_out

    def consume(self, group: Consumed, task: str = "train", update: int = 0) -> None:
        """Count rows whose gradients training has added. A row that is no open member of the step is a `ValueError`."""
        one = self.updates[task][update]
        if foreign := set(group.rows).difference(*one.members.values()):
            raise ValueError(f"row {min(foreign)} is not an open member of step {self.step}")
        self._remove(one, group.rows)
        one.sequences += len(group.rows) - len(group.empty_rows)
        one.tokens += group.loss_tokens
        one.has_computed |= not group.is_left_out
        if not group.is_finite:
            one.non_finite_rows.extend(group.rows)

    def consume_evaluation(self, rows: Iterable[int]) -> None:
        """Count rows that an evaluation has read."""
        self._remove(self.updates["eval"][0], rows)

    def is_consumed(self, task: str = "train", update: int = 0) -> bool:
        """Whether nothing of the update is left to consume."""
        return not self.num_left and not self.updates[task][update].members

    def totals(self, task: str = "train", update: int = 0) -> StepTotals:
        """The figures of an update that is closed; a `ValueError` while members are missing."""
        one = self.updates[task][update]
        if self.num_left:
            raise ValueError(f"step {self.step} still waits for {self.num_left} of its members")
        if one.members:
            rows = sorted(chain(*one.members.values()))
            raise ValueError(f"step {self.step} still waits for {len(rows)} rows, the first of them {rows[0]}")
        is_left_out = one.sequences > 0 and not one.has_computed
        return StepTotals(self.step, one.tokens, one.sequences, self.dead, one.non_finite_rows, is_left_out)

    def _updates(self, task: str, group: int) -> list[UpdateProgress]:
        """Updates that train a member: one of each epoch."""
        return self.updates[task][self.part[group] :: self.mini_batches]

    def _remove(self, one: UpdateProgress, rows: Iterable[int]) -> None:
        for row in rows:
            one.remove(row >> self.group_bits, [row])
