"""Episodes in environment processes that can be killed.

consumes: episodes that are begun, first come first served over all processes; their turns
waits for: room in a process; its answer, at most `deadline_seconds`
is unblocked by: the end of another episode; the answer, the process's end, or the deadline

An environment that misses its deadline is killed with its process, and so are the other episodes of that process; each of them
fails. A new process takes the place of one that ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from asyncflow.environments.base import Action, EnvironmentFailure, Opening, TurnResult
from asyncflow.environments.messages import (
    CloseEpisode,
    EnvironmentReady,
    EnvironmentReply,
    EnvironmentSetup,
    EpisodeClosed,
    EpisodeOpened,
    EpisodeStepped,
    ResetEpisode,
    StepEpisode,
)
from asyncflow.sandbox.frames import Failed, frame
from asyncflow.sandbox.interpreter import SCHEME
from asyncflow.sandbox.limits import ProcessLimits
from asyncflow.sandbox.pool import SandboxNames, SandboxPool, whole_path
from asyncflow.sandbox.process import SandboxProcess
from asyncflow.types import UserError

AnswerT = TypeVar("AnswerT", EpisodeOpened, EpisodeStepped, EpisodeClosed)


class EnvironmentPool(SandboxPool):
    """Pool whose processes have the same environment."""

    names = SandboxNames("environment pool", "environment process", "environment", "environment")
    module = "asyncflow.environments.worker"
    replies = EnvironmentReply

    def __init__(
        self,
        path: str,
        options: Mapping[str, Any],
        limits: ProcessLimits,
        *,
        num_workers: int,
        name: str,
        pythons: Sequence[str] = (),
    ) -> None:
        """`path`: `package.module:Name` or `/path/file.py:Name`. `pythons`: interpreters of the processes, in turn, where they are
        others, of other machines too (sandbox/interpreter.py).

        Raises `UserError` for a path or an interpreter of another shape.
        """
        self.path = whole_path(self.names.code, path)
        setup = EnvironmentSetup(self.path, options, limits)
        super().__init__([self.path], setup, limits, num_workers=num_workers, name=name, pythons=pythons)
        self.facts = EnvironmentReady()
        """Facts that the environment says of itself, once the pool is started."""
        self._is_elsewhere = any(python.startswith(SCHEME) for python in pythons)
        self._numbers = itertools.count()
        self._waiting: deque[asyncio.Future[SandboxProcess]] = deque()

    async def begin(self, example: Mapping[str, Any], seed: int) -> tuple[PooledEpisode, Opening | None]:
        """An episode, and its first observation. Raises `EnvironmentFailure`, and `RunError` if no process can be had any more."""
        process, number = await self._place(), next(self._numbers)
        try:
            reply = await self.ask(process, ResetEpisode(number, example, seed), EpisodeOpened)
        except BaseException:
            self.end(process, number)
            raise
        return PooledEpisode(self, process, number), reply.opening

    async def ask(self, process: SandboxProcess, question: msgspec.Struct, answer: type[AnswerT]) -> AnswerT:
        """The answer to a question. Raises `EnvironmentFailure`."""
        if self._error is not None:
            raise self._error
        reply = await self._ask(process, frame(question))
        if isinstance(reply, Failed):
            self.failures[reply.kind] += 1
            raise EnvironmentFailure(reply.kind, reply.message)
        assert isinstance(reply, answer), reply
        return reply

    def end(self, process: SandboxProcess, number: int) -> None:
        """Close an episode, beside everything else; its place is free then."""
        if self._error is None and process.is_alive:
            self._do_in_background(self._close_episode(process, number))
        elif self._error is None:
            self._retire(process)

    async def _close_episode(self, process: SandboxProcess, number: int) -> None:
        with contextlib.suppress(EnvironmentFailure):  # it is counted; a process that is lost has been retired
            await self.ask(process, CloseEpisode(number), EpisodeClosed)
        self._free(process)

    async def _place(self) -> SandboxProcess:
        """A process with a place for a question, which takes it. First come, first served."""
        if self._error is not None:
            raise self._error
        while self._places:
            process = self._places.pop()
            if process.is_alive:
                return process
            self._retire(process)  # it died while it was idle: no fault of this question
        place: asyncio.Future[SandboxProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            return await self._unless_failed(place)
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._free(place.result())
            raise

    def _free(self, process: SandboxProcess) -> None:
        while self._waiting and not process.is_replaced:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(process)
                return
        super()._free(process)

    def _num_places(self, ready: EnvironmentReady) -> int:
        if ready.is_captured and self._is_elsewhere:
            raise UserError(
                f"environment {self.path} calls the policy at an address of the rollout worker's own machine: its interpreter "
                f"(episodes.python) has to be there, too"
            )
        self.facts = ready
        return ready.episodes_per_process


class PooledEpisode:
    """Episode in a process of a pool."""

    def __init__(self, pool: EnvironmentPool, process: SandboxProcess, number: int) -> None:
        self._pool, self._process, self._number = pool, process, number

    async def step(self, action: Action) -> TurnResult:
        """The environment's answer to a turn. Raises `EnvironmentFailure`, and `RunError` if the pool is closed."""
        question = StepEpisode(self._number, str(action), action.is_finished, action.token_ids)
        return (await self._pool.ask(self._process, question, EpisodeStepped)).result

    def end(self) -> None:
        """End the episode: it is over, or is not wanted any more. Returns at once."""
        self._pool.end(self._process, self._number)
