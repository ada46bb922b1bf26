"""Drafts: where they come from, how many are worth a pass, and that no bit of a response depends on them."""

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncflow.engines.base import Response, SampleKey, Sampling
from asyncflow.engines.rollout import drafts
from asyncflow.engines.rollout.drafts import LONGEST, NO_DRAFT, Draft, Drafting, FinishedTexts, PassSeconds, continuation, joined
from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.engines.rollout.slot_options import Speculation
from asyncflow.engines.rollout.slots import Slots
from tests.depth import few

VOCABULARY = 48
MAX_CONTEXT = 170


def draft_of(*texts: list[int], most: int = 8) -> tuple[list[int], int]:
    draft = continuation(joined([np.array(text) for text in texts]), most)
    return draft.tokens.tolist(), draft.matched


def test_a_text_goes_on_as_it_did_the_last_time() -> None:
    assert draft_of([1, 2, 3, 4, 5, 6, 9, 3, 4]) == ([5, 6, 9, 3, 4, 5, 6, 9], 2)
    assert draft_of([7, 2, 8], [6, 2, 9], [5, 2]) == ([9], 1), "the latest of those that have as much in common, to its end"
    assert draft_of([3, 1, 2, 8], [6, 1, 5, 2], [3, 1, 2]) == ([8], 3), "the longest before the latest"
    assert draft_of([1, 2, 3, 4, 5, 6], [0, 2, 3, 4, 5]) == ([6], LONGEST)
    assert draft_of([4, 4, 4], most=3) == ([4, 4, 4], 2)
    assert draft_of([1, 2], [3, 1, 2]) == ([], 0) == draft_of([1, 2, 3]), "nothing follows, or it is nowhere else"


def test_the_occurrence_is_the_one_that_a_search_by_hand_finds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        text = joined([rng.integers(0, 4, rng.integers(1, 12)) for _ in range(rng.integers(1, 4))])
        best = (0, 0)
        for at in range(len(text) - 1):
            matched = 0
            while matched < LONGEST and text[at - matched] == text[-1 - matched] != drafts.SEPARATOR:
                matched += 1
            if text[at + 1] != drafts.SEPARATOR:
                best = max(best, (matched, at))
        found = continuation(text, 1)
        assert found.matched == best[0]
        assert not best[0] or found.tokens[0] == text[best[1] + 1]


def test_the_oldest_texts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "KEPT_TOKENS", 10)
    texts = FinishedTexts()
    for prompt, length in ((b"a", 4), (b"b", 4), (b"a", 1), (b"c", 4)):
        texts.add(prompt, np.zeros(length, np.int64))
    assert [len(texts.of(prompt)) for prompt in (b"a", b"b", b"c")] == [2, 0, 1]


def drafting(seconds: dict[int, float], hits: int = 0, misses: int = 0) -> Drafting:
    """After passes of so many rows, and after drafts with all of their context in common."""
    made, draft = Drafting("auto", num_slots=64), Draft(np.zeros(1, np.int64), LONGEST)
    for rows, each in seconds.items():
        made.passed(rows, each, has_drafts=False)
    for number in range(hits + misses):
        made.learn(draft, 1, int(number < hits))
    return made


def numbers(made: Drafting, matched: list[int]) -> list[int]:
    found = [Draft(np.arange(8), each) if each else NO_DRAFT for each in matched]
    return [len(draft.tokens) for draft in made.chosen(found)]


def test_as_many_drafts_are_verified_as_give_the_most_tokens_a_second() -> None:
    by_rows, flat = {rows: 0.001 * rows for rows in range(4, 65, 4)}, dict.fromkeys(range(4, 65, 4), 0.040)
    for made in (drafting(by_rows, hits=9, misses=1), drafting(by_rows, misses=10)):
        assert made.may_pay(3) and numbers(made, [4, 0, 0]) == [1, 0, 0], "a row of the padding costs nothing"
        assert not made.may_pay(4) and not made.may_pay(64), "the pass is compute-bound"
    assert numbers(drafting(flat, hits=9, misses=1), [4, 0, 4]) == [8, 0, 8]
    half = {4: 0.040, 8: 0.044, 16: 0.060, 32: 0.100, 64: 0.180}
    sure, unsure = numbers(drafting(half, hits=30), [4] * 4), numbers(drafting(half, hits=4, misses=8), [4] * 4)
    assert sum(sure) == 32 > sum(unsure) > 0 and max(unsure) - min(unsure) <= 1


def test_seconds_of_passes_are_a_line_and_one_that_was_interrupted_is_hardly_seen() -> None:
    seconds, sizes = PassSeconds(), np.array([4, 6, 8, 64])
    seconds.add(4, 0.040)
    assert seconds.of(sizes).tolist() == [0.040] * 4, "until others are seen, rows cost nothing: so they are tried"
    for number in range(200):
        rows = (4, 8, 12, 32)[number % 4]
        seconds.add(rows, 0.030 + 0.002 * rows + (1.0 if number == 198 else 0.0))
    assert np.allclose(seconds.of(sizes), [0.038, 0.046, 0.046, 0.158], rtol=0.05)
    for _ in range(1000):
        seconds.add(8, 0.060)  # another context, or another machine
    assert np.allclose(seconds.of(np.array([8])), 0.060, rtol=0.01)


def test_drafts_that_were_wrong_for_a_while_are_tried_again() -> None:
    wrong = drafting({4: 0.040, 8: 0.050}, misses=200)
    wrong.learn(Draft(np.zeros(3, np.int64), 1), 3, 0)
    before = numbers(wrong, [4] * 4)
    for _ in range(4000):
        wrong.passed(4, 0.040, has_drafts=False)
        wrong.passed(8, 0.050, has_drafts=False)
    assert sum(before) == 0 < sum(numbers(wrong, [4] * 4))


def test_a_search_that_takes_longer_than_it_gains_is_not_made() -> None:
    made = drafting({4: 0.001, 8: 0.00101}, hits=10)
    assert made.may_pay(4)
    made.searched(4, 0.02)
    assert not made.may_pay(4)
    for _ in range(1000):
        made.passed(4, 0.001, has_drafts=False)
    assert made.may_pay(4), "it may have been a hiccup"


def test_a_fixed_number_is_verified_while_there_is_room() -> None:
    made, none = Drafting(3, num_slots=8), Drafting(0, num_slots=8)
    assert made.most == 3 and made.may_pay(7) and not made.may_pay(8) and not none.may_pay(1)
    found = [Draft(np.arange(3), 1), NO_DRAFT, Draft(np.arange(3), 1)]
    assert [len(draft.tokens) for draft in made.chosen(found)] == [3, 0, 2]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, max_position_embeddings=256, tie_word_embeddings=True))
    with torch.no_grad():
        for parameter in model.parameters():  # so that a token depends on more than the one before it
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    return folder


Request = tuple[np.ndarray, Sampling, int, tuple[int, ...]]  # prompt, sampling, its number, samples
Bits = dict[tuple[int, int], tuple[bytes, bytes, str]]


def random_requests(seed: int) -> list[Request]:
    rng, made = random.Random(seed), []
    for number in range(rng.randint(2, 6)):
        prompt = np.array([rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 2, 9, 31, 32, 64, 65)))])
        truncation: dict[str, Any] = rng.choice(({}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}))
        stops = rng.sample(range(VOCABULARY), rng.choice((0, 1)))
        temperature = rng.choice((0.0, 0.2, 0.4, 1.0))
        sampling = Sampling(temperature, rng.choice((1, 5, 40, 100)), stop_ids=tuple(stops), **truncation)
        made.append((prompt, sampling, number, tuple(range(rng.randint(1, 4)))))
    return made


async def bits_of(engine: SlotEngine, requests: list[Request]) -> Bits:
    async def one(prompt: np.ndarray, sampling: Sampling, number: int, samples: tuple[int, ...]) -> list[tuple[int, Response]]:
        stream = engine.generate(prompt, samples=samples, sampling=sampling, key=SampleKey(7, number))
        return [(number, response) async for response in stream]

    made = [each for part in await asyncio.gather(*(one(*request) for request in requests)) for each in part]
    return {
        (number, response.sample): (response.token_ids.tobytes(), response.logprobs.tobytes(), response.finish_reason)
        for number, response in made
    }


def opened(path: Path, speculation: Speculation, num_slots: int, dtype: Any) -> SlotEngine:
    return SlotEngine(path, num_slots=num_slots, max_context=MAX_CONTEXT, dtype=dtype, stop_ids=(), speculation=speculation)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_no_bit_depends_on_drafts(path: Path, dtype: Any) -> None:
    batches = [random_requests(seed) for seed in range(few(3, 12))]
    without = opened(path, 0, 64, dtype)
    expected = [await bits_of(without, batch) for batch in batches]
    assert not sum(timing.drafts for timing in without.timings())
    await without.close()
    for speculation, num_slots in few(((3, 64), ("auto", 13)), ((3, 64), ("auto", 13), (1, 5), (8, 64), (64, 7), ("auto", 64))):
        engine = opened(path, speculation, num_slots, dtype)
        for batch, bits in zip(batches, expected, strict=True):
            assert await bits_of(engine, batch) == bits, (speculation, num_slots)
        timings = engine.timings()
        accepted = sum(timing.accepted for timing in timings)
        assert sum(timing.drafts for timing in timings) > accepted > 10
        await engine.close()


class AsDrawn:
    """Compares equal with whatever is drawn."""

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        return np.full(len(index), np.nan).view(Same)


class Same(np.ndarray):
    def __eq__(self, other: object) -> Any:
        return np.ones(len(self), bool)


async def test_a_wrong_draft_that_is_accepted_is_seen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_requests(0)
    without = opened(path, 0, 64, "float32")
    expected = await bits_of(without, batch)
    await without.close()
    append = Slots._append
    monkeypatch.setattr(Slots, "_append", lambda self, rows, logits, fed=None: append(self, rows, logits, AsDrawn()))
    engine = opened(path, 3, 64, "float32")
    assert await bits_of(engine, batch) != expected
    await engine.close()
