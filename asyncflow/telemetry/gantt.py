"""The Gantt chart's bars: colours by state, and levels of detail so that a long run stays quick to look at.

    spans -> bars, sorted in their lanes -> level 0 (finest) -> level 1 -> ... level n (a few thousand bars for the whole run)

A level groups runs of bars shorter than its resolution: in a group each state keeps its exact seconds, only the order of the pieces
inside the group is lost. The page draws the finest level that is not too much for the part in view, so zooming in shows every span.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final
from zlib import crc32

from asyncflow.telemetry.attribution import DATA, ENVIRONMENTS, INTERVAL, SLOWEST, START, STOP, WEIGHTS
from asyncflow.telemetry.idle import WAIT
from asyncflow.telemetry.spans import Span
from asyncflow.telemetry.trace import join_pieces, worker_order

BARS_IN_VIEW: Final = 2_500
"""Bars that the page draws at a time; browsers stay quick with this many rectangles."""

_LEVEL_SIZES: Final = (120_000, 15_000, BARS_IN_VIEW)
_STEPS_IN_FIRST_VIEW: Final = 3
_COVERED_BY_LANE: Final = frozenset({"generate_group", "decode_step", "prefill", "score"})

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


@dataclass(frozen=True, slots=True)
class Bar:
    """Rectangle of the chart; times in seconds from the run's start. `count` spans; step and version are -1 if they differ."""

    lane: int
    state: BarKind
    start: float
    end: float
    step: int
    version: int
    rows: int
    tokens: int
    count: int = 1


def state_of(span: Span) -> BarKind:
    """Kind of bar that a span becomes."""
    is_wait = span.task == WAIT
    return BarKind(span.cause if is_wait else span.task, is_wait, span.is_lane)


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


def gantt_chart(spans: Sequence[Span]) -> dict[str, Any]:
    """Data of the chart, as plain lists and numbers.

    `lanes`: worker names, top first. `states`: label, colour, wait, lane. `levels`: finest first, each with its `resolution` in
    seconds (0: nothing grouped) and its bars as columns. `steps` and `installs`: marks. `wall` and `first_view` in seconds.
    """
    spans = join_pieces(spans)
    origin = min((span.start for span in spans), default=0.0)
    lanes = worker_order(span.worker for span in spans)
    bars = _bars(spans, lanes, origin)
    states = sorted({bar.state for bar in bars}, key=_legend_order)
    colours = colours_of(states)
    number = {state: position for position, state in enumerate(states)}
    wall = max((span.end for span in spans), default=origin) - origin
    steps = step_ends(spans, origin)
    return {
        "lanes": lanes,
        "states": [{"label": s.label, "colour": colours[s], "wait": s.is_wait, "lane": s.is_lane} for s in states],
        "levels": [
            {"resolution": resolution, **_columns(level, number)} for resolution, level in drawn_levels(bars, wall, _LEVEL_SIZES)
        ],
        "steps": steps,
        "installs": [
            [lanes.index(span.worker), round(span.end - origin, 6), span.version]
            for span in spans
            if span.is_lane and span.task == "install"
        ],
        "wall": wall,
        "first_view": first_view(steps, wall),
        "bars_in_view": BARS_IN_VIEW,
    }


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


def first_view(steps: Sequence[Sequence[float]], wall: float) -> list[float]:
    """[from, to] in seconds: three steps in the middle of the run, or all of a run that has hardly more."""
    if len(steps) < _STEPS_IN_FIRST_VIEW + 2:
        return [0.0, wall]
    first = (len(steps) - _STEPS_IN_FIRST_VIEW) // 2
    start, end = steps[first - 1][1], steps[first + _STEPS_IN_FIRST_VIEW - 1][1]
    margin = 0.06 * (end - start)
    return [max(0.0, start - margin), min(wall, end + margin)]


def drawn_levels(bars: list[Bar], wall: float, sizes: Sequence[int]) -> list[tuple[float, list[Bar]]]:
    """(resolution in seconds, bars), finest first: the bars themselves if they are few, then coarser ones down to each size."""
    levels = [(0.0, bars)] if len(bars) <= sizes[0] else []
    resolution = wall / 1e5
    for size in sizes:
        if len(bars) <= size:
            continue
        while len(bars) > size and resolution < wall:
            resolution *= 1.5
            bars = coarser(bars, resolution)
        levels.append((resolution, bars))
    return levels


def coarser(bars: Iterable[Bar], resolution: float) -> list[Bar]:
    """Group runs of bars that are shorter than `resolution` (seconds), see the module's head. `bars` are sorted in their lanes."""
    out: list[Bar] = []
    run: list[Bar] = []
    for bar in bars:
        if run and (bar.lane != run[0].lane or bar.start - run[0].start >= resolution or bar.end - bar.start >= resolution):
            out += _grouped(run)
            run = []
        if bar.end - bar.start >= resolution:
            out.append(bar)
        else:
            run.append(bar)
    return _joined(out + _grouped(run))


def _grouped(run: Sequence[Bar]) -> list[Bar]:
    """Bars of a group, one for each state: on a lane side by side, each as long as its spans together; beside a lane they may
    overlap."""
    if len(run) < 2:
        return list(run)
    by_state: dict[BarKind, list[Bar]] = {}
    for bar in run:
        by_state.setdefault(bar.state, []).append(bar)
    grouped = []
    start = run[0].start
    for same in by_state.values():
        merged = reduce(_merge, same)
        if not merged.state.is_lane:
            grouped.append(replace(merged, end=max(bar.end for bar in same)))
            continue
        end = start + sum(bar.end - bar.start for bar in same)
        grouped.append(replace(merged, start=start, end=end))
        start = end
    return grouped


def _merge(a: Bar, b: Bar) -> Bar:
    return replace(
        a,
        end=b.end,
        step=a.step if a.step == b.step else -1,
        version=a.version if a.version == b.version else -1,
        rows=a.rows + b.rows,
        tokens=a.tokens + b.tokens,
        count=a.count + b.count,
    )


def _joined(bars: Iterable[Bar]) -> list[Bar]:
    """Join neighbours that touch and say the same: pieces of one long state, and overlapping work beside a lane."""
    out: list[Bar] = []
    for bar in bars:
        last = out[-1] if out else None
        is_same = last and (last.lane, last.state, last.step, last.version) == (bar.lane, bar.state, bar.step, bar.version)
        if last and is_same and bar.start - last.end <= 1e-9:
            out[-1] = replace(_merge(last, bar), end=max(last.end, bar.end))
        else:
            out.append(bar)
    return out


def _bars(spans: Iterable[Span], lanes: Sequence[str], origin: float) -> list[Bar]:
    """Lane by lane, each in the order of time; work beside a lane forms a lane of its own, numbered after all the others."""
    number = {worker: position for position, worker in enumerate(lanes)}
    bars = [
        Bar(
            lane=number[span.worker] + (0 if span.is_lane else len(lanes)),
            state=state_of(span),
            start=span.start - origin,
            end=span.end - origin,
            step=span.step,
            version=span.version,
            rows=span.rows,
            tokens=span.tokens,
        )
        for span in spans
        if span.is_lane or span.task not in _COVERED_BY_LANE
    ]
    return sorted(bars, key=lambda bar: (bar.lane, bar.start))


def _columns(bars: Iterable[Bar], number: dict[BarKind, int]) -> dict[str, list[float]]:
    rows = [
        (b.lane, number[b.state], round(b.start, 6), round(b.end - b.start, 6), b.step, b.version, b.rows, b.tokens, b.count)
        for b in bars
    ]
    names = ("lane", "state", "start", "seconds", "step", "version", "rows", "tokens", "count")
    columns = zip(*rows, strict=True) if rows else ((),) * len(names)
    return {name: list(column) for name, column in zip(names, columns, strict=True)}
