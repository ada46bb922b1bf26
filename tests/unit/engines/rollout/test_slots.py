"""The slot engine: what it returns, beside transformers; installs, cancellation and errors; independence of the batch."""

import asyncio
import contextlib
import copy
import itertools
import threading
import time
import weakref
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from asyncflow.engines.base import Response, SampleKey, Sampling
from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.engines.rollout.key_cache import KeyCache
from asyncflow.engines.rollout.linears import can_pack, padded
from tests.generating import KEY, PROMPT, responses, under_way
from tests.patience import patience


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    path = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 512}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=True, eos_token_id=1)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return model, path


@contextlib.asynccontextmanager
async def opened(path: Path, num_slots: int = 6, stop_ids: Sequence[int] | None = ()) -> AsyncIterator[SlotEngine]:
    engine = SlotEngine(path, num_slots=num_slots, max_context=224, stop_ids=stop_ids, speculation=0)  # a token a step
    try:
        yield engine
    finally:
        await engine.close()


async def responses_to(engine: SlotEngine, sampling: Sampling) -> dict[int, Response]:
    stream = engine.generate(PROMPT, samples=range(6), sampling=sampling, key=KEY)
    return {response.sample: response async for response in stream}


def log_probs_of(model: PreTrainedModel, response: Response, temperature: float = 1.0) -> np.ndarray:
    tokens = torch.tensor(np.concatenate([PROMPT, response.token_ids]))
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, len(PROMPT) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, tokens[len(PROMPT) :, None])[:, 0].numpy()


def count_calls(owner: Any, name: str) -> list[tuple]:
    """The arguments of the calls from now on, as they come."""
    calls, method = [], getattr(owner, name)

    def counted(*arguments: object) -> object:
        calls.append(arguments)
        return method(*arguments)

    setattr(owner, name, counted)
    return calls


@contextlib.asynccontextmanager
async def held_in_step(engine: SlotEngine, step: int, work: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Task]:
    """Start `work`; while the body runs, the engine's thread waits inside its decode step number `step`."""
    decoder, reached, go = engine._slots._decoder, threading.Event(), threading.Event()
    calls, decode = count_calls(decoder, "decode"), decoder.decode

    def held(*arguments: Any) -> torch.Tensor:
        if len(calls) == step - 1:
            reached.set()
            go.wait(patience(10))
        return decode(*arguments)

    decoder.decode = held
    task = asyncio.create_task(work)
    assert await asyncio.to_thread(reached.wait, 10)
    yield task
    await asyncio.sleep(0)  # tasks made in the body get as far as their first wait
    go.set()


def tensors_of(model: PreTrainedModel, shift: float = 0.0) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() + shift for name, parameter in model.named_parameters()}


async def test_sampled_and_greedy_responses_beside_transformers(saved: tuple[PreTrainedModel, Path]) -> None:
    model, path = saved
    greedy = model.generate(torch.tensor(PROMPT)[None], max_new_tokens=60, do_sample=False, eos_token_id=None)[0, len(PROMPT) :]
    async with opened(path) as engine:
        for temperature in (1.0, 0.7, 0.0):
            made = await responses(engine, range(4), 60, temperature)
            for response in made.values():
                assert response.token_ids.dtype == np.int64 and response.logprobs.dtype == np.float32
                assert response.finish_reason == "length" and response.version_spans.tolist() == [[0, 0]]
                assert np.abs(response.logprobs - log_probs_of(model, response, temperature or 1.0)).max() < 1e-5
            distinct = {tuple(response.token_ids) for response in made.values()}
            assert len(distinct) == (4 if temperature else 1)
        assert list(made[0].token_ids) == greedy.tolist()


async def test_bfloat16_agrees_loosely(saved: tuple[PreTrainedModel, Path]) -> None:
    model, path = saved
    engine = SlotEngine(path, num_slots=4, max_context=224, dtype="bfloat16", stop_ids=())
    response = (await responses(engine, [0]))[0]
    await engine.close()
    assert np.abs(response.logprobs - log_probs_of(model, response)).max() < 0.1


async def test_first_tokens_follow_the_softmax(saved: tuple[PreTrainedModel, Path]) -> None:
    model, path = saved
    with torch.no_grad():
        probs = model(torch.tensor(PROMPT)[None]).logits[0, -1].double().softmax(-1).numpy()
    async with opened(path, num_slots=64) as engine:
        made = await responses(engine, range(4000), 1)
    counts, expected = np.bincount([r.token_ids[0] for r in made.values()], minlength=64), 4000 * probs
    likely = expected > 5
    chi2 = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi2 < likely.sum() + 4 * np.sqrt(2 * likely.sum())


async def test_a_request_keeps_the_logits_behind_its_prompt_and_no_others(saved: tuple[PreTrainedModel, Path]) -> None:
    _, path = saved
    kept: list[tuple[int, Any]] = []  # rows that were active in the pass, and what each request keeps behind it
    async with opened(path) as engine:
        slots, fill = engine._slots, engine._slots._fill

        def watched(work: Any) -> None:
            num_active = slots._rows.num
            fill(work)
            kept.extend((num_active, request.first_logits_V) for request in slots._rows.requests)

        slots._fill = watched
        async with held_in_step(engine, 3, responses(engine, [0])) as first:
            second = asyncio.create_task(responses(engine, [0], 5, prompt=PROMPT + 1, key=SampleKey(0, 1)))
        await asyncio.gather(first, second)
    assert any(num_active for num_active, _ in kept), "no pass had other rows"
    assert all(logits_V.untyped_storage().nbytes() == logits_V.nbytes for _, logits_V in kept)


async def test_a_sample_does_not_depend_on_its_company(saved: tuple[PreTrainedModel, Path]) -> None:
    _, path = saved
    async with opened(path, num_slots=1) as engine:
        alone = {sample: (await responses(engine, [sample], 150))[sample] for sample in (0, 1, 2)}
    async with opened(path, num_slots=13) as engine:
        others = [
            responses(engine, range(2 + i % 3), 10 + 37 * i, 0.5 * (i % 3), np.arange(1 + 12 * i), SampleKey(0, i))
            for i in range(5)
        ]
        together = (await asyncio.gather(*others[:2], responses(engine, [2, 9, 0, 8, 1], 150), *others[2:]))[2]
    for sample, expected in alone.items():
        assert np.array_equal(together[sample].token_ids, expected.token_ids)
        assert np.array_equal(together[sample].logprobs.view(np.int32), expected.logprobs.view(np.int32))


async def test_two_temperatures_and_greedy_in_one_batch(saved: tuple[PreTrainedModel, Path]) -> None:
    _, path = saved
    async with opened(path) as engine:
        apart = [await responses(engine, [0, 1], temperature=t) for t in (1.0, 0.3, 0.0)]
        together = await asyncio.gather(*(responses(engine, [0, 1], temperature=t) for t in (1.0, 0.3, 0.0)))
    for one, other in zip(apart, together, strict=True):
        assert all(np.array_equal(one[sample].token_ids, other[sample].token_ids) for sample in (0, 1))


async def test_more_samples_than_slots(saved: tuple[PreTrainedModel, Path]) -> None:
    _, path = saved
    stops = range(0, 64, 9)  # unequal lengths: the slots are filled again one by one
    async with opened(path, 3, stops) as few, opened(path, 16, stops) as many:
        prefills = count_calls(few._slots._decoder, "prefill")
        task = asyncio.create_task(responses(few, range(16)))
        await asyncio.sleep(0)
        made, expected = await task, await responses(many, range(16))
    assert len({len(response.token_ids) for response in made.values()}) > 3
    assert all(np.array_equal(made[sample].token_ids, expected[sample].token_ids) for sample in range(16))
    assert len(prefills) < 8  # a sample that finds another of its prompt takes over the prompt's keys


async def test_waiting_samples_start_under_the_new_version(saved: tuple[PreTrainedModel, Path]) -> None:
    model, path = saved
    async with opened(path, num_slots=2, stop_ids=range(0, 64, 9)) as engine:
        async with held_in_step(engine, 3, responses(engine, range(12), 40)) as task:
            install = asyncio.create_task(engine.install(1, tensors_of(model, 0.05)))
        await install
        made, expected = await task, await responses(engine, range(12), 40)
    fresh = [sample for sample, response in made.items() if response.version_spans.tolist() == [[0, 1]]]
    assert len(fresh) > 4
    assert all(np.array_equal(made[sample].logprobs, expected[sample].logprobs) for sample in fresh)


async def test_end_tokens_stop(saved: tuple[PreTrainedModel, Path]) -> None:
    _, path = saved
    async with opened(path) as engine:
        free = await responses(engine, range(6), 60)
    stops = {int(free[0].token_ids[20]), int(free[1].token_ids[5])}
    async with opened(path, stop_ids=sorted(stops)) as engine:
        stopped = await responses(engine, range(6), 60)
    for sample, response in free.items():
        ends = np.flatnonzero(np.isin(response.token_ids, list(stops)))
        length = int(ends[0]) + 1 if len(ends) else 60
        assert stopped[sample].token_ids.tolist() == response.token_ids[:length].tolist()
        assert stopped[sample].finish_reason == ("stop" if len(ends) else "length")
    assert any(response.finish_reason == "stop" for response in stopped.values())


async def test_a_request_may_have_end_tokens_of_its_own_beside_one_that_has_none(saved: tuple[PreTrainedModel, Path]) -> None:
    _, path = saved
    async with opened(path, stop_ids=None) as engine:
        free = await responses_to(engine, Sampling(1.0, 60, stop_ids=()))
        stops = (int(free[0].token_ids[20]), int(free[1].token_ids[5]))
        stopped, of_files = await asyncio.gather(
            responses_to(engine, Sampling(1.0, 60, stop_ids=stops)), responses_to(engine, Sampling(1.0, 60))
        )
        with pytest.raises(ValueError, match=r"stop token 64 lies outside 0\.\.63"):
            engine.generate(PROMPT, samples=[0], sampling=Sampling(stop_ids=(64,)), key=KEY)
    assert all(response.finish_reason == "length" and len(response.token_ids) == 60 for response in free.values())
    for made, ends in ((stopped, stops), (of_files, (1,))):
        for sample, response in free.items():
            at = np.flatnonzero(np.isin(response.token_ids, ends))
            length = int(at[0]) + 1 if len(at) else 60
            assert made[sample].token_ids.tolist() == response.token_ids[:length].tolist()
    assert any(response.finish_reason == "stop" for response in stopped.values())


@pytest.mark.parametrize("length", [2, 7, 150])
async def test_a_sequence_is_scored_between_the_steps_of_a_response(saved: tuple[PreTrainedModel, Path], length: int) -> None:
    model, path = saved
    tokens = np.random.default_rng(length).integers(0, 64, length)
    with torch.no_grad():
        logits = model(torch.tensor(tokens)[None]).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(tokens[1:, None]))[:, 0].numpy()
    async with opened(path) as engine:
        alone = await responses(engine, [0])
        scored, beside = await asyncio.gather(engine.log_probs(tokens), responses(engine, [0]))
        assert scored.dtype == np.float32 and np.abs(scored - expected).max() < 1e-5
        assert beside[0].token_ids.tolist() == alone[0].token_ids.tolist()
        with pytest.raises(ValueError, match="exceed the engine's context of 224"):
            await engine.log_probs(np.zeros(225, np.int64))
        with pytest.raises(ValueError, match="empty"):
            await engine.log_probs(np.zeros(0, np.int64))


async def test_end_tokens_are_those_of_the_files(saved: tuple[PreTrainedModel, Path]) -> None:
    async with opened(saved[1], stop_ids=None) as engine:
        assert engine._slots._is_stop.nonzero()[0].tolist() == [1]


async def test_responses_arrive_as_they_end(saved: tuple[PreTrainedModel, Path]) -> None:
    _, path = saved
    order: list[int] = []

    async def note(length: int) -> None:
        order.append(len((await responses(engine, [0], length))[0].token_ids))

    async with opened(path) as engine:
        await asyncio.gather(note(200), note(2), note(90))
    assert order == [2, 90, 200]


async def test_a_response_is_not_kept_when_its_slot_stands_empty(
    saved: tuple[PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncflow.engines.rollout.deliveries.HOLD_SECONDS", 3600.0)
    _, path = saved
    async with opened(path) as engine:
        made = await responses(engine, range(2), 40)
    early = next(token for token in made[0].token_ids[:20].tolist() if token not in made[1].token_ids)
    async with opened(path, num_slots=2, stop_ids=[early]) as engine:
        stream = engine.generate(PROMPT, samples=range(2), sampling=Sampling(1.0, 40), key=KEY)

        async def first_one() -> Response:
            return await anext(stream)

        await responses(engine, [9], 2)  # the first that is handed over is so at once
        async with held_in_step(engine, 30, first_one()) as first, asyncio.timeout(patience(5)):
            assert (await first).sample == 0
        assert [response.sample async for response in stream] == [1]


@pytest.mark.parametrize(("samples", "hold_seconds"), [([0], 3600.0), ([0, 1], 0.0)])
async def test_what_ends_a_request_or_was_kept_for_long_enough_waits_for_no_slot(
    saved: tuple[PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch, samples: list[int], hold_seconds: float
) -> None:
    monkeypatch.setattr("asyncflow.engines.rollout.deliveries.HOLD_SECONDS", hold_seconds)
    _, path = saved
    async with opened(path, num_slots=1) as engine:
        await responses(engine, [9], 2)  # the first that is handed over is so at once

        arrived = asyncio.Event()

        async def noted() -> None:
            async for _ in engine.generate(PROMPT, samples=samples, sampling=Sampling(1.0, 20), key=KEY):
                arrived.set()

        async def both() -> None:
            await asyncio.gather(noted(), responses(engine, [2], 20))  # the slot never stands empty

        # In the second response: each has 19 steps.
        async with held_in_step(engine, 25, both()) as work, asyncio.timeout(patience(5)):
            await arrived.wait()
        await work


async def test_an_install_in_mid_response(saved: tuple[PreTrainedModel, Path]) -> None:
    model, path = saved
    async with opened(path) as engine:
        before = (await responses(engine, [0], 200))[0]
        async with held_in_step(engine, 20, responses(engine, [0, 1], 200)) as task:
            install = asyncio.create_task(engine.install(7, tensors_of(model, 0.05)))
        await install
        assert engine.installed_version == 7
        middle, after = (await task)[0], (await responses(engine, [0], 200))[0]
    (first, old), (change, new) = middle.version_spans.tolist()
    assert (first, old, change, new) == (0, 0, 21, 7)
    assert np.array_equal(middle.token_ids[:change], before.token_ids[:change])
    assert not np.array_equal(middle.logprobs[change:], before.logprobs[change:])
    assert after.version_spans.tolist() == [[0, 7]]
    assert not np.array_equal(after.logprobs, before.logprobs)


async def test_pausing_stops_between_steps_and_loses_nothing(saved: tuple[PreTrainedModel, Path]) -> None:
    _, path = saved
    async with opened(path) as engine:
        expected = await responses(engine, range(9), 60)
        decodes = count_calls(engine._slots._decoder, "decode")
        async with held_in_step(engine, 20, responses(engine, range(9), 60)) as task:
            pause = asyncio.create_task(engine.pause())
        await pause
        await engine.pause()
        waiting = asyncio.create_task(responses(engine, [9], 60))  # one that comes while it is paused
        await asyncio.sleep(0.05)
        assert len(decodes) == 20 and not task.done() and not waiting.done()
        await engine.resume()
        await engine.resume()
        made = await task
        assert (await waiting)[9].version_spans.tolist() == [[0, 0]]
    for sample, response in expected.items():
        assert np.array_equal(made[sample].logprobs.view(np.int32), response.logprobs.view(np.int32))
        assert made[sample].version_spans.tolist() == [[0, 0]]


async def test_a_response_is_kept_while_others_are_made_and_by_a_paused_engine_never(
    saved: tuple[PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncflow.engines.rollout.deliveries.HOLD_SECONDS", 3600.0)
    _, path = saved
    async with opened(path, num_slots=1) as engine:
        stream = engine.generate(PROMPT, samples=[0, 1, 2], sampling=Sampling(1.0, 20), key=KEY)

        async def next_one() -> int:
            return (await anext(stream)).sample

        await responses(engine, [9], 2)  # the first that is handed over is so at once
        async with held_in_step(engine, 25, next_one()) as first:  # in the second response: each has 19 steps
            pausing = asyncio.create_task(engine.pause())
            await asyncio.sleep(0.05)
            assert not first.done()
        await pausing
        async with asyncio.timeout(patience(10)):
            assert await first == 0
            await engine.resume()
            assert [await next_one(), await next_one()] == [1, 2]


async def test_installs_and_cancellations_work_while_paused(saved: tuple[PreTrainedModel, Path]) -> None:
    model, path = saved
    async with opened(path) as engine, opened(path) as unpaused:
        async with held_in_step(engine, 20, responses(engine, [0], 200)) as task:
            pause = asyncio.create_task(engine.pause())
        await pause
        abandoned = asyncio.create_task(responses(engine, [1, 2]))
        await asyncio.sleep(0)
        await engine.prepare(7, tensors_of(model, 0.05))
        await engine.install(7, tensors_of(model, 0.05))
        abandoned.cancel()
        assert engine.installed_version == 7 and not task.done()
        await asyncio.sleep(0)
        await engine.resume()
        made = (await task)[0]
        async with held_in_step(unpaused, 20, responses(unpaused, [0], 200)) as task:
            install = asyncio.create_task(unpaused.install(7, tensors_of(model, 0.05)))
        await install
        expected = (await task)[0]
    assert made.version_spans.tolist() == expected.version_spans.tolist() == [[0, 0], [21, 7]]
    assert np.array_equal(made.logprobs, expected.logprobs)


async def test_a_paused_engine_closes(saved: tuple[PreTrainedModel, Path]) -> None:
    async with opened(saved[1]) as engine:
        await engine.pause()
        task = asyncio.create_task(responses(engine, [0]))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await asyncio.wait_for(task, patience(5))
        with pytest.raises(RuntimeError, match="closed"):
            await engine.pause()


async def test_a_prepared_install_gives_the_bits_of_an_unprepared_one(saved: tuple[PreTrainedModel, Path]) -> None:
    """Also when another version was prepared, which must not be taken for it."""
    model, path = saved
    made = []
    for prepared in (None, 7, 8):
        async with opened(path) as engine:
            if prepared is not None:
                await engine.prepare(prepared, tensors_of(model, 0.05 if prepared == 7 else 0.5))
            await engine.install(7, tensors_of(model, 0.05))
            made.append((await responses(engine, [0], 40))[0])
    assert all(np.array_equal(made[0].logprobs, other.logprobs) for other in made[1:])


def wait_until_gone(refs: list[weakref.ref[torch.Tensor]], seconds: float = 5) -> None:
    deadline = time.monotonic() + patience(seconds)
    while any(ref() is not None for ref in refs) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert refs and all(ref() is None for ref in refs)


@pytest.mark.skipif(not can_pack(torch.float32, torch.device("cpu")), reason="this machine has nothing to prepare")
async def test_nothing_that_is_prepared_outlives_its_install_or_the_next_preparation(saved: tuple[PreTrainedModel, Path]) -> None:
    model, path = saved

    def of(engine: SlotEngine) -> list[weakref.ref[torch.Tensor]]:
        return [weakref.ref(tensor) for tensor in engine._prepared[1] or ()]

    async with opened(path) as engine:
        await engine.prepare(1, tensors_of(model, 0.05))
        replaced = of(engine)
        preparing = engine._decoder.prepare

        def prepare(tensors: Any) -> list[torch.Tensor]:  # in a thread, so the event loop may not have left the last call yet
            wait_until_gone(replaced)
            return preparing(tensors)

        engine._decoder.prepare = prepare  # type: ignore[method-assign]
        await engine.prepare(2, tensors_of(model, 0.1))
        installed = of(engine)
        await engine.install(2, tensors_of(model, 0.1))
        await asyncio.to_thread(wait_until_gone, installed)  # the engine's thread goes back to its inbox


async def test_preparing_changes_nothing_and_refuses_what_does_not_fit(saved: tuple[PreTrainedModel, Path]) -> None:
    model, path = saved
    async with opened(path) as engine:
        before = (await responses(engine, [0], 40))[0]
        await engine.prepare(7, tensors_of(model, 0.05))
        with pytest.raises(ValueError, match=r"model\.norm\.weight"):
            await engine.prepare(8, {name: t for name, t in tensors_of(model, 1.0).items() if name != "model.norm.weight"})
        assert engine.installed_version == 0
        assert np.array_equal((await responses(engine, [0], 40))[0].logprobs, before.logprobs)


async def test_a_refused_install_leaves_the_version(saved: tuple[PreTrainedModel, Path]) -> None:
    model, path = saved
    async with opened(path) as engine:
        before = (await responses(engine, [0]))[0]
        with pytest.raises(ValueError, match=r"model\.norm\.weight"):
            await engine.install(1, {name: t for name, t in tensors_of(model, 1.0).items() if name != "model.norm.weight"})
        assert engine.installed_version == 0
        assert np.array_equal((await responses(engine, [0]))[0].logprobs, before.logprobs)


async def test_leaving_early_frees_the_slots(saved: tuple[PreTrainedModel, Path]) -> None:
    _, path = saved
    async with opened(path, num_slots=4) as engine:
        expected = await responses(engine, range(3))
        task = await under_way(engine, range(50))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = engine.generate(PROMPT, samples=range(40), sampling=Sampling(max_new_tokens=200), key=KEY)
        async with contextlib.aclosing(stream):
            await anext(stream)
        made = await asyncio.wait_for(responses(engine, range(3)), patience(5))
        assert engine._slots._rows.num == 0 and not engine._slots.is_busy  # nothing runs on in the thread
    assert all(np.array_equal(made[sample].token_ids, expected[sample].token_ids) for sample in range(3))


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        (np.arange(25), Sampling(max_new_tokens=200)),
        (np.arange(0), Sampling()),
        (np.array([64]), Sampling()),
        (PROMPT, Sampling(max_new_tokens=0)),
        (PROMPT, Sampling(temperature=-1.0)),
    ],
)
async def test_impossible_requests_are_refused(saved: tuple[PreTrainedModel, Path], prompt: np.ndarray, sampling: Sampling) -> None:
    async with opened(saved[1]) as engine:
        with pytest.raises(ValueError, match=r"context|prompt|sampling"):
            engine.generate(prompt, samples=[0], sampling=sampling, key=KEY)


async def test_a_full_context_is_allowed(saved: tuple[PreTrainedModel, Path]) -> None:
    async with opened(saved[1]) as engine:
        assert len((await responses(engine, [0], 224 - len(PROMPT)))[0].token_ids) == 224 - len(PROMPT)


async def test_close_ends_pending_generates(saved: tuple[PreTrainedModel, Path]) -> None:
    async with opened(saved[1]) as engine:
        tasks = [await under_way(engine, range(10)), *(asyncio.create_task(responses(engine, range(10), 200)) for _ in range(2))]
        await asyncio.sleep(0)  # they ask
        await engine.close()
        await asyncio.sleep(0)  # they were woken before this coroutine was: a loop that ends here leaves nobody waiting
        for task in tasks:
            assert task.done()
            with pytest.raises(RuntimeError, match="closed"):
                await task
        with pytest.raises(RuntimeError, match="closed"):
            await responses(engine, [0])
        engine._thread.join(patience(5))
        assert not engine._thread.is_alive()


async def test_an_error_in_the_thread_reaches_every_waiter(saved: tuple[PreTrainedModel, Path]) -> None:
    model, path = saved
    async with opened(path, num_slots=2) as engine:
        await engine.install(1, tensors_of(model, float("nan")))
        tasks = [asyncio.create_task(responses(engine, [0, 1])) for _ in range(3)]
        for task in tasks:
            with pytest.raises(RuntimeError, match="not finite"):
                await asyncio.wait_for(task, patience(5))
        await engine.install(2, tensors_of(model))
        shorter = PROMPT[:3]  # behind which lie what were keys of the broken weights
        assert len(await responses(engine, [0, 1], prompt=shorter)) == 2


@pytest.mark.parametrize("kv_on_install", ["keep", "recompute"])
async def test_keys_are_kept_or_computed_again_by_the_installed_weights(
    saved: tuple[PreTrainedModel, Path], kv_on_install: Literal["keep", "recompute"]
) -> None:
    model, path = saved
    shifted = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in shifted.parameters():
            parameter.add_(0.05)
    engine = SlotEngine(path, num_slots=6, max_context=224, stop_ids=(), kv_on_install=kv_on_install)
    filled, counted, compute_again = count_calls(engine._decoder, "fill"), list[int](), engine._slots._compute_keys_again

    def noted() -> None:
        filled.clear()
        before = engine.num_computed
        compute_again()
        counted.append(engine.num_computed - before)
        counted.append(sum(len(piece.tokens) for *_, pieces in filled for piece in pieces))

    engine._slots._compute_keys_again = noted  # type: ignore[method-assign]
    async with held_in_step(engine, 20, responses(engine, range(9), 80)) as task:  # three wait for a slot
        install = asyncio.create_task(engine.install(7, tensors_of(shifted)))
    await install
    is_new = []
    for response in (await task).values():
        changes = response.version_spans.tolist()
        first = 0 if changes == [[0, 7]] else changes[1][0]
        expected = log_probs_of(shifted, response)
        is_new.append(np.abs(response.logprobs[first:] - expected[first:]).max() < 1e-4)
    await engine.close()
    assert sum(is_new) == (9 if kv_on_install == "recompute" else 3)
    # The prompt once for six slots, and what has been drawn in each but the last token.
    assert counted == ([len(PROMPT) + 6 * 20] * 2 if kv_on_install == "recompute" else [])


async def test_a_prompt_is_computed_once_after_an_install_and_shared_as_before(saved: tuple[PreTrainedModel, Path]) -> None:
    """By samples that wait, too. No response depends on who shares its prompt."""
    model, path = saved
    lengths = (70, 110)  # two whole blocks, and three
    made: list[dict[tuple[int, int], Response]] = []
    for groups in (
        [(0, [0, 1, 2]), (1, [0, 1, 2, 3, 4])],  # the last two wait
        [(0, [0]), (0, [1]), (0, [2]), (1, [0]), (1, [1]), (1, [2]), (1, [3]), (1, [4])],
    ):
        options: dict[str, Any] = {"kv_on_install": "recompute", "prefill_chunk": 4096, "stop_ids": ()}
        engine = SlotEngine(path, num_slots=6, max_context=224, **options)
        cache, filled, heads = engine._decoder.cache, count_calls(engine._decoder, "fill"), count_calls(engine._decoder, "_logits")

        async def group(number: int, samples: Sequence[int], engine: SlotEngine = engine) -> dict[tuple[int, int], Response]:
            prompt = np.arange(lengths[number]) % 61
            found = await responses(engine, samples, 12 + 20 * number, prompt=prompt, key=SampleKey(3, number))
            return {(number, sample): response for sample, response in found.items()}

        def num_filled(filled: list[tuple] = filled) -> int:
            return sum(len(piece.tokens) for *_, pieces in filled for piece in pieces)

        def num_blocks(cache: KeyCache = cache) -> int:
            return len({block for slot in range(6) for block in cache._table[slot, : cache._counts[slot]].tolist()})

        await engine.pause()
        running = [asyncio.create_task(group(*each)) for each in groups]
        await asyncio.sleep(0)
        for _ in range(8):
            await asyncio.wrap_future(engine._hand_in(engine._slots.step))
        before = num_blocks()
        filled.clear()
        heads.clear()
        await engine.install(1, tensors_of(model, 0.05))
        num_prompts = len(groups) if len(groups) == len(lengths) else 6
        # The first token came with the prompt, and the last one's keys come with the next.
        assert num_filled() == num_prompts // 2 * sum(lengths) + 6 * 7
        assert num_blocks() == before == num_prompts // 2 * (2 + 3) + 6
        assert sum(len(h_TE) for (h_TE,) in heads) == padded(num_prompts), "logits that nobody reads"
        filled.clear()
        await engine.resume()
        made.append({key: response for each in running for key, response in (await each).items()})
        assert num_filled() == (0 if num_prompts == 2 else 2 * lengths[1])
        await engine.close()
    together, apart = made
    assert len(together) == 8 and all(len(together[key].version_spans) == 1 for key in ((1, 3), (1, 4)))
    for key, response in together.items():
        assert np.array_equal(response.token_ids, apart[key].token_ids)
        assert np.array_equal(response.logprobs.view(np.int32), apart[key].logprobs.view(np.int32))


async def test_timings_say_what_was_computed(saved: tuple[PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncflow.engines.rollout.pass_timings.TIMED_TOGETHER", 1)
    began = time.monotonic()
    async with opened(saved[1], num_slots=2) as engine:
        await responses(engine, range(3), length=4)
        timings = engine.timings()
        assert not engine.timings()  # they are taken once
    assert all(began < timing.start < timing.end < time.monotonic() for timing in timings)
    prefills = [(timing.rows, timing.tokens) for timing in timings if timing.task == "prefill"]
    assert prefills == [(2, len(PROMPT)), (1, len(PROMPT))]  # the third one's sibling slots are free by then
    steps = [(timing.rows, timing.tokens) for timing in timings if timing.task == "decode_step"]
    assert steps == [*((2, 2 * (len(PROMPT) + made)) for made in (1, 2, 3)), *((1, len(PROMPT) + made) for made in (1, 2, 3))]


async def test_decode_steps_are_timed_together_until_something_else_is_done(saved: tuple[PreTrainedModel, Path]) -> None:
    async with opened(saved[1], num_slots=2) as engine:
        await responses(engine, range(3), length=4)
        await engine.pause()  # the last steps are ended before it
        await engine.resume()
        timings = engine.timings()
    counts = [(timing.task, timing.calls, timing.rows, timing.tokens) for timing in timings]
    attended = [len(PROMPT) + made for made in (1, 2, 3)]
    assert counts == [
        ("prefill", 1, 2, len(PROMPT)),
        ("decode_step", 3, 6, 2 * sum(attended)),
        ("prefill", 1, 1, len(PROMPT)),
        ("decode_step", 3, 3, sum(attended)),
    ]
    assert all(one.end <= next_one.start for one, next_one in itertools.pairwise(timings))
