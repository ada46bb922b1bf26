"""The engine whose responses a client makes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncflow.attestation import Attestation
from asyncflow.engines.base import Response, SampleKey, Sampling
from asyncflow.service.generation import OVER, STORED, OutsideEngine
from asyncflow.types import RunError, UserError

PROMPT = np.arange(3)


class Loop:
    """The loop's side: it asks for a group's samples, and stores what comes."""

    def __init__(self) -> None:
        self.engine, self.got = OutsideEngine(8, 2, vocabulary=50), list[Response]()

    async def generate(self, group: int = 5, samples: tuple[int, ...] = (0, 2)) -> None:
        sampling = Sampling(max_new_tokens=4)
        async for response in self.engine.generate(PROMPT, samples=samples, sampling=sampling, key=SampleKey(0, group)):
            self.got.append(response)
            self.engine.resolve((group << 2) | response.sample, STORED)


def response(**changes: Any) -> Response:
    made: dict[str, Any] = {
        "sample": 0,
        "token_ids": np.array([7, 8]),
        "logprobs": np.array([-1.0, -0.5], np.float32),
        "version_spans": np.array([[0, 0]]),
        "finish_reason": "stop",
    }
    return Response(**(made | changes))


async def test_prompts_are_taken_once_and_responses_come_back_to_who_asked() -> None:
    loop = Loop()
    generating = asyncio.create_task(loop.generate())
    (prompt,) = (await loop.engine.take(4, 1.0)).prompts
    assert prompt.samples == [0, 2] and prompt.group == 5
    assert (await loop.engine.take(4, 0.01)).prompts == []
    assert await loop.engine.put([(22, response()), (20, response())]) == [STORED, STORED]
    await generating
    assert [each.sample for each in loop.got] == [2, 0]
    assert await loop.engine.put([(22, response()), (21, response())]) == [OVER, OVER]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"token_ids": np.arange(5), "logprobs": -np.ones(5, np.float32)}, "has 5 tokens: 1 to 4"),
        ({"token_ids": np.array([7, 50])}, "token id that is not in 0 to 49"),
        ({"logprobs": np.array([-1.0], np.float32)}, "2 tokens and 1 log-probs"),
        ({"logprobs": np.array([-1.0, np.nan], np.float32)}, "finite, and 0 at most"),
        ({"version_spans": np.array([[0, 0], [0, 0]])}, "not ascending"),
        ({"version_spans": np.array([[0, 0], [2, 0]])}, "not ascending"),
        ({"version_spans": np.array([[0, 1]])}, "says versions"),
    ],
    ids=str,
)
async def test_a_response_that_breaks_a_law_is_refused_and_nothing_is_taken(changes: dict[str, Any], why: str) -> None:
    loop = Loop()
    generating = asyncio.create_task(loop.generate(samples=(0, 1)))
    await loop.engine.take(1, 1.0)
    with pytest.raises(UserError, match=why):
        await loop.engine.put([(20, response()), (21, response(**changes))])
    assert loop.got == []
    assert await loop.engine.put([(20, response()), (21, response())]) == [STORED, STORED]
    await generating


async def test_weights_are_installed_by_the_client_and_spans_may_cross_the_change() -> None:
    loop = Loop()
    generating = asyncio.create_task(loop.generate(samples=(0,)))
    await loop.engine.take(1, 1.0)
    installing = asyncio.create_task(loop.engine.install(3, {}))
    assert (await loop.engine.take(1, 1.0)).install == 3
    with pytest.raises(RunError, match="version 2 is not the one"):
        loop.engine.installed(2)
    said = Attestation([(["model.norm.weight"], 7)])
    loop.engine.installed(3, said)
    await installing
    assert await loop.engine.attest() == said
    loop.engine.installed(3)  # said twice
    assert await loop.engine.put([(20, response(version_spans=np.array([[0, 0], [1, 3]])))]) == [STORED]
    await generating


async def test_a_client_whose_weights_are_not_confirmed_gets_no_prompts() -> None:
    loop = Loop()
    await loop.engine.pause()
    generating = asyncio.create_task(loop.generate(samples=(0,)))
    installing = asyncio.create_task(loop.engine.install(3, {}))
    assert (await loop.engine.take(1, 1.0)).install == 3
    loop.engine.installed(3)
    await installing
    assert (await loop.engine.take(1, 0.05)).prompts == []
    await loop.engine.resume()
    assert len((await loop.engine.take(1, 1.0)).prompts) == 1
    assert await loop.engine.put([(20, response(version_spans=np.array([[0, 3]])))]) == [STORED]
    await generating


async def test_an_end_is_told_to_everybody_who_waits() -> None:
    loop = Loop()
    asking = asyncio.create_task(loop.engine.take(1, 5.0))
    await asyncio.sleep(0)
    loop.engine.stop()
    assert (await asking).is_over
    with pytest.raises(RunError, match="the client has gone"):
        await loop.engine.install(1, {})


async def test_a_prompt_that_nobody_wants_any_more_is_handed_to_nobody() -> None:
    loop = Loop()
    generating = asyncio.create_task(loop.generate())
    await loop.engine.take(1, 1.0)
    generating.cancel()
    await asyncio.gather(generating, return_exceptions=True)
    assert await loop.engine.put([(20, response())]) == [OVER]
