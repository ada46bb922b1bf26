"""Who computes beside whom is seen in spans, and the slowdown that it makes is recovered."""

from __future__ import annotations

import numpy as np
import pytest

from asyncflow.planner.contention import BusyWorkers, fit_slowdown
from asyncflow.planner.fit import TimedWork
from asyncflow.telemetry.spans import Span


def lane(worker: str, start: float, end: float, task: str = "work") -> Span:
    return Span(worker=worker, task=task, start=start, end=end)


def test_workers_beside_are_counted_by_the_time_that_they_compute() -> None:
    spans = [
        lane("rollout/0", 0, 10), lane("rollout/0", 10, 12, "wait"), lane("trainer/0", 4, 6), lane("trainer/0", 8, 20),
        Span(worker="trainer/0", task="publish", start=0, end=4, is_lane=False),
    ]  # fmt: skip
    busy = BusyWorkers(spans)
    starts, ends = np.array([0.0, 4.0, 7.0, 0.0]), np.array([4.0, 6.0, 9.0, 10.0])
    assert busy.mean_others("rollout/0", starts, ends).tolist() == [0.0, 1.0, 0.5, 0.4]
    assert busy.mean_others("trainer/0", starts, ends).tolist() == [1.0, 1.0, 1.0, 1.0]
    assert busy.mean_others("driver", starts, ends).tolist() == [1.0, 2.0, 1.5, 1.4]


@pytest.mark.parametrize("slowdown", [0.0, 0.4])
def test_a_known_slowdown_is_recovered_beside_the_costs(slowdown: float) -> None:
    rng = np.random.default_rng(1)
    found = []
    for tokens, beside in zip(rng.integers(100, 700, 300).tolist(), rng.uniform(0, 3, 300).tolist(), strict=True):
        factor = (1 + slowdown * min(beside, 1.0)) * max(1.0, (1 + beside) / 2)
        found.append(TimedWork((1.0, tokens), (0.02 + 5e-5 * tokens) * factor * (1 + 0.1 * rng.standard_normal()), beside))
    slowed, fitted = fit_slowdown("train", ("pass", "token"), found, cores=2)
    assert slowed == pytest.approx(slowdown, abs=0.06)
    assert list(fitted.coefficients.values()) == pytest.approx([0.02, 5e-5], rel=0.15)


def test_a_slowdown_is_not_made_up_where_nobody_was_ever_alone() -> None:
    always = [TimedWork((1.0,), 1.0 + 0.1 * number, 1.0) for number in range(10)]
    assert fit_slowdown("train", ("pass",), always, cores=2)[0] == 0.0
