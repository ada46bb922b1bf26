"""Contention measured: how much longer work takes while other workers of the machine compute beside it.

    spans -> number of busy workers at any moment -> of each timed piece of work: the mean number beside it
          -> the slowdown with which the pieces fit best

One run has all that is needed: at the beginning of a step only rollout computes, at its end only the trainer, and both between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from asyncflow.planner.fit import Fit, TimedWork, fit
from asyncflow.telemetry.idle import WAIT
from asyncflow.telemetry.spans import Span
from asyncflow.types import Array

SLOWDOWNS = np.arange(0.0, 3.001, 0.02)
"""Slowdowns that are tried. The largest: two processes that get in each other's way in caches and memory."""
LEAST_SPREAD = 0.05
"""Standard deviation of the share of time beside others, from which on a slowdown can be told from the rest."""


class BusyWorkers:
    """Number of workers that compute, over the time of a run."""

    def __init__(self, spans: Iterable[Span]) -> None:
        busy: dict[str, list[tuple[float, float]]] = {}
        for span in spans:
            if span.is_lane and span.task != WAIT:
                busy.setdefault(span.worker, []).append((span.start, span.end))
        self._bounds = {worker: np.sort(np.array(intervals), axis=0).T for worker, intervals in busy.items()}
        every = np.concatenate([np.zeros((2, 0)), *self._bounds.values()], axis=1)
        self._bounds[""] = np.sort(every, axis=1)
        self._sums = {
            worker: np.concatenate([np.zeros((2, 1)), np.cumsum(bounds, axis=1)], axis=1) for worker, bounds in self._bounds.items()
        }

    def mean_others(self, worker: str, starts: Array, ends: Array) -> Array:
        """Mean number of other workers that compute from each start to each end."""
        seconds = self._until("", ends) - self._until("", starts)
        if worker in self._bounds:
            seconds = seconds - self._until(worker, ends) + self._until(worker, starts)
        return np.asarray(seconds / np.maximum(ends - starts, 1e-9))

    def _until(self, worker: str, times: Array) -> Array:
        """Busy seconds of the worker (of all, if it is "") until each of the times."""
        (starts, ends), sums = self._bounds[worker], self._sums[worker]
        begun, ended = np.searchsorted(starts, times), np.searchsorted(ends, times)
        return np.asarray((times * begun - sums[0][begun]) - (times * ended - sums[1][ended]))


def share_of_cores(num_others: Array, cores: int) -> Array:
    """Share of the other cores that compute (0 to 1), which `Contention` multiplies a pool's slowdown with."""
    return np.minimum(num_others, cores - 1) / (cores - 1) if cores > 1 else np.zeros_like(num_others)


def fit_slowdown(name: str, terms: Sequence[str], samples: Sequence[TimedWork], cores: int) -> tuple[float, Fit]:
    """Slowdown of the samples' pool, and the fit of their seconds alone. Without samples both alone and beside others the slowdown
    is not known, and 0."""
    shares = share_of_cores(np.array([sample.num_others for sample in samples]), cores)
    if len(samples) == 0 or float(np.std(shares)) < LEAST_SPREAD:
        return 0.0, alone(name, terms, samples, 0.0, cores)
    fits = [(float(slowdown), alone(name, terms, samples, float(slowdown), cores)) for slowdown in SLOWDOWNS]
    return min(fits, key=lambda pair: pair[1].squares)


def alone(name: str, terms: Sequence[str], samples: Sequence[TimedWork], slowdown: float, cores: int) -> Fit:
    """Fit of what the samples would have taken alone, given their pool's slowdown."""
    return fit(name, terms, samples, factors_of(samples, slowdown, cores))


def factors_of(samples: Sequence[TimedWork], slowdown: float, cores: int) -> Array:
    """Times as long as alone that each sample takes: `Contention.factor`, for a mean number of workers beside it."""
    others = np.array([sample.num_others for sample in samples])
    return np.asarray((1.0 + slowdown * share_of_cores(others, cores)) * np.maximum(1.0, (1.0 + others) / cores))
