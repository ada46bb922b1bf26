"""The ledger for loops in any process: it adds waiting to `Ledger`, and decides nothing by itself.

consumes: what is opened, done, decided, offered, trained, failed and committed
waits for: the schedule's permission, a round, the end of evaluations
is unblocked by: whatever changes the ledger or what schedules look at
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from asyncflow import waits
from asyncflow.control.ledger.candidates import Candidates, Decided
from asyncflow.control.ledger.messages import Consumed, StepTotals, TrainedGroup, Update
from asyncflow.control.ledger.steps import Ledger
from asyncflow.control.schedule import Progress, Schedule
from asyncflow.control.signal import Signal
from asyncflow.telemetry.metrics import GroupFigures
from asyncflow.transfer_queue.controller import Handed
from asyncflow.transfer_queue.leases import DeadRow
from asyncflow.transport import remote
from asyncflow.types import CheckpointPlace, GroupMeta
from asyncflow.waits import Wait


class RoundGroup(msgspec.Struct, frozen=True):
    """Group that a rank trains in a round. `handed`: its lease, and its columns where they are at hand; None: the rank has it."""

    group: int
    handed: Handed | None


class LedgerService:
    """The ledger as a service of the driver. `allow` sets how many steps may be trained: a caller that raises it trains step by
    step."""

    def __init__(
        self, ledger: Ledger, schedule: Schedule, progress: Progress, signal: Signal, end_step: Callable[[str, int], None]
    ) -> None:
        """`end_step(task, step)`: the task, which does one step after another, gets no more rows of this one."""
        self.ledger = ledger
        self.limit = self._last = 0
        self.on_displaced: Callable[[int, int], None] = lambda group, lowest_version: None
        self.is_stopping = False
        self.is_waited_for = False
        """Whether a caller that trains step by step waits for something beside a step: an evaluation, or weights."""
        self.on_opened: Callable[[int], None] = lambda step: None
        self.on_consumed: Callable[[str, int, int, Consumed, GroupFigures], None] = lambda task, step, update, group, figures: None
        self.on_decided: Callable[[int, Decided], None] = lambda step, decided: None
        self.on_committed: Callable[[str, list[StepTotals], list[Update]], None] = lambda task, totals, updates: None
        self.checkpoint_due: Callable[[], CheckpointPlace | None] = lambda: None
        self._schedule, self._progress, self._signal, self._end_step = schedule, progress, signal, end_step
        self._ended: set[tuple[str, int]] = set()
        # What one rank was told, all are, also those that train another model on the same rows: they step together.
        self._may_train: dict[int, bool] = {}
        self._has_sums: dict[tuple[str, int], bool] = {}  # by task and step: whether its ranks get the sums of a statistic
        self._is_final: dict[int, bool] = {}  # by step: whether its updates are made, all of them, or none
        self._asked_checkpoint: int | None = None  # its version at least
        self._steps_to_keep: dict[int, CheckpointPlace] = {}  # steps after which a checkpoint is written, of the newest ones
        self._handed: dict[tuple[str, int], Handed] = {}  # by task and group: those that no rank has been given yet

    @remote
    async def open(self, metas: list[GroupMeta]) -> None:
        """Admit groups to their step or evaluation."""
        self.ledger.open(metas)
        for step in {meta.partition for meta in metas if meta.topic == "train"}:
            self.on_opened(step)
        self.changed()

    async def add_candidates(self, metas: list[GroupMeta]) -> None:
        """More candidates of their step."""
        self.ledger.add_candidates(metas)
        self.changed()

    async def wanted(self, step: int) -> Candidates | None:
        """Wait until the step has too few candidates, and return them. None: its members are known, or the run is stopping."""
        await self.until(lambda: self.ledger.is_settled(step) or self.ledger.lacking(step) is not None, waits.CANDIDATES, step=step)
        return None if self.is_stopping else self.ledger.lacking(step)

    def decide(self, group: int, *, is_varied: bool) -> None:
        """Record whether a candidate's rewards vary, and publish the decisions that follow. See `Ledger.decide`."""
        self.ledger.decide(group, is_varied=is_varied)
        self._decide_candidates()

    def begun(self, versions: Mapping[int, int]) -> None:
        """Record which version has begun each group; for groups that were admitted with finished rows. See `Ledger.begun`."""
        for group, version in versions.items():
            self.ledger.begun([group], version)

    @remote
    async def may_admit(self, step: int) -> bool:
        """Wait until the step's prompts may enter the queue. False: the run is stopping."""

        def may_be() -> bool:
            return step < self._may_be_admitted and self._schedule.may_admit(step, self._progress)

        return await self.until(may_be, waits.MAY_ADMIT, step=step)

    def num_newest(self, num_groups: int, group_size: int) -> int:
        """Number of groups of the step admitted now that only its own version may generate. See `Schedule.num_newest`."""
        return self._schedule.num_newest(num_groups, group_size, self._progress)

    @remote
    async def may_start(self, task: str, step: int) -> bool:
        """Wait until a task behind rollout may begin on the step. False: the run is stopping.

        Ranks step together, so what one of them was told of training all of them are.
        """

        def has_come() -> bool:  # where membership is first_come, a group may be worked on when the step that it left is over
            return step < self.ledger.committed or self.ledger.is_open(step)

        def may_begin() -> bool:
            return has_come() and self._schedule.may_start(task, step, self._progress)

        if task != self.ledger.tasks.policy:
            return await self.until(may_begin, waits.STEP_START, step=step, task=task)

        def may_train() -> bool:
            return step in self._may_train or (step < self.limit and may_begin())

        answer = await self.until(may_train, waits.STEP_START, step=step, task=task)
        if step not in self._may_train:
            self._may_train = {step - 1: True, step: answer}
        return self._may_train[step]

    def claim(self, step: int, group: int) -> bool:
        """Have a group trained in an earlier step (`Ledger.claim`). The group that it displaces gets a narrower interval:
        versions that would be too old for its new step may not generate it any more. True: the group is trained in `step`."""
        later, displaced = self.ledger.step_of(group), self.ledger.claim(step, group)
        if displaced is not None and displaced != group:
            self.on_displaced(displaced, later - self._schedule.max_staleness)
        self.changed()
        return displaced is not None

    async def may_take(self, step: int, task: str) -> None:
        """Wait until the trainers can use one more group of the step. See `StepState.may_take`."""

        def may_take() -> bool:
            return self.ledger.is_open(step) and self.ledger.step_state(step).may_take(task)

        await self._signal.until(may_take, waits.TAKING, step=step)

    def offer(self, step: int, task: str, handed: Handed, tokens: int) -> None:
        """Offer a leased complete group of the step, of so many tokens, to the trainers. Does nothing if it was delivered again."""
        group = handed.lease.groups[0].group
        if self.ledger.is_open(step) and self.ledger.step_state(step).offer(group, tokens, task):
            self._handed[task, group] = handed
            self.changed()

    async def closed(self, step: int, task: str) -> bool:
        """Wait until the task has committed the step. False: the run is stopping before the step's first update is made."""
        await self._signal.until(
            lambda: self.ledger.committed_by(task) > step or (self.is_stopping and not self._is_final.get(step)),
            waits.COMMIT,
            step=step,
            task=task,
        )
        return self.ledger.committed_by(task) > step

    @remote
    async def next_read(self, step: int, rank: int, number: int, task: str) -> Handed | None:
        """Wait for a rank's group of this number, of all that it will train: where training needs a statistic of the step, all of
        it is read first. None: the rank has no more, or the run is stopping."""
        if not self.ledger.is_open(step):
            return None
        state = self.ledger.step_state(step)
        state.read.add(task)
        self._signal.notify()
        await self.until(
            lambda: number < len(state.taken_by(rank, task)) or state.is_taken(task), waits.READ, step=step, number=number
        )
        taken = state.taken_by(rank, task)
        return self._handed.pop((task, taken[number])) if number < len(taken) else None

    @remote
    async def statistics(self, step: int, task: str, found: dict[int, list[float]]) -> list[float] | None:
        """Add a rank's statistics of its groups, wait for those of all groups of the step, and return their sums. None: the run
        stops.

        Ranks step together, so what one of them was told all are: one that asks when the run is stopping gets the sums if another
        has got them.
        """
        key, state = (task, step), self.ledger.step_state(step)
        state.statistics.setdefault(task, {}).update(found)
        self._signal.notify()
        is_there = await self.until(
            lambda: key in self._has_sums or step in self._is_final or state.has_statistics(task), waits.STATISTICS, step=step
        )
        if key not in self._has_sums:
            before = {(of, s): had for (of, s), had in self._has_sums.items() if s >= step - 1}
            self._has_sums = before | {key: is_there or self._is_final.get(step, False)}
        return state.sums(task) if self._has_sums[key] else None

    @remote
    async def next_round(
        self, step: int, rank: int, number: int, trained: list[TrainedGroup], task: str = "train", update: int = 0
    ) -> list[RoundGroup] | None:
        """Count the groups that a rank has trained, and wait for its groups of the update's round of this number. None: the update
        has no more rounds.

        It is the only message of a round. A rank that has trained a round asks for the one after the next, so it has the next one
        already. Ranks step together: a round that one of them was given is given to all, also when the run is stopping.
        """
        for each in trained:
            self.ledger.step_state(step).consume(each.consumed, task, update)
            self.on_consumed(task, step, update, each.consumed, each.figures)
        if not self.ledger.is_open(step):
            return None
        state = self.ledger.step_state(step)
        state.updates[task][update].ask(rank, number)
        self.changed()

        def is_known() -> bool:
            if state.round_of_rank(rank, number, task, update) is not None or (self.is_stopping and not self._is_final.get(step)):
                return True
            state.give_out(task, update)
            return state.round_of_rank(rank, number, task, update) is not None or state.is_given_out(task, update)

        await self._signal.until(is_known, waits.ROUND, step=step, number=number, task=task)
        self._signal.notify()  # the other ranks, whose round it is, too
        groups = state.round_of_rank(rank, number, task, update)
        return None if groups is None else [RoundGroup(group, self._handed.pop((task, group), None)) for group in groups]

    @remote
    async def consume_evaluation(self, version: int, rows: list[int]) -> None:
        """Count rows that an evaluation has read."""
        self.ledger.step_state(version, "eval").consume_evaluation(rows)
        self.changed()

    @remote
    async def totals(self, step: int, task: str = "train", update: int = 0) -> StepTotals | None:
        """The figures of a closed update. Before the step's first: once all rows of the step are in the hands of the ranks that
        train them, and no evaluation is left that needs weights which the next ones displace.

        None: the run is stopping. What one was told of a step all are, ranks and models: all of its updates are made, or none, so
        that a run never ends with a step half made.
        """
        displaced = step - self._schedule.max_staleness

        def may_be_made() -> bool:
            return not self._progress.unfinished(displaced) and all(
                self.ledger.step_state(step).is_taken(each) for each in self.ledger.tasks.trained
            )

        may_go_on = await self.until(lambda: step in self._is_final or may_be_made(), waits.EVALUATIONS, step=step)
        if step not in self._is_final:
            before = {s: is_final for s, is_final in self._is_final.items() if s == step - 1}  # another model may still be at it
            self._is_final = before | {step: may_go_on}
            self._steps_to_keep = {s: place for s, place in self._steps_to_keep.items() if s >= step - 1}
            if may_go_on and (place := self.checkpoint_due()) is not None:  # all models that are trained keep the same step
                self._steps_to_keep[step] = place
            self.changed()  # workers that would end with the run go on
        if not self._is_final[step]:
            return None
        await self._signal.until(lambda: self.ledger.is_consumed(step, task, update), waits.CONSUMED, step=step)
        return self.ledger.totals(step, task, update)

    @remote
    async def commit(self, step: int, updates: list[Update], task: str = "train") -> CheckpointPlace | None:
        """Make the step final for the task, after its optimiser's step. Returns the place of a checkpoint after it, if any."""
        asked = self._asked_checkpoint
        if asked is not None and step == self._next_to_commit and step + 1 >= asked:  # the first model that commits decides for all
            self._asked_checkpoint = None
            self._steps_to_keep[step] = "disk"
        self.on_committed(task, self.ledger.commit(step, task), updates)
        self.changed()
        return self._steps_to_keep.get(step)

    @remote
    async def released(self, step: int) -> CheckpointPlace | None:
        """Wait until every task that trains has committed the step: nobody needs its rows any more. Returns where a checkpoint is
        written after it, if one is, because somebody has asked for it or it is due by the clock."""
        await self._signal.until(lambda: not self.ledger.is_open(step), waits.RELEASED, step=step)
        return self._steps_to_keep.get(step)

    def ask_for_checkpoint(self, version: int = 0) -> int:
        """Have a checkpoint written with the next step that no model has committed, of this version at least. Returns its
        version."""
        self._asked_checkpoint = max(version, self._next_to_commit + 1)
        return self._asked_checkpoint

    @property
    def _next_to_commit(self) -> int:
        return max(map(self.ledger.committed_by, self.ledger.tasks.trained))

    def done(self, task: str, rows: list[int]) -> None:
        """Note rows that are done, as a task's controller says."""
        self.ledger.done(task, rows)
        self.changed()

    def fail(self, dead: list[DeadRow]) -> None:
        """Note rows that have failed for good, as a task's controller says."""
        self.ledger.fail(dead)
        self._decide_candidates()

    def _decide_candidates(self) -> None:
        """Publish the decisions on candidates that have become certain."""
        for step, decided in self.ledger.newly_decided():
            self.on_decided(step, decided)
        self.changed()

    def allow(self, steps: int, of: int) -> None:
        """Let so many steps of a run of `of` be trained; prompts are admitted as far ahead as the schedule's staleness reaches."""
        self.limit, self._last = steps, of
        self.changed()

    @property
    def is_held(self) -> bool:
        """Whether all that was allowed is trained, more is to come, and nobody waits for anything."""
        return self.limit < self._last and self.ledger.committed >= self.limit and not self.is_waited_for

    @property
    def _may_be_admitted(self) -> int:
        return min(self._last, self.limit + self._schedule.max_staleness) if self.limit else 0

    def stop(self) -> None:
        """Stop the run: nothing more is opened or begun."""
        self.is_stopping = True
        self.changed()

    @property
    def is_finishing(self) -> bool:
        """Whether a step is being made to its end, be the run stopping or not: updates of it are made that are not committed."""
        return any(
            is_final and self.ledger.committed_by(task) <= step
            for step, is_final in self._is_final.items()
            for task in self.ledger.tasks.trained
        )

    async def finished(self) -> None:
        """Wait until no step is being made to its end."""
        await self._signal.until(lambda: not self.is_finishing, waits.COMMIT, step=self.ledger.committed)

    def changed(self) -> None:
        """Wake the waits for what is true now. Tell the queue which tasks get no more rows of a step, or of an evaluation."""
        for task, step in self.ledger.ended():
            if (task, step) not in self._ended:
                self._ended.add((task, step))
                self._end_step(task, step)
                if task == "eval":
                    self.ledger.forget(task, step)
        self._signal.notify()

    async def until(self, condition: Callable[[], bool], wait: Wait, **facts: int | str) -> bool:
        """Wait until the condition holds, which changes with what the ledger hears of (`changed`). False: the run is stopping."""
        await self._signal.until(lambda: self.is_stopping or condition(), wait, **facts)
        return not self.is_stopping
