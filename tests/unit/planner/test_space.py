"""Pools of rewards are as large as they need to be, and what is not cut over devices is checked against one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec
import pytest

from asyncflow.config import load
from asyncflow.engines.costs import Costs, Lengths
from asyncflow.planner import search as module
from asyncflow.planner.bounds import bound
from asyncflow.planner.cost import UNIT
from asyncflow.planner.graph import Drawn, graph
from asyncflow.planner.plan import settings
from asyncflow.planner.space import TIE, Halves, Space
from asyncflow.simulation.run import simulate
from asyncflow.types import UserError
from tests.conftest import ROOT
from tests.unit.planner.test_search import candidates, searched, small


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the recipe names its shapes from there


def test_reward_processes_are_as_many_as_bind_and_no_more() -> None:
    """32 rewards of 2 s, by one process beside each of some workers, are what binds; of a quarter as many seconds they are not."""
    config, model, fields = small("reward.num_workers=1")
    found = {}
    for seconds in (0.0001, 2.0):
        slow = replace(model, measured={"reward_seconds": seconds})
        plans = searched(config, slow, fields, 6).plans
        found[seconds] = plans[0]
        assert settings(plans[0])["reward"] == {"num_workers": plans[0].config.reward.num_workers}
    assert found[0.0001].config.reward.num_workers == 1 < found[2.0].config.reward.num_workers <= 16
    one = searched(config, replace(model, measured={"reward_seconds": 2.0}), fields, 6)
    for plan in one.plans:  # nothing that ties is there with more processes
        same = [other for other in one.plans if other.place[:-1] == plan.place[:-1] and other.place[-1] < plan.place[-1]]
        assert all(other.step_seconds > plan.step_seconds * (1 + TIE) for other in same)


def test_reward_workers_follow_where_one_has_all_the_processes_that_its_host_has_cores_for() -> None:
    config, model, fields = small("reward.place=task", "reward.num_workers=8")
    every = candidates(config, replace(model, measured={"reward_seconds": 60.0}), fields, 4)
    assert {each.services for each in every} >= {(1, 8, 1), (1, 16, 1), (2, 16, 1)}
    sizes = {each.services: each.bound.seconds for each in every if each.place[:-1] == every[0].place[:-1]}
    assert [*sizes.values()] == sorted(sizes.values(), reverse=True)
    assert {each.config.plan.reward.num_workers for each in every} == {1, 2}  # 32 rows have no use for more than 32 processes


def test_a_reward_model_has_devices_and_the_bound_knows_its_rate(tmp_path) -> None:
    given = ["reward.place=task", f"reward.model={{path: {tmp_path}, dtype: bfloat16}}"]
    config, model, fields = small(*given)
    slow = replace(model, measured={"reward_model_token_seconds": 0.01})
    found = searched(config, slow, fields, 16)
    best = found.plans[0]
    assert best.config.plan.reward.num_workers == 4  # up to a quarter of the devices
    assert best.devices <= 16 and best.memory_gib["reward"] > 10
    assert best.bound.seconds <= best.step_seconds
    alone = candidates(config, slow, fields, 16)
    assert min(each.bound.seconds for each in alone) > 2 * best.bound.seconds  # with one worker


def test_a_critic_that_fits_on_no_device_is_refused_with_what_to_take() -> None:
    config, model, fields = small("algorithm={name: ppo, kl_coefficient: 0.0}")
    with pytest.raises(UserError, match=r"the critic fits on no device: .* at least 1\d\d\.\d GiB .* train.offload_optimizer"):
        searched(config, model, fields, 8)


def test_a_critic_that_is_the_slower_half_binds() -> None:
    config, model, fields = small("algorithm={name: ppo, kl_coefficient: 0.0}", "train.prompts_per_step=16")
    hardware = model.hardware.model_copy(update={"memory_gib": 400.0})
    large = replace(model, hardware=hardware, measured={"critic_token_seconds": 0.01})
    best = min(candidates(config, large, fields, 64), key=lambda each: (each.bound.seconds, each.place))
    assert best.bound.binds == "critic"
    plan = module._plan(best, large)
    done = simulate(module.simulated_config(plan), costs=module.simulated_costs(plan))
    steps = [row["perf/step_seconds"] for step, row in done.rows.items() if step]
    mean = sum(steps) / len(steps)  # a step ends with the policy's update, where the critic may be a little behind
    assert not done.violations and best.bound.seconds * 0.99 <= mean <= best.bound.seconds * 1.1


def test_cheap_bounds_are_under_the_whole_ones() -> None:
    config, model, fields = small(
        "train.reference=task", "algorithm={name: ppo, kl_coefficient: 0.01}", "train.prompts_per_step=64"
    )
    large = replace(model, hardware=model.hardware.model_copy(update={"memory_gib": 400.0}))
    space = Space(Halves(config, large, fields, 12), config, 0, Counter())
    for pair in space.pairs():
        assert space.least() * 0.999999 <= pair.seconds
        assert all(pair.seconds * 0.999999 <= each.bound.seconds for each in space.candidates(pair))


def test_storage_units_are_as_many_as_bind_where_each_has_a_process() -> None:
    slow = {"unit_seconds": 1.0}
    found = {}
    for place in ("driver", "workers"):
        config, model, fields = small(f"queue.place={place}")
        found[place] = searched(config, replace(model, measured=slow), fields, 6).plans[0]
        assert settings(found[place])["queue"] == {"num_units": found[place].config.queue.num_units}
    assert found["driver"].config.queue.num_units == 1 < found["workers"].config.queue.num_units <= 8
    assert found["driver"].bound.binds == "storage"
    assert found["workers"].step_seconds < found["driver"].step_seconds
    config, model, fields = small("queue.place=workers")
    assert searched(config, model, fields, 6).plans[0].config.queue.num_units == 1  # as it is measured


@pytest.mark.parametrize("place", ["driver", "workers"])
def test_simulated_units_work_one_request_after_another_and_no_step_is_under_the_bound(place: str) -> None:
    """Of units that have a process each, two take half as long."""
    costs = Costs(unit_seconds=0.5, load_seconds=0.0, lengths=Lengths(prompt=20, response_median=60.0))
    seconds = {}
    for units in (1, 2):
        given = ["eval.path=null", "run.steps=3", "train.prompts_per_step=8", "rollout.max_new_tokens=100", f"queue.place={place}"]
        config = load(ROOT / "recipes/quickstart.yaml", [*given, f"queue.num_units={units}"])
        done = simulate(config, costs=costs)
        assert not done.violations
        seconds[units] = sum(row["perf/step_seconds"] for step, row in done.rows.items() if step) / 2
        least = bound(graph(config, costs, Drawn(Drawn.of(config, costs, 3).tokens[1:])))
        assert least.binds == "storage" and least.seconds <= seconds[units] * 1.001
    assert seconds[2] == pytest.approx(seconds[1], rel=0.1) if place == "driver" else seconds[2] < 0.7 * seconds[1]


def test_units_that_cost_next_to_nothing_change_no_prediction() -> None:
    config = load(ROOT / "recipes/quickstart.yaml", ["eval.path=null", "run.steps=3"])
    costs = Costs(load_seconds=0.0)
    without, with_units = (simulate(config, costs=each) for each in (costs, msgspec.structs.replace(costs, **UNIT)))
    assert with_units.seconds == pytest.approx(without.seconds, rel=0.01)
