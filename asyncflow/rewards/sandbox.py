"""Scores samples in worker processes that can be killed.

consumes: samples handed to `RewardPool.score`, first come first served over all workers
waits for: a free worker, then its answer, at most `deadline_seconds` from the moment it took the sample up
is unblocked by: the answer, the worker's end, or the deadline

A worker has one sample at a time and is given the next one only after it answered or was replaced, so an answer can belong to no
other sample: a caller that gives up leaves its sample to run out its deadline. A scorer is ended by SIGKILL, with everything it
started: by its worker, or where that has to be killed too, in its worker's session, so that a daemon in a session of its own is out
of reach then. Most workers end a sample in time by themselves (`forked.py`); one that does not is killed, and a new one started.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import msgspec

from asyncflow.rewards import guard
from asyncflow.rewards.base import RewardFailure, RewardPart, Sample, Score
from asyncflow.rewards.messages import (
    MAX_FRAME_BYTES,
    TOKEN_BYTES,
    Broken,
    Failed,
    Ready,
    Reply,
    RewardLimits,
    Scored,
    Setup,
    frame,
)
from asyncflow.types import RunError, UserError

LAST_WORDS_BYTES = 4096
DRAIN_SECONDS = 0.2  # for the pipes of a process that has ended: somebody outside its group may hold them open
KILL_SECONDS = 5.0  # SIGKILL to the end of the process; longer only if the kernel is stuck
RESTART_PAUSES_SECONDS = (0.5, 2.0)
GRACE_SECONDS = 1.0  # beyond the deadline, for a worker that ends the sample itself

_decoder = msgspec.msgpack.Decoder(Reply)


class _Ended(Exception):
    """The worker's process ended before it answered."""


class Worker(asyncio.SubprocessProtocol):
    """The parent's end of one worker process."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = loop.create_future()  # the exit status, minus the signal's number if one ended it
        self._reply: asyncio.Future[Reply] | None = None
        self._token = b""  # of what was asked last
        self._received = bytearray()
        self._last_words = bytearray()
        self._open_pipes = {1, 2}
        self._exited = False
        self.is_garbled = False  # sent what is no answer
        self.grace_seconds = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._process = cast(asyncio.SubprocessTransport, transport)
        self._stdin = cast(asyncio.WriteTransport, self._process.get_pipe_transport(0))
        self.pid = self._process.get_pid()

    @property
    def is_alive(self) -> bool:
        return not self._exited

    @property
    def last_words(self) -> str:
        """Text that the process printed since it was last asked, at most 4 KiB, ready to be appended to a message."""
        text = self._last_words.decode(errors="replace").strip()
        return f"; its last words: {text}" if text else ""

    @property
    def last_line(self) -> str:
        """The end of the last words, for a message of one sentence."""
        lines = self._last_words.decode(errors="replace").strip().splitlines()
        return f"; its last words: {lines[-1]:.300}" if lines else ""

    @property
    def end(self) -> str:
        """End of the process, in words."""
        status = self.ended.result()
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"

    async def ask(self, question: bytes, seconds: float) -> Reply:
        """Send a frame and wait for the answer. Raises `TimeoutError`, or `_Ended` if the process ends first."""
        loop = asyncio.get_running_loop()
        if self._exited:
            await asyncio.shield(self.ended)
            raise _Ended
        self._last_words.clear()
        self._reply, self._token = loop.create_future(), os.urandom(TOKEN_BYTES)
        self._stdin.write(self._token + question)
        # A timer, not asyncio.timeout: an answer that came in time counts even where this loop was too busy to look.
        timer = loop.call_later(seconds, self._settle, TimeoutError())
        try:
            return await self._reply
        finally:
            timer.cancel()
            self._reply = None

    async def kill(self) -> None:
        """SIGKILL the process group and wait for the end. Raises `RunError` if the kernel does not deliver."""
        if not self._exited:  # an id that is free again may name a stranger
            self._kill_all()
        try:
            async with asyncio.timeout(KILL_SECONDS):
                await asyncio.shield(self.ended)
        except TimeoutError as error:
            raise RunError(f"reward worker {self.pid} is still there {KILL_SECONDS:g} s after SIGKILL") from error

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self._last_words += data
            del self._last_words[:-LAST_WORDS_BYTES]
            return
        self._received += data
        head = TOKEN_BYTES + 4
        while len(self._received) >= head:
            end = head + min(int.from_bytes(self._received[TOKEN_BYTES:head], "big"), MAX_FRAME_BYTES)
            if len(self._received) < end:
                return
            is_asked_for = self._received[:TOKEN_BYTES] == self._token
            try:
                reply = _decoder.decode(self._received[head:end])
            except msgspec.DecodeError:  # only a scorer that wrote into pipes it was not given can bring this about
                self.is_garbled = True
                self._kill_all()
                return
            del self._received[:end]
            if is_asked_for:  # else the answer of a sample before, which had given itself one
                self._settle(reply)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open_pipes.discard(fd)
        if self._exited and not self._open_pipes:
            self._finish()

    def process_exited(self) -> None:
        self._exited = True
        self._kill_all()  # what the scorer started and left behind
        if self._open_pipes:
            asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        if self.ended.done():
            return
        status = self._process.get_returncode()
        assert status is not None, "the event loop reported an end without a status"
        self.ended.set_result(status)
        self._process.close()
        self._settle(_Ended())

    def _settle(self, outcome: Reply | Exception) -> None:
        if self._reply is None or self._reply.done():
            return
        if isinstance(outcome, Exception):
            self._reply.set_exception(outcome)
        else:
            self._reply.set_result(outcome)

    def _kill_all(self) -> None:
        # The process leads its own session, so its id names that, also after its own end while others are left in it.
        guard.kill_sessions({self.pid})


class RewardPool:
    """Several processes, each with the same scorers. Use it from one event loop, in a thread that lives as long as the pool."""

    def __init__(
        self,
        parts: Sequence[RewardPart],
        limits: RewardLimits,
        *,
        num_workers: int,
        name: str,
        prompt_column: str | None = None,
        prompt_template: str | None = None,
        on_scored: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`on_scored` is called when a worker has answered, with the seconds that it took.

        `parts`: what a reward is the weighted sum of. `prompt_column`, `prompt_template`: what makes a prompt, where `data` says
        it. Raises `UserError` for a scorer's path of another shape, no parts, or no workers.
        """
        if num_workers < 1 or not parts:
            raise UserError(f"reward pool {name!r} needs at least one worker and one scorer, not {num_workers} and {len(parts)}")
        parts = [msgspec.structs.replace(part, scorer=_whole(part.scorer)) for part in parts]
        self.failures: Counter[str] = Counter()
        self._scorer = ", ".join(part.scorer for part in parts)
        self._setup = frame(Setup(parts, limits, prompt_column, prompt_template))
        self._num_workers, self._limits, self._name, self._on_scored = num_workers, limits, name, on_scored
        self._guard: asyncio.subprocess.Process | None = None
        self._workers: set[Worker] = set()
        self._idle: list[Worker] = []
        self._waiting: deque[tuple[bytes, asyncio.Future[Score]]] = deque()
        self._unanswered: set[asyncio.Future[Score]] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._error: Exception | None = RunError(f"reward pool {name!r} has not been started")

    async def start(self) -> None:
        """Start all workers. Raises `UserError`, with no process left, if the scorer cannot be imported or built."""
        self._guard = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", guard.__file__, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        outcomes = await asyncio.gather(*(self._spawn() for _ in range(self._num_workers)), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                await self.close()
                raise outcome
            self._idle.append(outcome)
        self._error = None

    async def score(self, sample: Sample) -> Score:
        """The sample's reward, a finite number, and its parts.

        Raises `RewardFailure` if there is none, and `RunError` if the pool is closed or can start no worker any more. May be
        cancelled: the sample's worker first finishes it, or is killed at its deadline, then goes on with the next sample.
        """
        if self._error is not None:
            raise self._error
        future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._waiting.append((frame(sample), future))
        self._unanswered.add(future)
        if self._idle:
            task = asyncio.create_task(self._serve(self._idle.pop()), name=f"reward pool {self._name}")
            self._serving.add(task)
            task.add_done_callback(self._served)
        try:
            return await future
        finally:
            self._unanswered.discard(future)

    async def close(self) -> None:
        """Kill all workers and wait for their end. Whoever still waits in `score` gets a `RunError`."""
        self._fail(RunError(f"reward pool {self._name!r} was closed"))
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await asyncio.gather(*(self._remove(worker) for worker in list(self._workers)))
        self._idle.clear()
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            try:
                async with asyncio.timeout(KILL_SECONDS):
                    await self._guard.wait()
            except TimeoutError as error:
                raise RunError(f"guard {self._guard.pid} of reward pool {self._name!r} does not end") from error
            self._guard = None

    async def _serve(self, worker: Worker) -> None:
        """Score what waits, one sample after another, then put a living worker back."""
        while self._waiting:
            question, future = self._waiting.popleft()
            if future.done():
                continue
            if not worker.is_alive:  # it died while idle: no fault of this sample
                worker = await self._replace(worker)
            clock = asyncio.get_running_loop().time
            began = clock()
            try:
                reward = await self._ask(worker, question)
            except RewardFailure as failure:
                if failure.kind != "skipped":
                    self.failures[failure.kind] += 1
                if not future.done():
                    future.set_exception(failure)
            else:
                self._on_scored(clock() - began)
                if not future.done():
                    future.set_result(reward)
            if not worker.is_alive:
                worker = await self._replace(worker)
        self._idle.append(worker)

    async def _ask(self, worker: Worker, question: bytes) -> Score:
        try:
            reply = await worker.ask(question, self._limits.deadline_seconds + worker.grace_seconds)
        except TimeoutError:
            await worker.kill()
            late = f"gave no answer within {self._limits.deadline_seconds:g} s and was killed"
            raise RewardFailure("timeout", f"scorer {self._scorer} {late}{worker.last_words}") from None
        except _Ended:
            # Nobody here kills a worker that may still answer, so a SIGKILL is the kernel's, and its reason is memory.
            is_memory = worker.ended.result() == -signal.SIGKILL and not worker.is_garbled
            kind = "memory" if is_memory else "exited"
            raise RewardFailure(kind, f"scorer {self._scorer}: its process {worker.end}{worker.last_words}") from None
        if isinstance(reply, Scored):
            if reply.reward is None:
                raise RewardFailure("skipped", f"scorer {self._scorer} has nothing to say about this sample")
            return Score(reply.reward, tuple(reply.parts))
        assert isinstance(reply, Failed), reply
        if reply.kind == "memory" and not worker.grace_seconds:  # what ate it may be kept: the next sample must not pay for it
            await worker.kill()
        raise RewardFailure(reply.kind, reply.message)

    async def _spawn(self) -> Worker:
        loop = asyncio.get_running_loop()
        command = (sys.executable, "-u", "-m", "asyncflow.rewards.worker", str(os.getpid()))
        _, worker = await loop.subprocess_exec(Worker, *command, start_new_session=True)
        self._workers.add(worker)
        self._tell_guard(f"+{worker.pid}\n")
        who = f"reward scorer {self._scorer}"
        try:
            reply = await worker.ask(self._setup, self._limits.start_seconds)
        except TimeoutError:
            await self._remove(worker)
            raise UserError(f"{who} was not imported and built within {self._limits.start_seconds:g} s{worker.last_line}") from None
        except _Ended:
            await self._remove(worker)
            raise UserError(f"{who}: its process {worker.end} before the scorer was built{worker.last_line}") from None
        if isinstance(reply, Broken):
            await self._remove(worker)
            raise UserError(f"reward scorer {reply.scorer} {reply.message}")
        assert isinstance(reply, Ready), reply
        worker.grace_seconds = GRACE_SECONDS if reply.has_deadline else 0.0
        return worker

    async def _replace(self, worker: Worker) -> Worker:
        """A new worker in the place of one that ended. A start that fails is tried again: a machine may be short for a moment."""
        await self._remove(worker)
        for pause in RESTART_PAUSES_SECONDS:
            try:
                return await self._spawn()
            except (UserError, OSError):
                await asyncio.sleep(pause)
        return await self._spawn()

    async def _remove(self, worker: Worker) -> None:
        await worker.kill()
        self._workers.discard(worker)
        self._tell_guard(f"-{worker.pid}\n")

    def _tell_guard(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.write(line.encode())

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(RunError(f"reward pool {self._name!r} cannot go on: {error}"))

    def _fail(self, error: Exception) -> None:
        """Fail every request for a reward from now on."""
        self._error = error
        for future in self._unanswered:
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()


def _whole(scorer: str) -> str:
    """The path of a scorer, that of a file from the root on. Raises `UserError` for another shape."""
    place, _, name = scorer.rpartition(":")
    if not (place and name):
        raise UserError(f"reward scorer {scorer!r}: write it as 'package.module:Name' or '/path/to/file.py:Name'")
    return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else scorer
