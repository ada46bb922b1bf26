"""A simulated run that ends because too few rollout workers have their weights, as the configuration says."""

from __future__ import annotations

from asyncflow.cluster.faults import Faults
from asyncflow.config import parse
from asyncflow.simulation.run import simulate


def test_a_simulated_run_has_the_configurations_idea_of_health() -> None:
    config = parse(
        {
            "run": {"name": "simulated", "steps": 50},
            "model": {"path": "none"},
            "data": {"path": "generated:arithmetic"},
            "schedule": "delayed",
            "rollout": {"num_workers": 2, "num_slots": 4, "group_size": 4, "max_new_tokens": 64},
            "train": {"prompts_per_step": 4},
            "telemetry": {"samples_per_step": 0},
            "weight_sync": {"min_healthy_workers": 2, "deadline_seconds": 5.0},
        }
    )
    (violation,) = simulate(config, faults=Faults(broken_fetches={"rollout/1": 1.0})).violations
    assert violation.startswith("worker rollout/1 has had no weights to serve for 5 s: version ")
    assert violation.endswith("did not arrive whole; 1 of 2 rollout workers are left, and weight_sync.min_healthy_workers is 2")
