"""Evaluations in every mode: they come after the training rows of their version, so no gradient is computed later for them."""

from __future__ import annotations

from typing import Any

import pytest

from asyncflow.config import parse
from asyncflow.simulation.run import Simulated, simulate

MODES: dict[str, Any] = {
    "synchronous": "synchronous",
    "periodic": "periodic",
    "delayed": "delayed",
    "sub_step": "sub_step",
    "bounded": {"name": "bounded", "max_staleness": 2},
}


def run_of(mode: str, **evaluation: Any) -> Simulated:
    tree = {
        "run": {"steps": 4},
        "model": {"path": "m"},
        "data": {"path": "generated:arithmetic"},
        "schedule": MODES[mode],
        "rollout": {"num_workers": 2, "num_slots": 16, "group_size": 4, "max_new_tokens": 64},
        "train": {"prompts_per_step": 8},
        "eval": {"path": None, "num_prompts": 64, "samples_per_prompt": 2, **evaluation},
    }
    return simulate(parse(tree))


def gradients_end(run: Simulated, step: int) -> float:
    """When the last gradient of a step was computed."""
    return max(span.end for span in run.spans if span.task == "forward_backward" and span.step == step)


@pytest.mark.parametrize("mode", MODES)
def test_the_trainer_computes_while_the_version_is_evaluated(mode: str) -> None:
    without, evaluated = run_of(mode), run_of(mode, path="generated:arithmetic", every_steps=1)
    assert not without.violations and not evaluated.violations
    assert [row["step"] for row in evaluated.evaluations] == [0, 1, 2, 3, 4]
    assert all(row["num_responses/sampled"] == 128 and row["num_responses/greedy"] == 64 for row in evaluated.evaluations)
    # Three times as many rows are evaluated as the step has: had they come first, this would be thrice as late.
    assert gradients_end(evaluated, 0) <= 1.1 * gradients_end(without, 0)
    # The trainer is at work on a step before the evaluation of the version that made it has ended.
    ends = [span.end for span in evaluated.spans if span.task == "generate_group" and span.group >= 1 << 40 and span.step == 1]
    assert min(s.start for s in evaluated.spans if s.task == "forward_backward" and s.step == 1) < max(ends)
