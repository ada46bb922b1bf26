"""Rows of metrics: few in memory, all of them to be had."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from asyncflow.config import parse
from asyncflow.run.context import Listener
from asyncflow.run.records.metric_rows import MetricRows
from asyncflow.run.records.step_rows import NEWEST, StepRows
from asyncflow.telemetry.hub import Hub
from asyncflow.telemetry.metrics import GroupFigures, StepMetrics, StepTimes
from asyncflow.telemetry.trace import SpanLog


def row(step: int) -> dict[str, Any]:
    return {"step": step, "reward/mean": step / 8}


def run_of(folder: Path, steps: int, first: int = 0) -> StepRows:
    """Rows of a run that goes on from step `first`: each is written, then added."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row(step)) + "\n" for step in range(first))
        file.flush()
        rows = StepRows(folder, [row(step) for step in range(first)])
        for step in range(first, steps):
            file.write(json.dumps(row(step)) + "\n")
            file.flush()
            rows[step] = row(step)
    return rows


@pytest.mark.parametrize("first", [0, 100, 2 * NEWEST])
def test_every_step_is_there_and_few_are_in_memory(tmp_path: Path, first: int) -> None:
    steps = 3 * NEWEST
    rows = run_of(tmp_path, steps, first)
    expected: dict[int, Mapping[str, Any]] = {step: row(step) for step in range(steps)}
    assert len(rows) == steps and list(rows) == list(expected) and len(rows._newest) == NEWEST
    assert dict(rows.items()) == expected and list(rows.values()) == list(expected.values()) and rows.since(0) == expected
    assert rows[3] == row(3) and rows[steps - 1] == row(steps - 1)
    assert 3 in rows and steps - 1 in rows and steps not in rows and -1 not in rows
    with pytest.raises(KeyError):
        rows[steps]


def test_the_newest_need_no_file(tmp_path: Path) -> None:
    rows = run_of(tmp_path, 2 * NEWEST)
    (tmp_path / "metrics.jsonl").unlink()
    assert rows[2 * NEWEST - 1] == row(2 * NEWEST - 1)
    assert rows.since(NEWEST + 5) == {step: row(step) for step in range(NEWEST + 5, 2 * NEWEST)}


def test_a_step_comes_once_and_in_order(tmp_path: Path) -> None:
    rows = run_of(tmp_path, 3)
    assert StepRows(tmp_path).since(0) == {} and not StepRows(tmp_path)
    with pytest.raises(ValueError, match="step 2 has come after step 2"):
        rows[2] = row(2)


async def test_a_metric_that_scorers_and_the_algorithm_name_is_the_mean_over_both(tmp_path: Path) -> None:
    async def status() -> tuple[dict[str, Any], dict[int, Any]]:
        return {}, {}

    tree = {
        "model": {"path": "m"},
        "data": {"path": "d"},
        "run": {"dir": str(tmp_path), "name": "run"},
        "telemetry": {"trackers": []},
    }
    context = SimpleNamespace(
        config=parse(tree),
        ledger=SimpleNamespace(ledger=SimpleNamespace(committed=0)),
        queue=SimpleNamespace(status=status),
        versions=SimpleNamespace(newest=None, share_attested=None),
    )
    cores = SimpleNamespace(seconds=lambda *_: {}, most_given=lambda: None, deal=lambda seconds: None)
    hub = Hub(SpanLog(tmp_path / "spans.jsonl"), lambda sample: None, lambda row: None, lambda response: None, lambda: None)
    hub.own_metrics = {0: {"steps": (3, 6.0)}, 1: {"steps": (1, 100.0)}}
    metrics, numbers = StepMetrics(), np.zeros(1)
    metrics.add_group(
        GroupFigures(1, numbers, numbers, numbers, numbers, numbers, 0.0, 1, 1, 1, {}, own_metrics={"steps": (1, 4.0)})
    )
    checks, found = SimpleNamespace(look_at_metrics=lambda row: None), list[Mapping[str, float]]()
    listener = Listener()
    listener.step = lambda step, row: found.append(row)  # type: ignore[method-assign]
    rows = MetricRows(
        *cast(Any, (context, hub, checks, listener)), num_devices=lambda *_: 1.0, cores=cast(Any, cores), num_resumes=0
    )
    await rows.finish(0, metrics, None, StepTimes(started=0.0, committed=1.0))
    rows.close()
    hub.log.close()
    assert found[0]["own/steps"] == 2.5
    assert hub.own_metrics == {1: {"steps": (1, 100.0)}}
