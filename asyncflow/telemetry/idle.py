"""Busy and idle time of workers, from the spans of their lanes.

    |--- generate ---|wait: weights|install|--- generate ---|      busy  {generate: 6.0, install: 0.5}
    0                4             5       5.5            7.5      idle  {weights: 1.0}              wall 7.5

A lane is in one state at a time, so busy and idle seconds add up to its wall time. Time that no span covers (a worker that died
and was started again) is `unrecorded`: neither busy nor idle, and never hidden in either.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from asyncflow.telemetry.spans import Span

WAIT = "wait"
"""The task of idle spans; their `cause` says what was waited for."""
HELPER_TASK = "helper_pass"
"""The task of passes that the helpers of a trainer, or of a critic, take beside its lane."""
_NOT_COMPUTING = (WAIT, "load", "load_state", "save", "checkpoint")


@dataclass(frozen=True, slots=True)
class Activity:
    """Seconds of one worker: `busy` by task, `idle` by cause, `wall` from its first moment to its last."""

    wall: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=dict)

    @property
    def busy_seconds(self) -> float:
        """Seconds in which it worked."""
        return sum(self.busy.values())

    @property
    def idle_seconds(self) -> float:
        """Seconds in which it waited."""
        return sum(self.idle.values())

    @property
    def unrecorded_seconds(self) -> float:
        """Wall time inside no span; 0 unless a worker was replaced or its last spans were lost."""
        return max(0.0, self.wall - self.busy_seconds - self.idle_seconds)


def lane_seconds(spans: Iterable[Span], start: float = -math.inf, end: float = math.inf) -> Iterator[tuple[Span, float]]:
    """Lane spans that reach into [start, end], each with its seconds there."""
    for span in spans:
        seconds = min(span.end, end) - max(span.start, start)
        if span.is_lane and seconds > 0:
            yield span, seconds


def busy_and_idle(spans: Iterable[Span], worker: str, start: float = -math.inf, end: float = math.inf) -> Activity:
    """Activity of one worker's lane, or of the part that lies inside [start, end]; all zero when there are no lane spans."""
    busy: defaultdict[str, float] = defaultdict(float)
    idle: defaultdict[str, float] = defaultdict(float)
    first, last = math.inf, -math.inf
    for span, seconds in lane_seconds((span for span in spans if span.worker == worker), start, end):
        by_state, state = (idle, span.cause) if span.task == WAIT else (busy, span.task)
        by_state[state] += seconds
        first, last = min(first, max(span.start, start)), max(last, min(span.end, end))
    return Activity(max(0.0, last - first), dict(busy), dict(idle))


def idle_ratios(spans: Iterable[Span], start: float, end: float) -> dict[str, float]:
    """Worker -> waiting seconds / recorded lane seconds, both inside [start, end].

    The denominator is what is recorded, not end - start: a state that is still going on has not reached the log, and counting its
    time as busy or as idle would be a guess. Workers without a lane span in the interval are left out.
    """
    idle: defaultdict[str, float] = defaultdict(float)
    recorded: defaultdict[str, float] = defaultdict(float)
    for span, seconds in lane_seconds(spans, start, end):
        recorded[span.worker] += seconds
        idle[span.worker] += seconds if span.task == WAIT else 0.0
    return {worker: idle[worker] / seconds for worker, seconds in sorted(recorded.items())}


def computing_seconds(spans: Sequence[Span], start: float, end: float, threads_of: Callable[[str], int]) -> float:
    """Seconds of cores inside [start, end]: lanes that compute, and what is done beside a trainer's lane by its helpers, each as
    many times as its worker has threads by `threads_of`."""
    total = 0.0
    for span, seconds in lane_seconds(spans, start, end):
        if span.task not in _NOT_COMPUTING:
            total += seconds * threads_of(span.worker)
    return total + sum(seconds * threads_of(span.worker) for span, seconds in helper_passes(spans, start, end))


def helper_passes(spans: Iterable[Span], start: float, end: float) -> Iterator[tuple[Span, float]]:
    """Passes of helpers that reach into [start, end], each with its seconds there."""
    for span in spans:
        if span.task == HELPER_TASK and (seconds := min(span.end, end) - max(span.start, start)) > 0:
            yield span, seconds


def idle_of_pools(spans: Iterable[Span], start: float, end: float) -> dict[str, float]:
    """Pool -> the mean of `idle_ratios` over its workers."""
    pools: defaultdict[str, list[float]] = defaultdict(list)
    for worker, ratio in idle_ratios(spans, start, end).items():
        pools[worker.partition("/")[0]].append(ratio)
    return {pool: statistics.fmean(ratios) for pool, ratios in pools.items()}


def active_seconds(spans: Iterable[Span], tasks: Iterable[str], start: float, end: float) -> float:
    """Seconds of [start, end] in which at least one worker's lane did one of `tasks`: the wall time of a pool at work."""
    wanted = frozenset(tasks)
    return covered_seconds((span for span in spans if span.is_lane and span.task in wanted), start, end)


def covered_seconds(spans: Iterable[Span], start: float, end: float) -> float:
    """Seconds of [start, end] that lie in at least one of the spans."""
    clipped = sorted((max(span.start, start), min(span.end, end)) for span in spans if span.start < end and span.end > start)
    total, reached = 0.0, start
    for low, high in clipped:
        if high > reached:
            total += high - max(low, reached)
            reached = high
    return total


def tokens_within(spans: Iterable[Span], task: str, start: float, end: float) -> float:
    """Tokens of the lane spans of `task`; a span that is partly inside [start, end] counts in proportion."""
    found = (pair for pair in lane_seconds(spans, start, end) if pair[0].task == task)
    return sum((span.tokens * seconds / (span.end - span.start) for span, seconds in found), 0.0)
