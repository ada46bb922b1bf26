"""Attribution of idle time: every wait of a worker's lane, cut where its reason changes.

    rollout/0  |-- generate ---|wait: slowest group|  interval    |   weights       |install|-- generate ...
    rollout/1  |-- generate -----------------------|  interval    |   weights       |install|-- generate ...
    trainer    |wait: data |forward_backward| slowest |f|optim_step|      weights            |data ...

| reason | the worker waits, and meanwhile |
|---|---|
| data | what it works on is being made: prompts, responses, rewards, log-probs |
| slowest group | the last group of a step is still being generated; to the trainer, and tasks before it, only that one is missing |
| interval | the schedule holds it back: the update whose version it is to serve next is not made, or the batch is not whole |
| weights | a newer version is there, and on its way: gathered, copied, hashed, fetched, installed |
| environments | all episodes that the rollout worker has wait for their environments |
| start, stop | the run begins or ends |

Loops name what they wait for as they see it; here that is held against what all workers did. Seconds are only cut, never lost, so a
lane's busy and idle seconds still add up to its wall time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final

import msgspec

from asyncflow.telemetry.idle import WAIT, lane_seconds
from asyncflow.telemetry.spans import Span

DATA: Final = "data"
SLOWEST: Final = "slowest group"
INTERVAL: Final = "interval"
WEIGHTS: Final = "weights"
ENVIRONMENTS: Final = "environments"
START: Final = "start"
STOP: Final = "stop"
REASONS: Final = (DATA, SLOWEST, INTERVAL, WEIGHTS, ENVIRONMENTS, START, STOP)
_KNOWN: Final = {START: START, STOP: STOP, "publish": WEIGHTS, "environment": ENVIRONMENTS}
"""Reason of a wait, whatever others did meanwhile, by the cause that its loop has named."""

Cuts = list[tuple[float, str]]
"""(until, reason), in the order of time; the last one is until infinity."""


@dataclass(slots=True)
class _StepMoments:
    """Moments of a step's groups. `made`: when the update that their first version comes from was made; at once for version 0."""

    begun: float = math.inf
    done: list[float] = field(default_factory=list)
    made: float = -math.inf
    is_first: bool = False

    @property
    def last_but_one(self) -> float:
        """Time at which all groups but one were there."""
        return self.done[-2] if len(self.done) > 1 else self.begun


def attributed(spans: Sequence[Span], *, begins: bool = True) -> list[Span]:
    """Spans, worker by worker in the order of time, with the reason as the `cause` of each wait.

    `begins`: the first step in them is the run's first.
    """
    steps, updates = _steps(spans, begins=begins), _updates(spans)
    lanes: dict[str, list[Span]] = {}
    for span in spans:
        lanes.setdefault(span.worker, []).append(span)
    out: list[Span] = []
    for worker, own in lanes.items():
        out += [span for span in own if not span.is_lane]
        lane = sorted((span for span in own if span.is_lane), key=lambda span: span.start)
        pool = worker.partition("/")[0]
        for waits, after in _stretches(lane):
            if pool == "rollout":
                out += _cut(waits, _rollout_cuts(waits, after, steps, updates))
            elif pool == "evaluator":
                out += _cut(waits, _evaluator_cuts(after))
            else:
                step = None if after is None else steps.get(after.step)
                for wait in waits:
                    out += _cut([wait], _task_cuts(wait, after, step))
            out += [after] if after is not None else []
    return out


def exposed_weights(spans: Iterable[Span], start: float, end: float) -> float | None:
    """Share of [start, end] that weights take from rollout workers and trainers: these wait for them, or `install` them.

    Of the seconds that are recorded of their lanes, all of them together; None without any. `spans`: as `attributed` returns them.
    """
    exposed = recorded = 0.0
    for span, seconds in lane_seconds(spans, start, end):
        if span.worker.partition("/")[0] in ("rollout", "trainer"):
            recorded += seconds
            exposed += seconds * (span.task == "install" or (span.task, span.cause) == (WAIT, WEIGHTS))
    return exposed / recorded if recorded else None


def _updates(spans: Iterable[Span]) -> list[tuple[float, int]]:
    """(end, step) of every optimiser step."""
    return sorted((span.end, span.step) for span in spans if span.is_lane and span.task == "optim_step")


def _steps(spans: Sequence[Span], *, begins: bool) -> dict[int, _StepMoments]:
    """Groups by the step that they were trained in. A group is there when it was generated, at the latest when it was trained."""
    trained: dict[int, tuple[int, float]] = {}  # by group: step, when
    for span in spans:
        if span.task in ("forward_backward", "train_group") and span.group >= 0:
            trained.setdefault(span.group, (span.step, span.start))
    begun: dict[int, tuple[float, int]] = {}  # by group: when, and by which version
    ended: dict[int, float] = {}
    for span in spans:
        if span.task == "generate_group" and span.group in trained:
            begun[span.group] = min(begun.get(span.group, (math.inf, 0)), (span.start, span.version))
            ended[span.group] = max(ended.get(span.group, 0.0), span.end)
    made_by = {step: end for end, step in _updates(spans)}
    steps: dict[int, _StepMoments] = {}
    for group, (start, version) in begun.items():
        number, trained_at = trained[group]
        step = steps.setdefault(number, _StepMoments())
        step.done.append(min(ended[group], trained_at))
        if start < step.begun:
            step.begun, step.made = start, made_by.get(version - 1, -math.inf)
    for step in steps.values():
        step.done.sort()
    if steps and begins:
        steps[min(steps)].is_first = True
    return steps


def _stretches(lane: Sequence[Span]) -> Iterator[tuple[list[Span], Span | None]]:
    """The waits before each busy span of a lane, with that span; None after the last one."""
    waits: list[Span] = []
    for span in lane:
        if span.task == WAIT:
            waits.append(span)
        else:
            yield waits, span
            waits = []
    yield waits, None


def _rollout_cuts(
    waits: Sequence[Span], after: Span | None, steps: dict[int, _StepMoments], updates: Sequence[tuple[float, int]]
) -> Cuts:
    """A rollout worker out of work waits for the next update, which waits for the groups of its step, and then for its weights."""
    if not waits or after is None:
        return [(math.inf, STOP)]
    then = WEIGHTS if after.task == "install" else DATA
    inside = [(end, step) for end, step in updates if waits[0].start < end <= waits[-1].end]
    if not inside:
        return [(math.inf, then)]
    updated, number = inside[-1]
    last_done = steps[number].done[-1] if number in steps else -math.inf
    return [(last_done, SLOWEST), (updated, INTERVAL), (math.inf, then)]


def _evaluator_cuts(after: Span | None) -> Cuts:
    """Causes of an evaluator's wait: the next version that is due, and, while one is evaluated, prompts and rewards."""
    if after is None:
        return [(math.inf, STOP)]
    return [(math.inf, INTERVAL if after.task == "install" else DATA)]


def _task_cuts(wait: Span, after: Span | None, step: _StepMoments | None) -> Cuts:
    """Causes of a wait of the trainer, or of a task before it, for groups of a step: first until they are begun, then until they
    are there."""
    if after is None or after.step < 0:
        return [(math.inf, STOP)]
    if step is None:
        return [(math.inf, DATA)]
    held = INTERVAL if wait.cause == "batch" else DATA
    before: Cuts = [(step.begun, START)] if step.is_first else [(step.made, INTERVAL), (step.begun, WEIGHTS)]
    return [*before, (step.done[0], DATA), (step.last_but_one, held), (step.done[-1], SLOWEST), (math.inf, held)]


def _cut(waits: Iterable[Span], cuts: Cuts) -> Iterator[Span]:
    """Waits in pieces of one reason each, with the same seconds in all. Some are known by their own cause."""
    for wait in waits:
        if wait.cause in _KNOWN:
            yield msgspec.structs.replace(wait, cause=_KNOWN[wait.cause])
            continue
        edges = accumulate((min(until, wait.end) for until, _ in cuts), max, initial=wait.start)
        for (low, high), (_, reason) in zip(pairwise(edges), cuts, strict=True):
            if high > low:
                yield msgspec.structs.replace(wait, start=low, end=high, cause=reason)
