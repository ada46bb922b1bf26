"""Metrics of the user's own."""

from __future__ import annotations

import math

import pytest

from asyncflow.own_metrics import MAX_NAMES, add, collecting, log_metric, means


def test_numbers_become_means_by_name_where_they_are_collected() -> None:
    log_metric("alone", 1.0)  # nobody collects
    with collecting() as sums:
        log_metric("steps", 3)
        log_metric("steps", True)
        with collecting() as inner:
            log_metric("steps", 100.0)
        log_metric("other/part-1", 0.5)
    assert means(sums) == {"own/steps": 2.0, "own/other/part-1": 0.5} and means(inner) == {"own/steps": 100.0}


@pytest.mark.parametrize(("name", "number"), [("", 1.0), ("two words", 1.0), ("x" * 101, 1.0), ("a", math.nan), ("a", math.inf)])
def test_a_bad_name_or_number_is_refused(name: str, number: float) -> None:
    with pytest.raises(ValueError, match=r"name is made of|finite number"):
        log_metric(name, number)


def test_there_are_not_more_names_than_a_step_s_row_can_bear() -> None:
    sums = {f"m{number}": (1, 1.0) for number in range(MAX_NAMES)}
    add(sums, {"new": (1, 1.0), "m0": (1, 2.0)})
    assert sums["m0"] == (2, 3.0) and len(sums) == MAX_NAMES and "new" not in sums
    with collecting() as collected:
        for name in sums:
            log_metric(name, 1.0)
        log_metric("m0", 1.0)
        with pytest.raises(ValueError, match="one too many"):
            log_metric("new", 1.0)
    assert collected.keys() == sums.keys()
