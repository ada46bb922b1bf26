"""Rollout workers that join and leave, in every mode, in virtual time, where nothing else goes wrong."""

from __future__ import annotations

import pytest

from asyncflow.cluster.faults import Faults, Resize
from asyncflow.config import parse
from asyncflow.engines.costs import Costs, Lengths
from asyncflow.simulation.run import Simulated, simulate
from asyncflow.telemetry.idle import busy_and_idle
from tests.depth import in_gate
from tests.schedules.configurations import MODES

COSTS = Costs(
    decode_step_seconds=0.02,
    forward_backward_seconds=0.01,
    load_seconds=1.0,
    lengths=Lengths(prompt=16, response_median=60.0, response_sigma=0.5),
)


def run_of(mode: str, *resizes: Resize) -> Simulated:
    config = parse(
        {
            "run": {"name": "simulated", "steps": 8},
            "model": {"path": "none"},
            "data": {"path": "generated:arithmetic"},
            "schedule": MODES[mode],
            "rollout": {"num_slots": 4, "group_size": 4, "max_new_tokens": 200},
            "train": {"prompts_per_step": 12},
            "telemetry": {"samples_per_step": 0},
        }
    )
    simulated = simulate(config, costs=COSTS, faults=Faults(resizes=resizes))
    assert simulated.violations == [] and len(simulated.rows) == 8
    return simulated


@pytest.mark.parametrize("mode", in_gate("delayed", "bounded", of=MODES))
def test_joiners_help_and_leavers_end_what_they_hold(mode: str) -> None:
    alone = run_of(mode)
    run = run_of(mode, Resize(15.0, 4, 60.0), Resize(35.0, 2, 60.0), Resize(35.1, 3, 60.0))
    assert run.counts["joined"] == 4 and run.counts["left"] == 2
    assert run.counts["leavers that were cut short"] == run.counts["groups delivered again"] == 0
    assert run.seconds < 0.7 * alone.seconds
    for worker in ("rollout/1", "rollout/2", "rollout/3", "rollout/4"):
        assert "generate" in busy_and_idle(run.spans, worker).busy, worker
    lanes = {worker: busy_and_idle(run.spans, worker) for worker in ("rollout/0", "rollout/1", "rollout/3")}
    assert lanes["rollout/0"].wall == pytest.approx(run.seconds, abs=1.0)
    assert lanes["rollout/1"].wall == pytest.approx(run.seconds - 15.0, abs=1.0)
    assert 20.0 < lanes["rollout/3"].wall < 40.0  # it has ended what it held, which takes seconds
    assert all(lane.unrecorded_seconds < 1e-6 for lane in lanes.values())


@pytest.mark.parametrize("mode", in_gate("sub_step", of=MODES))
def test_what_leavers_cannot_end_in_time_is_made_again(mode: str) -> None:
    run = run_of(mode, Resize(15.0, 4, 60.0), Resize(30.0, 1, 0.0))
    assert run.counts["leavers that were cut short"] == 3
    assert run.counts["groups delivered again"] > 0


def test_tokens_per_device_count_the_devices_that_there_were() -> None:
    run = run_of("periodic", Resize(20.0, 4, 60.0))
    tokens = {step: row["perf/tpspd"] * row["perf/step_seconds"] for step, row in run.rows.items()}  # by device
    alone = {step: row["perf/tpspd"] * row["perf/step_seconds"] for step, row in run_of("periodic").rows.items()}
    devices = [2.0 * alone[step] / tokens[step] for step in sorted(tokens)]  # what is trained is the same
    assert devices[0] == pytest.approx(2.0) and devices[-1] == pytest.approx(5.0)
    assert 2.0 < devices[1] < 5.0  # they joined in this step
