"""Line charts of the pages about runs: which metrics go together, as plain data for plotly.js.

Each chart is one card. A chart whose metrics the run never logged is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final

from asyncflow.telemetry.metrics import DEFINITIONS, metric_key

MetricRow = Mapping[str, Any]

_COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8A8F98")
_ACCURACY: Final = "Share of held-out prompts answered correctly, by policy version."


@dataclass(frozen=True, slots=True)
class Chart:
    """`lines`: metric -> the line's name. `band`: the metric that is drawn as a band above and below the first line.

    `is_share`: from 0 to 1, shown in per cent. `from_zero`: the axis begins at 0, so that heights compare.
    """

    title: str
    lines: Mapping[str, str]
    unit: str = ""
    band: str = ""
    is_share: bool = False
    from_zero: bool = False


CHARTS: Final = (
    Chart("Reward", {"reward/mean": "mean"}, band="reward/std"),
    Chart("Response length", {"response_length/mean": "mean"}, unit="tokens"),
    Chart("Responses cut off", {"response_length/clipped_ratio": "share of rows"}, is_share=True),
    Chart("TPSPD: trained tokens per second per device", {"perf/tpspd": "TPSPD"}, from_zero=True),
    Chart(
        "Tokens per second of each pool",
        {"perf/rollout_tokens_per_second": "rollout", "perf/train_tokens_per_second": "train"},
        from_zero=True,
    ),
    Chart(
        "Seconds", {"perf/step_seconds": "step", "perf/train_startup_seconds": "until training starts"}, unit="s", from_zero=True
    ),
    Chart("KL from the reference", {"policy/kl": "KL"}, unit="nats", from_zero=True),
    Chart("Entropy", {"policy/entropy": "entropy"}, unit="nats"),
    Chart("Gradient norm", {"policy/grad_norm": "before clipping"}, from_zero=True),
    Chart("Clipped tokens", {"policy/clip_ratio": "share of loss tokens"}, is_share=True),
    Chart("Loss", {"policy/loss": "loss"}),
    Chart("Staleness", {"staleness/mean": "mean", "staleness/max": "largest"}, unit="versions", from_zero=True),
    Chart("Physical / logical tokens", {"perf/physical_tokens_ratio": "ratio"}, from_zero=True),
    Chart("Groups without a signal", {"reward/zero_std_groups": "all rewards equal"}, unit="groups", from_zero=True),
    Chart(
        "Rows lost or repeated",
        {"rows/dead": "dead", "rows/redelivered": "again"},
        unit="rows",
        from_zero=True,
    ),
)


def metric_charts(rows: Sequence[MetricRow], evaluations: Sequence[MetricRow]) -> list[dict[str, Any]]:
    """Cards of the report, a dict each: title, note (the meaning of the lines), traces and layout for plotly.js."""
    cards = [_card(chart, rows) for chart in (*CHARTS, *_worker_charts(rows))]
    keys = accuracy_keys(evaluations)
    cards.insert(1, _card(Chart("Evaluation accuracy", dict(zip(keys, keys, strict=True)), is_share=True), evaluations, _ACCURACY))
    return [card for card in cards if card["traces"]]


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs that are drawn as one curve: the rows of metrics, and of evaluations, of each."""

    label: str
    rows: Sequence[Sequence[MetricRow]]
    evaluations: Sequence[Sequence[MetricRow]]


def compared_charts(groups: Sequence[Runs]) -> list[dict[str, Any]]:
    """Cards for several groups of runs, a line each: the mean at each step, and a band from the least to the largest run."""
    cards = []
    for chart in CHARTS:
        metric = next(iter(chart.lines))
        of_each = [(group.label, [_points(rows, metric) for rows in group.rows]) for group in groups]
        cards.append(_finished(chart, DEFINITIONS.get(metric_key(metric), ""), _compared(of_each)))
    for key in sorted({key for group in groups for rows in group.evaluations for key in accuracy_keys(rows)}, reverse=True):
        of_each = [(group.label, [_points(rows, key) for rows in group.evaluations]) for group in groups]
        chart = Chart(f"Evaluation: {key}", {}, is_share=True)
        cards.insert(1, _finished(chart, _ACCURACY, _compared(of_each)))
    return [card for card in cards if card["traces"]]


def _points(rows: Sequence[MetricRow], metric: str) -> dict[int, float]:
    return {row["step"]: row[metric] for row in rows if _is_number(row.get(metric))}


def _compared(of_each: Sequence[tuple[str, Sequence[Mapping[int, float]]]]) -> list[dict[str, Any]]:
    bands, lines = [], []
    for (label, runs), colour in zip(of_each, cycle(_COLOURS), strict=False):
        steps = sorted(set[int]().union(*runs))
        values = [[run[step] for run in runs if step in run] for step in steps]
        if not steps:
            continue
        if len(runs) > 1:
            bands += _edges(steps, [min(found) for found in values], [max(found) for found in values], colour)
        lines.append(_line(steps, [sum(found) / len(found) for found in values], label, colour))
    return bands + lines


def _worker_charts(rows: Sequence[MetricRow]) -> list[Chart]:
    """A line for every worker."""
    names = sorted({name for row in rows for name in row})

    def lines(family: str) -> dict[str, str]:
        return {name: name.removeprefix(family) for name in names if name.startswith(family)}

    return [
        Chart("Idle share of each worker", lines("perf/idle_ratio/"), is_share=True),
        Chart("Memory of each worker", lines("memory/rss_bytes/"), unit="bytes", from_zero=True),
    ]


def accuracy_keys(evaluations: Sequence[MetricRow]) -> list[str]:
    """The names of the accuracies in the rows of eval.jsonl: `accuracy`, or several that contain the word."""
    return sorted({name for row in evaluations for name, value in row.items() if "accuracy" in name and _is_number(value)})


def _card(chart: Chart, rows: Sequence[MetricRow], note: str | None = None) -> dict[str, Any]:
    """`note`: None: what the definitions of the lines say."""
    traces: list[dict[str, Any]] = []
    for (metric, label), colour in zip(chart.lines.items(), cycle(_COLOURS), strict=False):
        known = [row for row in rows if _is_number(row.get(metric))]
        if known:
            traces.append(_line([row["step"] for row in known], [row[metric] for row in known], label, colour))
    if chart.band and traces:
        traces[:0] = _band(next(iter(chart.lines)), chart.band, rows)
    return _finished(chart, _note(chart) if note is None else note, traces)


def _note(chart: Chart) -> str:
    """The definitions of the lines, each named where there are several; once where all lines share one."""
    labels: dict[str, str] = {}
    for metric, label in chart.lines.items():
        labels.setdefault(DEFINITIONS.get(metric_key(metric), ""), label)
    if len(labels) < 2:
        return next(iter(labels), "")
    return " ".join(f"{label}: {definition}" for definition, label in labels.items())


def _finished(chart: Chart, note: str, traces: list[dict[str, Any]]) -> dict[str, Any]:
    num_lines = sum(trace["showlegend"] for trace in traces)
    if num_lines < 2:
        for trace in traces:
            trace["showlegend"] = False
    axis: dict[str, Any] = {"tickformat": ".1~%"} if chart.is_share else {}
    if chart.from_zero or chart.is_share:
        axis["rangemode"] = "tozero"
    if chart.unit == "bytes":
        axis["tickformat"] = "~s"
    if chart.unit:
        axis["title"] = {"text": chart.unit}
    return {"title": chart.title, "note": note, "traces": traces, "yaxis": axis}


def _line(steps: Sequence[int], values: Sequence[float], label: str, colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(steps) <= 60 else "lines",
        "x": list(steps),
        "y": list(values),
        "name": label,
        "line": {"color": colour, "width": 2},
        "marker": {"size": 5},
        "showlegend": True,
    }


def _band(centre: str, spread: str, rows: Sequence[MetricRow]) -> list[dict[str, Any]]:
    known = [row for row in rows if _is_number(row.get(centre)) and _is_number(row.get(spread))]
    steps = [row["step"] for row in known]
    low = [row[centre] - row[spread] for row in known]
    high = [row[centre] + row[spread] for row in known]
    return _edges(steps, low, high, _COLOURS[0])


def _edges(steps: Sequence[int], low: Sequence[float], high: Sequence[float], colour: str) -> list[dict[str, Any]]:
    """The band between two curves."""
    edge = {"type": "scatter", "mode": "lines", "x": list(steps), "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return [
        {**edge, "y": list(low)},
        {**edge, "y": list(high), "fill": "tonexty", "fillcolor": f"rgba({red}, {green}, {blue}, 0.16)"},
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
