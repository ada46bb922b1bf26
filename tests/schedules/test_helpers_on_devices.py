"""Helpers of the trainer on devices of rollout, in virtual time: they compute there while nobody generates."""

from __future__ import annotations

import pytest

from asyncflow.config import Config, parse
from asyncflow.engines.costs import Costs, Lengths
from asyncflow.simulation.run import Simulated, drawn_faults, simulate
from asyncflow.telemetry.idle import HELPER_TASK
from tests.depth import few, in_gate
from tests.schedules.configurations import MODES

PASS_SECONDS = 0.5
MESSAGE = 0.02
"""Seconds that word of a stored row, or of the next version, may be on its way."""
COSTS = Costs(
    decode_step_seconds=0.01,
    forward_backward_seconds=PASS_SECONDS,
    train_token_seconds=0.0,
    load_seconds=1.0,
    lengths=Lengths(prompt=16, response_median=60.0, response_sigma=0.5),
)


def config_of(mode: str, *, has_helpers: bool) -> Config:
    return parse(
        {
            "run": {"name": "simulated", "steps": 5},
            "model": {"path": "none"},
            "data": {"path": "generated:arithmetic"},
            "schedule": MODES[mode],
            "rollout": {"num_workers": 2, "device": "cuda:1-2", "num_slots": 32, "group_size": 2, "max_new_tokens": 200},
            "train": {"prompts_per_step": 12, "device": "cuda", "accumulate": "exact"},
            "plan": {"shares": {"helpers": "rollout"} if has_helpers else {}},
            "telemetry": {"samples_per_step": 0},
        }
    )


def seconds(run: Simulated) -> float:
    return sum(row["perf/step_seconds"] for _, row in sorted(run.rows.items())[1:])


def generating(run: Simulated, worker: str) -> list[tuple[float, float]]:
    """Times from which to which a worker holds rows, or installs weights."""
    found = [(span.start, span.end) for span in run.spans if span.worker == worker and span.task in ("generate_group", "install")]
    merged: list[tuple[float, float]] = []
    for start, end in sorted(found):
        if merged and start <= merged[-1][1] + 1e-6:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


@pytest.mark.parametrize(("mode", "share"), [("synchronous", 0.7), ("periodic", 0.85)])
def test_helpers_shorten_steps_and_compute_while_nobody_generates_on_their_device(mode: str, share: float) -> None:
    alone, helped = (simulate(config_of(mode, has_helpers=has), costs=COSTS) for has in (False, True))
    assert alone.violations == helped.violations == []
    passes = [span for span in helped.spans if span.task == HELPER_TASK]
    assert passes and not [span for span in alone.spans if span.task == HELPER_TASK]
    assert seconds(helped) < share * seconds(alone)  # three compute where one did; where groups stream, those that come late
    busy = [generating(helped, f"rollout/{number}") for number in range(2)]
    for span in passes:
        begun_in = [any(start + MESSAGE < span.start < end - MESSAGE for start, end in each) for each in busy]
        assert not all(begun_in), f"a pass began at {span.start}, when both devices generated"
        for each in busy:  # a device is given back within a pass
            assert all(min(span.end, end) - max(span.start, start) <= PASS_SECONDS + MESSAGE for start, end in each)


@pytest.mark.parametrize("seed", few(range(1), range(6)))
@pytest.mark.parametrize("mode", in_gate("periodic", "delayed", of=MODES))
def test_the_laws_hold_with_helpers_whoever_dies_or_stalls(mode: str, seed: int) -> None:
    config = config_of(mode, has_helpers=True)
    run = simulate(config, costs=COSTS, faults=drawn_faults(config, COSTS, seed), seed=seed)
    assert run.violations == []
