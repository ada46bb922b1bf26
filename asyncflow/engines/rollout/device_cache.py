"""Keys and values on an accelerator: a decode step attends by PyTorch's own kernel, to copies of its slots' blocks.

A block's keys and values lie token by token. The query heads that share a key head are so many queries of that head: nothing is
repeated. The host hands over little for a step: of each row `[position, blocks of its slot ...]`. Everything else is computed from
it on the device, so that a step that was recorded once (step_graphs.py) can be replayed for others.

N = rows of a step, B = blocks of a row, E = keys of these, K = key/value heads, G = query heads of one of them, D = head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.engines.rollout.key_cache import BLOCK, AttendRows, KeyCache, Store
from asyncflow.engines.rollout.slot_cache import capped
from asyncflow.types import Array

COPIED_BYTES: Final = 2**30
"""Bytes of keys and values that one call attends to, at most: rows of long contexts attend some after others."""


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """Places that one decode step writes and reads, the same for every layer."""

    rows_N: Tensor  # int64: rows of the cache that the new tokens' keys and values are
    blocks_NB: Tensor  # int64: blocks of the slots; where one has fewer than B, its first again
    mask_N11E: Tensor  # 0, or -inf behind a row's own key


class DeviceCache(KeyCache):
    """`KeyCache` for steps without a host."""

    def __init__(self, config: DecoderConfig, *, num_slots: int, max_context: int, like: Tensor) -> None:
        super().__init__(config, num_slots=num_slots, max_context=max_context, like=like)
        self._rows = [layer.view(2, -1, self._kv_heads, self._head_dim) for layer in self.tensor]
        self._positions = torch.arange(self._table.shape[1] * BLOCK).to(like.device)

    def storing(self, slots: Array, positions: Array) -> Store:
        self.make_room(slots, positions)
        rows_T = torch.from_numpy(self._table[slots, positions // BLOCK] * BLOCK + positions % BLOCK).to(self.tensor.device)
        return lambda layer, k_TKD, v_TKD: self.store(layer, rows_T, k_TKD, v_TKD)

    def attending(self, slots: Array, positions: Array) -> AttendRows:
        step = self.step(torch.from_numpy(self.places(slots, positions)).to(self.tensor.device))
        return lambda layer, q_NHD: self.attend(layer, step, q_NHD)

    def places(self, slots: Array, positions: Array) -> Array:
        """Position and blocks of each row of a step (int64 [N, 1 + B]); the slots have them then.

        B is a power of two, so that there are few shapes. A slot with fewer blocks has its first one again: what lies in others'
        may not be finite, and weights of 0 would not hide it.
        """
        self.make_room(slots, positions)
        most = int(positions.max()) // BLOCK + 1
        num_blocks = min(1 << (most - 1).bit_length(), self._table.shape[1])
        held, has_NB = self._table[slots, :num_blocks], np.arange(num_blocks) < self._counts[slots, None]
        columns: Array = np.column_stack([positions, np.where(has_NB, held, held[:, :1])])
        return columns

    def step(self, places_NX: Tensor) -> DeviceStep:
        """The step of these `places`, on the device alone."""
        positions_N1, blocks_NB = places_NX[:, :1], places_NX[:, 1:]
        rows_N1 = blocks_NB.gather(1, positions_N1 // BLOCK) * BLOCK + positions_N1 % BLOCK
        is_later_NE = self._positions[: blocks_NB.shape[1] * BLOCK] > positions_N1
        mask_NE = self.tensor.new_zeros(is_later_NE.shape).masked_fill_(is_later_NE, -torch.inf)
        return DeviceStep(rows_N1.flatten(), blocks_NB, mask_NE[:, None, None])

    def store(self, layer: int, rows_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Write the keys and values of one layer to rows of the cache (int64 [T])."""
        for half, x_TKD in enumerate((k_TKD, v_TKD)):
            self._rows[layer][half].index_copy_(0, rows_T, x_TKD)

    def read(self, layer: int, blocks_PB: Tensor) -> tuple[Tensor, Tensor]:
        shape = (len(blocks_PB), -1, self._kv_heads, self._head_dim)
        k_PKED, v_PKED = (half.index_select(0, blocks_PB.flatten()).view(shape).transpose(1, 2) for half in self.tensor[layer])
        return k_PKED, v_PKED

    def attend(self, layer: int, step: DeviceStep, q_NHD: Tensor) -> Tensor:
        """Attention [N, H * D] of one query for each row to the keys of its slot."""
        q_NKGD = q_NHD.reshape(len(q_NHD), self._kv_heads, -1, self._head_dim)
        bytes_a_row = step.blocks_NB.shape[1] * self.block_bytes // len(self.tensor)
        rows = max(1, COPIED_BYTES // bytes_a_row)
        parts = (torch.split(x, rows) for x in (step.blocks_NB, step.mask_N11E, q_NKGD))
        attended = [self._attended(layer, *part).flatten(1) for part in zip(*parts, strict=True)]
        return torch.cat(attended) if len(attended) > 1 else attended[0]

    def _attended(self, layer: int, blocks_NB: Tensor, mask_N11E: Tensor, q_NKGD: Tensor) -> Tensor:
        k_NKED, v_NKED = self.read(layer, blocks_NB)
        if self._softcap is None:
            return F.scaled_dot_product_attention(q_NKGD, k_NKED, v_NKED, attn_mask=mask_N11E, scale=self._scale)
        scores_NKGE = capped((q_NKGD @ k_NKED.mT).float().mul_(self._scale), self._softcap).add_(mask_N11E)  # no kernel has it
        return scores_NKGE.softmax(-1).to(q_NKGD.dtype) @ v_NKED
