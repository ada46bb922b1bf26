"""The Gantt chart's bars: colours by state, and levels of detail so that a long run stays quick to look at.

    spans -> bars, sorted in their lanes -> level 0 (finest) -> level 1 -> ... level n (a few thousand bars for the whole run)

A level groups runs of bars shorter than its resolution that begin in the same cell of time, a cell being as long as the resolution:
in a group each state keeps its exact seconds, only the order of the pieces inside the group is lost. A page draws the finest level
that is not too much for the part in view, so zooming in shows every span. The report takes its levels with it
(`embedded_levels`); a live page asks for the part in view (`gantt_levels.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from zlib import crc32

import numpy as np

from asyncflow.telemetry.attribution import DATA, ENVIRONMENTS, INTERVAL, SLOWEST, START, STOP, WEIGHTS
from asyncflow.telemetry.idle import WAIT, Activity
from asyncflow.telemetry.spans import Span
from asyncflow.telemetry.trace import worker_order
from asyncflow.types import Array

BARS_IN_VIEW: Final = 2_500
"""Bars that the page draws at a time; browsers stay quick with this many rectangles."""
BAR: Final = np.dtype(
    [
        ("lane", np.int32),
        ("state", np.int32),
        ("start", np.float64),
        ("end", np.float64),
        ("step", np.int32),
        ("version", np.int32),
        ("rows", np.int64),
        ("tokens", np.int64),
        ("count", np.int64),
    ]
)
"""Rectangle of the chart. `lane`: twice the worker's number, and 1 more for work beside its lane; `state`: number of its `BarKind`;
times in seconds from the run's start; `count` spans; step and version are -1 if they differ."""
Bars = Array
"""Array of `BAR` [N]."""
Install = tuple[str, float, int]
"""End of an installation of weights: (worker, seconds, version)."""

_LEVEL_SIZES: Final = (120_000, 15_000, BARS_IN_VIEW)
_STEPS_IN_FIRST_VIEW: Final = 3
_COVERED_BY_LANE: Final = frozenset({"generate_group", "decode_step", "prefill", "score"})
_TOUCHING_SECONDS: Final = 1e-9

# Okabe and Ito's palette, told apart by colour-blind readers; one colour is one task on every page.
_TASK_COLOURS: Final = {
    "generate": "#0072B2",
    "generate_group": "#0072B2",
    "evaluate": "#88CCEE",
    "reward": "#B8A900",
    "reference": "#F0E442",
    "forward_backward": "#E69F00",
    "optim_step": "#D55E00",
    "values": "#AA4499",
    "critic_update": "#882255",
    "critic_update_optim_step": "#661133",
    "publish": "#CC79A7",
    "install": "#009E73",
    "fetch": "#56B4E9",
    "load": "#8A8F98",
}
_REASON_COLOURS: Final = {
    DATA: "#E69F00",
    SLOWEST: "#D55E00",
    ENVIRONMENTS: "#B5651D",
    INTERVAL: "#CC79A7",
    WEIGHTS: "#009E73",
    START: "#8A8F98",
    STOP: "#5F6570",
}
# Paul Tol's muted palette, for names that this file does not know.
_OTHER_COLOURS: Final = ("#882255", "#44AA99", "#999933", "#AA4499", "#332288", "#117733", "#6699CC", "#661100", "#CC6677")


@dataclass(frozen=True, slots=True)
class BarKind:
    """Kind of a bar: a task of the lane, a reason to wait, or a task beside the lane."""

    name: str
    is_wait: bool = False
    is_lane: bool = True

    @property
    def label(self) -> str:
        """Text of the legend."""
        if self.is_wait:
            return f"waiting: {self.name or 'unknown'}"
        return self.name if self.is_lane else f"{self.name} (beside)"


def colours_of(states: Iterable[BarKind]) -> dict[BarKind, str]:
    """A colour for each state. An unknown name's depends on the name, and is moved on only where two of one page would clash."""
    states = set(states)
    others: dict[tuple[bool, str], str] = {}
    for is_wait, name in sorted({(state.is_wait, state.name) for state in states}):
        if name not in (_REASON_COLOURS if is_wait else _TASK_COLOURS):
            first = crc32(name.encode()) % len(_OTHER_COLOURS)
            candidates = [*_OTHER_COLOURS[first:], *_OTHER_COLOURS[:first]]
            others[is_wait, name] = next((colour for colour in candidates if colour not in others.values()), candidates[0])
    return {
        state: others.get((state.is_wait, state.name)) or (_REASON_COLOURS if state.is_wait else _TASK_COLOURS)[state.name]
        for state in states
    }


class GanttFrame:
    """Workers and kinds of bars of one chart, by number, and the moment from which its times count.

    Numbers stay as more workers and kinds come, so that bars that were made stay right.
    """

    def __init__(self, origin: float) -> None:
        self.origin = origin
        self.workers: list[str] = []
        self.kinds: list[BarKind] = []
        self._workers: dict[str, int] = {}
        self._kinds: dict[tuple[str, bool, bool], int] = {}

    def bars(self, spans: Iterable[Span]) -> Bars:
        """Bars of spans, lane by lane, each in the order of time."""
        origin, workers, kinds = self.origin, self._workers, self._kinds
        rows = []
        for span in spans:
            is_lane, is_wait = span.is_lane, span.task == WAIT
            if not is_lane and span.task in _COVERED_BY_LANE:
                continue
            kind = (span.cause if is_wait else span.task, is_wait, is_lane)
            if (state := kinds.get(kind)) is None:
                state = kinds[kind] = len(kinds)
                self.kinds.append(BarKind(*kind))
            if (worker := workers.get(span.worker)) is None:
                worker = workers[span.worker] = len(workers)
                self.workers.append(span.worker)
            lane = 2 * worker + (not is_lane)
            rows.append((lane, state, span.start - origin, span.end - origin, span.step, span.version, span.rows, span.tokens, 1))
        return in_lanes(np.array(rows, BAR))

    def described(self, steps: Sequence[Sequence[float]], installed: Sequence[Install], wall: float) -> dict[str, Any]:
        """Data of the chart but for its bars, as plain lists and numbers.

        `lanes`: worker names, top first. `states`: label, colour, wait, lane. `steps` and `installs`: marks, these from
        `installed`. `wall` and `first_view` in seconds.
        """
        lanes, colours = worker_order(self.workers), colours_of(self.kinds)
        number = {worker: lane for lane, worker in enumerate(lanes)}
        return {
            "lanes": lanes,
            "states": [
                {"label": kind.label, "colour": colours[kind], "wait": kind.is_wait, "lane": kind.is_lane}
                for kind in sorted(self.kinds, key=_legend_order)
            ],
            "steps": steps,
            "installs": [[number[worker], round(end, 6), version] for worker, end, version in installed],
            "wall": wall,
            "first_view": first_view(steps, wall),
            "bars_in_view": BARS_IN_VIEW,
        }

    def columns(self, bars: Bars) -> dict[str, list[float]]:
        """Bars as columns of plain numbers. Lanes and states are numbered as `described` lists them; work beside a lane has a lane
        of its own, numbered after all the others."""
        lanes = {worker: lane for lane, worker in enumerate(worker_order(self.workers))}
        legend = {kind: position for position, kind in enumerate(sorted(self.kinds, key=_legend_order))}
        lane_of = np.array([lanes[worker] for worker in self.workers], np.int32)
        state_of = np.array([legend[kind] for kind in self.kinds], np.int32)
        lane, state = lane_of[bars["lane"] // 2] + len(lanes) * (bars["lane"] % 2), state_of[bars["state"]]
        columns = {"lane": lane, "state": state, "start": bars["start"].round(6), "seconds": (bars["end"] - bars["start"]).round(6)}
        columns |= {name: bars[name] for name in ("step", "version", "rows", "tokens", "count")}
        return {name: column.tolist() for name, column in columns.items()}

    def activities(self, bars: Bars, start: float = -np.inf, end: float = np.inf) -> dict[str, Activity]:
        """Activity of each worker's lane inside [start, end], seconds of the chart; workers without a bar there are left out."""
        bars = bars[(bars["lane"] % 2 == 0) & (bars["start"] < end) & (bars["end"] > start)]
        low, high = np.maximum(bars["start"], start), np.minimum(bars["end"], end)
        worker, shape = bars["lane"] // 2, (len(self.workers), len(self.kinds))
        seconds = np.bincount(worker * shape[1] + bars["state"], high - low, shape[0] * shape[1]).reshape(shape)
        first, last = np.full(shape[0], np.inf), np.full(shape[0], -np.inf)
        np.minimum.at(first, worker, low)
        np.maximum.at(last, worker, high)
        out = {}
        for name in worker_order(self.workers):
            number = self._workers[name]
            if first[number] < last[number]:
                found = [(self.kinds[kind], float(seconds[number, kind])) for kind in np.flatnonzero(seconds[number] > 0)]
                busy = {kind.name: amount for kind, amount in found if not kind.is_wait}
                idle = {kind.name: amount for kind, amount in found if kind.is_wait}
                out[name] = Activity(float(last[number] - first[number]), busy, idle)
        return out


def embedded_levels(frame: GanttFrame, bars: Bars, wall: float) -> list[dict[str, Any]]:
    """Levels that a page takes with it."""
    return [{"resolution": resolution, **frame.columns(level)} for resolution, level in drawn_levels(bars, wall, _LEVEL_SIZES)]


def _legend_order(state: BarKind) -> tuple[bool, bool, int, str]:
    known = list(_REASON_COLOURS if state.is_wait else _TASK_COLOURS)
    return state.is_wait, not state.is_lane, known.index(state.name) if state.name in known else len(known), state.name


def step_ends(spans: Iterable[Span], origin: float) -> list[list[float]]:
    """[step, seconds] of the end of each step's last `optim_step`, in the order of time."""
    ends: dict[int, float] = {}
    for span in spans:
        if span.is_lane and span.task == "optim_step":
            ends[span.step] = max(ends.get(span.step, 0.0), span.end - origin)
    return sorted(([step, round(end, 6)] for step, end in ends.items()), key=lambda mark: mark[1])


def installs(spans: Iterable[Span], origin: float) -> list[Install]:
    """The installations among spans."""
    return [(span.worker, span.end - origin, span.version) for span in spans if span.is_lane and span.task == "install"]


def first_view(steps: Sequence[Sequence[float]], wall: float) -> list[float]:
    """[from, to] in seconds: three steps in the middle of the run, or all of a run that has hardly more."""
    if len(steps) < _STEPS_IN_FIRST_VIEW + 2:
        return [0.0, wall]
    first = (len(steps) - _STEPS_IN_FIRST_VIEW) // 2
    start, end = steps[first - 1][1], steps[first + _STEPS_IN_FIRST_VIEW - 1][1]
    margin = 0.06 * (end - start)
    return [max(0.0, start - margin), min(wall, end + margin)]


def drawn_levels(bars: Bars, wall: float, sizes: Sequence[int]) -> list[tuple[float, Bars]]:
    """(resolution in seconds, bars), finest first: the bars themselves if they are few, then coarser ones down to each size."""
    levels = [(0.0, bars)] if len(bars) <= sizes[0] else []
    resolution = wall / 1e5
    for size in sizes:
        if len(bars) <= size:
            continue
        while len(bars) > size and resolution < wall:
            resolution *= 1.5
            bars = joined(grouped(bars, resolution))
        levels.append((resolution, bars))
    return levels


def in_lanes(bars: Bars) -> Bars:
    """Bars lane by lane, each in the order of time."""
    return bars[lane_order(bars)]


def lane_order(bars: Bars) -> Array:
    """Places of bars lane by lane, each in the order of time."""
    return np.lexsort((bars["start"], bars["lane"]))


def grouped(bars: Bars, resolution: float) -> Bars:
    """Group runs of bars that are shorter than `resolution` (seconds), see the module's head. `bars` are sorted in their lanes.

    Of a group there is one bar for each state: on a lane side by side, each as long as its spans together; beside a lane they may
    overlap.
    """
    return grouped_in_cells(bars, bars["start"], resolution)[0]


def grouped_in_cells(bars: Bars, moments: Array, resolution: float) -> tuple[Bars, Array]:
    """Bars as `grouped` makes them, each with the beginning of its cell: the one in which its `moments` (seconds [N]) lie. Side by
    side in a group, a bar may be drawn a little behind the end of its cell."""
    seconds, cell = bars["end"] - bars["start"], np.floor(moments / resolution)
    if len(bars) < 2:
        return bars, cell * resolution
    is_long = seconds >= resolution
    begins = _differ(bars["lane"]) | _differ(cell) | is_long
    begins[1:] |= is_long[:-1]
    group = np.cumsum(begins)
    order = np.lexsort((bars["state"], group))  # stable: bars of one state stay in the order of time
    ordered = bars[order]
    at = np.flatnonzero(_differ(group[order]) | _differ(ordered["state"]))
    by_time = np.argsort(order[at])  # states of a group in the order in which they first appear
    out = _merged(ordered, at)[by_time]
    total, of_group = np.add.reduceat(seconds[order], at)[by_time], group[order[at]][by_time]
    first = _differ(of_group)
    number = np.cumsum(first) - 1
    before = np.cumsum(total) - total
    side_by_side = out["start"][first][number] + before - before[first][number]
    is_lane = out["lane"] % 2 == 0
    out["start"] = np.where(is_lane, side_by_side, out["start"])
    out["end"] = np.where(is_lane, side_by_side + total, out["end"])
    return out, cell[order[at]][by_time] * resolution


def joined(bars: Bars) -> Bars:
    """Join neighbours that touch and say the same: pieces of one long state, and overlapping work beside a lane. `bars` are sorted
    in their lanes."""
    if len(bars) < 2:
        return bars
    begins = _differ(bars["lane"]) | _differ(bars["state"]) | _differ(bars["step"]) | _differ(bars["version"])
    begins[1:] |= bars["start"][1:] - bars["end"][:-1] > _TOUCHING_SECONDS
    return _merged(bars, np.flatnonzero(begins))


def _differ(column: Array) -> Array:
    """Mask of the places at which a column differs from the one before, bool [n]; the first place always counts."""
    differ = np.ones(len(column), bool)
    differ[1:] = column[1:] != column[:-1]
    return differ


def _merged(bars: Bars, at: Array) -> Bars:
    """One bar for each run of bars, which begin at these places: from the first one's start to the last end."""
    out = bars[at]
    out["end"] = np.maximum.reduceat(bars["end"], at)
    for name in ("rows", "tokens", "count"):
        out[name] = np.add.reduceat(bars[name], at)
    for name in ("step", "version"):
        low = np.minimum.reduceat(bars[name], at)
        out[name] = np.where(low == np.maximum.reduceat(bars[name], at), low, -1)
    return out
