"""Runs compared: curves over each other, what differs in their configurations, and what their workers waited for, side by side.

    RunReader, RunReader, ... --> RunsCompared --> the live page
                                            +--> compare.html, a page that needs nothing else (`asyncflow compare`)

Runs whose configurations differ in nothing but seed and name are drawn as one curve, their mean, with a band from the least to the
largest of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

from asyncflow.telemetry.charts import MetricRow, Runs, accuracy_keys, compared_charts
from asyncflow.telemetry.report import page_template, page_with_charts
from asyncflow.telemetry.run_reader import RunReader
from asyncflow.telemetry.sections import idle_of_pools

_SAME_BUT_FOR: Final = ("run.seed", "run.name", "run.dir", "run.overwrite", "plan.predicted")
_FIGURES: Final = {
    "seconds of a step": "perf/step_seconds",
    "TPSPD": "perf/tpspd",
    "mean reward": "reward/mean",
    "response length": "response_length/mean",
    "entropy": "policy/entropy",
    "groups without a signal": "reward/zero_std_groups",
    "staleness": "staleness/mean",
}
_NEWEST: Final = 10
"""Steps at the end of a run that the figures of its end are means over."""

ComparisonRows = list[tuple[str, list[str]]]
"""Rows of a table: a name, and a cell for each run."""


class RunsCompared:
    """Comparison of several runs, whose spans have been read."""

    def __init__(self, runs: Mapping[str, RunReader]) -> None:
        self._runs = runs
        self.names = list(runs)

    @property
    def charts(self) -> list[dict[str, Any]]:
        """Cards for plotly.js: each metric of all runs."""
        alike: dict[str, list[str]] = {}
        for name, run in self._runs.items():
            settings = {key: value for key, value in _flat(run.config) if not key.startswith(_SAME_BUT_FOR)}
            alike.setdefault(repr(sorted(settings.items())) if settings else name, []).append(name)
        groups = []
        for names in alike.values():
            label = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more seed{'s' * (len(names) > 2)}"
            groups.append(Runs(label, [self._runs[name].rows for name in names], [self._runs[name].evaluations for name in names]))
        return compared_charts(groups)

    @property
    def figures(self) -> ComparisonRows:
        """Steps, accuracy, and means over each run's last steps."""
        table: ComparisonRows = [("steps", [str(len(run.rows)) for run in self._runs.values()])]
        for key in sorted({key for run in self._runs.values() for key in accuracy_keys(run.evaluations)}):
            table.append((f"final {key}", [_last(run.evaluations, key) for run in self._runs.values()]))
        for name, key in _FIGURES.items():
            cells = [_mean(run.rows[1:][-_NEWEST:], key) for run in self._runs.values()]
            if any(cells):
                table.append((name, cells))
        return table

    @property
    def differences(self) -> ComparisonRows:
        """Settings that differ, by key."""
        flat = [dict(_flat(run.config)) for run in self._runs.values()]
        keys = sorted(set[str]().union(*flat) - {"run.name", "run.dir"})
        cells = ((key, [str(of_run.get(key, "")) for of_run in flat]) for key in keys)
        return [(key, values) for key, values in cells if len(set(values)) > 1]

    @property
    def idle(self) -> ComparisonRows:
        """Share of the workers' time that they wait, by pool and reason, mean over the steps after the first."""
        shares = []
        for run in self._runs.values():
            ends = [end for _, end in run.spans.steps]
            found = idle_of_pools(run.spans.activities(ends[0], ends[-1])) if len(ends) > 1 else {}
            shares.append({(pool, reason): share for pool, of_pool in found.items() for reason, share in of_pool.items()})
        names = sorted(set[tuple[str, str]]().union(*shares))
        return [
            (f"{pool}: {reason}", [f"{one[pool, reason]:.1%}" if (pool, reason) in one else "" for one in shares])
            for pool, reason in names
        ]

    def html(self) -> Markup:
        """The tables, and the place of the charts."""
        module = page_template("parts.html.j2").module
        return Markup(module.comparison(self.names, self.figures, self.idle, self.differences))  # type: ignore[attr-defined]


def write_comparison(runs: Mapping[str, RunReader], path: Path) -> Path:
    """Write a page that compares runs, whose files have been read, and return its path."""
    comparison = RunsCompared(runs)
    page = page_with_charts(
        "compare.html.j2",
        comparison.charts,
        title=" and ".join(comparison.names) if len(comparison.names) < 4 else f"{len(comparison.names)} runs",
        content=comparison.html(),
    )
    path.write_text(page, encoding="utf-8")
    return path


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def _mean(rows: Sequence[MetricRow], key: str) -> str:
    known = [row[key] for row in rows if row.get(key) is not None]
    return f"{statistics.fmean(known):,.4g}" if known else ""


def _last(rows: Sequence[MetricRow], key: str) -> str:
    known = [row[key] for row in rows if row.get(key) is not None]
    return f"{known[-1]:.1%}" if known else ""
