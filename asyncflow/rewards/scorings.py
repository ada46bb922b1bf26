"""Ways of scoring a sample beside and around the reward processes: a reward model, sums, a value on failure, delays.

consumes: samples
waits for: the reward processes and the model's engine, side by side; a sample's delay
is unblocked by: both; the model's deadline; the event loop's clock
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from asyncflow.rewards.base import RewardFailure, Sample, Score, weighted

Scoring = Callable[[Sample], Awaitable[Score]]


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
            raise failed("timeout", f"answered no request for {deadline_seconds:g} s (reward.deadline_seconds)") from None
        except MemoryError as error:
            raise failed("memory", f"ran out of memory: {error}") from error
        except Exception as error:  # as of a scorer: any exception fails the sample, and the sample's owner is told
            raise failed("raised", f"raised {type(error).__name__}: {error}") from error
        if not math.isfinite(value):
            raise failed("invalid", f"returned {value}, which is no finite number")
        return Score(value, (value,))

    return score


async def by_environment(sample: Sample) -> Score:
    """The rewards that the environment gave, summed over turns: a score of one part. An episode that a limit ended has one."""
    given = [reward for reward in sample.turn_rewards if reward is not None]
    if not given and sample.is_finished:
        raise RewardFailure("skipped", "the environment gave no reward")
    total = sum(given, start=0.0)
    return Score(total, (total,))


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


def with_fallback(score: Scoring, *, value: float, attempts: int, num_parts: int) -> Scoring:
    """`score`, tried so often; then `value`, with no part. What was skipped is not tried again, and has no value."""

    async def patient(sample: Sample) -> Score:
        for _ in range(attempts):
            try:
                return await score(sample)
            except RewardFailure as failure:
                if failure.kind == "skipped":
                    raise
        return Score(value, (None,) * num_parts)

    return patient


def delayed(score: Scoring, *, mean_seconds: float, salt: int) -> Scoring:
    """`score`, each reward late by `delay_seconds`; no reward process is held. By different delays `asyncflow verify` shows what
    does not depend on timing."""

    async def late(sample: Sample) -> Score:
        reward = await score(sample)
        await asyncio.sleep(delay_seconds(sample, mean_seconds, salt))
        return reward

    return late


def delay_seconds(sample: Sample, mean_seconds: float, salt: int) -> float:
    """Exponentially distributed, a function of the salt and the sample's prompt and response alone."""
    key = hashlib.sha256(f"{salt}\0{sample.prompt}\0{sample.response}".encode()).digest()
    uniform = int.from_bytes(key[:7], "big") / 2**56
    return -mean_seconds * math.log1p(-uniform)
