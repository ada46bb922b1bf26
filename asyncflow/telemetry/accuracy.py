"""Accuracy in an evaluation: estimates over prompts, and their confidence. Pure, in float64.

    rewards of each prompt's n responses --> mean@n, and pass@k for k up to n, each with an interval

* `pass_at_k`: the probability that at least one of k responses is correct, estimated without bias from n >= k responses of which c
  are: 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374, equation 1).
* `interval`: of the mean over prompts, at 95%. A prompt's responses are no independent trials, so prompts are what is counted:
  where all rewards are 0 or 1, Wilson's interval (1927) for as many trials as would vary as much as the prompts' means do (the
  effective sample size of clustered samples, Korn and Graubard 1998); elsewhere Student's t interval over prompts. That of
  pass@k is Wilson's, too: its estimates lie from 0 to 1, and often all at one end, where the t interval is a point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from asyncflow.types import Array

Z_95: Final = 1.959963984540054
"""The normal distribution's 97.5% quantile."""
_T_95: Final = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157)
"""Student's t distribution's, for 1 to 9 degrees of freedom."""
METHODS: Final[Mapping[str, str]] = {
    "wilson": "Wilson's interval, with prompts as clusters",
    "t": "Student's t interval over prompts",
}


@dataclass(frozen=True, slots=True)
class Responses:
    """Responses to one prompt. rewards float [n]; lengths int [n], tokens; truncated bool [n]. `prompt` counts the held-out
    prompts from 0.

    `num_unscored` of them could not be scored, and have the value that the user wants then.
    """

    prompt: int
    rewards: Array
    lengths: Array
    truncated: Array
    num_unscored: int = 0


@dataclass(frozen=True, slots=True)
class Interval95:
    """Interval of 95% for the mean over all prompts of the kind."""

    low: float
    high: float
    method: Literal["wilson", "t"]


def pass_at_k(num_responses: int, num_correct: int, k: int) -> float:
    """The unbiased estimate for one prompt. Raises `ValueError` for k above the number of responses."""
    if not 0 < k <= num_responses or not 0 <= num_correct <= num_responses:
        raise ValueError(f"pass@{k} cannot be estimated from {num_responses} responses, {num_correct} of them correct")
    return 1.0 - math.comb(num_responses - num_correct, k) / math.comb(num_responses, k)


def is_correct(rewards: Array | Sequence[float], correct_from: float) -> Array:
    """bool [n]: which rewards count as correct. They are float32 on their way, so 0.7 is compared with the float32 next to 0.7."""
    return np.asarray(np.asarray(rewards, np.float32) >= np.float32(correct_from))


def mean_interval(prompts: Sequence[Array]) -> Interval95 | None:
    """Interval of 95% for the mean over prompts of each prompt's mean reward. Each prompt has one reward or more.

    None where there is nothing to estimate it from: one prompt, with rewards other than 0 and 1.
    """
    means = np.array([np.mean(rewards, dtype=np.float64) for rewards in prompts])
    if all(np.isin(rewards, (0.0, 1.0)).all() for rewards in prompts):
        size = effective_size(means, sum(map(len, prompts)))
        return Interval95(*wilson(float(means.mean()), size), "wilson")
    return Interval95(*t_interval(means), "t") if len(means) > 1 else None


def pass_interval(counts: Sequence[tuple[int, int]], k: int) -> tuple[float, float]:
    """Interval of 95% for pass@k over prompts. `counts`: of each prompt its responses, k or more, and how many of them are
    correct.

    For pass@1 it is `mean_interval` of correct responses as 1, others as 0. For k > 1 a prompt is one trial at most: where pass@k
    of most prompts is near 1, the few that are never solved decide, and the agreement of the others' estimates says nothing about
    those few.
    """
    estimates = np.array([pass_at_k(n, c, k) for n, c in counts])
    size = effective_size(estimates, sum(n for n, _ in counts))
    return wilson(float(estimates.mean()), size if k == 1 else min(size, len(counts)))


def effective_size(means: Array, num_responses: int) -> float:
    """Number of independent trials of 0 or 1 that would tell as much about the mean as these means (float64 [m], each of 0 to 1)
    do.

    p (1 - p) / s^2, where s^2 is the variance of the mean that follows from the spread of the means (m - 1 degrees of freedom),
    times (z / t_{m-1})^2, since few means tell little about their spread; no more than there are responses. m where the spread
    tells nothing: each prompt has one response, which is a trial, or all means are the same.
    """
    p, m = float(means.mean()), len(means)
    if num_responses == m or (means == means[0]).all():  # a variance of equal means may be 1e-34
        return float(m)
    variance = float(means.var(ddof=1)) / m
    return min(p * (1.0 - p) / variance * (Z_95 / t_quantile(m - 1)) ** 2, num_responses)


def t_quantile(degrees: int) -> float:
    """The 97.5% quantile of Student's t distribution, to 5 digits (Abramowitz and Stegun 26.7.5)."""
    if degrees <= len(_T_95):
        return _T_95[degrees - 1]
    z, v = Z_95, float(degrees)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / v**power for power, term in enumerate(terms, 1))


def wilson(p: float, trials: float) -> tuple[float, float]:
    """The interval around a share `p` of so many trials; within 0 to 1 also where `p` is one of these."""
    centre = (p + Z_95**2 / (2 * trials)) / (1 + Z_95**2 / trials)
    half = Z_95 * math.sqrt(p * (1 - p) / trials + Z_95**2 / (4 * trials**2)) / (1 + Z_95**2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def t_interval(means: Array) -> tuple[float, float]:
    """Around the mean of two means or more (float64 [m])."""
    m, centre = len(means), float(means.mean())
    half = t_quantile(m - 1) * float(means.std(ddof=1)) / math.sqrt(m)
    return centre - half, centre + half


def powers_up_to(num_responses: int) -> list[int]:
    """The k of pass@k: powers of two, and all responses."""
    powers = [1 << i for i in range(num_responses.bit_length()) if 1 << i <= num_responses]
    return powers if powers[-1:] == [num_responses] else [*powers, num_responses]


def figures(kind: str, prompts: Sequence[Responses], *, correct_from: float, num_samples: int) -> dict[str, float | int]:
    """The figures of a kind of responses (sampled, greedy), by metric name; none without a response.

    `accuracy`: the mean reward, over prompts (mean@n); `pass@k`: a response with a reward of `correct_from` or more is correct, for
    k up to `num_samples`, over the prompts that have k responses (some may have failed to be scored). `interval/`: of both, at 95%.
    """
    if not prompts:
        return {}
    lengths, truncated = (np.concatenate([getattr(p, name) for p in prompts]) for name in ("lengths", "truncated"))
    interval = mean_interval([p.rewards for p in prompts])
    bounds = {} if interval is None else {f"interval/{kind}/low": interval.low, f"interval/{kind}/high": interval.high}
    row: dict[str, float | int] = {
        f"accuracy/{kind}": float(np.mean([np.mean(p.rewards, dtype=np.float64) for p in prompts])),
        **bounds,
        f"num_responses/{kind}": len(lengths),
        f"response_length/{kind}/mean": float(lengths.mean()),
        f"response_length/{kind}/median": float(np.median(lengths)),
        f"response_length/{kind}/max": int(lengths.max()),
        f"clipped_ratio/{kind}": float(truncated.mean()),
    }
    for k in powers_up_to(num_samples):
        counts = [(len(p.rewards), int(is_correct(p.rewards, correct_from).sum())) for p in prompts if len(p.rewards) >= k]
        if counts:
            row[f"pass@{k}/{kind}"] = float(np.mean([pass_at_k(n, c, k) for n, c in counts]))
            row[f"interval/pass@{k}/{kind}/low"], row[f"interval/pass@{k}/{kind}/high"] = pass_interval(counts, k)
    return row
