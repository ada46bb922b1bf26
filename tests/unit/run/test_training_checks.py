"""What is odd about a run's training is said aloud."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncflow.config import parse
from asyncflow.control.ledger import TaskPlan
from asyncflow.own_metrics import MAX_NAMES
from asyncflow.run.factories import shape_of
from asyncflow.run.records.training_checks import TrainingChecks
from asyncflow.types import RunError

Made = Callable[[], TrainingChecks]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def made(said: list[str]) -> Made:
    """Of a run of two groups a step, with four responses each."""

    def fails(error: RunError) -> None:
        raise error

    def make() -> TrainingChecks:
        tree = {"model": {"path": "m"}, "data": {"path": "d"}, "rollout": {"group_size": 4}}
        ledger = SimpleNamespace(tasks=TaskPlan(trained=("train",)), num_groups=lambda step: 2)
        config = parse({**tree, "reward": {"max_failed_fraction": 0.5}})
        context = SimpleNamespace(
            config=config,
            shape=shape_of(config),
            ledger=SimpleNamespace(ledger=ledger),
            log=said.append,
            background=SimpleNamespace(fail=fails),
        )
        return TrainingChecks(
            cast(Any, context),
            skipped_in_a_row={"train": 0},
            has_logged_unshared=False,
            reward_failures=lambda: Counter(timeout=7, crash=2),
        )

    return make


def test_engines_that_do_not_compute_the_same_are_told_once(made: Made, said: list[str]) -> None:
    checks = made()
    for row in ({}, {"mismatch/kl": 1e-5}, {"mismatch/kl": 0.01}):
        checks.look_at_metrics(row)
    assert said == []
    checks.look_at_metrics({"mismatch/kl": 0.025})
    checks.look_at_metrics({"mismatch/kl": 0.5})
    (sentence,) = said
    dtypes = "rollout.dtype, train.dtype and weight_sync.dtype"
    for words in ("mismatch/kl is 0.025 nats, above 0.01", dtypes, "algorithm.correction=truncated"):
        assert words in sentence


def test_where_no_row_is_fresh_the_divergence_over_all_rows_is_looked_at(made: Made, said: list[str]) -> None:
    checks = made()
    for row in ({"policy/rollout_kl": 0.1}, {"policy/rollout_kl": 5.0, "mismatch/kl": 0.001}):
        checks.look_at_metrics(row)
    assert said == []
    checks.look_at_metrics({"policy/rollout_kl": 0.25})
    assert "policy/rollout_kl is 0.25 nats, above 0.1, more than" in said[0]


def test_that_metrics_of_the_user_s_own_are_left_out_is_told_once(made: Made, said: list[str]) -> None:
    checks = made()
    checks.look_at_metrics({f"own/m{number}": 1.0 for number in range(MAX_NAMES - 1)} | {"reward/mean": 1.0})
    assert said == []
    for _ in range(2):
        checks.look_at_metrics({f"own/m{number}": 1.0 for number in range(MAX_NAMES)})
    assert len(said) == 1 and "other names are left out" in said[0]


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_a_mismatch_that_is_no_number_is_no_warning(made: Made, said: list[str], value: float) -> None:
    made().look_at_metrics({"mismatch/kl": value})
    assert said == []


def test_too_many_rows_of_a_step_without_a_reward_end_the_run(made: Made) -> None:
    checks = made()
    checks.not_scored(3, 4)
    checks.not_scored(4, 1, "no reward: it was late")  # another step's
    with pytest.raises(RunError) as caught:
        checks.not_scored(3, 1, "no reward: it was late")
    assert str(caught.value) == (
        "5 of the 8 rows of step 3 could not be scored, more than reward.max_failed_fraction=0.5 (attempts that failed so far: "
        "crash 2, timeout 7): mend the scorer, or raise that; the last one: it was late"
    )
