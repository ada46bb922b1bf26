"""A reward model as one of the parts of a reward, beside those that reward processes give.

consumes: a sample
waits for: the reward processes and the model's engine, side by side
is unblocked by: both; the model's deadline
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from asyncflow.rewards.base import RewardFailure, Sample, Score, weighted
from asyncflow.rewards.delays import Scoring


def by_model(compute: Callable[[Sample], Awaitable[float]], path: str, failures: Counter[str], deadline_seconds: float) -> Scoring:
    """A score of one part, what `compute` gives. A sample fails, and is counted, for which it raises, runs out of memory or has no
    finite number, and while which the model answers nobody for `deadline_seconds`: it computes one after another."""
    clock = asyncio.get_running_loop().time
    answered = clock()

    async def answer(sample: Sample) -> float:
        nonlocal answered
        began, computing = clock(), asyncio.ensure_future(compute(sample))
        try:
            while not computing.done():
                left = max(began, answered) + deadline_seconds - clock()
                if left <= 0:
                    raise TimeoutError
                await asyncio.wait([computing], timeout=left)
        finally:
            computing.cancel()  # nothing, if it is done
        answered = clock()
        return computing.result()

    def failed(kind: str, what: str) -> RewardFailure:
        failures[kind] += 1
        return RewardFailure(kind, f"reward model {path} {what}")

    async def score(sample: Sample) -> Score:
        try:
            value = await answer(sample)
        except TimeoutError:
            raise failed("timeout", f"answered nobody for {deadline_seconds:g} s (reward.deadline_seconds)") from None
        except MemoryError as error:
            raise failed("memory", f"ran out of memory: {error}") from error
        except Exception as error:  # as of a scorer: any exception fails the sample, and the sample's owner is told
            raise failed("raised", f"raised {type(error).__name__}: {error}") from error
        if not math.isfinite(value):
            raise failed("invalid", f"returned {value}, which is no finite number")
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
