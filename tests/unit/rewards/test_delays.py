"""Injected delays are a function of salt and sample, and hold up nobody else."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncflow.rewards.base import RewardFailure, Sample, Score
from asyncflow.rewards.delays import delay_seconds, delayed


def sample(number: int) -> Sample:
    return Sample("what?", f"it is {number}", {}, True)


def test_delays_are_exponential_and_another_salt_has_others() -> None:
    first, second = ([delay_seconds(sample(i), 0.2, salt) for i in range(4000)] for salt in (1, 2))
    assert first == [delay_seconds(sample(i), 0.2, 1) for i in range(4000)]
    for delays in (first, second):
        assert (
            min(delays) >= 0.0 and np.mean(delays) == pytest.approx(0.2, rel=0.1) and np.std(delays) == pytest.approx(0.2, rel=0.1)
        )
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1
    assert [delay_seconds(sample(i), 0.4, 1) for i in range(9)] == pytest.approx([2 * d for d in first[:9]])


async def test_a_reward_comes_late_and_a_failure_at_once_and_neither_waits_for_another() -> None:
    in_scorer: list[int] = []

    async def score(given: Sample) -> Score:
        number = int(given.response.split()[-1])
        in_scorer.append(number)
        if number < 0:
            raise RewardFailure("raised", "no")
        return Score(float(number), ())

    ended: list[float] = []
    late = delayed(score, mean_seconds=0.03, salt=5)

    async def one(number: int) -> None:
        ended.append((await late(sample(number))).reward)

    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(RewardFailure):
        await late(sample(-1))
    assert loop.time() - began < 0.02
    delays = [delay_seconds(sample(i), 0.03, 5) for i in range(20)]
    began = loop.time()
    await asyncio.gather(*map(one, range(20)))
    taken = loop.time() - began
    assert in_scorer == [-1, *range(20)]  # all were with the scorer before the first reward came
    assert max(delays) - 0.005 <= taken < sum(delays) / 2
    assert sorted(ended) == [*range(20)] and ended != sorted(ended)
