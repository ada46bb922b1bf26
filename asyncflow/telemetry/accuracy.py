"""What an evaluation's rewards say: estimates over prompts, and how sure they are. Pure, in float64.

    rewards of each prompt's n responses --> mean@n with an interval, pass@k for every k up to n

* `pass_at_k`: the probability that at least one of k responses is correct, estimated without bias from n >= k responses of which c
  are: 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374, equation 1).
* `interval`: of the mean over prompts, at 95%. A prompt's responses are no independent trials, so prompts are what is counted:
  where all rewards are 0 or 1, Wilson's interval (1927) for as many trials as would vary as much as the prompts' means do (the
  effective sample size of clustered samples, Korn and Graubard 1998); elsewhere a percentile bootstrap over prompts.
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
RESAMPLES: Final = 4000
METHODS: Final[Mapping[str, str]] = {
    "wilson": "Wilson's interval, with prompts as clusters",
    "bootstrap": f"percentile bootstrap over prompts, {RESAMPLES} resamples",
}


@dataclass(frozen=True, slots=True)
class Responses:
    """One prompt's. rewards float [n]; lengths int [n], tokens; truncated bool [n]. `prompt` counts the held-out prompts from 0."""

    prompt: int
    rewards: Array
    lengths: Array
    truncated: Array


@dataclass(frozen=True, slots=True)
class Interval95:
    """Where the mean over all prompts of the kind lies, at 95%."""

    low: float
    high: float
    method: Literal["wilson", "bootstrap"]


def pass_at_k(num_responses: int, num_correct: int, k: int) -> float:
    """The unbiased estimate for one prompt. Raises `ValueError` for k above the number of responses."""
    if not 0 < k <= num_responses or not 0 <= num_correct <= num_responses:
        raise ValueError(f"pass@{k} cannot be estimated from {num_responses} responses, {num_correct} of them correct")
    return 1.0 - math.comb(num_responses - num_correct, k) / math.comb(num_responses, k)


def mean_interval(prompts: Sequence[Array]) -> Interval95:
    """Of the mean over prompts of each prompt's mean reward. Each has one reward or more."""
    means = np.array([np.mean(rewards, dtype=np.float64) for rewards in prompts])
    if all(np.isin(rewards, (0.0, 1.0)).all() for rewards in prompts):
        return Interval95(*wilson(float(means.mean()), effective_size(means)), "wilson")
    return Interval95(*bootstrap(means), "bootstrap")


def effective_size(means: Array) -> float:
    """How many independent trials of 0 or 1 would vary as much as these means (float64 [m], each of 0 to 1).

    m of them, where each is 0 or 1, and more where they are less far apart.
    """
    p, m = float(means.mean()), len(means)
    squares = float(((means - p) ** 2).mean())
    most = p * (1.0 - p)
    return m * most / squares if squares > 0.0 else float(m)


def wilson(p: float, trials: float) -> tuple[float, float]:
    """The interval around a share `p` of so many trials; within 0 to 1 also where `p` is one of these."""
    centre = (p + Z_95**2 / (2 * trials)) / (1 + Z_95**2 / trials)
    half = Z_95 * math.sqrt(p * (1 - p) / trials + Z_95**2 / (4 * trials**2)) / (1 + Z_95**2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap(means: Array) -> tuple[float, float]:
    """From means (float64 [m]) drawn again with replacement; the same means give the same interval."""
    rng = np.random.default_rng(0)
    m = len(means)
    at_once = max(1, 2**22 // m)
    drawn = [means[rng.integers(m, size=(min(at_once, RESAMPLES - done), m))].mean(axis=1) for done in range(0, RESAMPLES, at_once)]
    low, high = np.quantile(np.concatenate(drawn), (0.025, 0.975))
    return float(low), float(high)


def powers_up_to(num_responses: int) -> list[int]:
    """The k of pass@k: powers of two, and all responses."""
    powers = [1 << i for i in range(num_responses.bit_length()) if 1 << i <= num_responses]
    return powers if powers[-1:] == [num_responses] else [*powers, num_responses]


def figures(kind: str, prompts: Sequence[Responses], *, correct_from: float, num_samples: int) -> dict[str, float | int]:
    """The figures of a kind of responses (sampled, greedy), by metric name; none without a response.

    `accuracy`: the mean reward, over prompts (mean@n); `pass@k`: a response with a reward of `correct_from` or more is correct, for
    k up to `num_samples`, over the prompts that have k responses (some may have failed to be scored).
    """
    if not prompts:
        return {}
    lengths, truncated = (np.concatenate([getattr(p, name) for p in prompts]) for name in ("lengths", "truncated"))
    interval = mean_interval([p.rewards for p in prompts])
    row: dict[str, float | int] = {
        f"accuracy/{kind}": float(np.mean([np.mean(p.rewards, dtype=np.float64) for p in prompts])),
        f"interval/{kind}/low": interval.low,
        f"interval/{kind}/high": interval.high,
        f"num_responses/{kind}": len(lengths),
        f"response_length/{kind}/mean": float(lengths.mean()),
        f"response_length/{kind}/median": float(np.median(lengths)),
        f"response_length/{kind}/max": int(lengths.max()),
        f"clipped_ratio/{kind}": float(truncated.mean()),
    }
    for k in powers_up_to(num_samples):
        counts = [(len(p.rewards), int((p.rewards >= correct_from).sum())) for p in prompts if len(p.rewards) >= k]
        if counts:
            row[f"pass@{k}/{kind}"] = float(np.mean([pass_at_k(n, c, k) for n, c in counts]))
    return row
