"""A value for samples that cannot be scored, where the user has configured one.

consumes: the score of a sample
waits for: that, as often as it may be tried
is unblocked by: the reward processes
"""

from __future__ import annotations

from asyncflow.rewards.base import RewardFailure, Sample, Score
from asyncflow.rewards.delays import Scoring


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
