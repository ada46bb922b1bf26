"""What sub-step asynchrony is for: part of each batch is made by the newest policy. In virtual time, without faults."""

from __future__ import annotations

from asyncflow.config import parse
from asyncflow.engines.sleeping import Costs, Lengths
from asyncflow.simulation.run import Simulated, simulate

COSTS = Costs(
    decode_step_seconds=0.02,
    forward_backward_seconds=0.0,
    load_seconds=0.0,
    lengths=Lengths(prompt=16, response_median=60.0, response_sigma=0.3),
)


def run_of(schedule: str) -> Simulated:
    config = parse(
        {
            "run": {"name": "simulated", "steps": 8},
            "model": {"path": "none"},
            "data": {"path": "generated:arithmetic"},
            "schedule": schedule,
            "rollout": {"num_workers": 4, "num_slots": 4, "group_size": 4, "max_new_tokens": 200},
            "train": {"prompts_per_step": 32},
            "telemetry": {"samples_per_step": 0},
        }
    )
    simulated = simulate(config, costs=COSTS)
    assert simulated.violations == []
    return simulated


def staleness(simulated: Simulated) -> float:
    """Mean over the samples of all steps but the first ones."""
    steps = [row["staleness/mean"] for step, row in simulated.rows.items() if step > 2]
    return sum(steps) / len(steps)


def test_workers_that_change_in_turn_make_samples_of_the_newest_version() -> None:
    delayed, sub_step = run_of("delayed"), run_of("sub_step")
    assert staleness(delayed) == 1.0
    assert staleness(sub_step) < 0.75
    assert sub_step.seconds < 1.05 * delayed.seconds
