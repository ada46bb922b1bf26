import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest

from asyncflow.engines.costs import Costs
from asyncflow.simulation.run import simulate
from asyncflow.telemetry.gantt import BAR
from asyncflow.telemetry.gantt_levels import GanttLevels
from asyncflow.telemetry.span_index import SpanIndex
from asyncflow.telemetry.spans import Span
from tests.builders import every_task_apart

_spec = importlib.util.spec_from_file_location("synthetic_run", Path(__file__).with_name("synthetic_run.py"))
synthetic_run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(synthetic_run)


def drawn(index: SpanIndex) -> list[tuple[object, ...]]:
    """Every bar of an index."""
    part = index.part(-1.0, index.wall + 1, 1 << 30)
    (level,), lanes, states = part["levels"], part["lanes"], part["states"]
    assert level["resolution"] == 0
    columns = zip(*(level[name] for name in ("lane", "state", "start", "seconds", "step")), strict=True)
    return sorted(
        (lanes[lane % len(lanes)], lane < len(lanes), states[state]["label"], round(start, 5), round(seconds, 5), step)
        for lane, state, start, seconds, step in columns
    )


def in_pieces(spans: list[Span], seed: int) -> SpanIndex:
    draw, index, place = random.Random(seed), SpanIndex(min(span.start for span in spans)), 0
    while place < len(spans):
        count = draw.choice([1, 7, 50, 400])
        index.add(spans[place : place + count])
        place += count
    return index


@pytest.mark.parametrize("mode", ["periodic", "delayed"])
def test_spans_that_come_in_pieces_make_the_bars_of_all_at_once(mode):
    spans = simulate(every_task_apart(mode, steps=8), costs=Costs()).spans
    whole = SpanIndex()
    whole.add(spans, is_all=True)
    for seed in range(2):
        index = in_pieces(spans, seed)
        assert drawn(index) == drawn(whole)
        assert index.steps == whole.steps and len(index.steps) == 8
        assert sorted(index.chart()["installs"]) == sorted(whole.chart()["installs"])
        assert len(index._newest) < len(spans) / 2  # the others are not looked at again


def test_spans_of_a_run_that_never_updates_are_settled_too():
    spans = [Span(worker="rollout/0", task="generate", start=i, end=i + 0.5, step=0) for i in range(3_000)]
    index = SpanIndex()
    for place in range(0, 3_000, 500):
        index.add(spans[place : place + 500])
    assert len(drawn(index)) == 3_000


def levels_of(bars: np.ndarray, seed: int) -> GanttLevels:
    levels, draw, place = GanttLevels(), random.Random(seed), 0
    while place < len(bars):
        count = draw.choice([10, 300, 2_000])
        levels.insert(bars[place : place + count])
        place += count
    return levels


def alternating(count: int) -> np.ndarray:
    draw, bars, now = random.Random(0), np.zeros(count, BAR), [0.0, 0.0, 0.0]
    for i in range(count):
        lane = i % 3
        end = now[lane] + draw.uniform(0.01, 0.1)
        bars[i] = (2 * lane, draw.randrange(3), now[lane], end, i // 100, 0, 1, 2, 1)
        now[lane] = end
    return bars


NONE = np.empty(0, BAR)


def test_a_part_is_drawn_at_the_finest_level_that_is_not_too_much():
    bars = alternating(20_000)
    levels, wall = levels_of(bars, 0), float(bars["end"].max())
    resolution, found = levels.part(0.0, wall, 800, NONE)
    assert resolution > 0 and len(found) <= 800
    seconds = bars["end"] - bars["start"]
    for state in range(3):
        grouped = (found["end"] - found["start"])[found["state"] == state].sum()
        assert grouped == pytest.approx(seconds[bars["state"] == state].sum())
    assert found["count"].sum() == len(bars)
    resolution, found = levels.part(100.0, 101.0, 800, NONE)
    inside = bars[(bars["start"] < 101.0) & (bars["end"] > 100.0)]
    assert resolution == 0 and found["count"].sum() == len(inside)


def test_levels_do_not_depend_on_the_pieces_that_bars_come_in():
    bars = alternating(20_000)
    wall = float(bars["end"].max())
    one, other = levels_of(bars, 1), levels_of(bars, 2)
    for start, end in ((0.0, wall), (wall / 3, wall / 2)):
        found, expected = one.part(start, end, 800, NONE), other.part(start, end, 800, NONE)
        if found[0] == expected[0]:
            assert np.array_equal(found[1][["lane", "state", "count"]], expected[1][["lane", "state", "count"]])
        assert found[1]["count"].sum() == pytest.approx(expected[1]["count"].sum(), rel=0.02)


def test_a_late_bar_finds_its_place():
    bars = alternating(9_000)
    late = bars[3_000:3_010]
    levels = GanttLevels()
    levels.insert(np.concatenate([bars[:3_000], bars[3_010:]]))
    levels.insert(late)
    assert np.array_equal(np.sort(levels.bars, order=["start", "lane"]), np.sort(bars, order=["start", "lane"]))
    _, found = levels.part(0.0, 1e9, 400, NONE)
    assert found["count"].sum() == len(bars)


def test_newest_bars_are_shown_and_may_change():
    bars = alternating(3_000)
    levels = levels_of(bars[:2_990], 0)
    end = float(bars["end"].max())
    assert levels.part(end - 1, end + 1, 5_000, bars[2_990:])[1]["end"].max() == pytest.approx(end)
    assert levels.part(end - 1, end + 1, 5_000, NONE)[1]["end"].max() < end
