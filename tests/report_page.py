"""What a run's report shows, read back from its page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from asyncflow.telemetry.attribution import REASONS


class Page(HTMLParser):
    """The elements and the visible text of a page; `scripts` are their contents with their attributes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str | None] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.words: list[str] = []
        self._script: dict[str, str | None] | None = None
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href", "onerror", "onload")]
        self._script = dict(attrs) if tag == "script" else None

    def handle_data(self, text: str) -> None:
        if self._script is not None:
            self.scripts.append((self._script, text))
            self._script = None
        else:
            self.words.append(text)

    def chart_data(self) -> dict[str, Any]:
        return next(json.loads(text) for attrs, text in self.scripts if attrs.get("id") == "chart-data")

    def mean_step(self) -> tuple[float, dict[str, dict[str, float]]]:
        """The seconds of the mean step, and each worker's by column, `sum` included; all are rounded to milliseconds."""
        step = re.search(r"A step of ([0-9.]+) s, mean over", self.source)
        table = re.search(r"<tr><th>worker</th>(.*)</tr>\n((?:.*<tr><td>.*\n)+)", self.source)
        assert step is not None and table is not None
        columns = re.findall(r">([^<]+)</th>", table[1])
        rows = {}
        for worker, cells in re.findall(r"<tr><td>([^<]+)</td>(.*)</tr>", table[2]):
            seconds = [float(cell) for cell in re.findall(r'number">([0-9.-]+)</td>', cells)]
            rows[worker] = dict(zip(columns, seconds, strict=True))
        return float(step[1]), rows


def check_chart(run_dir: Path, workers: list[str], steps: int) -> float:
    """One lane per worker without a gap, installs with their versions, waits by reason, and for each worker a sum that is the step.

    `workers`: from the top. Returns the mean step's seconds.
    """
    page = Page(run_dir / "report.html")
    gantt = page.chart_data()["gantt"]
    assert gantt["lanes"] == workers
    assert [number for number, _ in gantt["steps"]] == list(range(steps))
    for lane, worker in enumerate(workers):
        finest = gantt["levels"][0]
        bars = [
            (start, seconds)
            for of, start, seconds in zip(*(finest[key] for key in ("lane", "start", "seconds")), strict=True)
            if of == lane
        ]
        assert bars[-1][0] + bars[-1][1] >= gantt["steps"][-1][1] - 1e-5, worker
        for (start, seconds), (after, _) in pairwise(bars):
            assert start + seconds == pytest.approx(after, abs=1e-5), worker
        versions = [version for of, _, version in gantt["installs"] if of == lane]
        assert versions == sorted(set(versions)) and set(versions) <= set(range(1, steps + 1)), worker
        assert bool(versions) == worker.startswith("rollout/"), worker
    labels = {state["label"] for state in gantt["states"] if state["wait"]}
    assert {"waiting: data"} <= labels <= {f"waiting: {reason}" for reason in REASONS}
    seconds, rows = page.mean_step()
    assert list(rows) == workers
    for worker, parts in rows.items():
        whole = parts.pop("sum")
        assert set(parts) <= {"busy", *REASONS}, worker
        assert whole == pytest.approx(seconds, abs=2e-3), worker
        assert sum(parts.values()) == pytest.approx(whole, abs=1e-3 * len(parts)), worker
    return seconds
