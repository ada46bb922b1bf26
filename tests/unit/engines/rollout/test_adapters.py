"""Several adapters on one engine at once: a response has the bits of an engine that has its adapter installed, in any company."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncflow.attestation import fault_of
from asyncflow.bit_sums import sum_of
from asyncflow.engines.base import NO_TOKENS, Response, SampleKey, Sampling
from asyncflow.engines.rollout.adapter_bank import AdapterBank
from asyncflow.engines.rollout.decoder_weights import load_tensors
from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.engines.rollout.slot_options import AdapterRoom
from asyncflow.types import LoraSpec, UserError
from tests.depth import few
from tests.patience import patience, until
from tests.unit.engines.rollout.models import llama

Dtype = Literal["float32", "bfloat16"]
SPECS = {
    "one": LoraSpec(4, 8.0),
    "two": LoraSpec(1, 3.0, ("q_proj", "v_proj", "down_proj")),
    "three": LoraSpec(7, 7.0, ("up_proj", "o_proj", "k_proj")),
}
NAMES = (None, *SPECS)
ROOM = AdapterRoom(number=3, rank=8)
KEY = SampleKey(3, 8)
# One array for all: what shares keys by the array alone takes another adapter's.
LONG, SHORT = np.arange(300) * 7 % 64, np.arange(5, 20)
OBSERVED = np.arange(9, 18)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"), hidden_size=40)


@pytest.fixture(scope="module")
def adapters(path: Path) -> dict[str, dict[str, Tensor]]:
    engine, generator = SlotEngine(path, num_slots=1, max_context=8), torch.Generator().manual_seed(0)
    shapes = {name: engine._decoder.lora.new(spec).slices for name, spec in SPECS.items()}
    asyncio.run(engine.close())
    return {
        name: {each: torch.randn(piece.shape, generator=generator) * 0.2 for each, piece in slices.items()}
        for name, slices in shapes.items()
    }


Adapters = dict[str, dict[str, Tensor]]


@contextlib.asynccontextmanager
async def opened(path: Path, dtype: Dtype, num_slots: int = 16, **chosen: Any) -> AsyncIterator[SlotEngine]:
    engine = SlotEngine(path, num_slots=num_slots, max_context=400, dtype=dtype, stop_ids=(), **chosen)
    try:
        assert engine.is_deterministic, engine.why_not_deterministic
        yield engine
    finally:
        await engine.close()


@contextlib.asynccontextmanager
async def with_adapters(
    path: Path, adapters: Adapters, dtype: Dtype, names: Iterable[str] = SPECS, **chosen: Any
) -> AsyncIterator[SlotEngine]:
    async with opened(path, dtype, adapter_room=ROOM, **chosen) as engine:
        for name in names:
            await engine.load_adapter(name, SPECS[name], adapters[name])
        yield engine


@contextlib.asynccontextmanager
async def as_installed(path: Path, adapters: Adapters, name: str | None, dtype: Dtype, **chosen: Any) -> AsyncIterator[SlotEngine]:
    """An engine of a run: its one adapter is installed, or it has none."""
    async with opened(path, dtype, lora=None if name is None else SPECS[name], **chosen) as engine:
        if name is not None:
            await engine.install(1, adapters[name])
        yield engine


async def group(
    engine: SlotEngine, prompt: np.ndarray, samples: range, length: int = 12, **named: str | None
) -> dict[int, Response]:
    sampling = Sampling(max_new_tokens=length)
    return {each.sample: each async for each in engine.generate(prompt, samples=samples, sampling=sampling, key=KEY, **named)}


async def episode(engine: SlotEngine, **named: str | None) -> list[Response]:
    """Two turns, with something observed between them."""
    after, turns = NO_TOKENS, []
    for keeps in (True, False):
        sampling = Sampling(max_new_tokens=8, keeps=keeps)
        stream = engine.generate(SHORT, samples=[7], sampling=sampling, key=KEY, after=after, **named)
        turns += [each async for each in stream]
        after = np.concatenate([after, turns[-1].token_ids, OBSERVED])
    return turns


def bits(responses: Iterable[Response]) -> list[bytes]:
    return [part for each in responses for part in (each.token_ids.tobytes(), each.logprobs.tobytes())]


Work = Callable[..., Awaitable[list[bytes]]]


async def of_groups(engine: SlotEngine, **named: str | None) -> list[bytes]:
    long, short = await asyncio.gather(group(engine, LONG, range(2), **named), group(engine, SHORT, range(3), 20, **named))
    return bits([made[sample] for made in (long, short) for sample in sorted(made)])


async def of_an_episode(engine: SlotEngine, **named: str | None) -> list[bytes]:
    return bits(await episode(engine, **named))


async def log_probs(engine: SlotEngine, **named: str | None) -> list[bytes]:
    return [(await engine.log_probs(LONG[:150], **named)).tobytes()]


async def everything(engine: SlotEngine, **named: str | None) -> list[bytes]:
    parts = await asyncio.gather(*(work(engine, **named) for work in (of_groups, of_an_episode, log_probs)))
    return [each for part in parts for each in part]


async def expected(path: Path, adapters: Adapters, dtype: Dtype, name: str | None) -> list[bytes]:
    """One request after another, each alone in an engine that has its adapter installed."""
    async with as_installed(path, adapters, name, dtype) as engine:
        return [each for work in (of_groups, of_an_episode, log_probs) for each in await work(engine)]


def seen_together(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Adapters of each pass from now on."""
    passes, rows_of = [], AdapterBank.rows_of

    def seen(self: AdapterBank, numbers: np.ndarray) -> Any:
        passes.append(set(numbers.tolist()))
        return rows_of(self, numbers)

    monkeypatch.setattr(AdapterBank, "rows_of", seen)
    return passes


WAYS: list[dict[str, Any]] = [
    {"num_slots": 40, "num_parked": 4},
    {"num_slots": 5, "num_parked": 1, "prefill_chunk": 1, "speculation": 2},
    *few([], [{"num_slots": 13, "num_parked": 0, "prefill_chunk": 130, "speculation": 3}]),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_bits_are_those_of_an_engine_with_that_adapter_alone(
    path: Path, adapters: Adapters, dtype: Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {name: await expected(path, adapters, dtype, name) for name in NAMES}
    assert len({tuple(each) for each in wanted.values()}) == len(NAMES), "an adapter changes nothing"
    for way in WAYS:
        async with with_adapters(path, adapters, dtype, **way) as engine:
            passes = seen_together(monkeypatch)
            made = await asyncio.gather(*(everything(engine, adapter=name) for name in NAMES))
            monkeypatch.undo()
        assert max(map(len, passes)) == len(NAMES), "they were not computed together"
        for name, each in zip(NAMES, made, strict=True):
            assert each == wanted[name], (name, way)


async def test_loading_and_unloading_changes_no_bit_of_others(path: Path, adapters: Adapters) -> None:
    wanted = {name: await expected(path, adapters, "float32", name) for name in NAMES}
    async with with_adapters(path, adapters, "float32", ["one"]) as engine:
        running = [asyncio.create_task(everything(engine, adapter=name)) for name in (None, "one")]
        rounds = 0
        while rounds < 2 or not all(task.done() for task in running):
            for name in ("two", "three"):  # by turns, so that each has the number that the other had
                await engine.load_adapter(name, SPECS[name], adapters[name])
                assert await everything(engine, adapter=name) == wanted[name]
                await engine.unload_adapter(name)
            rounds += 1
        assert [await task for task in running] == [wanted[None], wanted["one"]]


@pytest.mark.parametrize("kv_on_install", ["keep", "recompute"])
async def test_whole_weights_are_installed_under_all_adapters(path: Path, adapters: Adapters, kv_on_install: str) -> None:
    generator = torch.Generator().manual_seed(5)
    other = {name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) for name, tensor in load_tensors(path).items()}
    chosen: dict[str, Any] = {"kv_on_install": kv_on_install, "prefill_chunk": 4096}

    async def interrupted(engine: SlotEngine, *names: dict[str, str | None]) -> list[list[bytes]]:
        """Install after the same number of tokens, whoever else there is."""
        await engine.pause()
        running = [asyncio.create_task(group(engine, LONG, range(2), 20, **named)) for named in names]
        await asyncio.sleep(0)
        for _ in range(8):
            await asyncio.wrap_future(engine._hand_in(engine._slots.step))
        await engine.install(2, other)
        await engine.resume()
        made = [await task for task in running]
        assert all(len(response.version_spans) == 2 for each in made for response in each.values())
        return [bits(each[sample] for sample in sorted(each)) for each in made]

    wanted = []
    for name in NAMES:
        async with as_installed(path, adapters, name, "float32", **chosen) as engine:
            wanted += await interrupted(engine, {})
    async with with_adapters(path, adapters, "float32", **chosen) as engine:
        assert await interrupted(engine, *({"adapter": name} for name in NAMES)) == wanted


async def test_an_adapter_goes_when_the_last_request_that_names_it_has_ended(path: Path, adapters: Adapters) -> None:
    async with with_adapters(path, adapters, "float32") as engine:
        await engine.pause()
        running = [asyncio.create_task(group(engine, SHORT, range(2), adapter=name)) for name in ("one", "two")]
        await asyncio.sleep(0)
        scoring = asyncio.create_task(engine.log_probs(SHORT, "three"))
        await asyncio.sleep(0)
        going = {name: asyncio.create_task(engine.unload_adapter(name)) for name in SPECS}
        await asyncio.wait([scoring], timeout=patience(10))  # between two steps, so also in a pause
        await asyncio.wait([going["three"]], timeout=patience(10))
        assert going["three"].done() and not going["one"].done() and not going["two"].done()
        for call in (engine.generate, engine.log_probs):
            with pytest.raises(ValueError, match="no adapter 'one' is loaded here"):
                given: Any = {} if call == engine.log_probs else {"samples": [0], "sampling": Sampling(), "key": KEY}
                found = call(SHORT, adapter="one", **given)
                await found  # type: ignore[misc]
        going["two"].cancel()  # it stays
        await asyncio.wait([going["two"]])
        await engine.resume()
        await going["one"]
        assert running[0].done(), "it has gone while a request names it"
        await running[1]
        await group(engine, SHORT, range(1), adapter="two")
        # One that is left early, or was never begun, holds nothing either.
        stream = engine.generate(SHORT, samples=[0, 1], sampling=Sampling(max_new_tokens=300), key=KEY, adapter="two")
        computed, left = engine.num_computed, asyncio.create_task(anext(stream))
        await until(lambda: engine.num_computed > computed)
        left.cancel()
        await asyncio.wait([left])
        never = engine.generate(SHORT, samples=[0], sampling=Sampling(), key=KEY, adapter="two")
        async with asyncio.timeout(patience(10)):
            await engine.unload_adapter("two")
        with pytest.raises(ValueError, match="no adapter 'two' is loaded here"):
            await anext(never)


async def turn(engine: SlotEngine, after: np.ndarray, **named: str | None) -> Response:
    sampling = Sampling(max_new_tokens=8, keeps=True)
    (made,) = [r async for r in engine.generate(SHORT, samples=[7], sampling=sampling, key=KEY, after=after, **named)]
    return made


async def test_keys_that_were_parked_are_not_those_of_another_adapter(path: Path, adapters: Adapters) -> None:
    async with with_adapters(path, adapters, "float32", ["one"], num_parked=2) as engine:
        first = await turn(engine, NO_TOKENS, adapter="one")
        after, number = np.concatenate([first.token_ids, OBSERVED]), engine._adapters.named("one").number
        await engine.load_adapter("two", SPECS["two"], adapters["two"])
        made = [await turn(engine, after, adapter="two")]
        await turn(engine, NO_TOKENS, adapter="one")
        await engine.unload_adapter("one")
        await engine.load_adapter("three", SPECS["three"], adapters["three"])
        assert engine._adapters.named("three").number == number, "it has the number whose keys were parked"
        made.append(await turn(engine, after, adapter="three"))
    for name, each in zip(("two", "three"), made, strict=True):
        async with as_installed(path, adapters, name, "float32") as engine:
            assert bits([each]) == bits([await turn(engine, after)])


async def test_what_does_not_fit_is_one_sentence_and_changes_nothing(path: Path, adapters: Adapters) -> None:
    async with with_adapters(path, adapters, "float32", ["one", "two"]) as engine:
        before = await of_groups(engine, adapter="one")
        mistakes = {
            "an adapter 'one' is loaded already: unload it first": ("one", SPECS["one"], adapters["one"]),
            "rank 9 exceeds the largest rank that this engine has room for, 8": ("new", LoraSpec(9, 9.0), adapters["one"]),
            "the adapter lacks 16 of 28 tensors, .* the first: it is for other targets": ("new", SPECS["one"], adapters["three"]),
            "of shape .* and the model takes": ("new", LoraSpec(3, 3.0), adapters["one"]),
        }
        for sentence, arguments in mistakes.items():
            with pytest.raises(ValueError, match=sentence):
                await engine.load_adapter(*arguments)
        await engine.load_adapter("three", SPECS["three"], adapters["three"])  # a failed one holds no room
        with pytest.raises(ValueError, match="3 adapters are loaded, which is all that this engine has room for: unload one"):
            await engine.load_adapter("four", SPECS["one"], adapters["one"])
        with pytest.raises(ValueError, match="no adapter 'four' is loaded here: load it before a request names it"):
            await engine.unload_adapter("four")
        assert await of_groups(engine, adapter="one") == before
    async with opened(path, "float32") as engine:
        with pytest.raises(ValueError, match="room for, 0"):
            await engine.load_adapter("one", SPECS["one"], adapters["one"])
    with pytest.raises(UserError, match=r"rollout\.engine\.adapter_room is for servers"):
        SlotEngine(path, num_slots=1, max_context=8, adapter_room=3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="closed"):
        await engine.load_adapter("one", SPECS["one"], adapters["one"])


async def test_each_adapter_is_attested_by_its_name(path: Path, adapters: Adapters) -> None:
    async with with_adapters(path, adapters, "bfloat16") as engine:
        for name, tensors in adapters.items():
            sums = {each: sum_of(each, tensor.bfloat16()) for each, tensor in tensors.items()}
            assert fault_of(await engine.attest(name), 1, sums) == ""
        whole = {each: sum_of(each, tensor.bfloat16()) for each, tensor in load_tensors(path).items()}
        assert fault_of(await engine.attest(), 1, whole) == ""


@pytest.mark.parametrize("speculation", [0, 4])
async def test_an_adapter_whose_logits_are_not_finite_ends_its_own_requests_alone(
    path: Path, adapters: Adapters, speculation: Any
) -> None:
    """Nor does any of its keys stay where others will have theirs."""

    async def made(name: str | None) -> list[bytes]:
        return bits([each for _, each in sorted((await group(engine, SHORT, range(3), 30, adapter=name)).items())])

    async with with_adapters(path, adapters, "float32", names=("one", "two"), num_slots=9, speculation=speculation) as engine:
        expected = {name: await made(name) for name in (None, "one", "two")}
        huge = {name: torch.full_like(tensor, 1e30) for name, tensor in adapters["three"].items()}
        await engine.load_adapter("three", SPECS["three"], huge)
        for prompt in (SHORT, LONG):
            beside = [asyncio.create_task(made(name)) for name in (None, "one")]
            with pytest.raises(RuntimeError, match="the weights of this adapter are broken"):
                await asyncio.wait_for(group(engine, prompt, range(3), 30, adapter="three"), patience(20))
            assert [await each for each in beside] == [expected[None], expected["one"]]
        left = asyncio.create_task(group(engine, LONG, range(3), 30, adapter="three"))  # in the midst of its prompt, maybe
        await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.wait([left])
        assert {name: await made(name) for name in expected} == expected
