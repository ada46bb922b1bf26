"""What a run's record says aloud."""

from __future__ import annotations

import pytest

from asyncflow.build.record import RunRecord, Told


def test_engines_that_do_not_compute_the_same_are_told_once() -> None:
    said: list[str] = []
    record = object.__new__(RunRecord)
    record._told = Told(group=lambda step: None, step=lambda step, row: None, evaluation=lambda row: None, says=said.append)
    record._has_said_mismatch = False
    for row in ({}, {"mismatch/kl": 1e-5}, {"mismatch/kl": 0.01}):
        record._look_at_mismatch(row)
    assert said == []
    record._look_at_mismatch({"mismatch/kl": 0.025})
    record._look_at_mismatch({"mismatch/kl": 0.5})
    (sentence,) = said
    dtypes = "rollout.dtype, train.dtype and weight_sync.dtype"
    for words in ("mismatch/kl is 0.025 nats, above 0.01", dtypes, "algorithm.correction=truncated"):
        assert words in sentence


def test_where_no_row_is_fresh_the_divergence_over_all_rows_is_looked_at() -> None:
    said: list[str] = []
    record = object.__new__(RunRecord)
    record._told = Told(group=lambda step: None, step=lambda step, row: None, evaluation=lambda row: None, says=said.append)
    record._has_said_mismatch = False
    for row in ({"policy/rollout_kl": 0.1}, {"policy/rollout_kl": 5.0, "mismatch/kl": 0.001}):
        record._look_at_mismatch(row)
    assert said == []
    record._look_at_mismatch({"policy/rollout_kl": 0.25})
    assert "policy/rollout_kl is 0.25 nats, above 0.1, more than" in said[0]


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_a_mismatch_that_is_no_number_is_no_warning(value: float) -> None:
    record = object.__new__(RunRecord)
    record._has_said_mismatch = False
    record._look_at_mismatch({"mismatch/kl": value})
