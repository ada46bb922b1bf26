"""What sub-step asynchrony is for: part of each batch is made by the newest policy. In virtual time."""

from __future__ import annotations

import math

import msgspec
import pytest

from asyncflow.cluster.faults import Faults, Hangs
from asyncflow.config import parse
from asyncflow.engines.costs import Costs, Lengths
from asyncflow.simulation.run import NO_FAULTS, Simulated, simulate
from tests.depth import deep, in_gate

LENGTHS = Lengths(prompt=16, response_median=60.0, response_sigma=0.3)
COSTS = Costs(decode_step_seconds=0.02, forward_backward_seconds=0.0, load_seconds=0.0, lengths=LENGTHS)


def run_of(schedule: str, faults: Faults = NO_FAULTS, *, costs: Costs = COSTS, workers: int = 4) -> Simulated:
    config = parse(
        {
            "run": {"name": "simulated", "steps": 8},
            "model": {"path": "none"},
            "data": {"path": "generated:arithmetic"},
            "schedule": schedule,
            "rollout": {"num_workers": workers, "num_slots": 4, "group_size": 4, "max_new_tokens": 200},
            "train": {"prompts_per_step": 32, "skip_zero_advantages": False},  # all of it counts
            "telemetry": {"samples_per_step": 0},
        }
    )
    simulated = simulate(config, costs=costs, faults=faults)
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


@deep
@pytest.mark.parametrize("workers", [1, 4])
def test_where_training_is_the_slower_half_part_of_each_batch_is_of_the_newest_version_too(workers: int) -> None:
    costs = Costs(
        decode_step_seconds=0.02,
        forward_backward_seconds=0.0,
        train_token_seconds=6e-3 / workers,
        optim_step_seconds=0.5,
        install_seconds=0.05,
        load_seconds=0.0,
        lengths=LENGTHS,
    )
    delayed, sub_step = (run_of(mode, costs=costs, workers=workers) for mode in ("delayed", "sub_step"))
    assert staleness(delayed) == 1.0
    assert [row["staleness/mean"] for step, row in sub_step.rows.items() if step > 5] == [19 / 32] * 2  # 13 of 32 prompts are kept
    assert sub_step.seconds < 1.02 * delayed.seconds


def test_one_that_begins_again_and_whose_weights_do_not_come_keeps_nobody_from_the_newest_version() -> None:
    hanging = run_of("sub_step", Faults(deaths=((30.0, "rollout/3"),), hanging_fetches={"rollout/3": Hangs(1.0, 60.0)}))
    assert hanging.counts["hanging fetches"] > 0
    assert staleness(hanging) < 0.75
    assert max(row["perf/step_seconds"] for row in hanging.rows.values()) < 30.0  # half of a fetch that hangs


@pytest.mark.parametrize("called", [(), (8.0, 16.0)], ids=["in turn", "all at once"])
@pytest.mark.parametrize("moment", in_gate(6, of=range(5, 9)))
def test_one_that_stands_still_in_its_turn_keeps_nobody_from_changing(moment: int, called: tuple[float, ...]) -> None:
    """It holds no rows then, so no lease ends that would have anybody look around."""
    costs = msgspec.structs.replace(COSTS, install_seconds=2.0)
    still = run_of("sub_step", Faults(stalls=((20.0 + moment, "rollout/1", math.inf),), calls=called), costs=costs)
    assert still.seconds < 300.0
