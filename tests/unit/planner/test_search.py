"""The search drops what does not fit, finds what an exhaustive search finds, and gives the same plan each time."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncflow.config import Config, load
from asyncflow.engines.costs import Lengths
from asyncflow.planner import search as module
from asyncflow.planner.cost import Model
from asyncflow.planner.hardware import find
from asyncflow.planner.plan import settings
from asyncflow.planner.search import simulated_config, simulated_costs
from asyncflow.planner.space import Candidate, Halves, Space, pools_of
from asyncflow.run.preparation.memory import Shapes
from asyncflow.simulation.run import simulate
from asyncflow.types import UserError
from tests.conftest import ROOT
from tests.unit.planner.conftest import Searched

RECIPE = ROOT / "recipes/papers/qwen2.5-7b-gsm8k.yaml"


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the recipe names its shapes from there


def small(*overrides: str) -> tuple[Config, Model, dict[str, Any]]:
    given = ["train.prompts_per_step=8", "rollout.group_size=4", "train.responses_per_micro_batch=4", *overrides]
    config = load(RECIPE, given)
    fields = json.loads(Path(config.model.path.removeprefix("shapes:")).read_text())
    return config, Model(Shapes.of(fields), Lengths(prompt=100, response_median=200.0), find("h100-80gb")), fields


def candidates(config: Config, model: Model, fields: dict[str, Any], devices: int) -> list[Candidate]:
    space = Space(Halves(config, model, fields, devices), config, 0, Counter())
    return [each for pair in space.pairs() for each in space.candidates(pair)]


def test_the_same_inputs_give_the_same_plan_and_counts_add_up(searched: Searched) -> None:
    config, model, fields = small()
    once, again = (searched(config, model, fields, 6) for _ in range(2))
    assert once == again
    counts = once.counts
    parts = ("too large", "beaten", "bounded away", "simulated", "left")
    assert counts["enumerated"] == sum(counts[name] for name in parts) > counts["simulated"] > 0
    best = once.plans[0]
    assert best.devices <= 6
    assert best.bound.seconds <= best.step_seconds <= min(plan.step_seconds for plan in once.plans)
    assert best.tpspd > 0


def test_no_plan_that_was_bounded_away_is_faster(searched: Searched) -> None:
    config, model, fields = small()
    found = searched(config, model, fields, 4)
    every = sorted(candidates(config, model, fields, 4), key=lambda each: (each.bound.seconds, each.place))
    if found.counts["left"]:
        pytest.skip("the search has not ended with a proof")
    for candidate in every[-3:]:
        plan, least = module._plan(candidate, model), candidate.bound
        done = simulate(simulated_config(plan), costs=simulated_costs(plan))
        seconds = [row["perf/step_seconds"] for step, row in done.rows.items() if step]
        assert sum(seconds) / len(seconds) >= least.seconds * 0.999
        assert sum(seconds) / len(seconds) >= found.plans[0].step_seconds


def test_one_part_of_the_machine_takes_about_as_long_as_all_of_it() -> None:
    config, model, fields = small("train.prompts_per_step=128", "rollout.group_size=8")
    plan = module._plan(min(candidates(config, model, fields, 32), key=lambda each: (each.bound.seconds, each.place)), model)
    assert plan.part > 1
    whole = replace(plan, part=1)
    seconds = []
    for each in (plan, whole):
        done = simulate(simulated_config(each), costs=simulated_costs(each))
        seconds.append(done.rows[1]["perf/step_seconds"])
    assert seconds[0] == pytest.approx(seconds[1], rel=0.15)


def test_a_model_that_fits_nowhere_is_said_with_what_it_needs(searched: Searched) -> None:
    config, model, fields = small()
    tiny = replace(model, hardware=model.hardware.model_copy(update={"memory_gib": 8.0}))
    with pytest.raises(UserError, match=r"fits nowhere: each device that trains, on up to 3 needs at least \d+\.\d GiB"):
        searched(config, tiny, fields, 4)


def test_too_few_devices_are_said_with_how_many_it_takes(searched: Searched) -> None:
    with pytest.raises(UserError, match=r"1 devices are too few for this run: .* take 2 or more"):
        searched(*small(), 1)


def test_more_devices_than_a_layout_can_use_are_left_over(searched: Searched) -> None:
    config, model, fields = small(
        "train.prompts_per_step=2", "rollout.num_workers=1", "rollout.group_size=2", "train.responses_per_micro_batch=2"
    )
    assert searched(config, model, fields, 64).plans[0].devices < 64


def test_pools_of_the_reference_and_of_values_are_searched(searched: Searched) -> None:
    config, model, fields = small("algorithm={name: ppo, kl_coefficient: 0.01}", "train.reference=task")
    large = model.hardware.model_copy(update={"memory_gib": 400.0})  # a critic is not cut
    costs = {"critic_seconds": 0.0, "critic_token_seconds": 0.0, "value_token_seconds": 0.02, "reference_token_seconds": 0.01}
    slow = replace(model, hardware=large, measured=costs)  # they are what binds
    sizes = {(pools.plan.reference.num_workers, pools.plan.values.num_workers) for pools in pools_of(config, 16)}
    assert sizes == {(reference, values) for reference in (1, 2, 4) for values in (0, 1, 2, 4)}
    best = searched(config, slow, fields, 16).plans[0]
    assert best.config.plan.reference.num_workers > 1 and best.config.plan.values.num_workers == 4
    assert best.devices <= 16
    assert {*best.memory_gib, *best.config.plan.shares} == {"train", "rollout", "reference", "critic", "values"}
    assert settings(best)["plan"]["values"] == {"num_workers": 4}


def test_larger_pools_than_the_devices_leave_room_for_are_left_out(searched: Searched) -> None:
    config, model, fields = small("algorithm={name: ppo, kl_coefficient: 0.0}")
    large = replace(model, hardware=model.hardware.model_copy(update={"memory_gib": 400.0}))
    assert searched(config, large, fields, 3).plans[0].config.plan.values.num_workers == 0


def test_a_reference_that_fits_on_no_device_is_refused_with_what_to_take(searched: Searched) -> None:
    config, model, fields = small("train.reference=task", "train.frozen_dtype=float32", "rollout.max_new_tokens=512")
    with pytest.raises(UserError, match=r"the reference fits on no device: .* needs at least (2\d|3\d)\.\d GiB of one, of which 2"):
        searched(config, replace(model, hardware=model.hardware.model_copy(update={"memory_gib": 24.0})), fields, 64)
    searched(*small("train.reference=task", "train.offload=true"), 8)  # which keeps it in host memory
