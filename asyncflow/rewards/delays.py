"""Injected delays: rewards that come later than they could, each by a time of its own that can be chosen again.

consumes: the score of a sample
waits for: its time; nobody else's, and no reward process is held
is unblocked by: the event loop's clock

What must not depend on timing is shown by running it twice with different delays (`asyncflow verify`).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable

from asyncflow.rewards.base import Sample, Score

Scoring = Callable[[Sample], Awaitable[Score]]


def delayed(score: Scoring, *, mean_seconds: float, salt: int) -> Scoring:
    """`score`, each reward late by `delay_seconds`."""

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
