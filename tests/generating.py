"""Responses of a rollout engine, for tests of every kind of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import numpy as np

from asyncflow.engines.base import Response, RolloutEngine, SampleKey, Sampling
from tests.patience import until

PROMPT: Final = np.arange(7, 27)
KEY: Final = SampleKey(seed=11, prompt_index=5)


async def responses(
    engine: RolloutEngine,
    samples: Sequence[int] = (0,),
    length: int = 40,
    temperature: float = 1.0,
    prompt: np.ndarray = PROMPT,
    key: SampleKey = KEY,
) -> dict[int, Response]:
    """Responses to one prompt, by sample."""
    stream = engine.generate(prompt, samples=samples, sampling=Sampling(temperature, length), key=key)
    return {response.sample: response async for response in stream}


async def under_way(engine: RolloutEngine, samples: Sequence[int], length: int = 200) -> asyncio.Task[dict[int, Response]]:
    """Responses, more than the engine makes at once: the first has come, and others are being made."""
    made, stream = {}, engine.generate(PROMPT, samples=samples, sampling=Sampling(max_new_tokens=length), key=KEY)

    async def take() -> dict[int, Response]:
        async for response in stream:
            made[response.sample] = response
        return made

    task = asyncio.create_task(take())
    await until(lambda: made or task.done(), 60)
    assert not task.done()
    return task
