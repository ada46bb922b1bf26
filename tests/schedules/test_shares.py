"""Steps whose prompts do not divide by the rollout workers: each has a share, in every mode, in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import groupby

import pytest

from asyncflow.cluster.faults import Faults, Resize
from asyncflow.config import Config, parse
from asyncflow.engines.costs import Costs, Lengths
from asyncflow.loops.rollout import share_of
from asyncflow.simulation.run import Simulated, drawn_faults, simulate
from asyncflow.telemetry.spans import Span
from asyncflow.types import MAX_CANDIDATES
from tests.depth import few, in_gate
from tests.schedules.configurations import MODES

COSTS = Costs(
    decode_step_seconds=0.02,
    forward_backward_seconds=0.01,
    load_seconds=1.0,
    lengths=Lengths(prompt=16, response_median=60.0, response_sigma=0.5),
)
TOGETHER = ["synchronous", "periodic"]
"""Modes in which all workers begin a step at one time: how many groups of it each one generates is its share."""
STEPS = 8


def config_of(mode: str, prompts: int, workers: int) -> Config:
    return parse(
        {
            "run": {"name": "simulated", "steps": STEPS},
            "model": {"path": "none"},
            "data": {"path": "generated:arithmetic"},
            "schedule": MODES[mode],
            "rollout": {"num_workers": workers, "num_slots": 16, "group_size": 2, "max_new_tokens": 200, "max_restarts": 10},
            "train": {"prompts_per_step": prompts},
            "eval": {"path": "generated:arithmetic", "num_prompts": 5, "every_steps": 3, "greedy": False, "num_workers": 2},
            "telemetry": {"samples_per_step": 0},
        }
    )


def groups(run: Simulated, counts: Callable[[Span], bool] = lambda span: True) -> Counter[tuple[int, str]]:
    """How many groups, of those that count, each rollout worker has generated, by step."""
    generated = (span for span in run.spans if span.task == "generate_group" and span.worker.startswith("rollout"))
    return Counter((span.step, span.worker) for span in generated if counts(span))


def of_step(step: int, counted: Counter[tuple[int, str]]) -> dict[str, int]:
    return {worker: count for (number, worker), count in sorted(counted.items()) if number == step}


def shares(prompts: int, workers: int, step: int) -> dict[str, int]:
    return {f"rollout/{place}": share_of(prompts, place, workers, step) for place in range(workers)}


def trained(run: Simulated) -> list[dict[str, float]]:
    """What of each step is no matter of timing."""
    return [{name: row[name] for name in ("reward/mean", "response_length/mean")} for _, row in sorted(run.rows.items())]


@pytest.mark.parametrize("prompts", [4, 5])
@pytest.mark.parametrize("mode", TOGETHER)
def test_of_each_step_each_worker_generates_its_share(mode: str, prompts: int) -> None:
    counted = groups(simulate(config_of(mode, prompts, 3), costs=COSTS))
    for step in range(1, STEPS):  # the first one begins while workers load
        assert of_step(step, counted) == shares(prompts, 3, step), step


@pytest.mark.parametrize("mode", TOGETHER)
def test_candidates_that_a_step_begins_with_are_shared_likewise(mode: str) -> None:
    """6 for 4 prompts, numbered from 0 in each step; those that are missing then are taken by any worker that has room."""
    tree = config_of(mode, 4, 4).model_dump(mode="json")
    tree["algorithm"] = {"name": "dapo", "dynamic_sampling": True}
    tree["train"] |= {"oversampling": 1.5, "max_candidates": 200}
    run = simulate(parse(tree), costs=COSTS)
    assert run.violations == [] and run.counts["degenerate groups"] > 0
    counted = groups(run, lambda span: span.group % MAX_CANDIDATES < 6)
    for step in range(1, STEPS):
        assert of_step(step, counted) == shares(6, 4, step), step


@pytest.mark.parametrize("prompts", [4, 5])
@pytest.mark.parametrize("mode", [*TOGETHER, "delayed"])
def test_what_is_trained_is_what_one_worker_would_have_generated(mode: str, prompts: int) -> None:
    alone, shared = (simulate(config_of(mode, prompts, workers), costs=COSTS) for workers in (1, 3))
    assert alone.violations == shared.violations == []
    assert trained(alone) == trained(shared) and len(trained(alone)) == STEPS
    assert alone.evaluations == shared.evaluations and len(alone.evaluations) > 2


@pytest.mark.parametrize("mode", TOGETHER)
def test_shares_follow_those_who_join_and_leave(mode: str) -> None:
    seconds = simulate(config_of(mode, 5, 3), costs=COSTS).seconds
    config = parse(config_of(mode, 5, 3).model_dump(mode="json") | {"run": {"name": "simulated", "steps": 3 * STEPS}})
    run = simulate(config, costs=COSTS, faults=Faults(resizes=(Resize(seconds, 4, 60.0), Resize(2 * seconds, 2, 60.0))))
    assert run.violations == [] and (run.counts["joined"], run.counts["left"]) == (1, 2)
    counted = groups(run)
    sizes = [[size for size in (2, 3, 4) if of_step(step, counted) == shares(5, size, step)] for step in range(1, 3 * STEPS)]
    assert sum(not size for size in sizes) <= 2, "a step during which one joined, and one during which two left"
    order = [size for (size,), _ in groupby(filter(None, sizes))]
    assert order == [3, 4, 2], sizes


@pytest.mark.parametrize("prompts", in_gate(5, of=[4, 5]))
@pytest.mark.parametrize("mode", in_gate("sub_step", "periodic", of=MODES))
def test_no_law_is_broken_where_workers_die_join_and_leave(mode: str, prompts: int) -> None:
    counts = Counter[str]()
    config = config_of(mode, prompts, 3)
    for seed in range(*few((1, 3), (0, 4))):
        run = simulate(config, costs=COSTS, faults=drawn_faults(config, COSTS, seed), seed=seed)
        assert run.violations == [], seed
        counts += run.counts
    assert min(counts[what] for what in ("deaths", "joined", "left", "groups delivered again")) > 0, counts
