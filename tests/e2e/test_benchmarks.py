"""Benchmarks of whole runs: with `--dir` each run's report stays under the run's name, and is told; without it no run stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncflow.telemetry.equivalence import overlap_seconds
from asyncflow.telemetry.trace import SPANS_FILE, read_spans
from tests.report_page import check_chart

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
SLEEPING = "sub_step.py --workers 1 --steps 5"
REAL = "overlap.py --slots 64 --median 8 --longest 16 --steps"


def benchmark(command: str, **environment: str) -> str:
    """What it prints."""
    name, *options = command.split()
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent), **environment},
    )
    assert "\ncommand: python" in done.stdout, (
        done.stdout + done.stderr
    )  # the exit code tells of targets, for which it is too short
    return done.stdout


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (SLEEPING, {f"{case}-{mode}" for case in ("balanced", "few-wide") for mode in ("delayed", "sub_step")}),
        (f"{REAL} 1 --modes delayed", {"delayed-64"}),
    ],
)
def test_every_report_stays_where_it_is_asked_to(command: str, names: set[str], tmp_path: Path) -> None:
    printed = benchmark(f"{command} --dir {tmp_path / 'kept'}")
    for name in names:
        assert str(tmp_path / "kept" / name / "report.html") in printed
        check_chart(tmp_path / "kept" / name, ["rollout/0", "trainer/0"], 5)


def test_of_two_runs_every_other_step_is_synchronous(tmp_path: Path) -> None:
    benchmark(f"{REAL} 4 --modes periodic --dir {tmp_path}")
    for number, name in enumerate(("synchronous-and-periodic-64", "periodic-and-synchronous-64")):
        overlapped = overlap_seconds(read_spans(tmp_path / name / SPANS_FILE))
        periodic = [seconds for step, seconds in overlapped.items() if step % 2 != number]
        synchronous = [seconds for step, seconds in overlapped.items() if step % 2 == number]
        # A group's span ends when its producer has heard that the queue has it, a moment after the trainer may have.
        assert len(synchronous) == len(periodic) == 4 and max(synchronous) < 0.1 * sum(periodic)


def test_nothing_stays_otherwise(tmp_path: Path) -> None:
    assert "report.html" not in benchmark(SLEEPING, TMPDIR=str(tmp_path))
    assert not list(tmp_path.iterdir())
