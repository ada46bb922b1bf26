"""Samplers: whole models installed where they are needed, adapters loaded beside one another, the oldest request first."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from asyncflow.engines.base import Response, SampleKey, Sampling
from asyncflow.service.limits import Busy
from asyncflow.service.tinker.samplers import ReadWeights, SampleRequest, SamplerFiles, Samplers
from asyncflow.types import LoraSpec, UserError
from tests.patience import patience

A, B, C, GONE = Path("a"), Path("b"), Path("c"), Path("gone")
ADAPTERS = P, Q, R = Path("p"), Path("q"), Path("r")
LORA = LoraSpec(4, 8.0)


class Engine:
    """Engine whose responses tell its weights, and end when they are let go."""

    def __init__(self) -> None:
        self.weights, self.installs, self.running = A, [], 0
        self.names: set[str] = set()  # of what is loaded, or on its way
        self.loaded: dict[str, Path] = {}
        self.slow: tuple[Path, ...] = ADAPTERS
        self.calls: list[str] = []  # what was loaded and unloaded
        self.named: list[str] = []  # of the requests under way
        self.go, self.may_load = asyncio.Event(), asyncio.Event()
        self.may_load.set()

    async def install(self, version: int, tensors: dict[str, Path]) -> None:
        assert not self.running, "weights change while responses are made under the old ones"
        self.weights = tensors["weights"]
        self.installs.append((version, self.weights))

    async def load_adapter(self, name: str, lora: LoraSpec, tensors: dict[str, Path]) -> None:
        assert lora == LORA and name not in self.names and len(self.names) < 2, "there is no room"
        self.names.add(name)
        if tensors["weights"] in self.slow:
            await self.may_load.wait()
        self.loaded[name] = tensors["weights"]
        self.calls.append(f"+{self.loaded[name]}")

    async def unload_adapter(self, name: str) -> None:
        assert str(self.loaded[name]) not in self.named
        self.names.remove(name)
        self.calls.append(f"-{self.loaded.pop(name)}")

    async def generate(self, prompt_ids, *, samples, sampling, key, adapter):
        weights = self.weights if adapter is None else self.loaded[adapter]
        assert adapter is None or self.weights == A, "an adapter over another base"
        self.running += 1
        self.named.append(str(weights))
        try:
            await self.go.wait()
            for sample in reversed(samples):
                token = ord(str(weights)) + 1000 * sample
                yield Response(sample, np.array([token]), np.zeros(1, np.float32), np.zeros((1, 2), np.int64), "stop")
        finally:
            self.running -= 1
            self.named.remove(str(weights))

    async def log_probs(self, token_ids, adapter):
        return -token_ids[1:].astype(np.float32) - (0 if adapter is None else ord(str(self.loaded[adapter])))

    async def close(self) -> None:
        self.go.set()


def read(folder: Path) -> ReadWeights:
    if folder == GONE:
        raise FileNotFoundError(folder)
    return ReadWeights({"weights": folder}, LORA if folder in ADAPTERS else None)


def samplers(*engines: Engine, largest_queue: int = 10) -> Samplers:
    return Samplers(engines, A, read, largest_queue=largest_queue, num_adapters=2)


def request(weights: Path, num_samples: int = 1, scored: int = 0) -> SampleRequest:
    files = SamplerFiles(A, weights) if weights in ADAPTERS else SamplerFiles(weights)
    return SampleRequest(files, np.arange(1, 5), num_samples, Sampling(), SampleKey(0, 0), scored)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0.01)


def names(outputs) -> str:
    return "".join(chr(int(output.sequences[0].token_ids[0])) for output in outputs)


async def test_samples_come_in_their_order_with_the_prompt_scored() -> None:
    engine = Engine()
    engine.go.set()
    output = await samplers(engine).sample(request(A, 3, scored=2))
    assert [one.token_ids.tolist() for one in output.sequences] == [[97], [1097], [2097]]
    assert output.prompt_logprobs is not None and np.isnan(output.prompt_logprobs[:2]).all()
    assert output.prompt_logprobs[2:].tolist() == [-3.0, -4.0]


async def test_other_weights_wait_for_an_idle_engine_and_nobody_overtakes() -> None:
    engine = Engine()
    made = samplers(engine)
    asked = [asyncio.create_task(made.sample(request(weights))) for weights in (A, A, B, A, C)]
    await settle()
    assert engine.running == 2 and not engine.installs
    engine.go.set()
    assert names(await asyncio.gather(*asked)) == "aabac"
    assert engine.installs == [(1, B), (2, A), (3, C)]


async def test_two_engines_serve_two_models_side_by_side() -> None:
    engines = [Engine(), Engine()]
    made = samplers(*engines)
    asked = [asyncio.create_task(made.sample(request(weights))) for weights in (A, B, A, B)]
    await settle()
    assert [engine.running for engine in engines] == [2, 2] and sum(len(engine.installs) for engine in engines) == 1
    for engine in engines:
        engine.go.set()
    assert names(await asyncio.gather(*asked)) == "abab"


async def test_weights_that_are_gone_are_a_sentence_and_the_next_request_is_served() -> None:
    engine = Engine()
    engine.go.set()
    made = samplers(engine)
    with pytest.raises(UserError, match="not there any more"):
        await made.sample(request(GONE))
    gone = SamplerFiles(A, GONE)
    for _ in range(3):
        with pytest.raises(UserError, match="not there any more"):
            await made.sample(SampleRequest(gone, np.arange(1, 5), 1, Sampling(), SampleKey(0, 0)))
    assert names([await made.sample(request(each)) for each in (A, B, P, Q)]) == "abpq"
    assert engine.installs == [(1, B), (2, A)]


async def test_a_request_that_is_cancelled_leaves_its_place_to_the_next() -> None:
    engine = Engine()
    made = samplers(engine, largest_queue=2)
    first, waits, next_one = (asyncio.create_task(made.sample(request(weights))) for weights in (A, B, C))
    await settle()
    with pytest.raises(Busy, match="2 requests for samples wait"):
        await made.sample(request(A))
    first.cancel()
    waits.cancel()
    await settle()
    engine.go.set()
    assert names([await next_one]) == "c" and engine.installs == [(1, C)]


async def asked(made: Samplers, *weights: Path) -> list[asyncio.Task]:
    """Requests for these weights, one after another, as far as they come."""
    tasks = [asyncio.create_task(made.sample(request(each))) for each in weights]
    await settle()
    return tasks


async def test_two_adapters_and_their_base_are_sampled_from_at_once_on_one_engine() -> None:
    engine = Engine()
    made = samplers(engine)
    running = await asked(made, P, A, Q, P)
    assert sorted(engine.named) == ["a", "p", "p", "q"]
    engine.go.set()
    assert names(await asyncio.gather(*running)) == "paqp"
    assert engine.calls == ["+p", "+q"] and not engine.installs
    scored = await made.sample(request(Q, scored=1))
    assert scored.prompt_logprobs is not None and scored.prompt_logprobs[-1] == -4 - ord("q")


async def test_the_adapter_that_was_named_longest_ago_goes_for_another_one() -> None:
    engine = Engine()
    engine.go.set()
    made = samplers(engine)
    for weights in (P, Q, P, R, P, Q):
        assert names([await made.sample(request(weights))]) == weights.name
    assert engine.calls == ["+p", "+q", "-q", "+r", "-r", "+q"]


async def test_an_adapter_without_room_waits_for_one_that_is_not_in_use_and_nobody_overtakes() -> None:
    engine = Engine()
    made = samplers(engine)
    running = await asked(made, P, Q, R, P, A)
    assert sorted(engine.named) == ["p", "q"]
    running[1].cancel()
    await settle()
    assert sorted(engine.named) == ["a", "p", "p", "r"] and engine.calls == ["+p", "+q", "-q", "+r"]
    engine.go.set()
    assert names(await asyncio.gather(running[0], *running[2:])) == "prpa"


async def test_a_whole_model_waits_until_no_adapter_is_in_use_and_their_base_comes_back() -> None:
    engine = Engine()
    made = samplers(engine)
    running = await asked(made, P, B, Q)
    assert engine.named == ["p"] and not engine.installs
    engine.go.set()
    assert names(await asyncio.gather(*running)) == "pbq"
    assert engine.installs == [(1, B), (2, A)] and engine.calls == ["+p", "+q"]


async def test_an_adapter_is_loaded_once_whoever_waits_for_it_and_whoever_gives_up() -> None:
    engine = Engine()
    engine.go.set()
    engine.may_load.clear()
    made = samplers(engine)
    first, second, other = await asked(made, P, P, A)
    assert names([await other]) == "a", "nobody else waits for a load"
    first.cancel()
    await settle()
    engine.may_load.set()
    assert names([await second]) == "p" and engine.calls == ["+p"]
    # One that nobody waits for any more may go again, when it has come.
    engine.may_load.clear()
    (third,) = await asked(made, Q)
    third.cancel()
    await settle()
    last = await asked(made, P, R)
    engine.may_load.set()
    assert names(await asyncio.gather(*last)) == "pr" and engine.calls == ["+p", "+q", "-q", "+r"]


async def test_an_adapter_may_be_wanted_again_while_it_goes() -> None:
    engine = Engine()
    engine.go.set()
    engine.slow = (P,)
    engine.may_load.clear()
    made = samplers(engine)
    (first,) = await asked(made, P)
    first.cancel()
    await made.sample(request(Q))
    last = await asked(made, R, P)  # in the places of p, which has not come yet, and of q
    engine.may_load.set()
    assert names(await asyncio.gather(*last)) == "rp" and sorted(engine.loaded.values()) == [P, R]


async def test_an_idle_engine_is_taken_before_a_busy_one_that_has_the_adapter() -> None:
    engines = [Engine(), Engine()]
    made = samplers(*engines)
    running = await asked(made, P, P, P)
    assert [engine.named for engine in engines] == [["p", "p"], ["p"]]
    for engine in engines:
        engine.go.set()
    assert names(await asyncio.gather(*running)) == "ppp"


async def test_what_failed_to_come_once_is_tried_again() -> None:
    engine, failures = Engine(), [OSError("a disk"), ValueError("does not fit")]
    engine.go.set()

    def read_at_last(folder: Path) -> ReadWeights:
        if failures:
            raise failures.pop(0)
        return read(folder)

    made = Samplers([engine], A, read_at_last, largest_queue=10, num_adapters=2)
    for error in (UserError, ValueError):
        with pytest.raises(error):
            await made.sample(request(P))
    assert names([await made.sample(request(P))]) == "p"


async def test_a_request_that_is_cancelled_as_it_gets_its_engine_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    made = samplers(engine)
    (first,) = await asked(made, P)
    second, third = await asked(made, B, C)
    serve, waiter = made._serve_queue, made._queue[0][1]

    def served() -> None:
        serve()
        if waiter.done():
            second.cancel()

    monkeypatch.setattr(made, "_serve_queue", served)
    engine.go.set()
    async with asyncio.timeout(patience(10)):
        assert names(await asyncio.gather(first, third)) == "pc"
    assert second.cancelled() and waiter.done() and not waiter.cancelled()
