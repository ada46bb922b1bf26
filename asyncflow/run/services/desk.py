"""The desk: experience of the step that a process from outside trains, and the weights that come back.

    trainer/0: OutsideTrainEngine --offer--> desk --take--> the outside trainers, each group to one of them
                                                  <--acknowledge--
                                  --update-> all taken, all acknowledged
                                  <---------------- publish: a file of weights

consumes: micro-batches of one step; weights
waits for: groups, which come as they are complete; acknowledgements; the weights
is unblocked by: the train loop; the outside trainers

The step's groups stay here until its weights are published, so that an outside trainer that dies loses nothing: another one gets
its groups. The leases, the step and the commit are the run's own, as with any other engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncflow.control.signal import Signal
from asyncflow.engines.train.experience import Experience, Published
from asyncflow.transport import remote
from asyncflow.types import RunError
from asyncflow.waits import OUTSIDE, RUN_ENDS


@dataclass(slots=True)
class DeskGroup:
    """Micro-batch that is to be trained. `taken_by`: the session that has it; "" if none has."""

    number: int
    experience: Experience
    taken_by: str = ""
    is_trained: bool = False


@dataclass(frozen=True, slots=True)
class TakenGroups:
    """Groups of a step that a trainer has taken. `normaliser`: what the step's sums are divided by, once all groups are handed out
    (`is_complete`); None before."""

    step: int
    groups: list[DeskGroup] = field(default_factory=list)
    normaliser: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the step has no more groups than those that have been taken."""
        return self.normaliser is not None


class TrainDesk:
    """The driver's service `desk`. `on_progress` is called when something moves."""

    def __init__(self, on_progress: Callable[[], None]) -> None:
        self.step = -1
        self._groups: dict[int, DeskGroup] = {}
        self._numbers = 0
        self._normaliser: int | None = None
        self._published: asyncio.Future[Published] | None = None
        self._verdict: asyncio.Future[str] | None = None  # of the engine on what was published last
        self._is_over = False
        self._changed = Signal()
        self._on_progress = on_progress

    # -- the engine's -------------------------------------------------------------------------------------------------------

    @remote
    async def begin(self, step: int) -> None:
        """Begin a step."""
        if step != self.step:
            self.step, self._groups, self._normaliser, self._published = step, {}, None, None
            self._notify()

    @remote
    async def offer(self, batches: list[Experience]) -> None:
        """Micro-batches of the step, to be trained."""
        for experience in batches:
            self._groups[self._numbers] = DeskGroup(self._numbers, experience)
            self._numbers += 1
        self._notify()

    @remote
    async def update(self, normaliser: int) -> Published:
        """Wait for the weights that come of the step's micro-batches, all of which have been offered."""
        if self._published is None:
            self._published = asyncio.get_running_loop().create_future()
        self._normaliser = normaliser
        self._notify()
        return await self._published

    @remote
    async def report_taken(self, why_not: str) -> None:
        """Take note that the engine has taken what `update` gave it, or, with a reason, has not, and asks again."""
        if why_not:
            self._published = asyncio.get_running_loop().create_future()
        if self._verdict is not None and not self._verdict.done():
            self._verdict.set_result(why_not)

    @remote
    async def discard(self) -> None:
        """Discard the step: nothing comes of it."""
        self._groups, self._normaliser, self._published = {}, None, None
        self._notify()

    # -- the outside trainers' ----------------------------------------------------------------------------------------------

    async def take(self, session: str, *, groups: int, tokens: int, timeout_seconds: float) -> TakenGroups:
        """Take groups of the step that no other trainer has: `groups` at most, and so many as have `tokens` together, one at
        least (0: no limit). Waits for some, so long; then there are none, and the step may be complete."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._changed.until(lambda: bool(self._ready()) or self._normaliser is not None or self._is_over, OUTSIDE)
        except TimeoutError:
            return TakenGroups(self.step)
        if self._is_over:
            raise RunError("the run is stopping, or was resumed: join anew for more experience")
        taken: list[DeskGroup] = []
        for group in self._ready():
            if (groups and len(taken) >= groups) or (tokens and taken and _tokens([*taken, group]) > tokens):
                break
            group.taken_by = session
            taken.append(group)
        is_complete = not self._ready() and self._normaliser is not None
        return TakenGroups(self.step, taken, self._normaliser if is_complete else None)

    def acknowledge(self, session: str, numbers: list[int]) -> None:
        """Note that these groups are in the gradient of the session's trainer. Raises `RunError` naming one that it does not
        have."""
        for number in numbers:
            group = self._groups.get(number)
            if group is None or group.taken_by != session:
                raise RunError(f"group {number} is not this trainer's: it was given to another one, or its step is over")
        for number in numbers:
            self._groups[number].is_trained = True
        self._on_progress()

    def leave(self, session: str) -> None:
        """Forget a session that has gone: what it had not acknowledged is for others."""
        for group in self._groups.values():
            if group.taken_by == session and not group.is_trained:
                group.taken_by = ""
        self._notify()

    def restart(self) -> None:
        """Hand all groups of the step out again, the acknowledged ones too: the gradient is lost."""
        for group in self._groups.values():
            group.taken_by, group.is_trained = "", False
        self._notify()

    def check(self, step: int) -> None:
        """Raises `RunError` where the weights that come of this step cannot be published now."""
        if self._is_over:
            raise RunError(f"the weights of step {step} come too late: the run is stopping, or was resumed")
        if step != self.step or self._normaliser is None or self._published is None:
            raise RunError(
                f"the weights that step {step} makes cannot be published: step {self.step} is being trained"
                + ("" if step != self.step else ", and not all of its groups are there yet")
            )
        if left := [number for number, group in self._groups.items() if not group.is_trained]:
            raise RunError(f"{len(left)} groups of step {step} are not acknowledged, group {left[0]} among them")

    async def publish(self, step: int, published: Published) -> None:
        """Weights that the step has made, for the train engine. Returns when it has taken them. Raises `RunError` as `check` does,
        and where the engine does not take them."""
        self.check(step)
        assert self._published is not None
        if self._published.done():
            raise RunError(f"the weights of step {step} have been published")
        self._verdict = asyncio.get_running_loop().create_future()
        self._published.set_result(published)
        if why := await self._verdict:
            raise RunError(why)

    async def stranded(self) -> None:
        """Wait until the engine waits for weights that nobody can publish any more, since the run is stopping."""
        await self._changed.until(lambda: self._is_over and self._published is not None and not self._published.done(), RUN_ENDS)

    def stop(self) -> None:
        """Stop: the run is stopping."""
        self._is_over = True
        if self._verdict is not None and not self._verdict.done():
            self._verdict.set_result("the run is stopping, or was resumed: the step is not committed")
        self._notify()

    def _ready(self) -> list[DeskGroup]:
        return [group for group in self._groups.values() if not group.taken_by]

    def _notify(self) -> None:
        self._on_progress()
        self._changed.notify()


def _tokens(groups: list[DeskGroup]) -> int:
    return sum(group.experience.num_tokens for group in groups)
