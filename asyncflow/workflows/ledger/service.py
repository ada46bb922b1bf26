"""The ledger for loops in any process: it adds waiting to `Ledger`, and decides nothing by itself.

consumes: what is opened, done, offered, consumed, given up and committed
waits for: the schedule's word, a turn, the end of evaluations
is unblocked by: whatever changes the ledger or what schedules look at
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncflow.transfer_queue.leases import DeadRow
from asyncflow.transport import remote
from asyncflow.types import GroupMeta
from asyncflow.workflows.ledger.steps import Consumed, Ledger, StepTotals, Update
from asyncflow.workflows.schedule import Progress, Schedule
from asyncflow.workflows.signal import Signal


class LedgerService:
    """See the module's head. `allow` says how many steps may be trained; more of them lets a driver step by hand."""

    def __init__(
        self, ledger: Ledger, schedule: Schedule, progress: Progress, signal: Signal, end_step: Callable[[str, int], None]
    ) -> None:
        """`end_step(purpose, step)` is told that a step has closed: nobody is to wait for more of its rows."""
        self.ledger = ledger
        self.limit = self._last = 0
        self.on_displaced: Callable[[int, int], None] = lambda group, lowest_version: None
        self.is_stopping = False
        self.on_opened: Callable[[int], None] = lambda step: None
        self.on_consumed: Callable[[int, Consumed], None] = lambda step, group: None
        self.on_committed: Callable[[StepTotals, Update], None] = lambda totals, update: None
        self._schedule, self._progress, self._signal, self._end_step = schedule, progress, signal, end_step
        self._ended: set[tuple[str, int]] = set()
        # What one rank was told, all are: they step together.
        self._may_train: dict[int, bool] = {}
        self._totals: dict[int, StepTotals | None] = {}

    @remote
    async def open(self, metas: list[GroupMeta]) -> None:
        """Groups enter their step or evaluation."""
        self.ledger.open(metas)
        for step in {meta.step for meta in metas if meta.purpose == "train"}:
            self.on_opened(step)
        self.changed()

    def begun(self, versions: Mapping[int, int]) -> None:
        """See `Ledger.begun`: the version by group, of groups with rows that came with them."""
        for group, version in versions.items():
            self.ledger.begun([group], version)

    @remote
    async def may_admit(self, step: int) -> bool:
        """Wait until the step's prompts may enter the queue. False: the run is stopping."""
        return await self._until(lambda: step < self._may_be_admitted and self._schedule.may_admit(step, self._progress))

    @remote
    async def may_start(self, task: str, step: int) -> bool:
        """Wait until a task behind rollout may begin on the step. False: the run is stopping.

        Ranks step together, so what one of them was told of training all of them are.
        """

        def has_come() -> bool:  # where membership is first_come, a group may be worked on when the step that it left is over
            return step < self.ledger.committed or self.ledger.is_open(step)

        def may_begin() -> bool:
            return has_come() and self._schedule.may_start(task, step, self._progress)

        if task != "train":
            return await self._until(may_begin)
        answer = await self._until(lambda: step in self._may_train or (step < self.limit and may_begin()))
        if step not in self._may_train:
            self._may_train = {step - 1: True, step: answer}
        return self._may_train[step]

    @remote
    async def claim(self, step: int, group: int) -> bool:
        """See `Ledger.claim`. The group that had to go is made by no version from now on that would be too old where it is."""
        later, displaced = self.ledger.step_of(group), self.ledger.claim(step, group)
        if displaced is not None and displaced != group:
            self.on_displaced(displaced, later - self._schedule.max_staleness)
        self.changed()
        return displaced is not None

    @remote
    async def offer(self, step: int, rank: int, group: int, tokens: int) -> bool:
        """A rank has a complete group of the step, of so many tokens, ready to train. False: another one trains it."""
        is_taken = self.ledger.is_open(step) and self.ledger.offer(step, rank, group, tokens)
        self.changed()
        return is_taken

    @remote
    async def turn(self, step: int, rank: int, number: int) -> list[int] | None:
        """Wait until a rank's groups of the step's turn of this number are known. None: the step has no more turns.

        Ranks step together: a turn that one of them was given is given to all, also when the run is stopping.
        """

        def is_known() -> bool:
            if not self.ledger.is_open(step) or self.ledger.turn(step, rank, number) is not None:
                return True
            if not self.is_stopping:
                self.ledger.ask_turn(step, rank, number)
            return self.is_stopping or ("train", step) in self._ended or self.ledger.turn(step, rank, number) is not None

        await self._signal.until(is_known)
        self._signal.notify()  # the others, whose turn it is, too
        return self.ledger.turn(step, rank, number) if self.ledger.is_open(step) else None

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
        """The figures of a closed step, once no evaluation is left that needs weights which the next ones displace.

        None: the run is stopping. Ranks step together, so what one of them was told all of them are.
        """
        displaced = step - self._schedule.max_staleness
        may_go_on = await self._until(lambda: step in self._totals or not self._progress.unfinished(displaced))
        if step not in self._totals:
            self._totals = {step: self.ledger.totals(step) if may_go_on else None}
        return self._totals[step]

    @remote
    async def commit(self, step: int, update: Update) -> None:
        """The optimiser has stepped: the step is final."""
        self.on_committed(self.ledger.commit(step), update)
        self.changed()

    def done(self, task: str, rows: list[int]) -> None:
        """Told by a task's controller."""
        self.ledger.done(task, rows)
        self.changed()

    def give_up(self, dead: list[DeadRow]) -> None:
        """Told by the rollout task's controller."""
        self.ledger.give_up(dead)
        self.changed()

    def allow(self, steps: int, of: int) -> None:
        """Let so many steps of a run of `of` be trained; prompts are admitted as far ahead as the schedule's staleness reaches."""
        self.limit, self._last = steps, of
        self.changed()

    @property
    def is_held(self) -> bool:
        """Whether all that was allowed is trained, and more is to come."""
        return self.limit < self._last and self.ledger.committed >= self.limit

    @property
    def _may_be_admitted(self) -> int:
        return min(self._last, self.limit + self._schedule.max_staleness) if self.limit else 0

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
