"""Hardware: shipped devices, and mistakes in one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncflow.planner.hardware import RESOURCES, find, known
from asyncflow.settings import from_yaml, to_yaml
from asyncflow.types import UserError


@pytest.mark.parametrize("name", known())
def test_every_shipped_device_has_a_rate_for_every_kind_of_work(name: str) -> None:
    rates = find(name).rates("bfloat16")
    assert set(rates) == set(RESOURCES)
    assert all(0 < seconds < 1 for seconds in rates.values())


def test_rates_are_peaks_times_the_share_that_is_reached() -> None:
    h100 = find("h100-80gb")
    assert h100.rates("bfloat16")["flops"] == pytest.approx(1 / (989.4e12 * 0.45))
    assert h100.rates("bfloat16")["memory_bytes"] == pytest.approx(1 / (3350e9 * 0.7))
    assert h100.usable_bytes == pytest.approx(0.9 * 80 * 2**30)


def test_a_pass_takes_as_long_to_start_as_a_call_unless_it_is_given() -> None:
    h100 = find("h100-80gb")
    assert h100.rates("bfloat16")["passes"] == h100.rates("bfloat16")["launches"] == pytest.approx(0.0015)
    eager = h100.model_copy(update={"pass_microseconds": 20_000.0}).rates("bfloat16")
    assert (eager["passes"], eager["launches"]) == (pytest.approx(0.02), pytest.approx(0.0015))


def test_a_field_that_is_missing_is_named(tmp_path: Path) -> None:
    tree = find("a100-80gb").model_dump()
    del tree["memory_gib"]
    (file := tmp_path / "mine.yaml").write_text(to_yaml(tree))
    with pytest.raises(UserError, match=r"mine\.yaml: 'memory_gib' is missing"):
        find(str(file))


def test_what_is_no_device_is_said_with_those_that_are_known() -> None:
    with pytest.raises(UserError, match=r"'h1000' is neither a file nor one of .*h100-80gb"):
        find("h1000")


def test_a_dtype_without_a_peak_is_named(tmp_path: Path) -> None:
    tree = from_yaml(to_yaml(find("a100-80gb").model_dump())) | {"peak_tflops": {"bfloat16": 312}}
    (file := tmp_path / "mine.yaml").write_text(to_yaml(tree))
    with pytest.raises(UserError, match=r"no peak_tflops\.float32"):
        find(str(file)).rates("float32")
