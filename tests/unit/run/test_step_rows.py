"""Rows of metrics: few in memory, all of them to be had."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncflow.run.records.step_rows import NEWEST, StepRows


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
