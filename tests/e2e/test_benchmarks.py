"""Benchmarks of whole runs: with `--dir` each run's report stays under the run's name, and is told; without it no run stays.

And the transfer queue's benchmark: a row's way to a consumer and plain requests, in turn over one queue.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncflow.telemetry.equivalence import overlap_seconds
from asyncflow.telemetry.trace import SPANS_FILE, read_spans
from tests.depth import deep, in_gate
from tests.patience import patience
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
        timeout=patience(300),
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
        pytest.param(f"{REAL} 1 --modes delayed", {"delayed-64"}, marks=deep),
    ],
)
@deep
def test_every_report_stays_where_it_is_asked_to(command: str, names: set[str], tmp_path: Path) -> None:
    printed = benchmark(f"{command} --dir {tmp_path / 'kept'}")
    for name in names:
        assert str(tmp_path / "kept" / name / "report.html") in printed
        check_chart(tmp_path / "kept" / name, ["rollout/0", "trainer/0"], 5)


@deep
def test_of_two_runs_every_other_step_is_synchronous(tmp_path: Path) -> None:
    benchmark(f"{REAL} 2 --modes periodic --dir {tmp_path}")
    for number, name in enumerate(("synchronous-and-periodic-64", "periodic-and-synchronous-64")):
        overlapped = overlap_seconds(read_spans(tmp_path / name / SPANS_FILE))
        periodic = [seconds for step, seconds in overlapped.items() if step % 2 != number]
        synchronous = [seconds for step, seconds in overlapped.items() if step % 2 == number]
        # A group's span ends when its producer has heard that the queue has it, a moment after the trainer may have.
        assert len(synchronous) == len(periodic) == 3 and max(synchronous) < 0.1 * sum(periodic)


@deep
def test_nothing_stays_otherwise(tmp_path: Path) -> None:
    assert "report.html" not in benchmark(SLEEPING, TMPDIR=str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("num_units", in_gate(1, of=[1, 2]))
async def test_rows_and_plain_requests_go_to_a_queue_in_turn(num_units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    queue = importlib.import_module("transfer_queue")
    async with queue.a_queue(num_units) as (client, path, _):
        plain, seconds, row_bytes = await queue.put_to_received(client, queue.Payloads(0), path, 20)
        _, units = await client.status()
    assert len(plain) == len(seconds) == 20 and 0 < plain[0] <= plain[-1] and 0 < seconds[0] <= seconds[-1]
    assert 64 * 8 + 128 * 12 <= row_bytes <= 192 * 8 + 384 * 12  # see Payloads.small
    assert len(units) == num_units and not any(unit.rows for unit in units.values())
