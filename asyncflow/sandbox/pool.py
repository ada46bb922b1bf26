"""Pool of processes that run one piece of the user's code.

consumes: questions
waits for: the building of the user's code in each process; a process's answer, at most `deadline_seconds`
is unblocked by: the answer, the process's end, or the deadline

A guard outlives the owner, and kills what is left of the processes then.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec

from asyncflow.sandbox import guard
from asyncflow.sandbox.frames import Broken, Failed, frame
from asyncflow.sandbox.interpreter import PACKAGE_FOLDER, command_of
from asyncflow.sandbox.limits import ProcessLimits
from asyncflow.sandbox.process import KILL_SECONDS, ProcessEnded, SandboxProcess
from asyncflow.types import RunError, UserError
from asyncflow.user_file import tells_of_shortage

T = TypeVar("T")

NUM_STARTS = 3  # of a process that somebody kills before it has begun
RESTART_PAUSES_SECONDS = (0.5, 2.0)


class SandboxNames(NamedTuple):
    """Names in messages: of a kind of pool, such as `reward pool`; of its processes, such as `reward worker`; of the user's code in
    them, such as `reward scorer`; and of the object that this code builds there, such as `scorer`."""

    pool: str
    process: str
    code: str
    built: str


class SandboxPool(ABC):
    """Several processes with the same code. Use it from one event loop, in a thread that lives as long as the pool."""

    names: ClassVar[SandboxNames]
    module: ClassVar[str]
    """Run with the owner's process id as argument; its first question is the setup."""
    replies: ClassVar[Any]
    """See `SandboxProcess`."""

    def __init__(
        self,
        paths: Sequence[str],
        setup: msgspec.Struct,
        limits: ProcessLimits,
        *,
        num_workers: int,
        name: str,
        pythons: Sequence[str] = (),
    ) -> None:
        """`paths`: of the user's code. `pythons`: other interpreters than this process's, taken in turn, which find this package
        and have numpy and msgspec of their own: paths, or see `interpreter.py`.

        Raises `UserError` for an address that is none.
        """
        self.failures: Counter[str] = Counter()
        self._paths = ", ".join(paths)
        self._name, self._code = f"{self.names.pool} {name!r}", f"{self.names.code} {self._paths}"
        self._setup, self._limits, self._num_workers = frame(setup), limits, num_workers
        self._commands = itertools.cycle([command_of(python, self.module) for python in pythons or (sys.executable,)])
        self._variables = {**os.environ, "PYTHONPATH": PACKAGE_FOLDER} if pythons else None
        self._guard: asyncio.subprocess.Process | None = None
        self._living: set[SandboxProcess] = set()
        self._places: list[SandboxProcess] = []  # a process as often as it may be asked
        self._parked: set[asyncio.Future[Any]] = set()  # of callers, which are told of the pool's end
        self._background: set[asyncio.Task[None]] = set()
        self._error: Exception | None = RunError(f"{self._name} has not been started")

    async def start(self) -> None:
        """Start all processes. Raises `UserError`, with none left, if the user's code cannot be imported or built."""
        self._guard = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", guard.__file__, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        outcomes = await asyncio.gather(*(self._spawn() for _ in range(self._num_workers)), return_exceptions=True)
        try:
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
                self._add(*outcome)
        except BaseException:
            await self.close()
            raise
        self._error = None

    async def close(self) -> None:
        """Kill all processes and wait for their end, and the guard's. A caller that still waits for an answer gets a `RunError`.

        Raises `RunError` if the kernel does not deliver.
        """
        self._fail(RunError(f"{self._name} was closed"))
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await asyncio.gather(*(self._remove(process) for process in list(self._living)))
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            try:
                async with asyncio.timeout(KILL_SECONDS):
                    await self._guard.wait()
            except TimeoutError as error:
                raise RunError(f"guard {self._guard.pid} of {self._code} does not end") from error
            self._guard = None

    @abstractmethod
    def _num_places(self, ready: Any) -> int:
        """Number of questions that a new process may have at a time, by its answer to the setup. Raises `UserError` for one that
        is of no use."""

    async def _ask(self, process: SandboxProcess, question: bytes, grace_seconds: float = 0.0) -> Any:
        """Answer to a question, a frame; or `Failed`: of a process that is late, and was killed, or that has ended."""
        subject = f"{self.names.built} {self._paths}"
        try:
            return await process.ask(question, self._limits.deadline_seconds + grace_seconds)
        except TimeoutError:
            self._retire(process)
            await process.kill()
            late = f"gave no answer within {self._limits.deadline_seconds:g} s and was killed"
            return Failed("timeout", f"{subject} {late}{process.last_words}")
        except ProcessEnded:
            if self._error is not None:
                raise self._error from None
            self._retire(process)
            return Failed(process.kind_of_end, f"{subject}: its process {process.end}{process.last_words}")

    async def _unless_failed(self, future: asyncio.Future[T]) -> T:
        """Result of a future. Raises the pool's error, if that comes first."""
        self._parked.add(future)
        try:
            return await future
        finally:
            self._parked.discard(future)

    def _do_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Start work in the background. An error of it ends the pool."""
        task = asyncio.create_task(work, name=self._name)
        self._background.add(task)
        task.add_done_callback(self._has_ended)

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self._error is None:
            self._fail(RunError(f"{self._name} cannot go on: {error}"))

    def _fail(self, error: Exception) -> None:
        """Fail every request from now on."""
        self._error = error
        for future in self._parked:
            if not future.done():
                future.set_exception(error)

    # -- places of processes ------------------------------------------------------------------------------------------------

    def _free(self, process: SandboxProcess) -> None:
        """Give a place back."""
        if not process.is_replaced:
            self._places.append(process)

    def _add(self, process: SandboxProcess, ready: Any) -> None:
        for _ in range(self._num_places(ready)):
            self._free(process)

    def _retire(self, process: SandboxProcess) -> None:
        """Give a process that ended, or is to end, nothing more, and put a new one in its place, beside everything else."""
        if not process.is_replaced:
            process.is_replaced = True
            self._places = [other for other in self._places if other is not process]
            self._do_in_background(self._replace(process))

    # -- processes ----------------------------------------------------------------------------------------------------------

    async def _replace(self, process: SandboxProcess) -> None:
        """Put a new process in the place of this one. A start that fails is tried again: a machine may be short of memory for a
        moment."""
        await self._remove(process)
        for pause in RESTART_PAUSES_SECONDS:
            try:
                return self._add(*await self._spawn())
            except (RunError, UserError, OSError):
                await asyncio.sleep(pause)
        self._add(*await self._spawn())

    async def _spawn(self) -> tuple[SandboxProcess, Any]:
        """A new process and its answer to the setup. One that is killed before it has answered, or finds too little memory or too
        few file handles, or ends before it comes to the user's code, is started again, a few times.

        With no process left it raises `UserError` if the user's code cannot be imported or built, or not in time, or if the
        process has ended by itself, and `RunError` if all had to be started again: that is no mistake of the user's code.
        """
        for _ in range(NUM_STARTS):
            process, reply = await self._spawned()
            if isinstance(reply, Broken):
                await self._remove(process)
                why = f"{self.names.code} {reply.name} {reply.message}"
                if not tells_of_shortage(reply.message):
                    raise UserError(why)
            elif reply is not None:
                return process, reply
            else:
                why = f"{self._code}: its process {process.end} before the {self.names.built} was built{process.last_line}"
        raise RunError(f"{why}, {NUM_STARTS} times")

    async def _spawned(self) -> tuple[SandboxProcess, Any]:
        """A new process and its answer to the setup; None if it was killed before it had one, or the machine was too short of
        something for it to have one, or it did not come to the user's code."""
        loop, names, seconds = asyncio.get_running_loop(), self.names, self._limits.start_seconds
        _, process = await loop.subprocess_exec(
            lambda: SandboxProcess(self.replies, names.process), *next(self._commands), start_new_session=True, env=self._variables
        )
        self._living.add(process)
        self._write_to_guard(f"+{process.pid}\n")
        try:
            return process, await process.ask(self._setup, seconds, counts_stops=False)
        except TimeoutError:
            is_stopped = process.is_stopped
            await self._remove(process)
            if is_stopped or self._is_without_blame(process):
                return process, None
            raise UserError(f"{self._code} was not imported and built within {seconds:g} s{process.last_line}") from None
        except ProcessEnded:
            await self._remove(process)
            if process.ended.result() < 0 or tells_of_shortage(process.last_line) or self._is_without_blame(process):
                return process, None
            ended = f"its process {process.end} before the {names.built} was built"
            raise UserError(f"{self._code}: {ended}{process.last_line}") from None

    def _is_without_blame(self, process: SandboxProcess) -> bool:
        """Whether the user has no part in a process's end: this one's interpreter had not come to the user's code."""
        return self._variables is None and not process.has_begun

    async def _remove(self, process: SandboxProcess) -> None:
        """Kill a process, and forget it."""
        await process.kill()
        self._living.discard(process)
        self._write_to_guard(f"-{process.pid}\n")

    def _write_to_guard(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.write(line.encode())


def whole_path(code: str, path: str) -> str:
    """The path of the user's code, that of a file from the root on. Raises `UserError` for another shape."""
    place, _, name = path.rpartition(":")
    if not (place and name):
        raise UserError(f"{code} {path!r}: write it as 'package.module:Name' or '/path/to/file.py:Name'")
    return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else path
