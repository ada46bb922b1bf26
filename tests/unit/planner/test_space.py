"""Pools of rewards are as large as they need to be, and what is not sharded is checked against one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from asyncflow.config import Config, load
from asyncflow.engines.costs import Costs, Lengths
from asyncflow.planner import search as module
from asyncflow.planner.bounds import Bound, bound
from asyncflow.planner.cost import UNIT, Model
from asyncflow.planner.graph import Drawn, graph
from asyncflow.planner.part import config_of_part, costs_of_part, divided, part_of
from asyncflow.planner.plan import settings
from asyncflow.planner.search import Plan
from asyncflow.planner.space import TIE, Halves, Space
from asyncflow.run.device_shares import check_shares
from asyncflow.simulation.run import simulate
from asyncflow.types import UserError
from tests.conftest import ROOT
from tests.depth import deep
from tests.unit.planner.conftest import Searched
from tests.unit.planner.test_search import candidates, small


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the recipe names its shapes from there


def test_reward_processes_are_as_many_as_bind_and_no_more(searched: Searched) -> None:
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


def test_a_reward_model_has_devices_and_the_bound_knows_its_rate(searched: Searched, tmp_path) -> None:
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


def test_a_critic_that_fits_on_no_device_is_refused_with_what_to_take(searched: Searched) -> None:
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
    large = replace(
        model, hardware=model.hardware.model_copy(update={"memory_gib": 400.0}), measured={"train_token_seconds": 0.001}
    )
    space = Space(Halves(config, large, fields, 12), config, 0, Counter())
    for pair in space.pairs():
        assert space.least() * 0.999999 <= pair.seconds
        assert all(pair.seconds * 0.999999 <= each.bound.seconds for each in space.candidates(pair))


def test_storage_units_are_as_many_as_bind_where_each_has_a_process(searched: Searched) -> None:
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


def test_of_plans_that_tie_the_one_with_the_fewest_processes_is_kept() -> None:
    config, model, fields = small()
    plan = module._plan(candidates(config, model, fields, 4)[0], model)

    def taking(seconds: float, *place: int) -> Plan:
        return replace(plan, bound=Bound(seconds, "reward"), place=place)

    plans = [taking(1.0, 7, 2), taking(1.005, 7, 1), taking(1.2, 7, 0), taking(1.3, 8, 1)]
    assert [each.place for each in module._fewest(plans)] == [(7, 1), (7, 0), (8, 1)]


def test_what_is_not_divided_is_as_much_slower_in_a_part() -> None:
    given = ["train.reference=task", "algorithm={name: ppo, kl_coefficient: 0.01}", "reward.place=task", "queue.num_units=8"]
    given += ["plan.values.num_workers=2", "plan.reference.num_workers=3", "plan.reward.num_workers=2", "reward.num_workers=4"]
    config, _, _ = small(*given, "queue.place=workers", "train.prompts_per_step=64")
    costs = Costs(
        value_token_seconds=1.0, critic_token_seconds=1.0, reference_token_seconds=1.0, reward_seconds=1.0, unit_seconds=1.0
    )
    of_part, slow = divided(config, 4), costs_of_part(costs, config, 4)
    plan = of_part.plan
    sizes = (plan.values.num_workers, plan.reference.num_workers, plan.reward.num_workers, of_part.reward.num_workers)
    assert (*sizes, of_part.queue.num_units) == (1, 3, 1, 2, 2)
    assert (slow.value_token_seconds, slow.critic_token_seconds, slow.reference_token_seconds) == (2.0, 4.0, 4.0)
    assert (slow.reward_seconds, slow.unit_seconds, slow.optim_step_seconds) == (1.0, 1.0, costs.optim_step_seconds)
    alike = msgspec.structs.replace(
        costs, value_token_seconds=None, reference_seconds=8.0
    )  # a pass of values is as the reference's
    assert costs_of_part(alike, config, 4).value_token_seconds == 2.0  # what a pass takes without tokens is of no token


def shared(*overrides: str, gib: float = 400.0) -> tuple[Config, Model, dict[str, Any]]:
    """A run with a reference that hardly computes, on devices of so many GiB."""
    config, model, fields = small("train.reference=task", "algorithm.kl_coefficient=0.01", *overrides)
    hardware = model.hardware.model_copy(update={"memory_gib": gib})
    return config, replace(model, hardware=hardware, measured={"reference_token_seconds": 1e-6}), fields


def test_a_task_that_hardly_computes_shares_devices_where_memory_allows_it(searched: Searched) -> None:
    best = searched(*shared(), 4).plans[0]
    assert best.config.plan.shares == {"reference": "train"} and settings(best)["plan"]["shares"] == {"reference": "train"}
    assert set(best.memory_gib) == {"train", "rollout"}
    searched(*shared("plan.shares={}"), 2)  # there is no other way, with two devices


def test_memory_of_tasks_that_share_devices_is_added_up_and_refused_where_it_does_not_fit(searched: Searched) -> None:
    config, model, fields = shared("plan.shares={reference: train}")
    halves = Halves(config, model, fields, 4)
    least = min(halves.gib(half, ["train", "reference"]) for half in halves.training)
    assert least > min(half.memory_gib for half in halves.training) + 10  # 7B in bfloat16
    searched(*shared("plan.shares={reference: train}", gib=1.01 * least / 0.9), 4)
    with pytest.raises(UserError, match="train and reference fit on no device together"):
        searched(*shared("plan.shares={reference: train}", gib=0.99 * least / 0.9), 4)


def test_simulated_tasks_take_turns_on_a_device_that_they_share() -> None:
    """As much work of the reference as of the trainer: on one device both take as long as one after the other."""
    costs = Costs(
        decode_step_seconds=1e-5, decode_slot_seconds=0.0, prefill_token_seconds=0.0, forward_backward_seconds=0.0,
        train_token_seconds=1e-3, reference_token_seconds=1e-3, reward_seconds=1e-6, load_seconds=0.0, optim_step_seconds=0.0,
        publish_seconds=0.0, fetch_seconds=0.0, install_seconds=0.0, lengths=Lengths(prompt=20, response_median=60.0),
    )  # fmt: skip
    given = ["eval.path=null", "run.steps=3", "train.prompts_per_step=8", "rollout.max_new_tokens=100", "schedule=delayed"]
    given += ["train.reference=task", "algorithm.kl_coefficient=0.1", "train.tokens_per_micro_batch=null"]
    seconds = {}
    for shares in ("{}", "{reference: train}"):
        config = load(ROOT / "recipes/quickstart.yaml", [*given, f"plan.shares={shares}"])
        done = simulate(config, costs=costs)
        assert not done.violations
        seconds[shares] = sum(row["perf/step_seconds"] for row in done.rows.values())
        found = bound(graph(config, costs, Drawn(Drawn.of(config, costs, 3).tokens[1:])))
        assert found.seconds <= seconds[shares] / 3 * 1.05
    assert found.binds == "train and reference on the same devices"
    assert seconds["{reference: train}"] > 1.5 * seconds["{}"]


@deep
def test_a_part_of_a_machine_with_shared_devices_takes_about_as_long_as_all_of_it() -> None:
    given = ["train.reference=task", "algorithm.kl_coefficient=0.01", "train.prompts_per_step=128", "rollout.group_size=8"]
    given += ["plan.shares={reference: train}", "plan.reference.num_workers=4"]
    config, model, fields = small(*given)
    every = [each for each in candidates(config, model, fields, 32) if each.part == 4]
    plan = module._plan(min(every, key=lambda each: (each.bound.seconds, each.place)), model)
    seconds = []
    for each in (plan, replace(plan, part=1)):
        done = simulate(module.simulated_config(each), costs=module.simulated_costs(each))
        assert not done.violations
        seconds.append(done.rows[1]["perf/step_seconds"])
    assert seconds[0] == pytest.approx(seconds[1], rel=0.15)


@pytest.mark.parametrize(("mini_batches", "part"), [(1, 2), (3, 2), (4, 1)])
def test_a_part_has_whole_mini_batches(mini_batches: int, part: int) -> None:
    given = ["train.prompts_per_step=12", "rollout.group_size=64", f"train.mini_batches={mini_batches}"]
    config, _, _ = small(*given, "plan.train.dp=2", "rollout.num_workers=2")
    assert part_of(config, 2, 2) == part
    assert config_of_part(config, part).train.prompts_per_step == 12 // part


LOCAL = (
    "cluster=local", "train.device=cuda", "rollout.device=cuda:1-2", "rollout.engine=slots", "train.accumulate=exact",
    "train.prompts_per_step=16",
)  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        ("algorithm={name: ppo, kl_coefficient: 0.0}", "train.critic.device=cuda", "plan.shares={helpers: rollout, critic: train}"),
        ("reward.place=task", "reward.model={path: /m, device: cuda}", "plan.shares={helpers: rollout, reward: train}"),
    ],
)
def test_what_shares_the_trainer_s_device_is_simulated_beside_helpers(given: tuple[str, ...]) -> None:
    config, _, _ = small(*LOCAL, "plan.train={dp: 1, tp: 1, pp: 1}", *given)
    simulated = config_of_part(config, 1)
    check_shares(simulated)
    assert simulated.plan.shares == config.plan.shares


def test_helpers_are_on_devices_of_rollout_where_they_gain_and_memory_allows_both(searched: Searched) -> None:
    config, model, fields = small(*LOCAL)
    alone = config.model_copy(update={"train": config.train.model_copy(update={"helpers": 0})})
    large = replace(model, hardware=model.hardware.model_copy(update={"memory_gib": 400.0}))
    assert not searched(config, large, fields, 3).plans[0].config.plan.shares  # generation takes the time: they would gain nothing
    slow = replace(large, measured={"train_token_seconds": 0.002})
    best, without = (searched(each, slow, fields, 2).plans[0] for each in (config, alone))
    assert settings(best)["plan"]["shares"] == {"helpers": "rollout"} and not without.config.plan.shares
    assert best.bound.seconds <= best.step_seconds < 0.8 * without.step_seconds
    assert best.memory_gib["rollout"] > without.memory_gib["rollout"] + 70  # 7.6 billion weights, and their sums
    offloaded = config.model_copy(update={"train": config.train.model_copy(update={"offload_optimizer": True})})
    # A helper takes 132 of them, as the trainer does, and the engine 18.
    for gib, has_helpers in {150.0: True, 140.0: False}.items():
        usable = model.hardware.model_copy(update={"memory_gib": gib / model.hardware.usable_memory})
        every = candidates(offloaded, replace(slow, hardware=usable), fields, 2)
        assert every and any(each.config.plan.shares for each in every) == has_helpers
    asked = offloaded.model_copy(update={"plan": offloaded.plan.model_copy(update={"shares": {"helpers": "rollout"}})})
    with pytest.raises(UserError, match=r"no device of rollout.device=cuda:1-2, with 140.0 GiB, has room"):
        candidates(asked, replace(slow, hardware=usable), fields, 2)
    assert not any(each.config.plan.shares for each in candidates(config, slow, fields, 5) if each.config.rollout.num_workers > 2)
