"""Packed attention as one call of flex_attention, for tensors that no flash-attention kernel takes, such as float32 on CUDA.

The block mask says which blocks of 128 queries and 128 keys have a pair to compute. It is made from the segments' lengths; inside a
block the mask is a comparison of positions. This code has not run on a GPU yet; the tests compare the mask with a plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from asyncflow.engines.train.model.packing import AttentionLayout, SharedPrompt

# P packed tokens, B blocks of them; H query heads, K key and value heads, D elements per head.

_BLOCK_TOKENS = 128


def flex_attend(query_PHD: Tensor, key_PKD: Tensor, value_PKD: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
    """Attention output [P, H, D] of packed tokens, differentiable. `scale`: factor of the scores."""
    mask = block_mask(layout.segment_lengths, layout.prompts, query_PHD.device)
    query_1HPD, key_1KPD, value_1KPD = (x.transpose(0, 1)[None] for x in (query_PHD, key_PKD, value_PKD))
    out_1HPD = _compiled()(query_1HPD, key_1KPD, value_1KPD, block_mask=mask, scale=scale, enable_gqa=True)
    return out_1HPD[0].transpose(0, 1)


@lru_cache(maxsize=4)  # every layer of a model asks again
def block_mask(segment_lengths: tuple[int, ...], prompts: tuple[SharedPrompt, ...], device: torch.device) -> BlockMask:
    """Block mask for packed tokens: a query sees the keys from the start of its segment up to itself, and its shared prompt."""
    lengths = np.array(segment_lengths)
    num_tokens = int(lengths.sum())
    start_P = np.repeat(np.cumsum(lengths) - lengths, lengths)
    num_blocks = -(-num_tokens // _BLOCK_TOKENS)
    first_B = np.arange(num_blocks) * _BLOCK_TOKENS
    # A block of queries sees keys from the start of its first query's segment on. If that is the prompt, all of it is among them.
    block_B = np.arange(num_blocks)
    is_own_BB = (block_B[None] >= start_P[first_B][:, None] // _BLOCK_TOKENS) & (block_B[None] <= block_B[:, None])
    is_needed_BB = is_own_BB
    prompt_begin_P, prompt_end_P = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int64)

    def holds_B(tokens: slice) -> np.ndarray:
        found: np.ndarray = (first_B < tokens.stop) & (first_B + _BLOCK_TOKENS > tokens.start)
        return found

    for each in AttentionLayout(segment_lengths, prompts, torch.empty(0)).shared():
        is_needed_BB = is_needed_BB | (holds_B(each.responses)[:, None] & holds_B(each.prompt)[None])
        prompt_begin_P[each.responses], prompt_end_P[each.responses] = each.prompt.start, each.prompt.stop
    start, prompt_begin, prompt_end = (torch.tensor(x, device=device) for x in (start_P, prompt_begin_P, prompt_end_P))

    def may_see(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_own = (key >= start[query]) & (key <= query)
        return is_own | ((key >= prompt_begin[query]) & (key < prompt_end[query]))

    def on_device(values: np.ndarray) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)[None, None]

    return BlockMask.from_kv_blocks(
        on_device(is_needed_BB.sum(1)),
        on_device(np.argsort(~is_needed_BB, axis=1, kind="stable")),  # the needed ones first, in order
        BLOCK_SIZE=_BLOCK_TOKENS,
        mask_mod=may_see,
        seq_lengths=(num_tokens, num_tokens),
    )


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    # Without compilation it would compute the scores of all pairs. Dynamic: lengths differ between micro-batches.
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True)
    return compiled
