"""`asyncflow simulate`: what it prints and keeps, and how a broken law is told and repeated."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncflow.telemetry.idle import busy_and_idle
from asyncflow.telemetry.trace import read_spans
from tests.e2e.commands import rows, run_command, write_config

Small = Callable[..., dict[str, Any]]

TOO_EARLY = """
from asyncflow.types import Interval
from asyncflow.control.modes import Periodic


class TooEarly(Periodic):
    def interval(self, step):
        return Interval(max(0, step - 1), step)
"""


def test_it_keeps_a_report_of_the_first_seed_and_says_what_was_seen(small: Small, tmp_path: Path) -> None:
    config = write_config(tmp_path, small(run={"steps": 5}, rollout={"num_workers": 2}, model={"path": "not there"}))
    command = run_command("simulate", config, "schedule=delayed", "--seeds", "6", "--processes", "2", "--faults")
    assert command.returncode == 0, command.stdout + command.stderr
    for words in ("delayed, 2 rollout workers, 5 steps a run", "staleness      mean", "6 runs, 0 of them with violations"):
        assert words in command.stdout
    assert re.search(r"idle +rollout \d+\.\d%, trainer \d+\.\d%", command.stdout)
    assert re.search(r"\d+ deaths", command.stdout)
    run_dir = tmp_path / "runs" / "test-simulated"
    for name in ("report.html", "trace.json", "certificate.json"):
        assert (run_dir / name).stat().st_size > 100, name
    assert [row["step"] for row in rows(run_dir / "metrics.jsonl")] == list(range(5))
    spans = read_spans(run_dir / "spans.jsonl")
    for worker in ("rollout/0", "trainer/0"):
        activity = busy_and_idle(spans, worker)
        assert activity.wall > 0 and activity.unrecorded_seconds < 1e-6 * activity.wall


def test_a_seed_is_repeated_to_the_last_digit(small: Small, tmp_path: Path) -> None:
    tree = small(rollout={"num_workers": 2}, eval={"path": "generated:arithmetic", "num_prompts": 4})
    config, found = write_config(tmp_path, tree), []
    for _ in range(2):
        assert run_command("simulate", config, "schedule=bounded", "--first", "3", "--faults").returncode == 0
        metrics = rows(tmp_path / "runs" / "test-simulated" / "metrics.jsonl")
        found.append(
            [{name: value for name, value in row.items() if name.startswith(("perf", "reward", "rows"))} for row in metrics]
        )
    assert found[0] == found[1] != []


def test_a_broken_law_is_told_with_the_command_that_repeats_it(small: Small, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TOO_EARLY)
    tree = small(schedule={"path": f"{tmp_path / 'mine.py'}:TooEarly"}, rollout={"num_workers": 2})
    config = write_config(tmp_path, tree)
    command = run_command("simulate", config, "run.steps=4", "--seeds", "3")
    assert command.returncode == 1
    assert "outside Interval" in command.stdout and "with violations" in command.stdout
    again = next(line for line in command.stdout.splitlines() if "again:" in line).split("asyncflow ")[1].split()
    repeated = run_command(*again)
    assert repeated.returncode == 1 and "outside Interval" in repeated.stdout


def test_costs_come_from_a_file(small: Small, tmp_path: Path) -> None:
    config, costs = write_config(tmp_path, small()), tmp_path / "costs.json"
    seconds = {}
    for step_seconds in (0.01, 0.1):
        costs.write_text(json.dumps({"decode_step_seconds": step_seconds, "lengths": {"response_median": 40}}))
        command = run_command("simulate", config, "--costs", costs)
        assert command.returncode == 0, command.stdout + command.stderr
        found = re.search(r"median ([\d.,]+) s a run", command.stdout)
        assert found is not None
        seconds[step_seconds] = float(found[1].replace(",", ""))
    assert seconds[0.1] > 4 * seconds[0.01]
    costs.write_text(json.dumps({"decode_seconds": 1}))
    command = run_command("simulate", config, "--costs", costs)
    assert command.returncode == 2 and "decode_seconds" in command.stderr and len(command.stderr.splitlines()) == 1
