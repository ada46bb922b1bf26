"""Whether a bounded queue has room for what enters it at once, and evaluators have something to do."""

from __future__ import annotations

from typing import Any

import pytest

from asyncflow.config import Config, parse
from asyncflow.run.preparation.checks import check_capacity, check_evaluators
from asyncflow.types import UserError

STEP, EVALUATION = 4 * 2, 3 * (2 + 1)
"""Rows: of 4 prompts, and of 3 that are evaluated, greedily as well."""


def config_of(capacity_rows: int, num_evaluators: int, **queue: Any) -> Config:
    return parse(
        {
            "model": {"path": "m"},
            "data": {"path": "d"},
            "rollout": {"group_size": 2},
            "train": {"prompts_per_step": 4},
            "eval": {"path": "e", "samples_per_prompt": 2, "num_workers": num_evaluators},
            "queue": {"capacity_rows": capacity_rows, **queue},
        }
    )


def test_each_evaluator_must_have_a_share_of_an_evaluation() -> None:
    check_evaluators(config_of(STEP, 6), 3)
    with pytest.raises(UserError, match=r"^eval.num_workers=7 is more than the 6 groups of an evaluation \(3 prompts, .* 1 of"):
        check_evaluators(config_of(STEP, 7), 3)


def test_a_step_and_an_evaluation_must_fit_each_alone_and_with_evaluators_together() -> None:
    check_capacity(config_of(EVALUATION, 0), 3, 10)
    check_capacity(config_of(STEP + EVALUATION, 1), 3, 10)
    check_capacity(config_of(STEP, 1), 0, 10)
    with pytest.raises(UserError, match=r"^an evaluation puts 9 rows on each of 1 storage units"):
        check_capacity(config_of(EVALUATION - 1, 0), 3, 10)
    with pytest.raises(UserError, match=r"^a step with an evaluation beside it puts 17 rows .*capacity_rows is 16: raise it"):
        check_capacity(config_of(STEP + EVALUATION - 1, 1), 3, 10)
    on_each = 2 * 2 + 2 * 3
    check_capacity(config_of(on_each, 1, num_units=2), 3, 10)
    with pytest.raises(UserError, match=r"puts 10 rows on each of 2 storage units"):
        check_capacity(config_of(on_each - 1, 1, num_units=2), 3, 10)
