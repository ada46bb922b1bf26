"""Metrics of the user's own: a scorer, or an algorithm's `advantages`, names a number, and the step's metrics have its mean.

from asyncflow.own_metrics import log_metric

def score(sample):
    log_metric("num_steps", sample.response.count("\\n"))        # own/num_steps
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

MetricSums = dict[str, tuple[int, float]]
"""By name, how many numbers there were, and their sum."""

StepSums = dict[int, MetricSums]
"""Sums by training step."""

PREFIX: Final = "own/"
MAX_NAMES: Final = 64
_NAME: Final = re.compile(r"[\w.][\w./-]{0,99}")
_collected: ContextVar[MetricSums | None] = ContextVar("collected", default=None)
step_scored: ContextVar[int | None] = ContextVar("step_scored", default=None)
"""Training step whose response is scored in this context; None: an evaluation's."""


def log_metric(name: str, value: Any) -> None:
    """Add a finite number to what the mean `own/<name>` is of. Elsewhere than in a scorer or in `advantages` it does nothing, so
    both can be tried alone.

    Raises `ValueError` for another name than letters, digits and `_ . / -`, for what is no finite number, and for more than
    `MAX_NAMES` names of one sample, or of one group.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"a metric's name is made of letters, digits and _ . / -, at most 100 of them, which {name!r:.120} is not")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the metric {name!r} is to be a finite number, not {value!r:.60}")
    if (sums := _collected.get()) is not None:
        if name not in sums and len(sums) >= MAX_NAMES:
            raise ValueError(f"there are {MAX_NAMES} metrics of your own already, so {name!r} is one too many")
        add(sums, {name: (1, number)})


@contextmanager
def collecting() -> Iterator[MetricSums]:
    """Context in which `log_metric` adds to what is returned."""
    sums: MetricSums = {}
    token = _collected.set(sums)
    try:
        yield sums
    finally:
        _collected.reset(token)


def add(sums: MetricSums, more: Mapping[str, tuple[int, float]]) -> None:
    """Add sums to sums. Names above `MAX_NAMES` are left out: many samples, each with few names, may come to more."""
    for name, (count, total) in more.items():
        if name not in sums and len(sums) >= MAX_NAMES:
            continue
        before = sums.get(name, (0, 0.0))
        sums[name] = before[0] + count, before[1] + total


def means(sums: Mapping[str, tuple[int, float]]) -> dict[str, float]:
    """The means, by the names that metrics have."""
    return {f"{PREFIX}{name}": total / count for name, (count, total) in sums.items() if count}
