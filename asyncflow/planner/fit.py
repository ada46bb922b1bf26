"""Fits: seconds of a piece of work as a sum of terms, none of them negative, by least squares; and how well they fit.

    seconds = factor x (c0 x term 0 + c1 x term 1 + ...)        c >= 0

A model with few terms fits badly where it has the wrong shape, not only where the measurement is noisy. So the residual is that of
the means of samples of about one size: noise averages out in them, a wrong shape does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from asyncflow.types import Array

SIZES: Final = 5
"""Sizes of work, by what is predicted, whose mean residuals are looked at."""
LEAST_SAMPLES: Final = 3
OF_A_SIZE: Final = 8
"""Samples of one size, at least: from fewer the error of their mean is not known well enough to tell noise from a wrong shape."""
BAD: Final = 0.15
"""Mean residual of one size, as a fraction, from which on a fit is called bad."""
ERRORS: Final = 3.0
"""Standard errors that such a residual must differ from 0 by: less may be noise."""


@dataclass(frozen=True, slots=True)
class TimedWork:
    """A piece of work: its amounts, one for each term, its seconds, and how many workers computed beside it, in the mean."""

    amounts: tuple[float, ...]
    seconds: float
    num_others: float = 0.0


class Residual(msgspec.Struct, frozen=True):
    """Deviation of measured seconds from those of a model.

    `bias`: (measured - predicted) / predicted, over all samples. `worst`: the same for the size where it is largest, with that
    size's mean predicted seconds, `worst_seconds`. `noise`: mean absolute residual of single samples / mean seconds. `is_bad`:
    whether the worst one is more than noise explains.
    """

    name: str
    num_samples: int
    bias: float
    worst: float
    worst_seconds: float
    noise: float
    is_bad: bool

    def line(self) -> str:
        """The residual in one line."""
        line = f"{self.name:18} {self.num_samples:6,} samples  bias {self.bias:+6.1%}  worst size {self.worst:+6.1%}"
        return f"{line}  noise {self.noise:5.0%}"

    def warning(self) -> str:
        """Sentence that says what is wrong; "" where nothing is."""
        if not self.is_bad:
            return ""
        word = "longer" if self.worst > 0 else "shorter"
        return (
            f"{self.name}: work of about {1e3 * self.worst_seconds:.3g} ms takes {abs(self.worst):.0%} {word} than the cost model "
            f"says, which {self.num_samples} samples do not explain by noise: a term of the model is missing or counted twice"
        )


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted piece. `coefficients` by term, in seconds for each unit; `squares`: sum of squared residuals."""

    coefficients: dict[str, float]
    squares: float
    residual: Residual


def fit(name: str, terms: Sequence[str], samples: Sequence[TimedWork], factors: Array | float = 1.0) -> Fit:
    """Least squares with coefficients that are not negative. `factors`: times as long as the terms say that each sample takes.

    A term that is alike in all samples, beside a constant one, cannot be told from it, and gets 0.
    """
    if not samples:
        return Fit(dict.fromkeys(terms, 0.0), 0.0, residual(name, np.zeros(0), np.zeros(0)))
    seconds = np.array([sample.seconds for sample in samples])
    matrix = np.array([sample.amounts for sample in samples], float) * np.broadcast_to(factors, len(samples))[:, None]
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    best, squares = np.zeros(len(terms)), float((seconds**2).sum())
    for size in range(1, len(terms) + 1):  # the best of all subsets: with few terms that is quick, and exact
        for chosen in itertools.combinations(range(len(terms)), size):
            part = matrix[:, chosen] / scale[list(chosen)]
            found, _, rank, _ = np.linalg.lstsq(part, seconds, rcond=1e-9)
            if rank < size or (found < 0).any():
                continue
            of_part = float(((seconds - part @ found) ** 2).sum())
            if of_part < squares * (1 - 1e-9):
                best, squares = np.zeros(len(terms)), of_part
                best[list(chosen)] = found / scale[list(chosen)]
    if (whole := float((matrix @ best).sum())) > 0:
        best *= seconds.sum() / whole  # all samples together take what they took
        squares = float(((seconds - matrix @ best) ** 2).sum())
    coefficients = dict(zip(terms, best.tolist(), strict=True))
    return Fit(coefficients, squares, residual(name, matrix @ best, seconds))


def residual(name: str, predicted: Array, measured: Array) -> Residual:
    """Residual of a model that predicts seconds [N] where [N] were measured."""
    if len(measured) < LEAST_SAMPLES or not predicted.sum():
        return Residual(name, len(measured), 0.0, 0.0, 0.0, 0.0, False)
    off, order = measured - predicted, np.argsort(predicted, kind="stable")
    worst, worst_seconds, is_bad = 0.0, 0.0, False
    sizes = max(1, min(SIZES, len(order) // OF_A_SIZE)) if np.ptp(predicted) > 1e-6 * predicted.mean() else 1
    for size in np.array_split(order, sizes):
        relative = float(off[size].sum() / predicted[size].sum())
        error = float(off[size].std() / np.sqrt(len(size)) / predicted[size].mean())
        if abs(relative) > abs(worst):
            worst, worst_seconds = relative, float(predicted[size].mean())
        is_bad = is_bad or abs(relative) > max(BAD, ERRORS * error)
    bias, noise = float(off.sum() / predicted.sum()), float(np.abs(off).mean() / measured.mean())
    return Residual(name, len(measured), bias, worst, worst_seconds, noise, is_bad)
