"""Fits recover known costs, and tell a wrong shape from noise."""

from __future__ import annotations

import numpy as np
import pytest

from asyncflow.planner.fit import TimedWork, fit, residual

TERMS = ("step", "slot", "context")


def steps(noise: float, count: int = 400) -> list[TimedWork]:
    """Decode steps of known costs: 4 ms, 0.1 ms a slot, and 2 us for each token attended to."""
    rng = np.random.default_rng(0)
    slots, contexts = rng.integers(1, 128, count), rng.integers(20, 100, count)
    seconds = (0.004 + 1e-4 * slots + 2e-6 * slots * contexts) * (1 + noise * rng.standard_normal(count))
    return [TimedWork((1.0, n, n * c), s) for n, c, s in zip(slots.tolist(), contexts.tolist(), seconds.tolist(), strict=True)]


def test_known_costs_are_recovered() -> None:
    exact = fit("decode_step", TERMS, steps(0.0))
    assert list(exact.coefficients.values()) == pytest.approx([0.004, 1e-4, 2e-6])
    noisy = fit("decode_step", TERMS, steps(0.2))
    assert list(noisy.coefficients.values()) == pytest.approx([0.004, 1e-4, 2e-6], rel=0.3)
    assert not noisy.residual.is_bad and noisy.residual.noise == pytest.approx(0.16, abs=0.05)


def test_all_samples_together_take_what_they_took() -> None:
    samples = [TimedWork((1.0, float(n)), 0.1 + 0.02 * n**1.5) for n in range(40)]  # of another shape than the terms
    found = fit("curved", ("constant", "each"), samples)
    whole = sum(
        sample.amounts[0] * found.coefficients["constant"] + sample.amounts[1] * found.coefficients["each"] for sample in samples
    )
    assert whole == pytest.approx(sum(sample.seconds for sample in samples))


def test_no_cost_is_negative_and_one_term_of_two_that_are_alike_has_all() -> None:
    falling = [TimedWork((1.0, float(n)), 1.0 - 0.01 * n) for n in range(50)]
    found = fit("falling", ("constant", "each"), falling)
    assert found.coefficients["each"] == 0.0 and found.coefficients["constant"] == pytest.approx(0.755)
    alike = fit("alike", ("first", "second"), [TimedWork((1.0, 2.0), 3.0)] * 5)
    assert alike.coefficients == {"first": pytest.approx(3.0), "second": 0.0}
    assert fit("none", ("first",), []).coefficients == {"first": 0.0}


def test_a_wrong_shape_is_told_from_noise() -> None:
    lacks = fit("decode_step", ("step",), [TimedWork(sample.amounts[:1], sample.seconds) for sample in steps(0.2)])
    assert not lacks.residual.warning()  # all are of one size to it: nothing to see
    measured = np.array([sample.seconds for sample in steps(0.2)])
    amounts = np.array([sample.amounts for sample in steps(0.2)])
    assert not residual("decode_step", amounts @ [0.004, 1e-4, 2e-6], measured).is_bad
    twice = residual("decode_step", amounts @ [0.008, 1e-4, 2e-6], measured)  # a term that is counted twice
    assert twice.is_bad and "shorter than the cost model says" in twice.warning()
    assert twice.worst_seconds < amounts.mean(axis=0) @ [0.008, 1e-4, 2e-6]  # most of all where little else is done
