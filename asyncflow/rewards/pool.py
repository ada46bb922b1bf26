"""Scores samples in worker processes that can be killed.

consumes: samples handed to `RewardPool.score`, first come first served over all workers
waits for: a free worker, then its answer, at most `deadline_seconds` from the moment it took the sample up
is unblocked by: the answer, the worker's end, or the deadline

A worker has one sample at a time and is given the next one only after it answered or was replaced, so an answer can belong to no
other sample: a caller that is cancelled leaves its sample to run out its deadline. A scorer is ended by SIGKILL, with everything it
started: by its worker, or where that has to be killed too, in its worker's session, so that a daemon in a session of its own is out
of reach then. Most workers end a sample in time by themselves (`forked.py`); one that does not is killed, and a new one started.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from asyncflow.rewards.base import RewardFailure, RewardPart, Sample, Score
from asyncflow.rewards.messages import Ready, RewardReply, Scored, Setup
from asyncflow.sandbox.frames import Failed, frame
from asyncflow.sandbox.limits import ProcessLimits
from asyncflow.sandbox.pool import SandboxNames, SandboxPool, whole_path
from asyncflow.sandbox.process import SandboxProcess
from asyncflow.types import UserError

GRACE_SECONDS = 1.0  # beyond the deadline, for a worker that ends the sample itself


class RewardPool(SandboxPool):
    """Pool whose processes have the same scorers."""

    names = SandboxNames("reward pool", "reward worker", "reward scorer", "scorer")
    module = "asyncflow.rewards.worker"
    replies = RewardReply

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
        parts = [msgspec.structs.replace(part, scorer=whole_path(self.names.code, part.scorer)) for part in parts]
        setup = Setup(parts, limits, prompt_column, prompt_template)
        super().__init__([part.scorer for part in parts], setup, limits, num_workers=num_workers, name=name)
        self._on_scored = on_scored
        self._questions: deque[tuple[bytes, asyncio.Future[Score]]] = deque()
        self._grace_seconds = 0.0

    async def score(self, sample: Sample) -> Score:
        """The sample's reward, a finite number, and its parts.

        Raises `RewardFailure` if there is none, and `RunError` if the pool is closed or can start no worker any more. May be
        cancelled: the sample's worker first finishes it, or is killed at its deadline, then goes on with the next sample.
        """
        if self._error is not None:
            raise self._error
        future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._questions.append((frame(sample), future))
        self._begin_serving()
        return await self._unless_failed(future)

    def _begin_serving(self) -> None:
        if self._questions and self._places:
            self._do_in_background(self._serve(self._places.pop()))

    async def _serve(self, worker: SandboxProcess) -> None:
        """Score what waits, one sample after another, while the worker lives; then give its place back."""
        clock = asyncio.get_running_loop().time
        while self._questions and not worker.is_replaced:
            if not worker.is_alive:  # it died while idle: no fault of a sample
                self._retire(worker)
                break
            question, future = self._questions.popleft()
            if future.done():
                continue
            began = clock()
            try:
                score = await self._score_by(worker, question)
            except RewardFailure as failure:
                if failure.kind != "skipped":
                    self.failures[failure.kind] += 1
                if not future.done():
                    future.set_exception(failure)
            else:
                self._on_scored(clock() - began)
                if not future.done():
                    future.set_result(score)
        self._free(worker)

    def _free(self, process: SandboxProcess) -> None:
        super()._free(process)
        self._begin_serving()

    async def _score_by(self, worker: SandboxProcess, question: bytes) -> Score:
        reply = await self._ask(worker, question, self._grace_seconds)
        if isinstance(reply, Scored):
            if reply.reward is None:
                raise RewardFailure("skipped", f"scorer {self._paths} has nothing to say about this sample")
            return Score(reply.reward, tuple(reply.parts), reply.metrics)
        assert isinstance(reply, Failed), reply
        if reply.kind == "memory" and not self._grace_seconds:  # what ate it may be kept: the next sample must not pay for it
            self._retire(worker)
        raise RewardFailure(reply.kind, reply.message, reply.trace)

    def _num_places(self, ready: Ready) -> int:
        self._grace_seconds = GRACE_SECONDS if ready.has_deadline else 0.0
        return 1
