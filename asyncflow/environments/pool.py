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
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from asyncflow.environments.base import Action, EnvironmentFailure, Opening, TurnResult
from asyncflow.environments.messages import (
    CloseEpisode,
    EnvironmentReady,
    EnvironmentSetup,
    EpisodeClosed,
    EpisodeOpened,
    EpisodeStepped,
    Reply,
    ResetEpisode,
    StepEpisode,
)
from asyncflow.sandbox.frames import Broken, Failed, frame
from asyncflow.sandbox.interpreter import SCHEME
from asyncflow.sandbox.limits import ProcessLimits
from asyncflow.sandbox.process import ProcessEnded, SandboxNames, SandboxProcess, SandboxProcesses, patiently
from asyncflow.types import RunError, UserError

Answer = TypeVar("Answer", EpisodeOpened, EpisodeStepped, EpisodeClosed)


class EnvironmentPool:
    """Several processes, each with the same environment. Use it from one event loop, in a thread that lives as long as the pool."""

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
        place, _, cls = path.rpartition(":")
        if not (place and cls):
            raise UserError(f"environment {path!r}: write it as 'package.module:Name' or '/path/to/file.py:Name'")
        self.path = f"{Path(place).resolve()}:{cls}" if place.endswith(".py") else path
        self.failures: Counter[str] = Counter()
        self.facts = EnvironmentReady()
        """Facts that the environment says of itself, once the pool is started."""
        names = SandboxNames(process="environment process", code=f"environment {self.path}", built="environment")
        self._processes = SandboxProcesses(
            "asyncflow.environments.worker",
            frame(EnvironmentSetup(self.path, options, limits)),
            Reply,
            names,
            start_seconds=limits.start_seconds,
            pythons=pythons,
        )
        self._is_elsewhere = any(python.startswith(SCHEME) for python in pythons)
        self._limits, self._num_workers, self._name = limits, num_workers, name
        self._numbers = itertools.count()
        self._room: list[SandboxProcess] = []  # a process as often as it can take an episode
        self._waiting: deque[asyncio.Future[SandboxProcess]] = deque()
        self._background: set[asyncio.Task[None]] = set()
        self._error: Exception | None = RunError(f"environment pool {name!r} has not been started")

    async def start(self) -> None:
        """Start all processes. Raises `UserError`, with none left, if the environment cannot be imported or built."""
        await self._processes.start_guard()
        outcomes = await asyncio.gather(*(self._spawn() for _ in range(self._num_workers)), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                await self.close()
                raise outcome
            self._add(outcome)
        self._error = None

    async def begin(self, example: Mapping[str, Any], seed: int) -> tuple[PooledEpisode, Opening | None]:
        """An episode, and its first observation. Raises `EnvironmentFailure`, and `RunError` if no process can be had any more."""
        episode = PooledEpisode(self, await self._process(), next(self._numbers))
        try:
            reply = await episode.ask(ResetEpisode(episode.number, example, seed), EpisodeOpened)
        except BaseException:
            episode.end()
            raise
        return episode, None if reply.words is None else Opening(reply.words, reply.tools)

    async def close(self) -> None:
        """Kill all processes and wait for their end. A caller that still waits for an answer gets a `RunError`."""
        self._fail(RunError(f"environment pool {self._name!r} was closed"))
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._room.clear()
        await self._processes.close()

    def failed(self, kind: str, what: str) -> EnvironmentFailure:
        """A failure, which is counted."""
        self.failures[kind] += 1
        return EnvironmentFailure(kind, what)

    async def ask(self, process: SandboxProcess, question: msgspec.Struct, answer: type[Answer]) -> Answer:
        """The answer to a question. Raises `EnvironmentFailure`."""
        if self._error is not None:
            raise self._error
        who = f"environment {self.path}"
        try:
            reply = await process.ask(frame(question), self._limits.deadline_seconds)
        except TimeoutError:
            self._retire(process)
            late = f"gave no answer within {self._limits.deadline_seconds:g} s and was killed"
            raise self.failed("timeout", f"{who} {late}{process.last_words}") from None
        except ProcessEnded:
            if self._error is not None:
                raise self._error from None
            self._retire(process)
            raise self.failed(process.kind_of_end, f"{who}: its process {process.end}{process.last_words}") from None
        if isinstance(reply, Failed):
            raise self.failed(reply.kind, reply.message)
        assert isinstance(reply, answer), reply
        return reply

    def end(self, process: SandboxProcess, number: int) -> None:
        """Close an episode, beside everything else; its place is free then."""
        if process.is_alive and self._error is None:
            self._beside_do(self._close_episode(process, number))

    async def _close_episode(self, process: SandboxProcess, number: int) -> None:
        with contextlib.suppress(EnvironmentFailure):  # it is counted; a process that is lost has been retired
            await self.ask(process, CloseEpisode(number), EpisodeClosed)
        self._free(process)

    async def _process(self) -> SandboxProcess:
        """A process with room for an episode, which takes it."""
        if self._error is not None:
            raise self._error
        if self._room:
            return self._room.pop()
        place: asyncio.Future[SandboxProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._free(place.result())
            raise

    def _free(self, process: SandboxProcess) -> None:
        if process.is_replaced:
            return
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(process)
                return
        self._room.append(process)

    def _add(self, process: SandboxProcess) -> None:
        for _ in range(self.facts.episodes_per_process):
            self._free(process)

    async def _spawn(self) -> SandboxProcess:
        process, reply = await self._processes.spawn()
        if isinstance(reply, Broken):
            await self._processes.remove(process)
            raise UserError(f"environment {reply.name} {reply.message}")
        assert isinstance(reply, EnvironmentReady), reply
        if reply.is_captured and self._is_elsewhere:
            await self._processes.remove(process)
            raise UserError(
                f"environment {self.path} calls the policy at an address of the rollout worker's own machine: its interpreter "
                f"(episodes.python) has to be there, too"
            )
        self.facts = reply
        return process

    def _retire(self, process: SandboxProcess) -> None:
        """Give a process that ended, or is to end, nothing more, and put a new one in its place, beside everything else."""
        if not process.is_replaced:
            process.is_replaced = True
            self._room = [other for other in self._room if other is not process]
            self._beside_do(self._replace(process))

    async def _replace(self, process: SandboxProcess) -> None:
        await self._processes.remove(process)
        try:
            self._add(await patiently(self._spawn))
        except (UserError, OSError, RunError) as error:
            self._fail(RunError(f"environment pool {self._name!r} cannot go on: {error}"))

    def _beside_do(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _fail(self, error: Exception) -> None:
        """Fail every episode from now on."""
        self._error = error
        for place in self._waiting:
            if not place.done():
                place.set_exception(error)
        self._waiting.clear()


class PooledEpisode:
    """One episode in a process of a pool."""

    def __init__(self, pool: EnvironmentPool, process: SandboxProcess, number: int) -> None:
        self.number = number
        self._pool, self._process = pool, process

    async def ask(self, question: msgspec.Struct, answer: type[Answer]) -> Answer:
        """See `EnvironmentPool.ask`."""
        return await self._pool.ask(self._process, question, answer)

    async def step(self, action: Action) -> TurnResult:
        """The environment's answer to a turn. Raises `EnvironmentFailure`, and `RunError` if the pool is closed."""
        question = StepEpisode(self.number, str(action), action.is_finished, action.token_ids)
        reply = await self.ask(question, EpisodeStepped)
        return TurnResult(reply.words, reply.reward, reply.done, reply.info)

    def end(self) -> None:
        """The episode has ended, or is not wanted any more. Returns at once."""
        self._pool.end(self._process, self.number)
