"""Simulated runs whose rows are episodes: the laws hold under every mode, and time decides when, never what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncflow.config import Config, parse
from asyncflow.engines.costs import Costs, Lengths
from asyncflow.simulation.run import drawn_faults, simulate
from asyncflow.telemetry.certificate import read_certificate

COSTS = Costs(lengths=Lengths(prompt=16, response_median=20.0), environment_seconds=0.3, environment_turns=4)
MODES: list[Any] = ["synchronous", "periodic", "delayed", "sub_step", {"name": "bounded", "max_staleness": 2}]


def config_of(mode: Any, **episodes: Any) -> Config:
    return parse(
        {
            "run": {"steps": 3},
            "model": {"path": "m"},
            "data": {"path": "d.jsonl"},
            "environment": "my_file.py:Game",
            "episodes": {"max_turns": 4, **episodes},
            "schedule": mode,
            "rollout": {"num_workers": 2, "num_slots": 8, "group_size": 4, "max_new_tokens": 400},
            "train": {"prompts_per_step": 6},
        }
    )


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_no_law_is_broken_while_workers_die_and_environments_are_slow(mode: Any) -> None:
    config = config_of(mode)
    for seed in range(2):
        assert not simulate(config, costs=COSTS, faults=drawn_faults(config, COSTS, seed), seed=seed).violations


def test_late_environments_end_their_episodes_and_no_row_is_lost(tmp_path: Path) -> None:
    run = simulate(config_of("periodic", deadline_seconds=0.35), costs=COSTS, run_dir=tmp_path)
    assert not run.violations
    certificate = read_certificate(tmp_path)
    assert certificate is not None
    assert certificate.episode_timeouts == sum(row["episode/timeouts"] for row in run.rows.values()) > 0
    assert all(row["rows/trained"] == 24 for row in run.rows.values())
