"""Packing of a prompt and its responses into one sequence without padding; one shared prompt, or one for each response (rows).

    shared       tokens       p p p   a a   b b b        segments of 3, 2, 3; the responses see the prompt
                 positions    0 1 2   3 4   3 4 5
                 predict          ^   ^     ^ ^          the prompt's last position predicts the first token of each response

    rows         tokens       p p p a a   p p p b b b    segments of 5, 6; none sees another
                 positions    0 1 2 3 4   0 1 2 3 4 5
                 predict          ^ ^         ^ ^ ^

The prompt's last position predicts the first token of a response (papers: the flag on PA 13), so in the shared sequence its hidden
state is used once for each response; the logits at the last token of a response are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from asyncflow.types import Array, Ragged

LEAST_TOKEN_RATIO = 1.1
"""Ratio of tokens below which sharing the prompt saves less than its extra attention calls cost.

See `token_ratio`. Measured by benchmarks/shared_prompt.py.
"""
INERT_TOKENS = 4
"""Tokens of an inert micro-batch (`pack_inert`). From 4 tokens on, matrix products take the same routine as other micro-batches."""

# P tokens of the packed sequence, prompt or prompts included; T response tokens; R responses; H hidden elements.


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayout:
    """Layout of a packed sequence: which token attends to which. A model's attention calls get it as the argument `layout`.

    Each segment attends causally to itself. With `has_prompt` the first segment is a prompt, which all other segments see whole.
    """

    segment_lengths: tuple[int, ...]  # add up to P
    has_prompt: bool
    positions_P: Tensor  # int64: the model's position_ids

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the shared prompt; 0 if there is none."""
        return self.segment_lengths[0] if self.has_prompt else 0


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Packed prompt and responses: P tokens of the sequence, T response tokens. Tensors are int64, on the model's device."""

    tokens_P: Tensor
    targets_T: Tensor  # the response tokens, end to end, or others that are predicted in their places
    row_T: Tensor  # the response that a token belongs to, 0..R-1
    layout: AttentionLayout
    prompt_length: int
    response_lengths: tuple[int, ...]
    fill_tokens: int = 0  # tokens of the last segment, if it only fills up the sequence

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
        if self.layout.has_prompt:
            sizes = [size for n in (self.prompt_length, *self.response_lengths) for size in (n - 1, 1)]
            _, last_1H, *rest, _ = hidden_PH.split_with_sizes([*sizes, self.fill_tokens])
            hidden_TH = torch.cat([part for body_BH in rest[::2] for part in (last_1H, body_BH)])
        else:
            sizes = [size for n in self.response_lengths for size in (self.prompt_length - 1, n, 1)]
            hidden_TH = torch.cat(hidden_PH.split_with_sizes([*sizes, self.fill_tokens])[1::3])
        return hidden_TH if temperature == 1.0 else hidden_TH / temperature


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
        layout=AttentionLayout(tuple(len(s) for s in segments), has_prompt, on_device(positions)),
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
    layout = AttentionLayout((num_tokens,), has_prompt=False, positions_P=torch.arange(num_tokens, device=device))
    return Packed(tokens_P, tokens_P[:0], tokens_P[:0], layout, num_tokens, response_lengths=(), fill_tokens=num_tokens)


def filled_alike(packed: Sequence[Packed], at_most: float = 1.0) -> list[Packed]:
    """Packed sequences of one length: shorter ones get a last segment that no other segment sees and that predicts nothing.

    If fill tokens would be more than the fraction `at_most` of all tokens, the sequences are returned as they are.
    """
    longest = max((one.num_tokens for one in packed), default=0)
    if longest * len(packed) * (1 - at_most) > sum(one.num_tokens for one in packed):
        return [*packed]
    return [_filled(one, longest - one.num_tokens) if one.num_tokens < longest else one for one in packed]


def _filled(packed: Packed, num_tokens: int) -> Packed:
    zeros = packed.tokens_P.new_zeros(num_tokens)  # token 0 at position 0, which every model has
    layout = AttentionLayout(
        segment_lengths=(*packed.layout.segment_lengths, num_tokens),
        has_prompt=packed.layout.has_prompt,
        positions_P=torch.cat([packed.positions_P, zeros]),
    )
    return replace(packed, tokens_P=torch.cat([packed.tokens_P, zeros]), layout=layout, fill_tokens=packed.fill_tokens + num_tokens)


def token_ratio(prompt_length: int, response_lengths: Sequence[int]) -> float:
    """Ratio of the tokens in rows to the tokens in the shared sequence: K (Lp + Lr) / (Lp + K Lr) for K equal responses."""
    num_response_tokens = sum(response_lengths)
    return (prompt_length * len(response_lengths) + num_response_tokens) / (prompt_length + num_response_tokens)
