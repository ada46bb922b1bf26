"""Evaluations in every mode: they come after the training rows of their version, so no gradient is computed later for them."""

from __future__ import annotations

from typing import Any

import pytest

from asyncflow.config import parse
from asyncflow.registry import build
from asyncflow.simulation.run import Simulated, simulate
from asyncflow.workflows import SCHEDULES

MODES: dict[str, Any] = {
    "synchronous": "synchronous",
    "periodic": "periodic",
    "delayed": "delayed",
    "sub_step": "sub_step",
    "bounded": {"name": "bounded", "max_staleness": 2},
}


def tree_of(mode: str, **evaluation: Any) -> dict[str, Any]:
    return {
        "run": {"steps": 4},
        "model": {"path": "m"},
        "data": {"path": "generated:arithmetic"},
        "schedule": MODES[mode],
        "rollout": {"num_workers": 2, "num_slots": 16, "group_size": 4, "max_new_tokens": 64},
        "train": {"prompts_per_step": 8},
        "eval": {"path": None, "num_prompts": 64, "samples_per_prompt": 2, **evaluation},
    }


def run_of(mode: str, **evaluation: Any) -> Simulated:
    return simulate(parse(tree_of(mode, **evaluation)))


def gradients_end(run: Simulated, step: int) -> float:
    """When the last gradient of a step was computed."""
    return max(span.end for span in run.spans if span.task == "forward_backward" and span.step == step)


def generation(run: Simulated, step: int, *, evaluation: bool) -> tuple[float, float]:
    """When the first of its groups was begun, and the last one was there."""
    groups = [s for s in run.spans if s.task == "generate_group" and s.step == step and (s.group >= 1 << 40) is evaluation]
    return min(span.start for span in groups), max(span.end for span in groups)


@pytest.mark.parametrize("mode", MODES)
def test_the_trainer_computes_while_the_version_is_evaluated(mode: str) -> None:
    without, evaluated = run_of(mode), run_of(mode, path="generated:arithmetic", every_steps=1)
    assert not without.violations and not evaluated.violations
    assert [row["step"] for row in evaluated.evaluations] == [0, 1, 2, 3, 4]
    assert all(row["num_responses/sampled"] == 128 and row["num_responses/greedy"] == 64 for row in evaluated.evaluations)
    # Three times as many rows are evaluated as the step has: had they come first, this would be thrice as late.
    assert gradients_end(evaluated, 0) <= 1.1 * gradients_end(without, 0)
    # A step that version 0 may make as well is not held up by version 0's evaluation.
    chosen = parse(tree_of(mode)).schedule
    schedule = build("schedule", chosen.name, chosen.options, SCHEDULES)
    made_by_0 = [step for step in range(4) if 0 in schedule.interval(step)]
    assert len(made_by_0) == 1 + schedule.max_staleness
    for step in made_by_0[1:]:
        assert gradients_end(evaluated, step) <= 1.1 * gradients_end(without, step), step
    # The trainer is at work on a step before the evaluation of the version that made it has ended.
    assert (
        min(s.start for s in evaluated.spans if s.task == "forward_backward" and s.step == 1)
        < generation(evaluated, 1, evaluation=True)[1]
    )
    # What the evaluation costs: the first step that its version may not make is generated behind it.
    assert generation(evaluated, made_by_0[-1] + 1, evaluation=False)[0] > generation(evaluated, 0, evaluation=True)[0]


def test_under_delayed_a_step_of_the_evaluated_version_is_trained_as_early_as_without_every_time() -> None:
    """Step v + 1 is made by version v, whose evaluation is behind it."""
    evaluated = run_of("delayed", path="generated:arithmetic", every_steps=1)
    for version in range(1, 3):
        begins, ends = generation(evaluated, version, evaluation=True)
        last_rows = generation(evaluated, version + 1, evaluation=False)[1]
        assert generation(evaluated, version + 1, evaluation=False)[0] < begins
        assert gradients_end(evaluated, version + 1) <= last_rows + 0.5 < ends
