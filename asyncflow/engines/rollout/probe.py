"""Whether a slot's bits depend on its own tokens alone, on this machine: what sample identity promises.

Nothing in torch guarantees it. So the decoder's own passes run with its own weights, through the first layer and the head, and the
logits of a few prompts must be the same bits alone and among others:

    prefill   short prompts, and one with two blocks of keys, each in a pass of its own; then all in one pass, beside a long one
    decode    one slot alone; then more and more slots, each prompt in several of them
    feed      several tokens of a slot in one step, and in steps of their own
    pieces    a prompt of several tiles in one pass, and a tile in each
    adapters  where there may be any, all of it is done with one; then a slot that has it, beside one that has none

A pass through all layers would say no more: they have the same shapes.
"""

from __future__ import annotations

import copy

import numpy as np
import torch

from asyncflow.engines.rollout.adapter_bank import INSTALLED
from asyncflow.engines.rollout.decoder import Decoder
from asyncflow.engines.rollout.key_cache import BLOCK
from asyncflow.engines.rollout.prompt_attention import CHUNK, PromptPiece
from asyncflow.types import Array, LoraSpec

LENGTHS = (1, 2, 3, BLOCK + 1)
LONGEST = 256  # tokens of the prompt beside them
FED = BLOCK + 5  # tokens of an observation
TRIED = INSTALLED + 1  # number of the adapter
CUT = CHUNK + BLOCK + 5  # tokens of a prompt that is computed in pieces


def find_dependence(decoder: Decoder, *, num_slots: int, max_context: int, lora: LoraSpec | None = None) -> str:
    """Sentence about what was seen to depend on its neighbours in the batch, or "". The slots must be free; their keys are
    overwritten. `lora`: of an adapter that slots may have.

    Call it in the thread that generates, under `torch.inference_mode`.
    """
    decoder = copy.copy(decoder)
    decoder.layers = decoder.layers[:1]
    if lora is not None:
        return _with_adapter(decoder, lora, num_slots=num_slots, max_context=max_context)
    return _find_dependence(decoder, num_slots=num_slots, max_context=max_context)


def _with_adapter(decoder: Decoder, lora: LoraSpec, *, num_slots: int, max_context: int) -> str:
    """The same with an adapter whose products are no zeros, for all slots and then for one of two."""
    waves = decoder.lora.new(lora)
    for piece in waves.slices.values():
        piece.copy_(torch.arange(piece.numel()).sin().view(piece.shape))
    decoder.adapters = np.full_like(decoder.adapters, TRIED)
    decoder.lora.put(TRIED, waves)
    try:
        found = _find_dependence(decoder, num_slots=num_slots, max_context=max_context)
        return found or (_dependence_on_adapters(decoder, max_context) if num_slots > 1 else "")
    finally:
        decoder.lora.remove(TRIED)


def _dependence_on_adapters(decoder: Decoder, max_context: int) -> str:
    decoder.adapters[1] = INSTALLED  # the base alone
    tokens = _tokens(decoder, min(FED, max_context - 1))
    at, alone = np.array([len(tokens)]), []
    for slot in (0, 1):
        first = decoder.prefill([tokens], [[slot]])
        alone += [first, decoder.decode(tokens[-1:], at, np.array([slot]))]
    first = decoder.prefill([tokens] * 2, [[0], [1]])
    then = decoder.decode(tokens[[-1, -1]], at.repeat(2), np.array([0, 1]))
    together = [logits[slot : slot + 1] for slot in (0, 1) for logits in (first, then)]
    if all(torch.equal(one, other) for one, other in zip(alone, together, strict=True)):
        return ""
    return "the logits of a slot depend on the adapter of the slot beside it"


def _find_dependence(decoder: Decoder, *, num_slots: int, max_context: int) -> str:
    lengths = [length for length in LENGTHS if length < max_context]
    prompts = [_tokens(decoder, length) for length in lengths]
    positions = np.array(lengths)
    alone = []
    for prompt, position in zip(prompts, positions, strict=True):
        first = decoder.prefill([prompt], [[0]])
        alone.append((first[0], decoder.decode(prompt[-1:], np.array([position]))[0]))

    beside = _tokens(decoder, min(LONGEST, max_context))
    together = decoder.prefill([beside, *prompts[::-1]], [[0]] * (1 + len(prompts)))[1:].flip(0)
    for length, (first, _), logits in zip(lengths, alone, together, strict=True):
        if not torch.equal(first, logits):
            return f"the logits after a prompt of {length} tokens depend on the prompts beside it"

    num_rows = num_slots
    while num_rows:
        which = np.sort(np.arange(num_rows) % len(prompts))  # the prompt of each slot
        _, begins, counts = np.unique(which, return_index=True, return_counts=True)
        decoder.prefill(prompts[: len(begins)], [range(begin, begin + count) for begin, count in zip(begins, counts, strict=True)])
        rows = decoder.decode(np.array([prompts[i][-1] for i in which]), positions[which])
        for slot, i in enumerate(which):
            if not torch.equal(rows[slot], alone[i][1]):
                return f"the logits of a slot among {num_rows} differ from those of the slot alone"
        num_rows = num_rows * 2 // 3
    return _dependence_of_a_feed(decoder, max_context) or _dependence_of_pieces(decoder, max_context)


def _dependence_of_pieces(decoder: Decoder, max_context: int) -> str:
    tokens = _tokens(decoder, min(CUT, max_context))
    whole, in_pieces = decoder.prefill([tokens], [[0]]), torch.empty(0)
    for first in range(0, len(tokens), CHUNK):
        in_pieces = decoder.compute([PromptPiece(0, first, tokens[first : first + CHUNK])])
    return "" if torch.equal(whole, in_pieces) else f"the logits after a prompt of {len(tokens)} tokens depend on its pieces"


def _dependence_of_a_feed(decoder: Decoder, max_context: int) -> str:
    tokens = _tokens(decoder, min(FED, max_context - 1))
    positions, fed = np.arange(1, len(tokens) + 1), np.zeros(len(tokens), np.int64)
    decoder.prefill([tokens[:1]], [[0]])
    together = decoder.decode(tokens, positions, fed)
    decoder.prefill([tokens[:1]], [[0]])
    for token, position, logits in zip(tokens, positions, together, strict=True):
        if not torch.equal(logits, decoder.decode(np.array([token]), np.array([position]))[0]):
            return f"the logits of a token among {len(tokens)} of its slot differ from those of the token alone"
    return ""


def _tokens(decoder: Decoder, length: int) -> Array:
    return np.arange(1, length + 1) * 7919 % decoder.config.vocab_size
