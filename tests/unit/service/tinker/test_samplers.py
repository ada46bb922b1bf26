"""Samplers: weights by folder, installed where they are needed, the oldest request first."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from asyncflow.engines.base import Response, SampleKey, Sampling
from asyncflow.service.limits import Busy
from asyncflow.service.tinker.samplers import SampleRequest, Samplers
from asyncflow.types import UserError

A, B, C, GONE = Path("a"), Path("b"), Path("c"), Path("gone")


class Engine:
    """Engine whose responses tell its weights, and end when they are let go."""

    def __init__(self) -> None:
        self.weights, self.installs, self.running = A, [], 0
        self.go = asyncio.Event()

    async def install(self, version: int, tensors: dict[str, Path]) -> None:
        assert not self.running, "weights change while responses are made under the old ones"
        self.weights = tensors["weights"]
        self.installs.append((version, self.weights))

    async def generate(self, prompt_ids, *, samples, sampling, key):
        self.running += 1
        try:
            weights = self.weights
            await self.go.wait()
            for sample in reversed(samples):
                token = ord(str(weights)) + 1000 * sample
                yield Response(sample, np.array([token]), np.zeros(1, np.float32), np.zeros((1, 2), np.int64), "stop")
        finally:
            self.running -= 1

    async def log_probs(self, token_ids):
        return -token_ids[1:].astype(np.float32)

    async def close(self) -> None:
        self.go.set()


def load(folder: Path) -> dict[str, Path]:
    if folder == GONE:
        raise FileNotFoundError(folder)
    return {"weights": folder}


def request(weights: Path, num_samples: int = 1, scored: int = 0) -> SampleRequest:
    return SampleRequest(weights, np.arange(1, 5), num_samples, Sampling(), SampleKey(0, 0), scored)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0.01)


def names(outputs) -> str:
    return "".join(chr(int(output.sequences[0].token_ids[0])) for output in outputs)


async def test_samples_come_in_their_order_with_the_prompt_scored() -> None:
    engine = Engine()
    engine.go.set()
    output = await Samplers([engine], A, load, 10).sample(request(A, 3, scored=2))
    assert [one.token_ids.tolist() for one in output.sequences] == [[97], [1097], [2097]]
    assert output.prompt_logprobs is not None and np.isnan(output.prompt_logprobs[:2]).all()
    assert output.prompt_logprobs[2:].tolist() == [-3.0, -4.0]


async def test_other_weights_wait_for_an_idle_engine_and_nobody_overtakes() -> None:
    engine = Engine()
    made = Samplers([engine], A, load, 10)
    asked = [asyncio.create_task(made.sample(request(weights))) for weights in (A, A, B, A, C)]
    await settle()
    assert engine.running == 2 and not engine.installs
    engine.go.set()
    assert names(await asyncio.gather(*asked)) == "aabac"
    assert engine.installs == [(1, B), (2, A), (3, C)]


async def test_two_engines_serve_two_models_side_by_side() -> None:
    engines = [Engine(), Engine()]
    made = Samplers(engines, A, load, 10)
    asked = [asyncio.create_task(made.sample(request(weights))) for weights in (A, B, A, B)]
    await settle()
    assert [engine.running for engine in engines] == [2, 2] and sum(len(engine.installs) for engine in engines) == 1
    for engine in engines:
        engine.go.set()
    assert names(await asyncio.gather(*asked)) == "abab"


async def test_weights_that_are_gone_are_a_sentence_and_the_next_request_is_served() -> None:
    engine = Engine()
    engine.go.set()
    made = Samplers([engine], A, load, 10)
    with pytest.raises(UserError, match="not there any more"):
        await made.sample(request(GONE))
    assert names([await made.sample(request(A)), await made.sample(request(B))]) == "ab"


async def test_a_request_that_is_cancelled_leaves_its_place_to_the_next() -> None:
    engine = Engine()
    made = Samplers([engine], A, load, 2)
    first, waits, next_one = (asyncio.create_task(made.sample(request(weights))) for weights in (A, B, C))
    await settle()
    with pytest.raises(Busy, match="2 requests for samples wait"):
        await made.sample(request(A))
    first.cancel()
    waits.cancel()
    await settle()
    engine.go.set()
    assert names([await next_one]) == "c" and engine.installs == [(1, C)]
