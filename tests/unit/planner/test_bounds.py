"""The bound of a step is under what the loops take, near it, and says what binds."""

from __future__ import annotations

import msgspec
import pytest

from asyncflow.config import Config, load
from asyncflow.engines.costs import Costs, Lengths
from asyncflow.planner.bounds import bound
from asyncflow.planner.graph import Drawn, Graph, Task, graph
from asyncflow.simulation.run import simulate
from tests.conftest import ROOT
from tests.depth import in_gate

STEPS = 4
COSTS = Costs(
    decode_step_seconds=0.01, decode_slot_seconds=1e-4, decode_context_seconds=1e-7, train_token_seconds=1e-4,
    reward_seconds=1e-6, load_seconds=0.0, lengths=Lengths(prompt=20, response_median=60.0),
)  # fmt: skip


def config(*overrides: str) -> Config:
    given = ["eval.path=null", f"run.steps={STEPS}", "train.prompts_per_step=12", "rollout.max_new_tokens=200", *overrides]
    return load(ROOT / "recipes/quickstart.yaml", given)


@pytest.mark.parametrize("train_token_seconds", in_gate(1e-4, of=[1e-5, 1e-4, 1e-3]))
@pytest.mark.parametrize(
    "overrides",
    [
        ["schedule=synchronous"],
        ["schedule=periodic"],
        ["schedule=periodic", "rollout.num_workers=3", "rollout.num_slots=8"],
        ["schedule=periodic", "plan.train.dp=2"],
        ["schedule=periodic", "train.reference=task", "algorithm.kl_coefficient=0.1"],
        ["schedule=delayed", "rollout.num_workers=2"],
        ["schedule=bounded", "rollout.num_workers=2"],
    ],
)
def test_no_simulated_step_is_under_its_bound_and_most_are_near_it(overrides: list[str], train_token_seconds: float) -> None:
    of, costs = config(*overrides), msgspec.structs.replace(COSTS, train_token_seconds=train_token_seconds)
    done = simulate(of, costs=costs)
    assert not done.violations
    drawn = Drawn(Drawn.of(of, costs, STEPS).tokens[1:])
    least = bound(graph(of, costs, drawn)).seconds
    first, last = (done.rows[1]["perf/step_seconds"], done.rows[STEPS - 1]["perf/step_seconds"])
    mean = sum(done.rows[step]["perf/step_seconds"] for step in range(1, STEPS)) / (STEPS - 1)
    assert least <= mean * 1.001 or "delayed" in overrides[0] or "bounded" in overrides[0], (least, mean)
    assert least <= max(first, last, mean) * 1.05
    assert mean < 2.5 * least


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.reference=task", "algorithm.kl_coefficient=0.1"],
        ["algorithm={name: ppo, kl_coefficient: 0.0}"],
        ["algorithm={name: ppo, kl_coefficient: 0.0}", "plan.values.num_workers=1"],
    ],
)
def test_what_a_pass_takes_however_few_its_tokens_is_counted_once_for_each_pass(overrides: list[str]) -> None:
    """Of the reference and of values, which have no costs of their own: these passes bind."""
    of = config("schedule=periodic", "train.responses_per_micro_batch=2", *overrides)
    costs = msgspec.structs.replace(COSTS, reference_seconds=0.5, reference_token_seconds=1e-5)
    done = simulate(of, costs=costs)
    assert not done.violations
    mean = sum(done.rows[step]["perf/step_seconds"] for step in range(1, STEPS)) / (STEPS - 1)
    least = bound(graph(of, costs, Drawn(Drawn.of(of, costs, STEPS).tokens[1:]))).seconds
    passes = 12 * of.rollout.group_size / 2
    assert 0.5 * passes < least <= mean * 1.001


def test_the_path_of_a_step_is_shared_by_as_many_steps_as_may_be_stale() -> None:
    tasks = (Task("rollout", busy=1.0, span=6.0, first=1.0, last=6.0), Task("train", busy=1.0, span=1.0, first=1.0, last=1.0))
    fresh, stale = (bound(Graph(tasks, 2.0, staleness, is_streamed=True)) for staleness in (0, 1))
    assert fresh.seconds == 9.0 and fresh.binds == "path of rollout"  # 6 + 1 + 2
    assert stale.seconds == 4.5


def test_the_busiest_pool_binds_when_weights_may_be_old() -> None:
    tasks = (Task("rollout", busy=3.0, span=3.0, first=1.0, last=3.0), Task("train", busy=5.0, span=5.0, first=1.0, last=1.0))
    found = bound(Graph(tasks, 0.0, 4, is_streamed=True))
    assert (found.seconds, found.binds) == (5.0, "train")


def test_a_synchronous_step_is_the_sum_of_its_tasks() -> None:
    tasks = (Task("rollout", busy=3.0, span=3.0, first=1.0, last=3.0), Task("train", busy=5.0, span=5.0, first=1.0, last=1.0))
    assert bound(Graph(tasks, 1.0, 0, is_streamed=False)).seconds == 9.0
