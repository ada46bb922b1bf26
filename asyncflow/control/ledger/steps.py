"""Steps of a run: their members, and what is committed. A pure state machine: no I/O, no clock, no event loop.

    Ledger ---> TaskPlan, UpdatePlan: what is the same for all steps (step_tasks.py)
           ---> StepState: one for each open step and each evaluation (step_state.py)
           ---> UpdateProgress: one for each update of the step (update_progress.py)

A step is opened with its groups, its rows are generated, perhaps scored and referred, then consumed by training under leases that
stay open, and it closes when every member has been consumed or has failed. The normaliser is an integer over the members that
trained. Then the optimiser steps, and the commit makes it final.

A step may have several updates: its groups are cut into mini-batches by their numbers, and each epoch goes through all of them.
Each update has its own members, rounds and normaliser; a group stays with the rank that has it, which trains it again in later
epochs. Several models may be trained on the same rows (policy and critic), each by a task of its own, which has its own updates and
commits.

A step may want groups whose rewards vary (`candidates.py`): it is opened with candidates then, to which more may be added
(`add_candidates`), and gets its members from them, one by one. Until it has all of them nothing of it closes.

Where membership is `first_come`, a complete group may take the place of an incomplete one in an earlier step (`claim`): the two
change steps, so that each step keeps as many groups, and the other one only if it will not be too old by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from asyncflow.control.ledger.candidates import Candidates, Decided
from asyncflow.control.ledger.messages import StepTotals
from asyncflow.control.ledger.step_state import StepState
from asyncflow.control.ledger.step_tasks import ONE_MODEL, ONE_UPDATE, TaskPlan, UpdatePlan
from asyncflow.control.ledger.update_progress import UpdateProgress
from asyncflow.transfer_queue.leases import DeadRow
from asyncflow.types import GroupMeta


class Ledger:
    """Pure: every method is a transition or a question."""

    def __init__(
        self,
        group_bits: int,
        tasks: TaskPlan = ONE_MODEL,
        updates: UpdatePlan = ONE_UPDATE,
        *,
        max_staleness: int = 0,
        first: int = 0,
        has_evaluators: bool = False,
    ) -> None:
        """`first`: the step that the run begins with, the version of all models. `has_evaluators`: evaluations are made by workers
        of their own, under weights that stay for them: nobody waits for these."""
        self.tasks, self._updates = tasks, updates
        self._group_bits, self._max_staleness, self._has_evaluators = group_bits, max_staleness, has_evaluators
        self._steps: dict[tuple[str, int], StepState] = {}
        self._step_of_group: dict[int, tuple[str, int]] = {}
        self._begun: dict[int, int] = {}  # by group, the oldest version that has begun it
        self._committed = dict.fromkeys(tasks.trained, first)
        self._last_totals: dict[str, list[StepTotals]] = {task: [] for task in tasks.trained}

    @property
    def committed(self) -> int:
        """Steps that the policy has committed: its version."""
        return self._committed[self.tasks.policy]

    def committed_by(self, task: str) -> int:
        """Steps that a task has committed: its model's version."""
        return self._committed[task]

    def is_open(self, step: int) -> bool:
        """Whether the training step is open: admitted, and not committed by every task."""
        return ("train", step) in self._steps

    def step_state(self, step: int, topic: str = "train") -> StepState:
        """State of an open step or evaluation. Raises `ValueError` if it is not open."""
        if (topic, step) not in self._steps:
            raise ValueError(f"{topic} step {step} is not open")
        return self._steps[topic, step]

    def open_evaluations(self) -> list[StepState]:
        """States of the evaluations that are open."""
        return [state for (topic, _), state in self._steps.items() if topic == "eval"]

    # -- what belongs to which step ---------------------------------------------------------------------------------------

    def open(self, metas: Iterable[GroupMeta]) -> None:
        """The groups of a training step, all at once, or of an evaluation. Opening one twice is a `ValueError`."""
        by_step: dict[tuple[str, int], list[GroupMeta]] = {}
        for meta in metas:
            by_step.setdefault((meta.topic, meta.partition), []).append(meta)
        for key in sorted(by_step):
            if key in self._steps:
                raise ValueError(f"{key[0]} step {key[1]} is open already")
            state = self._steps[key] = self._new_step(*key)
            self._enter(by_step[key])
            if state.candidates is None:
                state.cut({meta.group: self._rows(meta) for meta in by_step[key]})

    def add_candidates(self, metas: Iterable[GroupMeta]) -> None:
        """More candidates of a step that is open. A `ValueError` where it has its members."""
        metas = list(metas)
        for step in {meta.partition for meta in metas}:
            if self.is_settled(step):
                raise ValueError(f"step {step} takes no more candidates")
        self._enter(metas)

    def _enter(self, metas: Iterable[GroupMeta]) -> None:
        for meta in metas:
            rows = self._rows(meta)
            self._step_of_group[meta.group] = key = (meta.topic, meta.partition)
            state = self._steps[key]
            if state.candidates is not None:
                state.candidates.add(meta.group, rows)
            for task, todo in state.todo.items():
                if state.candidates is None or task not in self.tasks.of_members:
                    todo.update(rows)
            state.last_version = max(state.last_version, meta.interval.high)

    def _new_step(self, topic: str, step: int) -> StepState:
        is_training = topic == "train"
        updates = dict.fromkeys(self.tasks.trained, self._updates.num_updates) if is_training else {topic: 1}
        ranks = {task: self._updates.num_ranks if task == self.tasks.policy else 1 for task in updates}
        mini_batches = self._updates.mini_batches if is_training else 1
        has_candidates = is_training and bool(self.tasks.chosen_by)
        return StepState(
            step,
            self._group_bits,
            mini_batches,
            self._updates,
            updates={
                t: [UpdateProgress([{} for _ in range(ranks[t])], [0] * ranks[t]) for _ in range(n)] for t, n in updates.items()
            },
            todo={task: set() for task in self.tasks.before},
            candidates=Candidates(self.tasks.num_members, has_places=mini_batches > 1) if has_candidates else None,
        )

    def _rows(self, meta: GroupMeta) -> set[int]:
        first = meta.group << self._group_bits
        return set(range(first, first + meta.size))

    def step_of(self, group: int) -> int:
        """The step that a group is a member of."""
        return self._step_of_group[group][1]

    def knows(self, group: int) -> bool:
        """Whether a group belongs to an open step or evaluation."""
        return group in self._step_of_group

    def num_groups(self, step: int) -> int:
        """Number of groups that the step has, or has had: its members, and candidates that are no surplus."""
        return sum(key == ("train", step) for key in self._step_of_group.values())

    def groups(self) -> dict[int, list[int]]:
        """Groups that each open step has had as members, in the order of their numbers; the keys are steps."""
        steps: dict[int, list[int]] = {}
        for group, (topic, step) in sorted(self._step_of_group.items()):
            if topic == "train":
                steps.setdefault(step, []).append(group)
        return steps

    def claim(self, step: int, group: int) -> int | None:
        """Have this complete group trained in this step, a member of which it becomes if it was one of a later step.

        It takes the place of an incomplete group there that the later step is not too late for: of the one begun last, which is
        returned. The group itself is, if it was the step's already; None if it may not be trained in it.
        """
        later = self.step_of(group)
        if later <= step:
            return group if later == step else None
        state = self._steps["train", step]
        waiting = {row >> self._group_bits for row in state.todo[self.tasks.before[-1]]}
        movable = [g for g in waiting if g in self._begun and self._begun[g] + self._max_staleness >= later]
        if not movable:
            return None
        other = max(movable, key=lambda g: (self._begun[g], g))
        self._steps["train", later].exchange(group, state, other)
        self._step_of_group[group], self._step_of_group[other] = ("train", step), ("train", later)
        return other

    def fail(self, dead: Iterable[DeadRow]) -> None:
        """Take out rows that will never train: they leave their step, and are counted."""
        for letter in dead:
            if (state := self._state_of_row(letter.row)) is not None:
                state.fail(letter.row)

    def forget(self, topic: str, step: int) -> None:
        """Forget a step or an evaluation."""
        self._steps.pop((topic, step), None)
        for group in [g for g, key in self._step_of_group.items() if key == (topic, step)]:
            del self._step_of_group[group]
            self._begun.pop(group, None)

    # -- members that are chosen among candidates -------------------------------------------------------------------------

    def is_settled(self, step: int) -> bool:
        """Whether the members of the step are known."""
        return not self.is_open(step) or not self._steps["train", step].num_left

    def lacking(self, step: int) -> Candidates | None:
        """The candidates of a step that has too few of them."""
        state = self._steps.get(("train", step))
        candidates = state.candidates if state is not None else None
        return candidates if candidates is not None and candidates.num_missing else None

    def decide(self, group: int, *, is_varied: bool) -> None:
        """Record that a candidate has its rewards. A group that is no candidate any more is ignored."""
        state = self._state_of_row(group << self._group_bits)
        if state is not None and state.candidates is not None:
            state.candidates.decide(group, is_varied=is_varied)

    def is_member(self, group: int) -> bool:
        """Whether a group has been chosen from the candidates of an open step."""
        state = self._state_of_row(group << self._group_bits)
        return state is not None and state.candidates is not None and group in state.candidates.members

    def newly_decided(self) -> list[tuple[int, Decided]]:
        """Decisions on candidates since the last call, each with its step: members are members from now on, what is
        degenerate has nothing left to be done to it, and surplus has left its step."""
        found = []
        for (_, step), state in self._steps.items():
            if state.candidates is None or (decided := state.candidates.newly_decided()) is None:
                continue
            for group, place in decided.members.items():
                rows = state.candidates.rows[group]
                state.join(group, place * self._updates.mini_batches // self.tasks.num_members, rows)
                for task in self.tasks.of_members:
                    state.todo[task].update(rows)
            for todo in state.todo.values():
                todo.difference_update(decided.left)
            for group in decided.surplus:
                del self._step_of_group[group]
                self._begun.pop(group, None)
            found.append((step, decided))
        return found

    # -- what is done, and what is left to do -----------------------------------------------------------------------------

    def begun(self, groups: Iterable[int], version: int) -> None:
        """Record that rows of these groups are being generated by this version from now on."""
        for group in groups:
            if self.knows(group):
                self._begun[group] = min(version, self._begun.get(group, version))

    def groups_begun(self) -> list[int]:
        """Groups of open steps that are being generated, or have been."""
        return [group for group in self._begun if self._step_of_group[group][0] == "train"]

    def done(self, task: str, rows: Iterable[int]) -> None:
        """Note that these rows have what a task gives them."""
        for row in rows:
            if (state := self._state_of_row(row)) is not None:
                state.todo[task].discard(row)

    def _state_of_row(self, row: int) -> StepState | None:
        key = self._step_of_group.get(row >> self._group_bits)
        return self._steps.get(key) if key is not None else None

    def is_done(self, task: str, step: int) -> bool:
        """Every row of the step has what the task gives it, or will never have it."""
        if not self.is_open(step):
            return step < self.committed
        is_all = task in self.tasks.of_candidates or self.is_settled(step)
        return step < self.committed or (is_all and not self._steps["train", step].todo[task])

    def not_generated(self) -> set[int]:
        """Rows of open steps that lack something that comes before training, and that a resumed run keeps."""
        task = self.tasks.last_kept
        return {row for (topic, _), state in self._steps.items() if topic == "train" for row in state.todo[task]}

    def unfinished(self, version: int) -> int:
        """Rows without a response that no version after `version` may generate, and members that are still to be found for it."""
        rows = sum(
            len(state.todo[self.tasks.before[0]])
            for (topic, _), state in self._steps.items()
            if state.last_version <= version and not (topic == "eval" and self._has_evaluators)
        )
        return rows + self.to_come(version)

    def to_come(self, version: int) -> int:
        """Members to be found for steps that no version after `version` may generate: perhaps among candidates to be admitted."""
        return sum(state.num_left for state in self._steps.values() if state.last_version <= version)

    def offered(self, task: str) -> int:
        """Rows of training steps that lie ready for the ranks of this task, and that no rank has been given yet."""
        return sum(
            len(state.updates[task][0].members.get(group, ()))
            for (topic, _), state in self._steps.items()
            if topic == "train" and task in state.updates
            for groups in state.updates[task][0].offered
            for group in groups
        )

    def missing(self) -> list[str]:
        """A line for each open step and evaluation that says what it waits for."""
        return [
            f"{topic} step {step}: {len(state.todo[self.tasks.before[0]])} rows without a response, {len(rows)} not consumed"
            f" (first: {min(rows)})"
            for (topic, step), state in self._steps.items()
            if (rows := list(chain(*state.members.values())))
        ] + [
            f"train step {step}: {state.num_left} members are not found yet, among {len(state.candidates.rows)} candidates, with"
            f" {len(state.todo[self.tasks.before[0]])} rows without a response"
            for (_, step), state in self._steps.items()
            if state.candidates is not None and state.num_left
        ]

    # -- what has been trained --------------------------------------------------------------------------------------------

    def is_consumed(self, step: int, task: str = "train", update: int = 0) -> bool:
        """Whether nothing of the update is left to consume."""
        return step < self._committed[task] or self.step_state(step).is_consumed(task, update)

    def totals(self, step: int, task: str = "train", update: int = 0) -> StepTotals:
        """The figures of an update that is closed; a `ValueError` while members are missing.

        Those of the step that the task committed last are kept: ranks that make no update together (a held step) may ask later.
        """
        if self._last_totals[task] and self._last_totals[task][0].step == step:
            return self._last_totals[task][update]
        return self.step_state(step).totals(task, update)

    def ended(self) -> list[tuple[str, int]]:
        """(task, step) of evaluations that have been read, and of steps that have all that a task gives them step by step: the
        queue is to say that no more rows come. Training learns from its rounds that a step has no more."""
        found = list[tuple[str, int]]()
        for (topic, step), state in self._steps.items():
            if topic == "eval":
                found += [("eval", step)] if state.is_consumed("eval") else []
            elif not state.num_left:
                found += [(task, step) for task in self.tasks.by_step if not state.todo[task]]
        return found

    def commit(self, step: int, task: str = "train") -> list[StepTotals]:
        """Make the step final for a task. Returns the figures of its updates. Steps commit in order; anything else is a
        `ValueError`."""
        totals = [self.totals(step, task, update) for update in range(self._updates.num_updates)]
        if step != self._committed[task]:
            raise ValueError(f"step {step} cannot be committed after {self._committed[task]} steps")
        self._committed[task] += 1
        self._last_totals[task] = totals
        if all(committed > step for committed in self._committed.values()):
            self.forget("train", step)
        return totals
