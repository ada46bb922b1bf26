"""One suite over every rollout engine: what `RolloutEngine` says, of the embedded one, of vLLM, and of vLLM's stand-in.

The real vLLM takes part where ASYNCFLOW_VLLM_PYTHON names an interpreter that has it: one server for all tests
(`make test-deep SUITES=vllm`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from asyncflow.attestation import fault_of
from asyncflow.bit_sums import sum_of
from asyncflow.engines.base import Response, RolloutEngine, Sampling
from asyncflow.engines.rollout import ROLLOUT_ENGINES
from asyncflow.engines.rollout.vllm.client import ServerLost
from asyncflow.engines.rollout.vllm.engine import VllmEngine
from asyncflow.registry import build
from asyncflow.types import TensorSpec
from tests.conftest import MODEL
from tests.contract.devices import alike, needed_devices
from tests.depth import in_gate
from tests.generating import KEY, PROMPT, responses, under_way
from tests.patience import patience
from tests.vllm.servers import CONTEXT, fake_python

ENGINES = {
    **{name + device: name for name in ("slots", "transformers") for device in ("", "-cuda", "-npu")},
    **{"vllm-stand-in": "vllm", "vllm": "vllm"},  # its servers have their devices themselves
}
DEVICES = {name: name.rpartition("-")[2] for name in ENGINES if name.endswith(("-cuda", "-npu"))}
Opened = Callable[..., AbstractAsyncContextManager[RolloutEngine]]


@pytest.fixture(params=list(ENGINES))
def opened(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """`opened(model=MODEL, **changes)`: an engine, as a worker builds it, that is closed with the block."""
    options: dict[str, Any] = {}
    if request.param in DEVICES:
        options["device"] = DEVICES[request.param]
        needed_devices(options["device"])
    elif request.param == "vllm-stand-in":
        options["python"] = str(fake_python(tmp_path))
    elif request.param == "vllm":
        server = request.getfixturevalue("vllm_server")
        monkeypatch.setenv("THE_KEY", server.key)
        options |= {"addresses": [server.address], "key_variable": "THE_KEY"}

    @contextlib.asynccontextmanager
    async def opened(model: Path = MODEL, **changes: Any) -> AsyncIterator[RolloutEngine]:
        arguments = {"model_path": model, "num_slots": 6, "max_context": CONTEXT, "stop_ids": (), **options, **changes}
        engine = await asyncio.to_thread(build, "rollout engine", ENGINES[request.param], arguments, ROLLOUT_ENGINES)
        try:
            yield engine
        finally:
            await engine.close()

    return opened


@pytest.fixture
def own_device(opened: Opened, request: pytest.FixtureRequest) -> str:
    """Where the engine computes."""
    return DEVICES.get(request.node.callspec.params["opened"], "cpu")


@pytest.fixture
def is_model(opened: Opened, request: pytest.FixtureRequest) -> None:
    """For tests of what a model computes."""
    if request.node.callspec.params["opened"] == "vllm-stand-in":
        pytest.skip("the stand-in has no model")


def changed(shift: float) -> dict[str, torch.Tensor]:
    """Other weights."""
    return {name: tensor * (1 + shift) for name, tensor in load_file(MODEL / "model.safetensors").items()}


def saved(folder: Path, shift: float) -> Path:
    """A model with those weights."""
    shutil.copytree(MODEL, folder)
    save_file(changed(shift), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def reference(model: Path, response: Response, temperature: float = 1.0) -> np.ndarray:
    """The log-probs that transformers gives the response's tokens."""
    tokens = torch.tensor(np.concatenate([PROMPT, response.token_ids]))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens[None]).logits[0, len(PROMPT) - 1 : -1]
    log_probs: np.ndarray = (logits / temperature).log_softmax(-1).gather(1, tokens[len(PROMPT) :, None])[:, 0].numpy()
    return log_probs


async def turn(engine: RolloutEngine, after: np.ndarray, length: int, *, keeps: bool, temperature: float = 1.0) -> Response:
    sampling = Sampling(temperature, length, keeps=keeps)
    (made,) = [each async for each in engine.generate(PROMPT, samples=[2], sampling=sampling, key=KEY, after=after)]
    return made


async def test_a_later_turn_stands_behind_all_that_was_said(opened: Opened, is_model: None) -> None:
    async with opened() as engine:
        first = await turn(engine, np.empty(0, np.int64), 12, keeps=True)
        said = np.concatenate([first.token_ids, np.arange(30, 50)])
        second = await turn(engine, said, 12, keeps=False)
        engine.forget(KEY, 2)
    whole = Response(2, np.concatenate([said, second.token_ids]), second.logprobs, second.version_spans, "length")
    assert np.abs(second.logprobs - reference(MODEL, whole)[len(said) :]).max() < 1e-3
    assert len(second.token_ids) == 12 and second.version_spans.tolist() == [[0, 0]]


async def test_a_turn_has_noise_of_its_own_and_the_same_again(opened: Opened) -> None:
    async with opened() as engine:
        first, *again = [await turn(engine, np.arange(count), 12, keeps=False) for count in (10, 10, 11)]
    if engine.is_deterministic:
        assert first.token_ids.tolist() == again[0].token_ids.tolist() and first.logprobs.tobytes() == again[0].logprobs.tobytes()
    assert first.token_ids.tolist() != again[1].token_ids.tolist()


async def installed_midway(
    engine: RolloutEngine, shift: float, *, version: int, samples: Sequence[int] = (0,), pauses: bool = True
) -> dict[int, Response]:
    """Responses of 200 tokens that are under way while a version is installed."""
    for attempt in itertools.count():
        await engine.install(0, changed(0.0))
        task = asyncio.create_task(responses(engine, samples, 200))
        await asyncio.sleep(0.02 * 2 ** (attempt % 7))
        if pauses:
            await engine.pause()
        await engine.install(version, changed(shift))
        if pauses:
            await engine.resume()
        made = await task
        if all(len(response.version_spans) == 2 for response in made.values()):
            return made
        assert attempt < 30, "no install came in the middle of a response"
    raise AssertionError


def assert_same(one: Response, other: Response, device: str) -> None:
    assert np.array_equal(one.token_ids, other.token_ids)
    alike(one.logprobs, other.logprobs, device)


async def test_responses_are_what_the_contract_says(opened: Opened) -> None:
    async with opened(version=3) as engine:
        made = await responses(engine, (4, 0, 2), 30)
        assert engine.is_deterministic == (not engine.why_not_deterministic)
    assert sorted(made) == [0, 2, 4]
    for response in made.values():
        assert response.token_ids.dtype == np.int64 and response.token_ids.shape == (30,)
        assert response.logprobs.dtype == np.float32 and response.logprobs.shape == (30,) and (response.logprobs <= 0).all()
        assert response.version_spans.dtype == np.int64 and response.version_spans.tolist() == [[0, 3]]
        assert response.finish_reason == "length"
    assert len({tuple(response.token_ids) for response in made.values()}) == 3


@pytest.mark.smoke
async def test_log_probs_are_of_the_distribution_sampled_from(opened: Opened, is_model: None) -> None:
    async with opened() as engine:
        for temperature in (1.0, 0.6, 0.0):
            for response in (await responses(engine, range(4), 40, temperature)).values():
                assert np.abs(response.logprobs - reference(MODEL, response, temperature or 1.0)).max() < 1e-4
        greedy, drawn = await asyncio.gather(responses(engine, (0,), 40, 0.0), responses(engine, range(1, 5), 40, 0.6))
        assert np.abs(greedy[0].logprobs - reference(MODEL, greedy[0])).max() < 1e-4  # also beside others
        assert all(np.abs(r.logprobs - reference(MODEL, r, 0.6)).max() < 1e-4 for r in drawn.values())


async def test_end_tokens_stop(opened: Opened) -> None:
    async with opened() as engine:
        free = (await responses(engine, (0,), 60, 0.0))[0]
    end = int(free.token_ids[20])
    first = free.token_ids.tolist().index(end)
    async with opened(stop_ids=[end]) as engine:
        stopped = (await responses(engine, (0,), 60, 0.0))[0]
    assert stopped.token_ids.tolist() == free.token_ids[: first + 1].tolist() and stopped.finish_reason == "stop"


async def test_more_samples_than_slots_and_many_prompts(opened: Opened) -> None:
    async with opened(num_slots=3) as engine:
        prompts = [PROMPT[: 3 + i] for i in range(5)]
        made = await asyncio.gather(*(responses(engine, range(4), 20, prompt=prompt) for prompt in prompts))
    assert all(sorted(group) == [0, 1, 2, 3] for group in made)


async def test_more_prompts_at_once_than_are_computed_in_one_batch(opened: Opened) -> None:
    """A prompt that is left for the next batch, or cut in two, is as good as any other: vLLM takes 2048 tokens at a time."""
    async with opened(num_slots=16) as engine:
        prompts = [np.roll(np.arange(5, 205), i) for i in range(16)]
        made = await asyncio.gather(*(responses(engine, (0,), 4, prompt=prompt) for prompt in prompts))
        assert all(len(group[0].token_ids) == 4 for group in made)
        if isinstance(engine, VllmEngine):
            assert engine.instances[0].num_restarts == 0


async def test_responses_arrive_as_they_end(opened: Opened, request: pytest.FixtureRequest) -> None:
    if ENGINES[request.node.callspec.params["opened"]] == "transformers":
        pytest.skip("what comes while a batch is generated waits for its end")
    order: list[int] = []

    async def note(length: int) -> None:
        order.append(len((await responses(engine, (0,), length))[0].token_ids))

    async with opened() as engine:
        await responses(engine)
        for _ in range(10):  # on a busy machine the short ones may begin late
            order.clear()
            await asyncio.gather(note(200), note(2), note(90))
            if order == [2, 90, 200]:
                break
    assert order == [2, 90, 200]


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        (np.arange(25), Sampling(max_new_tokens=200)),
        (np.arange(0), Sampling()),
        (np.array([373]), Sampling()),
        (PROMPT, Sampling(max_new_tokens=0)),
        (PROMPT, Sampling(temperature=-1.0)),
        (PROMPT, Sampling(top_p=0.0)),
        (PROMPT, Sampling(min_p=1.0)),
        (PROMPT, Sampling(stop=("",))),
    ],
)
async def test_impossible_requests_are_refused(opened: Opened, prompt: np.ndarray, sampling: Sampling) -> None:
    async with opened() as engine:
        with pytest.raises(ValueError, match=r"context|prompt|sampling"):
            engine.generate(prompt, samples=[0], sampling=sampling, key=KEY)


async def test_a_full_context_is_allowed(opened: Opened) -> None:
    async with opened() as engine:
        assert len((await responses(engine, (0,), CONTEXT - len(PROMPT)))[0].token_ids) == CONTEXT - len(PROMPT)


@pytest.mark.parametrize(
    "cut", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.7, "min_p": 0.01}], ids=lambda cut: "-".join(cut)
)
async def test_log_probs_are_those_of_the_tokens_that_truncation_leaves(
    opened: Opened, is_model: None, own_device: str, cut: dict[str, Any]
) -> None:
    async with opened() as engine:
        stream = engine.generate(PROMPT, samples=range(3), sampling=Sampling(0.8, 30, **cut), key=KEY)
        made = [response async for response in stream]
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for response in made:
        tokens = torch.tensor(np.concatenate([PROMPT, response.token_ids]))
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, len(PROMPT) - 1 : -1] / 0.8
        for name, warper in (("min_p", MinPLogitsWarper), ("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper)):
            logits = warper(cut[name])(None, logits) if name in cut else logits
        expected = logits.log_softmax(-1).gather(1, tokens[len(PROMPT) :, None])[:, 0].numpy()
        assert np.abs(expected - response.logprobs).max() < (1e-4 if own_device == "cpu" else 1e-2)


async def test_a_response_ends_with_its_stop_string(opened: Opened, is_model: None) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    async with opened() as engine:
        whole = (await responses(engine, (0,), 40))[0].token_ids.tolist()
        texts = [tokenizer.decode(whole[: n + 1]) for n in range(len(whole))]
        stop = texts[19][-3:]
        count = next(n + 1 for n, text in enumerate(texts) if stop in text)
        stream = engine.generate(PROMPT, samples=[0], sampling=Sampling(1.0, 40, stop=("\u2603", stop)), key=KEY)
        (ended,) = [response async for response in stream]
        assert ended.token_ids.tolist() == whole[:count] and ended.finish_reason == "stop"
        assert len(ended.logprobs) == count


@pytest.mark.smoke
async def test_what_it_attests_is_what_was_installed(opened: Opened) -> None:
    """Each time, by every tensor's name; and nothing else."""
    async with opened() as engine:
        for version in (1, 2):
            installed, other = changed(0.01 * version), changed(0.01 * version + 0.001)
            await engine.install(version, installed)
            attested = await engine.attest()
            assert attested is not None
            assert fault_of(attested, version, {name: sum_of(name, tensor) for name, tensor in installed.items()}) == ""
            found = fault_of(attested, version, {name: sum_of(name, tensor) for name, tensor in other.items()})
            assert f"in {len(attested.parts)} of {len(attested.parts)} parts" in found


@pytest.mark.smoke
@pytest.mark.parametrize("pauses", in_gate(True, of=[True, False]))
async def test_an_install_in_mid_response(opened: Opened, pauses: bool) -> None:
    async with opened() as engine:
        before = (await responses(engine, (0,), 200))[0]
        middle = (await installed_midway(engine, 0.05, version=7, pauses=pauses))[0]
        after = (await responses(engine, (0,), 200))[0]
    (first, old), (change, new) = middle.version_spans.tolist()
    assert (first, old, new) == (0, 0, 7) and 0 < change < 200
    assert np.abs(middle.logprobs[:change] - before.logprobs[:change]).max() < 1e-5
    assert middle.token_ids[:change].tolist() == before.token_ids[:change].tolist()
    assert not np.array_equal(middle.logprobs[change:], before.logprobs[change:])
    assert after.version_spans.tolist() == [[0, 7]] and not np.array_equal(after.logprobs, before.logprobs)


@pytest.mark.parametrize("kv_on_install", ["keep", "recompute"])
async def test_keys_are_kept_or_computed_again_by_the_installed_weights(
    opened: Opened, kv_on_install: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What begins after the install has no keys of the old weights, under the same prompt, in either case."""
    if kv_on_install == "recompute" and ENGINES[request.node.callspec.params["opened"]] == "transformers":
        pytest.skip("transformers' caches are kept")
    shift, model = -0.05, saved(tmp_path / "changed", -0.05)
    async with opened(kv_on_install=kv_on_install, num_slots=2) as engine:
        task = asyncio.create_task(responses(engine, (5,), 200))
        await responses(engine, (6,), 2)
        task.cancel()  # its prompt is cached
        middle = (await installed_midway(engine, shift, version=7))[0]
        after = (await responses(engine, (0,), 200))[0]
    change = middle.version_spans[1, 0]
    if request.node.callspec.params["opened"] == "vllm-stand-in":
        async with opened(model=model) as engine:
            fresh = (await responses(engine, (0,), 200))[0]
        tail, later = (np.abs(r.logprobs - fresh.logprobs) for r in (middle, after))
    else:
        tail, later = (np.abs(r.logprobs - reference(model, r)) for r in (middle, after))
    print(f"largest differences from the new weights: tail {tail[change:].max():.2e}, later {later.max():.2e}")
    assert later.max() < 1e-5
    assert (tail[change:].max() < 1e-5) == (kv_on_install == "recompute")


async def test_an_engine_that_was_reset_has_ended_all_requests_and_makes_the_same_responses(opened: Opened) -> None:
    async with opened(num_slots=2) as engine:
        if (reset := getattr(engine, "reset", None)) is None:
            pytest.skip("a worker with this engine does not stay for another attempt of its run")
        expected = await responses(engine, (5, 6), 60)
        task = await under_way(engine, range(12))
        await engine.pause()
        await reset()
        with pytest.raises(RuntimeError, match="was reset"):
            await task
        again = await responses(engine, (5, 6), 60)
        assert [again[sample].token_ids.tolist() for sample in (5, 6)] == [expected[sample].token_ids.tolist() for sample in (5, 6)]


async def test_pausing_stops_and_loses_nothing(opened: Opened) -> None:
    async with opened() as engine:
        samples = range(24)  # more than any engine here makes at once, so that the pause comes long before the last
        started = time.monotonic()
        expected = await responses(engine, samples, 100)
        took = time.monotonic() - started
        task = await under_way(engine, samples, 100)
        await engine.pause()
        await engine.pause()
        waiting = asyncio.create_task(responses(engine, (99,), 5))  # one that comes while it is paused
        await asyncio.sleep(1.5 * took)
        assert not task.done() and not waiting.done()
        await engine.prepare(1, changed(0.1))
        await engine.resume()
        await engine.resume()
        made = await task
        assert (await waiting)[99].version_spans.tolist() == [[0, 0]]
    for sample, response in expected.items():
        assert np.array_equal(made[sample].token_ids, response.token_ids)
        assert np.abs(made[sample].logprobs - response.logprobs).max() < 1e-5
        assert made[sample].version_spans.tolist() == [[0, 0]]


async def test_a_prepared_install_is_that_of_an_unprepared_one(opened: Opened, own_device: str) -> None:
    """Also when another version was prepared, which must not be taken for it; nor one that was prepared, and replaced."""
    made = []
    async with opened() as engine:
        for prepared in ((), (7,), (8,), (7, 7)):
            await engine.install(0, changed(0.0))
            for again, version in enumerate(prepared):
                await engine.prepare(version, changed(0.05 if version == 7 and again == len(prepared) - 1 else 0.5))
            await engine.install(7, changed(0.05))
            made.append((await responses(engine))[0])
    for other in made[1:]:
        assert_same(made[0], other, own_device)


async def test_a_version_may_be_installed_again_with_other_weights(opened: Opened, own_device: str) -> None:
    async with opened() as engine:
        await engine.install(1, changed(0.05))
        one = (await responses(engine))[0]
        await engine.install(2, changed(0.2))
        await engine.install(1, changed(0.1))
        other = (await responses(engine))[0]
        await engine.install(1, changed(0.05))
        assert_same((await responses(engine))[0], one, own_device)
    assert not np.array_equal(one.logprobs, other.logprobs) and other.version_spans.tolist() == [[0, 1]]


@pytest.mark.smoke
async def test_what_is_installed_comes_back(opened: Opened) -> None:
    """To the bit, in the engine's dtype, tensor by tensor as the specs say."""
    async with opened(dtype="float32") as engine:
        for version, shift in ((1, 0.05), (2, 0.5)):
            if version == 2:
                await engine.prepare(version, changed(shift))
            await engine.install(version, changed(shift))
            source = await engine.export_weights()
            assert source is not None
            tensors = {name: tensor.clone() async for name, tensor in source.tensors()}
            assert {name: TensorSpec.of(tensor) for name, tensor in tensors.items()} == dict(source.specs)
            expected = changed(shift)
            assert tensors.keys() == expected.keys()
            assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.parametrize("wrong", ["missing", "shape", "dtype", "unknown"])
async def test_what_does_not_fit_is_refused_and_changes_nothing(opened: Opened, own_device: str, wrong: str) -> None:
    tensors, name = changed(0.5), "model.norm.weight"
    match wrong:
        case "missing":
            del tensors[name]
        case "shape":
            tensors[name] = tensors[name][:-1]
        case "dtype":
            tensors[name] = tensors[name].long()
        case "unknown":
            name = "model.norm.bias"
            tensors[name] = tensors["model.norm.weight"]
    async with opened() as engine:
        before = (await responses(engine))[0]
        for method in (engine.prepare, engine.install):
            with pytest.raises(ValueError, match=name.replace(".", r"\.")):
                await method(1, tensors)
        after = (await responses(engine))[0]
    assert_same(before, after, own_device)
    assert after.version_spans.tolist() == [[0, 0]]


async def test_leaving_early_makes_room(opened: Opened) -> None:
    async with opened(num_slots=4) as engine:
        expected = await responses(engine, range(3))
        task = await under_way(engine, range(50))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = engine.generate(PROMPT, samples=range(40), sampling=Sampling(max_new_tokens=200), key=KEY)
        async with contextlib.aclosing(stream):  # type: ignore[type-var]
            await anext(stream)
        began = time.monotonic()
        made = await responses(engine, range(3))
        assert time.monotonic() - began < patience(30)
    for sample, response in expected.items():
        assert np.array_equal(made[sample].token_ids, response.token_ids)


async def test_close_ends_what_is_pending(opened: Opened) -> None:
    async with opened(num_slots=2) as engine:
        await responses(engine)
        tasks = [asyncio.create_task(responses(engine, range(10), 200)) for _ in range(3)]
        await engine.pause()
        await engine.close()
        for task in tasks:
            with pytest.raises(RuntimeError, match="closed"):
                await asyncio.wait_for(task, patience(10))
        for call in (engine.pause(), engine.resume(), engine.install(1, changed(0.1)), responses(engine)):
            with pytest.raises(RuntimeError, match="closed"):
                await call
        await engine.close()


def test_the_interpreter_of_these_tests_has_no_vllm() -> None:
    """AsyncFlow's half must not need it."""
    assert "vllm" not in sys.modules


@pytest.mark.parametrize("how", ["started", "loaded", "failed"])
async def test_an_update_that_was_cut_off_does_not_stand_in_the_next_ones_way(opened: Opened, own_device: str, how: str) -> None:
    """As a driver that dies, or an update that fails, leaves a server which somebody else has started."""
    async with opened() as engine:
        if not isinstance(engine, VllmEngine):
            pytest.skip("the embedded engine has no server that outlives it")
        await engine.install(1, changed(0.1))
        expected = (await responses(engine))[0]
        client = engine.instances[0].client
        await client.pause("keep", clear_cache=False)
        await client.start_weight_update()
        if how != "started":
            await engine.prepare(2, changed(0.3))
            update = engine._weights.next_file.description()
            if how == "loaded":
                await client.update_weights(update)
            else:  # one of three that are fused is there, and the next lies beyond the file's end
                count = next(i for i, (name, *_) in enumerate(update["tensors"]) if "k_proj.weight" in name)
                update["tensors"] = [*update["tensors"][: count + 1], ["model.norm.weight", [64], update["num_bytes"]]]
                with pytest.raises(ServerLost):
                    await client.update_weights(update)
        await engine.install(1, changed(0.1))
        assert_same((await responses(engine))[0], expected, own_device)
        assert engine.instances[0].num_restarts == 0
