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
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from asyncflow.rewards.base import RewardFailure, RewardPart, Sample, Score
from asyncflow.rewards.messages import Ready, Reply, Scored, Setup
from asyncflow.sandbox.frames import Broken, Failed, frame
from asyncflow.sandbox.limits import ProcessLimits
from asyncflow.sandbox.process import ProcessEnded, SandboxNames, SandboxProcess, SandboxProcesses, patiently
from asyncflow.types import RunError, UserError

GRACE_SECONDS = 1.0  # beyond the deadline, for a worker that ends the sample itself


class Worker:
    """One process of the pool. It has `grace_seconds` beyond the deadline where it ends a sample itself."""

    def __init__(self, process: SandboxProcess, grace_seconds: float) -> None:
        self.process, self.grace_seconds = process, grace_seconds


class RewardPool:
    """Several processes, each with the same scorers. Use it from one event loop, in a thread that lives as long as the pool."""

    def __init__(
        self,
        parts: Sequence[RewardPart],
        limits: ProcessLimits,
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
        self._num_workers, self._limits, self._name, self._on_scored = num_workers, limits, name, on_scored
        names = SandboxNames(process="reward worker", code=f"reward scorer {self._scorer}", built="scorer")
        self._processes = SandboxProcesses(
            "asyncflow.rewards.worker",
            frame(Setup(parts, limits, prompt_column, prompt_template)),
            Reply,
            names,
            start_seconds=limits.start_seconds,
        )
        self._idle: list[Worker] = []
        self._waiting: deque[tuple[bytes, asyncio.Future[Score]]] = deque()
        self._unanswered: set[asyncio.Future[Score]] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._error: Exception | None = RunError(f"reward pool {name!r} has not been started")

    async def start(self) -> None:
        """Start all workers. Raises `UserError`, with no process left, if the scorer cannot be imported or built."""
        await self._processes.start_guard()
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
        """Kill all workers and wait for their end. A caller that still waits in `score` gets a `RunError`."""
        self._fail(RunError(f"reward pool {self._name!r} was closed"))
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        self._idle.clear()
        await self._processes.close()

    async def _serve(self, worker: Worker) -> None:
        """Score what waits, one sample after another, then put a living worker back."""
        while self._waiting:
            question, future = self._waiting.popleft()
            if future.done():
                continue
            if not worker.process.is_alive:  # it died while idle: no fault of this sample
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
            if not worker.process.is_alive:
                worker = await self._replace(worker)
        self._idle.append(worker)

    async def _ask(self, worker: Worker, question: bytes) -> Score:
        process = worker.process
        try:
            reply = await process.ask(question, self._limits.deadline_seconds + worker.grace_seconds)
        except TimeoutError:
            await process.kill()
            late = f"gave no answer within {self._limits.deadline_seconds:g} s and was killed"
            raise RewardFailure("timeout", f"scorer {self._scorer} {late}{process.last_words}") from None
        except ProcessEnded:
            how = f"its process {process.end}{process.last_words}"
            raise RewardFailure(process.kind_of_end, f"scorer {self._scorer}: {how}") from None
        if isinstance(reply, Scored):
            if reply.reward is None:
                raise RewardFailure("skipped", f"scorer {self._scorer} has nothing to say about this sample")
            return Score(reply.reward, tuple(reply.parts), reply.metrics)
        assert isinstance(reply, Failed), reply
        if reply.kind == "memory" and not worker.grace_seconds:  # what ate it may be kept: the next sample must not pay for it
            await process.kill()
        raise RewardFailure(reply.kind, reply.message, reply.trace)

    async def _spawn(self) -> Worker:
        process, reply = await self._processes.spawn()
        if isinstance(reply, Broken):
            await self._processes.remove(process)
            raise UserError(f"reward scorer {reply.name} {reply.message}")
        assert isinstance(reply, Ready), reply
        return Worker(process, GRACE_SECONDS if reply.has_deadline else 0.0)

    async def _replace(self, worker: Worker) -> Worker:
        """A new worker in the place of one that ended."""
        await self._processes.remove(worker.process)
        return await patiently(self._spawn)

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
