"""Pieces of prompts and turns: what a pass computes, by equality; and that no bit of a response depends on it."""

import asyncio
import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncflow.engines.base import NO_TOKENS, SampleKey, Sampling
from asyncflow.engines.rollout.decoder import Decoder
from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.engines.rollout.filling import Claim, MissingKeys, PassWork, in_passes
from asyncflow.engines.rollout.prompt_attention import CHUNK, PromptPiece
from asyncflow.engines.rollout.requests import SlotRequest
from tests.depth import few
from tests.unit.engines.rollout.models import llama

MAX_CONTEXT = 460


def request_of(num_tokens: int, num_after: int = 0, prompt: np.ndarray | None = None) -> SlotRequest:
    ids = np.arange(num_tokens) if prompt is None else prompt
    return SlotRequest(ids, Sampling(), deque(), np.arange(1000, 1000 + num_after))


def claim_of(request: SlotRequest, slot: int, num_cached: int = 0) -> Claim:
    return Claim(request, [(0, np.uint64(0))], [slot], num_cached)


def said(work: PassWork) -> list[tuple[int, int, int]]:
    """Slot, first position and number of tokens of each part."""
    fed = [(claim.slots[0], claim.num_cached, len(tokens)) for claim, tokens in work.fed]
    return fed + [(piece.slot, piece.first, len(piece.tokens)) for _, piece in work.pieces]


def passes(filling: MissingKeys, num_tokens: int) -> list[list[tuple[int, int, int]]]:
    """What all passes compute, until nothing is left."""
    made = []
    while (work := filling.next(num_tokens)).num_tokens:
        made.append(said(work))
        filling.fed(work)
        for prompt, piece in work.pieces:
            filling.has_computed(prompt, piece)
    return made


def test_a_pass_has_so_many_tokens_and_prompts_are_cut_at_multiples_alone() -> None:
    filling = MissingKeys()
    for slot, length in enumerate((300, 40, 200, 10)):
        filling.add(claim_of(request_of(length), slot))
    assert passes(filling, 256) == [[(0, 0, 256)], [(0, 256, 44), (1, 0, 40), (2, 0, 128), (3, 0, 10)], [(2, 128, 72)]]
    filling.add(claim_of(request_of(300), 0))
    assert passes(filling, 1) == [[(0, 0, CHUNK)], [(0, CHUNK, CHUNK)], [(0, 2 * CHUNK, 44)]], "a piece is always taken"


def test_claims_to_one_prompt_are_computed_once_and_turns_behind_it_go_on_first() -> None:
    filling, prompt = MissingKeys(), np.arange(150)
    filling.add(claim_of(request_of(0, prompt=prompt), 0))
    filling.add(claim_of(request_of(0, 20, prompt=prompt), 1))
    filling.add(claim_of(request_of(50), 2))
    filling.add(claim_of(request_of(30, 40), 3, num_cached=35))  # parked
    assert filling.num_rows == 4
    assert passes(filling, 100) == [[(3, 35, 35)], [(0, 0, 128)], [(0, 128, 22), (2, 0, 50)], [(1, 150, 20)]]
    assert filling.num_rows == 0


def test_other_weights_begin_prompts_again_and_turns_where_keys_are_recomputed() -> None:
    for with_turns in (False, True):
        filling, turn = MissingKeys(), claim_of(request_of(140, 200), 1, num_cached=150)
        filling.add(claim_of(request_of(300), 0))
        filling.has_computed(*filling.next(128).pieces[0])
        filling.add(turn)
        filling.fed(filling.next(100))
        assert said(filling.next(300)) == [(1, 250, 90), (0, 128, 172)]
        filling.begin_again(with_turns=with_turns)
        left = [each for work in passes(filling, 1000) for each in work]
        assert left == ([(0, 0, 300), (1, 0, 140), (1, 140, 200)] if with_turns else [(1, 250, 90), (0, 0, 300)])
        assert turn.is_current == with_turns, "with the prompt's old keys it is no sibling"


def test_a_request_that_is_cancelled_gives_its_slots_back_and_others_go_on_in_theirs() -> None:
    filling, prompt = MissingKeys(), np.arange(300)
    first, second = request_of(0, prompt=prompt), request_of(0, prompt=prompt)
    filling.add(claim_of(first, 0))
    filling.add(claim_of(second, 1))
    work = filling.next(128)
    filling.has_computed(*work.pieces[0])
    assert filling.cancel(first) == [0]
    assert passes(filling, 1000) == [[(1, 0, 300)]]
    filling.add(claim_of(second, 1))
    assert filling.cancel(second) == [1] and not filling.num_rows and not filling.next(1000).num_tokens


def test_pieces_are_computed_in_passes_of_some_tokens() -> None:
    pieces = [PromptPiece(slot, 0, np.arange(length)) for slot, length in enumerate((100, 40, 120, 1, 300, 5, 90))]
    found = [[piece.slot for piece in some] for some in in_passes(pieces, 128)]
    assert found == [[0, 1], [2], [3, 4], [5, 6]], "the last one of a pass is whole"
    assert list(in_passes([], 128)) == []


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"), hidden_size=40)


Turn = tuple[int, int, np.ndarray, np.ndarray]  # number of the prompt, sample, prompt, what stands behind it


def random_turns(seed: int) -> list[Turn]:
    rng, made = random.Random(seed), []
    for number in range(6):
        prompt = np.array([rng.randrange(64) for _ in range(rng.choice((3, 40, CHUNK, CHUNK + 1, 200, 2 * CHUNK, 300, 400)))])
        for sample in range(rng.randint(1, 3)):
            after = np.array([rng.randrange(64) for _ in range(rng.choice((0, 0, 5, 30)))], np.int64)
            made.append((number, sample, prompt, after))
    return made


async def bits_of(engine: SlotEngine, turns: list[Turn]) -> dict[tuple[int, int], bytes]:
    async def one(number: int, sample: int, prompt: np.ndarray, after: np.ndarray) -> tuple[tuple[int, int], bytes]:
        sampling, key = Sampling(max_new_tokens=5 + 8 * sample), SampleKey(3, number)
        (made,) = [r async for r in engine.generate(prompt, samples=[sample], sampling=sampling, key=key, after=after)]
        return (number, sample), made.token_ids.tobytes() + made.logprobs.tobytes()

    return dict(await asyncio.gather(*(one(*turn) for turn in turns)))


def opened(path: Path, chunk: int, num_slots: int, dtype: Any) -> SlotEngine:
    return SlotEngine(path, num_slots=num_slots, max_context=MAX_CONTEXT, dtype=dtype, stop_ids=(), prefill_chunk=chunk)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_no_bit_depends_on_the_pieces_of_a_prompt(path: Path, dtype: Any) -> None:
    batches = [random_turns(seed) for seed in range(few(2, 8))]
    engine, expected = opened(path, 100_000, 16, dtype), []
    assert engine.is_deterministic, engine.why_not_deterministic
    for batch in batches:  # each alone, its prompt in one pass
        expected.append({key: bits for turn in batch for key, bits in (await bits_of(engine, [turn])).items()})
    await engine.close()
    for chunk, num_slots in few(((1, 16), (256, 5)), ((1, 16), (128, 3), (150, 16), (256, 5), (400, 16))):
        engine = opened(path, chunk, num_slots, dtype)
        for batch, bits in zip(batches, expected, strict=True):
            assert await bits_of(engine, batch) == bits, (chunk, num_slots)
        await engine.close()


async def test_a_piece_that_does_not_see_what_is_before_it_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = Decoder.fill

    def blind(self: Decoder, *arguments: Any) -> torch.Tensor:
        logits = fill(self, *arguments)
        for piece in arguments[4]:
            self.cache.tensor[:, :, self.cache.blocks(np.array([piece.slot]), 1)[0]] *= 1.01  # its first block
        return logits

    monkeypatch.setattr(Decoder, "fill", blind)
    engine = opened(path, 256, 4, "float32")
    assert not engine.is_deterministic and "depend on its pieces" in engine.why_not_deterministic
    await engine.close()


async def test_running_responses_get_a_token_in_every_pass_of_a_long_prompt(path: Path) -> None:
    engine = opened(path, 128, 4, "float32")
    passes: list[tuple[int, int]] = []
    decode, fill = engine._decoder.decode, engine._decoder.fill

    def filled(tokens: np.ndarray, *rest: Any) -> torch.Tensor:
        passes.append((len(tokens), sum(len(piece.tokens) for piece in rest[3])))
        return fill(tokens, *rest)

    def decoded(tokens: np.ndarray, *rest: Any) -> torch.Tensor:
        passes.append((len(tokens), 0))
        return decode(tokens, *rest)

    engine._decoder.decode, engine._decoder.fill = decoded, filled  # type: ignore[method-assign]
    running = asyncio.create_task(bits_of(engine, [(0, 4, np.arange(9), NO_TOKENS)]))
    while len(passes) < 3:
        await asyncio.sleep(0)
    await bits_of(engine, [(1, 0, np.arange(400) % 64, NO_TOKENS)])
    await running
    await engine.close()
    assert [each for each in passes if each[1]] == [(0, 9), (1, 128), (1, 128), (1, 128), (1, 16)]
