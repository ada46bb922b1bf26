"""Hub of workers' spans and states at the driver, and their way there.

worker: Recorder --> Reporter --every flush_seconds--> Hub (driver): SpanLog, states, samples
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import psutil

from asyncflow.own_metrics import StepSums, add
from asyncflow.telemetry.spans import Recorder, Span
from asyncflow.telemetry.tokens import TrainedTokens
from asyncflow.telemetry.trace import SpanLog
from asyncflow.threads import places
from asyncflow.transport import remote
from asyncflow.waits import OpenWait, OpenWaits

SETTLE_SECONDS = 1.0
CLOCK_PROBES = 8
LONG_SECONDS = 5.0  # of one state of a lane, after which a worker says where its threads are
MAX_UNSCORED = 16  # of a report


class UnscoredResponse(msgspec.Struct, frozen=True):
    """Response that a scorer could not score, at one attempt. `kind`: as `RewardFailure` has it; `trace`: of what was raised."""

    kind: str
    error: str
    trace: str
    prompt: str
    response: str
    example: dict[str, Any]


class WorkerState(msgspec.Struct, frozen=True):
    """State of a worker's lane at `time`; `cause` is what it waits for if `task` is `wait`. Times in seconds, monotonic.

    `why_not_deterministic`: why its engine may not make a lost response again exactly; empty if it does. `reward_failures`: by
    kind, since the worker began; `num_scored`: responses that got a reward; `own_metrics`: of scorers, since the last report.
    `waits`: the oldest ones that are open; `threads`: where its threads are that compute, or are at files, if its lane has been in
    one state for some seconds.
    """

    worker: str
    pid: int
    task: str
    cause: str
    since: float
    time: float
    rss_bytes: int
    why_not_deterministic: str
    reward_failures: dict[str, int]
    num_scored: int
    own_metrics: StepSums = {}
    waits: list[OpenWait] = []
    threads: list[str] = []


class Hub:
    """The driver's end. `on_sample` takes the sampled responses, `on_trained` those that were trained, token by token,
    `on_unscored` those that could not be scored; `on_tokens` is told that there was progress."""

    def __init__(
        self,
        log: SpanLog,
        on_sample: Callable[[Mapping[str, Any]], None],
        on_trained: Callable[[TrainedTokens], None],
        on_unscored: Callable[[UnscoredResponse], None],
        on_tokens: Callable[[], None],
    ) -> None:
        self.log = log
        self.states: dict[str, WorkerState] = {}
        self.own_metrics: StepSums = {}  # of all workers, until they are taken
        self.past: list[WorkerState] = []  # the last ones of workers that have gone; one that was started again is in both
        self._on_sample, self._on_trained, self._on_unscored, self._on_tokens = on_sample, on_trained, on_unscored, on_tokens
        self._reported = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._reported_at: dict[str, float] = {}  # when, by the driver's clock

    @remote
    async def report(
        self,
        spans: list[Span],
        samples: list[dict[str, Any]],
        trained: list[TrainedTokens],
        unscored: list[UnscoredResponse],
        state: WorkerState,
    ) -> None:
        """Take the spans and samples of a worker since its last report, those that it has trained, responses that could not be
        scored, and its present state."""
        for span in spans:
            self.log.append(span)
        for sample in samples:
            self._on_sample(sample)
        for row in trained:
            self._on_trained(row)
        self.states[state.worker], self._reported_at[state.worker] = state, self._clock()
        for step, sums in state.own_metrics.items():
            add(self.own_metrics.setdefault(step, {}), sums)
        for each in unscored:
            self._on_unscored(each)
        if any(span.tokens for span in spans):
            self._on_tokens()
        self._reported.set()

    @remote
    async def now(self) -> float:
        """Time of the driver's clock, which all times are given in."""
        return self._clock()

    def is_silent(self, worker: str, seconds: float) -> bool:
        """Whether a worker that is connected has not reported for so long."""
        silence = self.silence(worker)
        return silence is not None and silence > seconds

    def silence(self, worker: str) -> float | None:
        """Seconds since this worker has reported; None if it never has, or has gone."""
        return self._clock() - self._reported_at[worker] if worker in self._reported_at else None

    def left(self, worker: str) -> None:
        """Note that a worker has gone: its reports are not waited for."""
        self._reported_at.pop(worker, None)
        if (state := self.states.pop(worker, None)) is not None:
            self.past.append(state)
        self._reported.set()

    async def have_left(self, names: str, seconds: float) -> bool:
        """Wait until no worker whose name begins so is connected; False after so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                while any(worker.startswith(names) for worker in self.states):
                    self._reported.clear()
                    await self._reported.wait()
        except TimeoutError:
            return False
        return True

    async def settle(self, moment: float) -> None:
        """Wait until every worker has reported up to this moment, a second at most."""
        deadline = asyncio.get_running_loop().time() + SETTLE_SECONDS
        while any(state.time < moment for state in self.states.values()):
            self._reported.clear()
            try:
                await asyncio.wait_for(self._reported.wait(), deadline - asyncio.get_running_loop().time())
            except TimeoutError:
                return


async def driver_clock(hub: Hub, own: Callable[[], float]) -> Callable[[], float]:
    """The driver's clock on another machine, from this one's `own`: right to half of the quickest of some round trips."""
    measured = []
    for _ in range(CLOCK_PROBES):
        sent = own()
        theirs = await hub.now()
        back = own()
        measured.append((back - sent, theirs - (sent + back) / 2))
    offset = min(measured)[1]
    return lambda: own() + offset


class Reporter:
    """A worker's end: buffers its spans and samples, and sends them, with what a rollout worker sets here for the certificate, and
    what the worker waits for: the task that makes it, and those begun there."""

    def __init__(self, hub: Hub, worker: str, clock: Callable[[], float], device: str, flush_seconds: float) -> None:
        self.recorder = Recorder(worker, clock, lambda span: self._spans.append(span), device)
        self.why_not_deterministic = ""
        self.reward_failures: Mapping[str, int] = {}
        self.num_scored = 0
        self.own_metrics: StepSums = {}
        self._hub, self._clock, self._flush_seconds = hub, clock, flush_seconds
        self._spans: list[Span] = []
        self._samples: list[dict[str, Any]] = []
        self._trained: list[TrainedTokens] = []
        self._unscored: list[UnscoredResponse] = []
        self._process = psutil.Process()
        self._waits = OpenWaits()
        self._waits.begin()

    def keep_sample(self, sample: Mapping[str, Any]) -> None:
        """Send a sampled response with the next report."""
        self._samples.append(dict(sample))

    def keep_tokens(self, row: TrainedTokens) -> None:
        """Send a row that was trained with the next report."""
        self._trained.append(row)

    def keep_unscored(self, response: UnscoredResponse) -> None:
        """Send a response that could not be scored with the next report; of many, the first."""
        if len(self._unscored) < MAX_UNSCORED:
            self._unscored.append(response)

    async def run(self) -> None:
        """Report again and again, until it is cancelled."""
        while True:
            await self.flush()
            await asyncio.sleep(self._flush_seconds)

    async def flush(self) -> None:
        """Report to the hub now."""
        self.recorder.flush()
        task, cause, since = self.recorder.state
        new = self._spans, self._samples, self._trained, self._unscored
        self._spans, self._samples, self._trained, self._unscored = [], [], [], []
        rss = self._process.memory_info().rss
        now = self._clock()
        open_waits = self._waits.now(asyncio.get_running_loop().time())
        threads = places() if (task != "wait" or cause == "checkpoint") and now - since >= LONG_SECONDS else []
        certified = self.why_not_deterministic, dict(self.reward_failures), self.num_scored, self.own_metrics
        self.own_metrics = {}
        state = WorkerState(self.recorder.worker, self._process.pid, task, cause, since, now, rss, *certified, open_waits, threads)
        await asyncio.shield(self._hub.report(*new, state))  # one that is cancelled here has taken the spans already
