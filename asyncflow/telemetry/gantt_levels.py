"""Levels of detail of a Gantt chart that grows: bars are added as a run goes on, and a page asks for the part in view.

    level 0     every bar                            |.|..|.|...|.||..|.|..|.|
    level 1     cells of r seconds                   |. .|.  .|. |.  .|.   |
    level 2     cells of 2 r seconds, of level 1     |.  .   |.     .|

Cells begin at multiples of their length, so a bar changes one cell of each level, and every level is kept by making anew its last
cells. Each level is sorted by cell (level 0 by start), and knows the latest end so far: both ends of a part in view are found by
bisection.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from asyncflow.telemetry.gantt import BAR, Bars, grouped, grouped_in_cells, in_lanes, joined, lane_order
from asyncflow.types import Array

_FEW_BARS: Final = 500
"""A level of no more bars needs no coarser one above it."""
_MEDIANS: Final = 4.0
"""Resolution of the first level, in median lengths of a bar: a finer one would group next to nothing."""


class _Resolution:
    """Bars of one resolution, sorted by cell; room doubles as they become more."""

    def __init__(self, resolution: float) -> None:
        self.resolution = resolution
        self._bars, self._cells, self._reached, self._size = np.empty(1024, BAR), np.empty(1024), np.empty(1024), 0

    @property
    def bars(self) -> Bars:
        return self._bars[: self._size]

    @property
    def cells(self) -> Array:
        return self._cells[: self._size]

    def since(self, moment: float) -> int:
        """Place of the first bar of this cell, or of a later one."""
        return int(np.searchsorted(self.cells, moment))

    def within(self, start: float, end: float) -> slice:
        """Places between which all bars are that reach into (start, end), and perhaps others."""
        return slice(int(np.searchsorted(self._reached[: self._size], start, "right")), self.since(end))

    def replace_from(self, place: int, bars: Bars, cells: Array) -> None:
        """Replace all bars from a place on."""
        size = place + len(bars)
        if size > len(self._bars):
            room = max(size, 2 * len(self._bars))
            self._bars = np.resize(self._bars, room)
            self._cells, self._reached = np.resize(self._cells, room), np.resize(self._reached, room)
        order = np.argsort(cells, kind="stable")
        self._bars[place:size], self._cells[place:size] = bars[order], cells[order]
        before = self._reached[place - 1] if place else -np.inf
        self._reached[place:size] = np.maximum(np.maximum.accumulate(self._bars["end"][place:size]), before)
        self._size = size


class GanttLevels:
    """Bars of a chart, in as many levels as its length asks for."""

    def __init__(self) -> None:
        self._levels = [_Resolution(0.0)]

    @property
    def bars(self) -> Bars:
        """Every bar, by start."""
        return self._levels[0].bars

    def insert(self, bars: Bars) -> None:
        """Add bars. It costs least where they are later than those that are there."""
        if not len(bars):
            return
        finest, moment = self._levels[0], float(bars["start"].min())
        place = finest.since(moment)
        since = np.concatenate([finest.bars[place:], bars])
        finest.replace_from(place, since, since["start"])
        for finer, level in zip(self._levels[:-1], self._levels[1:], strict=True):
            moment = np.floor(moment / level.resolution) * level.resolution
            self._remake(level, finer, moment)
        while len((last := self._levels[-1]).bars) > _FEW_BARS:
            level = _Resolution(2 * last.resolution if last is not finest else self._first_resolution(self.bars))
            if level.resolution > float(self.bars["end"].max()):
                break
            self._remake(level, last, -np.inf)
            self._levels.append(level)

    def part(self, start: float, end: float, most: int, newest: Bars) -> tuple[float, Bars]:
        """The finest level that has no more than `most` bars in (start, end), or is made coarser until it has: (resolution in
        seconds, bars).

        `newest`: bars that are not among those that were added, since they may still change.
        """
        newest = newest[(newest["start"] < end) & (newest["end"] > start)]
        for level in self._levels:
            is_last = level is self._levels[-1]
            places = level.within(start, end)
            if places.stop - places.start > 4 * most and not is_last:
                continue
            found = level.bars[places]
            found = found[(found["end"] > start) & (found["start"] < end)]
            with_newest = [found, grouped(in_lanes(newest), level.resolution) if level.resolution else newest]
            shown = joined(in_lanes(np.concatenate(with_newest)))
            if len(shown) <= most or is_last:
                break
        resolution = level.resolution
        while len(shown) > most and resolution < end - start:  # many lanes, or many of the newest bars
            resolution = 2 * resolution or self._first_resolution(shown)
            shown = joined(grouped(shown, resolution))
        return resolution, shown

    @staticmethod
    def _first_resolution(bars: Bars) -> float:
        """Resolution of the first coarse level: a power of two, so that cells and their halves begin without rounding."""
        median = float(np.median(bars["end"] - bars["start"]))
        return float(2.0 ** math.ceil(math.log2(max(_MEDIANS * median, 1e-6))))

    @staticmethod
    def _remake(level: _Resolution, finer: _Resolution, moment: float) -> None:
        """Make a level anew from the cell that begins at this moment."""
        place = finer.since(moment)
        source, moments = finer.bars[place:], finer.cells[place:]
        order = lane_order(source)
        level.replace_from(level.since(moment), *grouped_in_cells(source[order], moments[order], level.resolution))
