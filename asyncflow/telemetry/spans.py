"""Spans: what every worker did, and what it waited for, in one schema for real and simulated runs.

    worker's lane   |--- forward_backward ---|wait: rows|- forward_backward -|- optim_step -|wait: publish|- forward_backward ...
    beside it                                                                                 |------ publish ------|

A worker's lane is in exactly one state at any moment, so busy time and idle time by cause add up to wall time by construction.
Spans off the lane (`is_lane` false: one group's generation, one background fetch) may overlap anything.
Times are seconds of the clock given to the recorder; in one run on one node all clocks are CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import msgspec

COUNTS = ("rows", "tokens", "bytes")


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Interval of one worker. `task` is `wait` for idle time, and `cause` is then what was waited for.

    `calls`: of an engine, where the span is of several, as of decode steps; `rows` and `tokens` are sums over them. `drafts` and
    `accepted`: draft tokens that were verified in such steps, and those that were right.
    """

    worker: str
    task: str
    start: float
    end: float
    is_lane: bool = True
    cause: str = ""
    step: int = -1
    version: int = -1
    group: int = -1
    rows: int = 0
    tokens: int = 0
    bytes: int = 0
    calls: int = 0
    drafts: int = 0
    accepted: int = 0
    layout: str = ""
    device: str = ""


class Recorder:
    """Writes one worker's spans. `sink` takes finished spans; `state` is what the worker does now, for `asyncflow status`."""

    def __init__(self, worker: str, clock: Callable[[], float], sink: Callable[[Span], None], device: str = "") -> None:
        self.worker = worker
        self.device = device
        self.clock = clock
        self._sink = sink
        self._task = "wait"
        self._fields: dict[str, str | int] = {"cause": "start"}
        self._counts: dict[str, int] = {}
        self._entered = self._since = clock()

    @property
    def state(self) -> tuple[str, str, float]:
        """(task, cause, since) of the lane."""
        return self._task, str(self._fields.get("cause", "")), self._entered

    def enter(self, task: str, **fields: str | int) -> None:
        """End the lane's present state and begin another. Entering the state it is in already changes nothing.

        `rows`, `tokens` and `bytes` are counts as of `add`: a state that `flush` cuts in pieces has them once.
        """
        counts = {name: int(fields.pop(name)) for name in COUNTS if name in fields}
        if (task, fields) != (self._task, self._fields):
            self.flush()
            self._task, self._fields, self._entered = task, fields, self._since
        self.add(**counts)

    def add(self, *, rows: int = 0, tokens: int = 0, bytes: int = 0) -> None:
        """Count work towards the lane's present state."""
        for name, amount in zip(COUNTS, (rows, tokens, bytes), strict=True):
            if amount:
                self._counts[name] = self._counts.get(name, 0) + amount

    def waiting(self, cause: str) -> None:
        """Show the lane as idle, for this cause."""
        self.enter("wait", cause=cause)

    @contextmanager
    def busy(self, task: str, **fields: str | int) -> Iterator[None]:
        """Show the lane as busy with `task` inside the block, and in its former state again after it."""
        before_task, before_fields = self._task, self._fields
        self.enter(task, **fields)
        try:
            yield
        finally:
            self.enter(before_task, **before_fields)

    def held(self, cause: str) -> AbstractContextManager[None]:
        """Show the lane as idle inside the block, for this cause, and in its former state again after it."""
        return self.busy("wait", cause=cause)

    def off_lane(self, task: str, start: float, end: float | None = None, **fields: str | int) -> None:
        """Record work that overlaps the lane, from `start` to `end` (None: to now)."""
        self._emit(task, start, self.clock() if end is None else end, is_lane=False, **fields)

    def flush(self) -> None:
        """End the lane's present state at this moment and go on in it (so that long states reach the sink)."""
        now = self.clock()
        if now > self._since:
            self._emit(self._task, self._since, now, **{**self._fields, **self._counts})
        self._since = now
        self._counts = {}

    def _emit(self, task: str, start: float, end: float, **fields: str | int | bool) -> None:
        times = {"worker": self.worker, "task": task, "start": start, "end": end, "device": self.device}
        self._sink(msgspec.convert({**times, **fields}, Span))


@dataclass(slots=True, eq=False)
class _LoopWork:
    """Work of one loop on a lane that it shares."""

    task: str
    fields: dict[str, str | int]
    is_shown: bool = False


class SharedLane(Recorder):
    """The lane of a worker that does several things at once, for each of its loops to use as if it were its own.

    The lane shows what was begun first of what has not ended. Where nothing is, it is waiting for what was said last.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.worker, self.device, self.clock = recorder.worker, recorder.device, recorder.clock
        self._recorder = recorder
        self._under_way: list[_LoopWork] = []
        self._waits = "rows"

    @property
    def state(self) -> tuple[str, str, float]:
        """See `Recorder.state`."""
        return self._recorder.state

    def waiting(self, cause: str) -> None:
        """See `Recorder.waiting`."""
        self._waits = cause
        self._show()

    @contextmanager
    def busy(self, task: str, **fields: str | int) -> Iterator[None]:
        """See `Recorder.busy`."""
        work = _LoopWork(task, fields)
        self._under_way.append(work)
        self._show()
        try:
            yield
        finally:
            self._under_way.remove(work)
            if not work.is_shown:  # what was begun before it outlasts it, and has its rows with its own
                self._recorder.add(**{name: int(fields[name]) for name in COUNTS if name in fields})
            self._show()

    def off_lane(self, task: str, start: float, end: float | None = None, **fields: str | int) -> None:
        """See `Recorder.off_lane`."""
        self._recorder.off_lane(task, start, end, **fields)

    def _show(self) -> None:
        if not self._under_way:
            self._recorder.waiting(self._waits)
        elif not (first := self._under_way[0]).is_shown:
            first.is_shown = True
            self._recorder.enter(first.task, **first.fields)
