import random
from itertools import pairwise

import numpy as np
import pytest

from asyncflow.telemetry.gantt import BAR, BarKind, GanttFrame, colours_of, drawn_levels, first_view, grouped, joined, step_ends
from asyncflow.telemetry.spans import Span


def bars(rows):
    return np.array(rows, BAR)


def alternating(count: int, lanes: int = 2):
    """Short bars of three states, end to end, in each lane."""
    draw = random.Random(0)
    rows = []
    for lane in range(lanes):
        now = 0.0
        for i in range(count // lanes):
            end = now + draw.uniform(0.001, 0.1)
            rows.append((2 * lane, i % 3, now, end, i // 10, 0, 1, 2, 1))
            now = end
    return bars(rows)


def seconds_by(found) -> dict[tuple[int, int], float]:
    totals: dict[tuple[int, int], float] = {}
    for bar in found:
        key = int(bar["lane"]), int(bar["state"])
        totals[key] = totals.get(key, 0.0) + float(bar["end"] - bar["start"])
    return totals


def test_levels_shrink_to_their_sizes_and_keep_every_second_row_and_token():
    every = alternating(20_000)
    wall = every["end"].max()
    levels = drawn_levels(every, wall, (10_000, 5_000, 800))
    assert len(levels) == 3
    for (resolution, level), size in zip(levels, (10_000, 5_000, 800), strict=True):
        assert 0 < resolution < wall
        assert len(level) <= size
        assert seconds_by(level) == pytest.approx(seconds_by(every))
        for name in ("rows", "tokens", "count"):
            assert level[name].sum() == every[name].sum()
        for a, b in pairwise(level):
            assert a["lane"] < b["lane"] or a["end"] <= b["start"] + 1e-9


def test_few_bars_are_drawn_as_they_are():
    few = alternating(50)
    ((resolution, level),) = drawn_levels(few, 5.0, (100, 60))
    assert resolution == 0 and np.array_equal(level, few)


def test_a_long_bar_is_never_grouped():
    busy, idle = 0, 1
    short_and_long = bars(
        [
            (0, idle, 0.0, 0.01, -1, -1, 0, 0, 1),
            (0, busy, 0.01, 0.02, 3, 1, 5, 6, 1),
            (0, idle, 0.02, 0.05, -1, -1, 0, 0, 1),
            (0, busy, 0.05, 2.0, 3, 1, 0, 0, 1),
        ]
    )
    shown = joined(grouped(short_and_long, 0.5))
    assert [(b["state"], round(b["start"], 6), round(b["end"], 6), b["count"]) for b in shown] == [
        (idle, 0.0, 0.04, 2),
        (busy, 0.04, 2.0, 2),
    ]


def test_work_beside_a_lane_may_overlap_and_is_not_laid_side_by_side():
    beside = bars([(1, 0, 0.0, 0.3, 0, 0, 1, 0, 1), (1, 0, 0.1, 0.4, 0, 0, 1, 0, 1), (1, 1, 0.2, 0.25, 0, 0, 1, 0, 1)])
    assert [(b["state"], b["start"], b["end"], b["count"]) for b in grouped(beside, 1.0)] == [(0, 0.0, 0.4, 2), (1, 0.2, 0.25, 1)]


def test_first_view_is_three_steps_in_the_middle():
    steps = [[i, float(10 * (i + 1))] for i in range(9)]
    low, high = first_view(steps, 95.0)
    assert low == pytest.approx(30 - 1.8)
    assert high == pytest.approx(60 + 1.8)
    assert first_view(steps[:3], 35.0) == [0.0, 35.0]
    assert first_view([], 0.0) == [0.0, 0.0]


def test_a_step_ends_with_its_last_update():
    ends = [(0, 1.0), (0, 2.0), (1, 4.0)]
    spans = [Span(worker="trainer/0", task="optim_step", start=e - 0.5, end=e, step=s) for s, e in ends]
    assert step_ends(spans, 0.5) == [[0, 1.5], [1, 3.5]]


def test_unknown_tasks_and_causes_are_drawn_in_stable_colours_of_their_own():
    names = [f"strange {i}" for i in range(6)]
    colours = colours_of([BarKind(name) for name in names] + [BarKind("generate")])
    assert len(set(colours.values())) == 7
    one = BarKind("strange 0")
    assert colours_of([one])[one] == colours_of([one, BarKind("load")])[one]
    spans = [
        Span(worker="w", task="strange", start=0, end=1),
        Span(worker="w", task="wait", cause="odd", start=1, end=2),
        Span(worker="w", task="wait", start=2, end=3),
        Span(worker="w", task="elsewhere", start=0, end=3, is_lane=False),
    ]
    frame = GanttFrame(0.0)
    level = frame.columns(frame.bars(spans))
    chart = frame.described([], [], 3.0)
    assert {state["label"] for state in chart["states"]} == {
        "strange",
        "waiting: odd",
        "waiting: unknown",
        "elsewhere (beside)",
    }
    assert all(state["colour"].startswith("#") for state in chart["states"])
    assert level["start"] == [0, 1, 2, 0]
    assert level["lane"] == [0, 0, 0, 1]


def test_no_spans_make_an_empty_chart():
    chart = GanttFrame(0.0).described([], [], 0.0)
    assert (chart["lanes"], chart["wall"], chart["steps"]) == ([], 0.0, [])
