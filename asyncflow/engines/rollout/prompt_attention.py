"""Attention of prompts, in tiles that begin at multiples of `CHUNK` whatever pass they are in: no bit depends on the pass.

    PromptPiece, ... --tiles--> Tiles: those that attend in one call, and the way back --attend--> [P * L, H * D]

T = tokens in a pass, P = tiles of a call, L = queries of a tile, E = keys of a tile, B = blocks, H = query heads, K = key/value
heads, D = head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.engines.rollout.key_cache import BLOCK, KeyCache
from asyncflow.engines.rollout.slot_cache import capped
from asyncflow.types import Array

CHUNK = 128  # tokens of a prompt whose queries attend in one call of the kernel, which rounds by the number of queries, too


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Tokens (int64) of a sequence that one pass computes, from position `first` on. The slot has the keys before it.
    `wants_logits`: those after its last token are wanted."""

    slot: int
    first: int
    tokens: Array
    wants_logits: bool = True


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of prompts that begin at one position and have as many blocks: they attend in one call. P tiles of L tokens, E keys.

    What a piece lacks of a tile is filled up, so that a token's place in the call is the same whatever pass it is in: with the
    first token of the piece, where this begins within the tile, and with the tile's last one until its block is full.
    """

    rows_PL: Tensor  # int64: the pass's row of each query
    keys_PE: Tensor | None  # int64: the pass's row of each key; None: keys before the pass are among them
    blocks_PB: Tensor | None  # int64: then the blocks of the cache that have them
    mask_LE: Tensor | None  # bool: which keys a query attends to; None: the first ones, up to its own


class PromptAttention:
    """Attention of the prompts of one decoder's passes, whose keys are in its cache."""

    def __init__(self, config: DecoderConfig, cache: KeyCache, device: torch.device) -> None:
        self._config, self._cache, self._device = config, cache, device

    def tiles(self, pieces: Sequence[PromptPiece], begin: int, num_inert: int) -> tuple[list[Tiles], Tensor]:
        """Tiles of pieces whose tokens are the rows of a pass from `begin` on, by the calls that they attend in; and the way back:
        the row of each token of the pass (int64 [T]) in what `begin` rows and these calls give, one after another."""
        # Of each tile its slot, the row that position 0 would have, where its piece begins, and where the tile ends.
        calls: dict[tuple[int, int, bool], list[tuple[int, int, int, int]]] = {}
        end = begin
        for piece in pieces:
            stop, row = piece.first + len(piece.tokens), end - piece.first
            for position in range(piece.first // CHUNK * CHUNK, stop, CHUNK):
                until = min(position + CHUNK, stop)
                call = position, until - position + -until % BLOCK, bool(piece.first)
                calls.setdefault(call, []).append((piece.slot, row, piece.first, until))
            end += len(piece.tokens)
        tiles, rows_T, made = [], np.arange(end + num_inert), begin
        rows_T[end:] = 0
        for (position, size, has_before), members in calls.items():
            slots, rows, firsts, untils = np.array(members).T
            for _, row, first, until in members:
                first = max(position, first)
                rows_T[row + first : row + until] = made - position + np.arange(first, until)
                made += size
            num_keys = position + size
            keys_PE = rows[:, None] + np.clip(np.arange(num_keys), firsts[:, None], untils[:, None] - 1)
            tiles.append(
                Tiles(
                    rows_PL=self._on_device(keys_PE[:, position:]),
                    keys_PE=None if has_before else self._on_device(keys_PE),
                    blocks_PB=self._cache.blocks(slots, num_keys // BLOCK) if has_before else None,
                    mask_LE=self._on_device(np.tri(size, num_keys, position, bool)) if position else None,
                )
            )
        return tiles, self._on_device(rows_T)

    def attend(self, layer: int, tiles: Tiles, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Attention [P * L, H * D] of the tiles' queries to the keys of their prompts.

        They are copied, to lie aligned however they lay among others, and L is a multiple of `BLOCK`: the kernel rounds the keys
        behind the last whole vector otherwise, so a prompt alone would differ from the same one in a longer sequence.
        """
        q_PHLD = _rows(q_THD, tiles.rows_PL)
        if tiles.keys_PE is not None:
            k_PKED, v_PKED = _rows(k_TKD, tiles.keys_PE), _rows(v_TKD, tiles.keys_PE)
        else:
            assert tiles.blocks_PB is not None
            k_PKED, v_PKED = self._cache.read(layer, tiles.blocks_PB)
        scale, softcap, group = (
            self._config.attention_multiplier,
            self._config.attention_softcap,
            q_PHLD.shape[1] // k_PKED.shape[1],
        )
        if softcap is None:
            is_causal, enable_gqa = tiles.mask_LE is None, group > 1
            attended_PHLD = F.scaled_dot_product_attention(
                q_PHLD, k_PKED, v_PKED, attn_mask=tiles.mask_LE, is_causal=is_causal, enable_gqa=enable_gqa, scale=scale
            )
        else:  # no kernel has it
            k_PHED, v_PHED = (x.repeat_interleave(group, 1) for x in (k_PKED, v_PKED))
            scores_PHLE = capped(q_PHLD @ k_PHED.mT * (q_PHLD.shape[-1] ** -0.5 if scale is None else scale), softcap)
            num_queries, num_keys = scores_PHLE.shape[2:]
            later_LE = torch.ones(num_queries, num_keys, dtype=torch.bool, device=self._device).triu_(1 + num_keys - num_queries)
            weights_PHLE = scores_PHLE.masked_fill_(later_LE, -torch.inf).softmax(-1, dtype=torch.float32).to(q_PHLD.dtype)
            attended_PHLD = weights_PHLE @ v_PHED
        return attended_PHLD.transpose(1, 2).flatten(0, 1).flatten(1)

    def _on_device(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _rows(x_THD: Tensor, rows_PL: Tensor) -> Tensor:
    """Copies [P, H, L, D] of rows of a pass."""
    return x_THD.index_select(0, rows_PL.reshape(-1)).view(*rows_PL.shape, *x_THD.shape[1:]).transpose(1, 2)
