"""Index of a run's spans, which grows with them: bars of the Gantt chart, with the reason of every wait.

    spans.jsonl -> newest spans, whose reasons may still change -> once the step after theirs is trained -> bars in levels, for good

Why a worker waited is known when all groups of the step are trained (`attribution.py`). So the newest spans are attributed anew
each time, and those before the last update but one are not looked at again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from asyncflow.telemetry.attribution import attributed
from asyncflow.telemetry.gantt import BAR, Bars, GanttFrame, Install, embedded_levels, first_view, in_lanes, installs, step_ends
from asyncflow.telemetry.gantt_levels import GanttLevels
from asyncflow.telemetry.idle import WAIT, Activity
from asyncflow.telemetry.spans import Span
from asyncflow.telemetry.trace import join_pieces

_GROUP_TASKS: Final = ("generate_group", "forward_backward", "train_group")
_MANY_SPANS: Final = 50_000
_KEPT_UPDATES: Final = 16
"""Updates before the newest spans that are still known: versions older than that make no row."""


class SpanIndex:
    """Bars of the spans that were added. `wall`: seconds from the first span's start to the last one's end."""

    def __init__(self, origin: float | None = None) -> None:
        """`origin`: time of the chart's beginning; None: the first start of the first spans that are added."""
        self.frame = GanttFrame(origin) if origin is not None else None
        self.wall = 0.0
        self.num_spans = 0
        self._levels = GanttLevels()
        self._newest: list[Span] = []
        self._newest_bars: Bars = np.empty(0, BAR)
        self._context: list[Span] = []  # bars already, and still needed to tell why the newest spans waited
        self._ends: dict[int, float] = {}
        self._installs: list[Install] = []
        self._newest_installs: list[Install] = []
        self._begins = True

    def add(self, spans: Sequence[Span], *, is_all: bool = False) -> None:
        """Add spans in the order in which they were written. `is_all`: no more of them will come."""
        if not spans:
            return
        if self.frame is None:
            self.frame = GanttFrame(min(span.start for span in spans))
        self.num_spans += len(spans)
        self.wall = max(self.wall, max(span.end for span in spans) - self.frame.origin)
        for step, end in step_ends(spans, self.frame.origin):
            self._ends[int(step)] = max(self._ends.get(int(step), 0.0), end)
        self._newest = join_pieces([*self._newest, *spans])
        context = {id(span) for span in self._context}
        newest = [span for span in attributed([*self._context, *self._newest], begins=self._begins) if id(span) not in context]
        if not is_all and (cut := self._last_update_but_one()) is not None:
            newest = self._settle(cut, newest)
        self._newest_bars = self.frame.bars(newest)
        self._newest_installs = installs(newest, self.frame.origin)

    @property
    def steps(self) -> list[list[float]]:
        """[step, seconds] of the end of each step's last update, in the order of time."""
        return sorted(([step, end] for step, end in self._ends.items()), key=lambda mark: mark[1])

    @property
    def workers(self) -> list[str]:
        """Workers that have spans."""
        return [] if self.frame is None else self.frame.workers

    def chart(self) -> dict[str, Any]:
        """The whole chart, see `GanttFrame.described`, with the levels that a page takes with it."""
        frame = self.frame or GanttFrame(0.0)
        described = frame.described(self.steps, [*self._installs, *self._newest_installs], self.wall)
        return described | {"levels": embedded_levels(frame, in_lanes(self._bars), self.wall)}

    def part(self, start: float, end: float, most: int) -> dict[str, Any]:
        """The part of the chart in (start, end): `described` with the marks in it, and as `levels` the one that has no more than
        `most` bars there."""
        frame = self.frame or GanttFrame(0.0)
        marks = [mark for mark in self.steps if start <= mark[1] <= end]
        there = [mark for mark in (*self._installs, *self._newest_installs) if start <= mark[1] <= end]
        resolution, bars = self._levels.part(start, end, most, self._newest_bars)
        level = {"resolution": resolution, **frame.columns(bars)}
        view = first_view(self.steps, self.wall)
        return frame.described(marks, there, self.wall) | {"levels": [level], "first_view": view}

    def activities(self, start: float = -math.inf, end: float = math.inf) -> dict[str, Activity]:
        """See `GanttFrame.activities`."""
        return {} if self.frame is None else self.frame.activities(self._bars, start, end)

    def last_states(self) -> dict[str, tuple[str, str, float, float]]:
        """Last state of each worker's lane: (task, cause as its loop has named it, start, end), in seconds of the chart."""
        last: dict[str, Span] = {}
        for span in self._newest:
            if span.is_lane and (span.worker not in last or span.end > last[span.worker].end):
                last[span.worker] = span
        origin = self.frame.origin if self.frame is not None else 0.0
        return {name: (span.task, span.cause, span.start - origin, span.end - origin) for name, span in last.items()}

    def served_versions(self) -> dict[str, int]:
        """The version that each worker has installed last."""
        return {worker: version for worker, _, version in [*self._installs, *self._newest_installs]}

    @property
    def _bars(self) -> Bars:
        return np.concatenate([self._levels.bars, self._newest_bars])

    def _last_update_but_one(self) -> float | None:
        updates = {span.step: span.end for span in self._newest if span.is_lane and span.task == "optim_step"}
        if len(updates) > 1:
            return sorted(updates.values())[-2]
        # Nobody here updates, as where a process from outside trains: no reason depends on it.
        return sorted(span.end for span in self._newest)[_MANY_SPANS // 2] if len(self._newest) > _MANY_SPANS else None

    def _settle(self, moment: float, spans: list[Span]) -> list[Span]:
        """Make bars, for good, of spans that ended by this moment: on a lane up to the end of its last work. Returns the others."""
        assert self.frame is not None
        until: dict[str, float] = {}
        for span in self._newest:
            if span.is_lane and span.task != WAIT and span.end <= moment:
                until[span.worker] = max(until.get(span.worker, -math.inf), span.end)

        def settled_of(spans: Sequence[Span]) -> tuple[list[Span], list[Span]]:
            """Spans that are settled, and the others."""
            parted: tuple[list[Span], list[Span]] = [], []
            for span in spans:
                parted[span.end > (until.get(span.worker, -math.inf) if span.is_lane else moment)].append(span)
            return parted

        (settled, left), (known, self._newest) = settled_of(spans), settled_of(self._newest)
        self._levels.insert(self.frame.bars(settled))
        self._installs += installs(settled, self.frame.origin)
        known = [*self._context, *known]
        updates = [span for span in known if span.is_lane and span.task == "optim_step"][-_KEPT_UPDATES:]
        step = max((span.step for span in updates), default=0)
        self._context = [*updates, *(span for span in known if span.task in _GROUP_TASKS and span.step >= step)]
        self._begins = False
        return left
