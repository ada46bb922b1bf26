"""A reward model as one of the parts of a reward, beside those that reward processes give.

consumes: a sample
waits for: the reward processes and the model's engine, side by side
is unblocked by: both
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from asyncflow.rewards.base import RewardFailure, Sample, Score, weighted
from asyncflow.rewards.delays import Scoring


def by_model(compute: Callable[[Sample], Awaitable[float]], path: str, failures: Counter[str]) -> Scoring:
    """A score of one part, what `compute` gives. What it refuses by a `ValueError`, or has no number for, fails, and is counted."""

    async def score(sample: Sample) -> Score:
        try:
            value = await compute(sample)
        except ValueError as error:
            failures["raised"] += 1
            raise RewardFailure("raised", f"reward model {path}: {error}") from error
        if not math.isfinite(value):
            failures["invalid"] += 1
            raise RewardFailure("invalid", f"reward model {path} returned {value}, which is no finite number")
        return Score(value, (value,))

    return score


def together(scorings: Sequence[Scoring], weights: Sequence[float], num_parts: Sequence[int]) -> Scoring:
    """The weighted sum of all their parts, `num_parts` of each; of what one of them skips the others' alone."""

    async def parts_of(scoring: Scoring, count: int, sample: Sample) -> tuple[float | None, ...]:
        try:
            return (await scoring(sample)).parts
        except RewardFailure as failure:
            if failure.kind != "skipped":
                raise
            return (None,) * count

    async def score(sample: Sample) -> Score:
        found = await asyncio.gather(*(parts_of(each, n, sample) for each, n in zip(scorings, num_parts, strict=True)))
        parts = tuple(part for some in found for part in some)
        total = weighted(parts, weights)
        if total is None:
            raise RewardFailure("skipped", "no scorer has anything to say about this sample")
        return Score(total, parts)

    return score
