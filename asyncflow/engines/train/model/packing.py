"""Packing of a prompt and its responses into one sequence without padding; one shared prompt, or one for each response (rows).

    shared       tokens       p p p   a a   b b b        segments of 3, 2, 3; the responses see the prompt
                 positions    0 1 2   3 4   3 4 5
                 predict          ^   ^     ^ ^          the prompt's last position predicts the first token of each response

    rows         tokens       p p p a a   p p p b b b    segments of 5, 6; none sees another
                 positions    0 1 2 3 4   0 1 2 3 4 5
                 predict          ^ ^         ^ ^ ^

The prompt's last position predicts the first token of a response (papers: the flag on PA 13), so in the shared sequence its hidden
state is used once for each response; the logits at the last token of a response are not used.

Several micro-batches are computed in one pass as one sequence (`joined`), each in its own form; none sees another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from asyncflow.engines.cuts import cut_evenly
from asyncflow.types import Array, Ragged

LEAST_TOKEN_RATIO = 1.1
"""Ratio of tokens below which sharing the prompt saves less than its extra attention calls cost.

See `token_ratio`. Measured by benchmarks/shared_prompt.py.
"""
MOST_FILLED = 1.25
"""Tokens of a batch of rows, filled up to one length, over those of its micro-batches by themselves, up to which these share it."""
INERT_TOKENS = 4
"""Tokens of an inert micro-batch (`pack_inert`). From 4 tokens on, matrix products take the same routine as other micro-batches."""

# P tokens of the packed sequence, prompt or prompts included; T response tokens; R responses; H hidden elements.


@dataclass(frozen=True, slots=True)
class SharedPrompt:
    """Segment that is a prompt, by its number, and the number of segments right behind it that see it whole."""

    segment: int
    num_responses: int


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """Tokens of a shared prompt, and of the responses that see it, as places in the packed sequence."""

    prompt: slice
    responses: slice
    response_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayout:
    """Layout of a packed sequence: which token attends to which. A model's attention calls get it as the argument `layout`.

    Each segment attends causally to itself, and the segments behind a shared prompt also to all of the prompt.
    """

    segment_lengths: tuple[int, ...]  # add up to P
    prompts: tuple[SharedPrompt, ...]  # in order
    positions_P: Tensor  # int64: the model's position_ids
    are_bits_free: bool = False
    """Whether the last bits of a response may depend on the others of its prompt, as where they get no exact sums."""

    @property
    def has_prompt(self) -> bool:
        """Whether a prompt is shared."""
        return bool(self.prompts)

    def shared(self) -> list[SharedTokens]:
        """The shared prompts with their responses, in order."""
        ends, found = [0, *accumulate(self.segment_lengths)], []
        for one in self.prompts:
            first, end = one.segment + 1, one.segment + 1 + one.num_responses
            lengths = self.segment_lengths[first:end]
            found.append(SharedTokens(slice(ends[one.segment], ends[first]), slice(ends[first], ends[end]), lengths))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Packed prompt and responses, or several of them: P tokens of the sequence, T response tokens. Tensors are int64, on the
    model's device."""

    tokens_P: Tensor
    targets_T: Tensor  # the response tokens, end to end, or others that are predicted in their places
    row_T: Tensor  # the response that a token belongs to, 0..R-1
    layout: AttentionLayout
    prompt_length: int  # 0 if several are joined
    response_lengths: tuple[int, ...]
    fill_tokens: int = 0  # tokens of the last segment, if it only fills up the sequence
    parts: tuple[Packed, ...] = ()  # those that were joined; none: it is one micro-batch
    temperature: float | None = None  # of the distribution whose log-probs are taken; None: the model's own

    @property
    def positions_P(self) -> Tensor:
        """Positions of the tokens, int64 [P], for the model's `position_ids`."""
        return self.layout.positions_P

    @property
    def num_tokens(self) -> int:
        """Number P of tokens that the model computes, fill tokens included."""
        return sum(self.layout.segment_lengths)

    def predicting(self, hidden_PH: Tensor, temperature: float = 1.0) -> Tensor:
        """Hidden states [T, H] that predict the response tokens, from all hidden states [P, H], divided by the temperature.

        Uses slices and a concatenation: a gather that takes one row many times would add up that row's gradient in an order that
        varies between runs. The slices come from one split, whose backward is one concatenation; separate slices would each make a
        gradient of all P tokens.
        """
        if not self.response_lengths:
            return hidden_PH[:0]
        sizes, chosen = self._cuts()
        pieces = hidden_PH.split_with_sizes(sizes)
        hidden_TH = torch.cat([pieces[i] for i in chosen])
        return hidden_TH if temperature == 1.0 else hidden_TH / temperature

    @property
    def token_counts(self) -> tuple[int, ...]:
        """Number of response tokens of each micro-batch. They add up to T."""
        return tuple(sum(part.response_lengths) for part in self.parts or (self,))

    @property
    def places(self) -> list[slice]:
        """Place of each micro-batch in the sequence, fill tokens left out."""
        lengths = [part.num_tokens for part in self.parts] or [self.num_tokens - self.fill_tokens]
        return [slice(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]

    def _cuts(self) -> tuple[list[int], list[int]]:
        """Sizes of pieces that make up the sequence, and the numbers of those that predict the response tokens, in order."""
        sizes: list[int] = []
        chosen: list[int] = []
        if self.parts:
            for part in self.parts:
                of_part, chosen_of_part = part._cuts()
                chosen += [len(sizes) + i for i in chosen_of_part]
                sizes += of_part
        elif self.layout.has_prompt:
            sizes = [size for n in (self.prompt_length, *self.response_lengths) for size in (n - 1, 1)]
            chosen = [i for k in range(len(self.response_lengths)) for i in (1, 2 + 2 * k)]
        else:
            sizes = [size for n in self.response_lengths for size in (self.prompt_length - 1, n, 1)]
            chosen = list(range(1, len(sizes), 3))
        return [*sizes, self.fill_tokens], chosen


def pack(prompt_ids: Array, responses: Ragged, device: str | torch.device = "cpu", *, is_shared: bool) -> Packed:
    """Pack the responses (R ragged int64 entries) of one prompt (int64 [Lp]).

    With `is_shared` the responses share one copy of the prompt, else each has its own copy. A single response always has its own.

    Raises `ValueError` if the prompt or a response is empty, so that nothing would predict its first token or be predicted.
    """
    lengths = responses.lengths.tolist()
    if not len(prompt_ids) or not lengths or not min(lengths):
        raise ValueError(f"cannot pack a prompt of {len(prompt_ids)} tokens with responses of {lengths}")
    has_prompt = is_shared and len(lengths) > 1
    if has_prompt:
        segments = [prompt_ids, *responses]
        starts = [0] + [len(prompt_ids)] * len(lengths)
    else:
        segments = [np.concatenate([prompt_ids, response]) for response in responses]
        starts = [0] * len(lengths)
    positions = np.concatenate([np.arange(start, start + len(s)) for start, s in zip(starts, segments, strict=True)])

    def on_device(values: Array) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Packed(
        tokens_P=on_device(np.concatenate(segments)),
        targets_T=on_device(responses.values),
        row_T=on_device(np.repeat(np.arange(len(lengths)), lengths)),
        layout=AttentionLayout(
            tuple(len(s) for s in segments), (SharedPrompt(0, len(lengths)),) if has_prompt else (), on_device(positions)
        ),
        prompt_length=len(prompt_ids),
        response_lengths=tuple(lengths),
    )


def pack_thrifty(
    prompt_ids: Array,
    responses: Ragged,
    device: str | torch.device = "cpu",
    targets: Ragged | None = None,
    *,
    may_share: bool = True,
) -> Packed:
    """Pack a prompt (int64 [Lp]) and its responses (R ragged int64), and share the prompt if it may be and saves enough tokens.

    `targets`: tokens that are predicted in the places of the response tokens (`MicroBatch.target_ids`). The decision depends on
    the lengths alone, so every model computes the same layout. Raises `ValueError` as `pack`, and for targets of other lengths.
    """
    ratio = token_ratio(len(prompt_ids), responses.lengths.tolist())
    packed = pack(prompt_ids, responses, device, is_shared=may_share and ratio >= LEAST_TOKEN_RATIO)
    if targets is None:
        return packed
    if not np.array_equal(targets.offsets, responses.offsets):
        raise ValueError(f"responses of {responses.lengths.tolist()} tokens have targets of {targets.lengths.tolist()}")
    return replace(packed, targets_T=torch.tensor(targets.values, dtype=torch.int64, device=device))


def pack_inert(num_tokens: int, device: str | torch.device = "cpu") -> Packed:
    """Pack one segment of zeros that attends only to itself and predicts nothing.

    A process computes it when it has no micro-batch while others have one.
    """
    tokens_P = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    layout = AttentionLayout((num_tokens,), prompts=(), positions_P=torch.arange(num_tokens, device=device))
    return Packed(tokens_P, tokens_P[:0], tokens_P[:0], layout, num_tokens, response_lengths=(), fill_tokens=num_tokens)


def joined(parts: Sequence[Packed]) -> Packed:
    """Several micro-batches, none of them filled up, as one sequence. A single one is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    prompts: list[SharedPrompt] = []
    lengths: list[int] = []
    rows: list[Tensor] = []
    num_rows = 0
    for part in parts:
        prompts += [replace(one, segment=one.segment + len(lengths)) for one in part.layout.prompts]
        lengths += part.layout.segment_lengths
        rows.append(part.row_T + num_rows)
        num_rows += len(part.response_lengths)
    return Packed(
        tokens_P=torch.cat([part.tokens_P for part in parts]),
        targets_T=torch.cat([part.targets_T for part in parts]),
        row_T=torch.cat(rows),
        layout=AttentionLayout(tuple(lengths), tuple(prompts), torch.cat([part.positions_P for part in parts])),
        prompt_length=0,
        response_lengths=tuple(length for part in parts for length in part.response_lengths),
        parts=tuple(parts),
    )


def cut_into_passes(packed: Sequence[Packed], most_tokens: int | None, num_parts: int = 1) -> list[slice]:
    """Neighbouring micro-batches that are computed in one pass each: as many as have at most so many tokens together, and at least
    one. None: each by itself. Where `num_parts` are computed at the same time, passes are as short as even parts (`cut_evenly`)."""
    if most_tokens is None:
        return [slice(number, number + 1) for number in range(len(packed))]
    passes = cut_evenly(packed, lambda one: one.num_tokens, most_tokens, num_parts)
    return [slice(begin, end) for begin, end in pairwise(accumulate(map(len, passes), initial=0))]


def cut_into_batches(packed: Sequence[Packed], most_tokens: int, num_parts: int = 1) -> list[slice]:
    """`cut_into_passes` of micro-batches without shared prompts, whose rows are computed filled up to the longest of the pass.

    Tokens are counted so. A micro-batch that would make them more than `MOST_FILLED` of what each has by itself begins another
    pass.
    """
    cut: list[slice] = []
    for part in cut_evenly(range(len(packed)), lambda number: _filled([packed[number]]), most_tokens, num_parts):
        begin = part[0]
        for end in part[1:]:
            together = packed[begin : end + 1]
            if _filled(together) > min(most_tokens, MOST_FILLED * sum(_filled([one]) for one in together)):
                cut.append(slice(begin, end))
                begin = end
        cut.append(slice(begin, part[-1] + 1))
    return cut


def _filled(packed: Sequence[Packed]) -> int:
    """Tokens of a batch of all rows, filled up to the longest."""
    lengths = [length for one in packed for length in one.layout.segment_lengths]
    return len(lengths) * max(lengths)


def filled_up(packed: Packed, num_tokens: int) -> Packed:
    """Packed sequence of at least so many tokens: a shorter one gets a last segment that no other segment sees and that predicts
    nothing."""
    if (missing := num_tokens - packed.num_tokens) <= 0:
        return packed
    zeros = packed.tokens_P.new_zeros(missing)  # token 0 at position 0, which every model has
    layout = AttentionLayout(
        segment_lengths=(*packed.layout.segment_lengths, missing),
        prompts=packed.layout.prompts,
        positions_P=torch.cat([packed.positions_P, zeros]),
    )
    return replace(packed, tokens_P=torch.cat([packed.tokens_P, zeros]), layout=layout, fill_tokens=packed.fill_tokens + missing)


def filled_alike(packed: Sequence[Packed], at_most: float = 1.0) -> list[Packed]:
    """Packed sequences of one length: shorter ones are filled up.

    If fill tokens would be more than the fraction `at_most` of all tokens, the sequences are returned as they are.
    """
    longest = max((one.num_tokens for one in packed), default=0)
    if longest * len(packed) * (1 - at_most) > sum(one.num_tokens for one in packed):
        return [*packed]
    return [filled_up(one, longest) for one in packed]


def token_ratio(prompt_length: int, response_lengths: Sequence[int]) -> float:
    """Ratio of the tokens in rows to the tokens in the shared sequence: K (Lp + Lr) / (Lp + K Lr) for K equal responses."""
    num_response_tokens = sum(response_lengths)
    return (prompt_length * len(response_lengths) + num_response_tokens) / (prompt_length + num_response_tokens)
