"""Episodes on the slot engine: a later turn has the bits of one that was never interrupted, whatever became of its keys."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from asyncflow.engines.base import NO_TOKENS, Response, SampleKey, Sampling
from asyncflow.engines.rollout.engine import SlotEngine
from tests.unit.engines.rollout.models import llama

KEY = SampleKey(seed=3, prompt_index=8)
PROMPT = np.arange(5, 42)
OBSERVED = [np.arange(9, 9 + length) for length in (3, 40, 1)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"), hidden_size=32)


def engine(path: Path, num_slots: int = 4, num_parked: int = 4, speculation: int = 0, chunk: int = 256) -> SlotEngine:
    arguments: dict[str, Any] = {"speculation": speculation, "prefill_chunk": chunk, "max_context": 224, "stop_ids": ()}
    return SlotEngine(path, num_slots=num_slots, num_parked=num_parked, **arguments)


async def turn(engine: SlotEngine, sample: int, after: np.ndarray, length: int = 10, keeps: bool = True) -> Response:
    sampling = Sampling(max_new_tokens=length, keeps=keeps)
    (made,) = [each async for each in engine.generate(PROMPT, samples=[sample], sampling=sampling, key=KEY, after=after)]
    return made


async def episode(engine: SlotEngine, sample: int, keeps: Sequence[bool] = (True, True, True)) -> list[Response]:
    after, turns = NO_TOKENS, []
    for kept, observed in zip((*keeps, False), (*OBSERVED, NO_TOKENS), strict=True):
        turns.append(await turn(engine, sample, after, keeps=kept))
        after = np.concatenate([after, turns[-1].token_ids, observed])
    return turns


def bits(turns: Sequence[Response]) -> list[bytes]:
    return [part for turn in turns for part in (turn.token_ids.tobytes(), turn.logprobs.tobytes())]


async def test_turns_are_those_of_transformers_over_the_whole_sequence(path: Path) -> None:
    made = engine(path)
    turns = await episode(made, 2)
    await made.close()
    model = LlamaForCausalLM.from_pretrained(path).eval()
    after = NO_TOKENS
    for each, observed in zip(turns, (*OBSERVED, NO_TOKENS), strict=True):
        whole = torch.tensor(np.concatenate([PROMPT, after, each.token_ids]))
        with torch.no_grad():
            logprobs = model(whole[None]).logits[0].log_softmax(-1)
        expected = logprobs[len(whole) - len(each.token_ids) - 1 : -1].gather(1, torch.tensor(each.token_ids)[:, None])[:, 0]
        assert np.abs(each.logprobs - expected.numpy()).max() < 1e-5
        after = np.concatenate([after, each.token_ids, observed])


async def test_the_bits_do_not_depend_on_what_was_kept_nor_on_neighbours(path: Path) -> None:
    kept = engine(path)
    expected = {sample: bits(await episode(kept, sample)) for sample in range(6)}
    computed = kept.num_computed
    await kept.close()
    num_tokens = 6 * (len(PROMPT) + 40 + sum(map(len, OBSERVED)))
    assert computed <= 1.05 * num_tokens, "each token once, but for the last of a turn"
    assert len({tuple(each) for each in expected.values()}) == 6
    for num_parked, keeps in ((0, (True, True, True)), (4, (False, True, False)), (2, (False, False, False))):
        other = engine(path, num_parked=num_parked, speculation=2, chunk=20)
        made = await asyncio.gather(*(episode(other, sample, keeps) for sample in range(6)))
        await other.close()
        assert {sample: bits(turns) for sample, turns in enumerate(made)} == expected, (num_parked, keeps)


async def test_an_episode_that_is_dropped_is_computed_again(path: Path) -> None:
    small, large = engine(path, num_slots=4, num_parked=0), engine(path, num_slots=4, num_parked=8)
    first = {}
    for made in (small, large):
        turns = await asyncio.gather(*(turn(made, sample, NO_TOKENS) for sample in range(8)))  # four of them lose their slots
        first[made] = turns
        before = made.num_computed
        after = np.concatenate([turns[0].token_ids, OBSERVED[0]])
        second = await turn(made, 0, after)
        first[made] = [*turns, second]
        made.forget(KEY, 0)
        spent = made.num_computed - before
        assert spent == (len(PROMPT) + len(after) + 9 if made is small else len(OBSERVED[0]) + 1 + 9)
    assert bits(first[small]) == bits(first[large])
    await asyncio.gather(small.close(), large.close())


async def test_the_noise_goes_on_by_position(path: Path) -> None:
    made = engine(path)
    whole = await turn(made, 1, NO_TOKENS, length=20)
    await made.close()
    other = engine(path)
    second = await turn(other, 1, whole.token_ids[:8], length=12)
    await other.close()
    assert second.token_ids.tolist() == whole.token_ids[8:].tolist() and second.logprobs.tobytes() == whole.logprobs[8:].tobytes()


async def test_a_version_that_is_installed_between_two_turns_begins_the_next_one(path: Path) -> None:
    made = engine(path)
    first = await turn(made, 0, NO_TOKENS)
    tensors = {name: tensor async for name, tensor in (await made.export_weights()).tensors()}
    await made.install(7, {name: tensor * 1.01 for name, tensor in tensors.items()})
    second = await turn(made, 0, first.token_ids)
    await made.close()
    assert first.version_spans.tolist() == [[0, 0]] and second.version_spans.tolist() == [[0, 7]]


async def test_an_episode_that_ends_gives_its_slot_back(path: Path) -> None:
    made = engine(path, num_slots=4, num_parked=4)
    turns = await asyncio.gather(*(turn(made, sample, NO_TOKENS) for sample in range(8)))
    assert len(made._slots._parked) == 8 and not made._slots._free
    for sample in range(8):
        made.forget(KEY, sample)
    await turn(made, 0, turns[0].token_ids, keeps=False)
    assert not made._slots._parked and sorted(made._slots._free) == list(range(8))
    await made.close()


async def test_tokens_that_are_none_of_the_model_are_refused(path: Path) -> None:
    made = engine(path)
    with pytest.raises(ValueError, match="outside 0"):
        await turn(made, 0, np.array([64]))
    await made.close()


async def test_requests_that_begin_alike_share_their_prompt_and_have_the_bits_of_their_own(path: Path) -> None:
    made = engine(path, num_slots=8)
    apart = await asyncio.gather(*(turn(made, sample, NO_TOKENS, keeps=False) for sample in range(6)))
    computed = made.num_computed
    await made.close()
    assert computed < 2 * len(PROMPT) + 6 * 10 + 1, "once, or twice where the first one was quicker than the others"
    other = engine(path, num_slots=8)
    stream = other.generate(PROMPT, samples=range(6), sampling=Sampling(max_new_tokens=10), key=KEY)
    together = {response.sample: response async for response in stream}
    await other.close()
    assert bits(apart) == bits([together[sample] for sample in range(6)])
