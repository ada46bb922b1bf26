"""Keys and values on an accelerator: attention of a decode step as batched products over all blocks of its slots.

The host hands over little for a step: one row of integers for each token, `[token, position, blocks of its slot ...]`. Everything
else is computed from it on the device, so that a step that was recorded once (step_graphs.py) can be replayed for others.

N = rows of a step, B = blocks of a row, K = key/value heads, G = query heads of one of them, D = head size, L = keys of all blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncflow.engines.rollout.slot_cache import BLOCK, KeyPlaces, SlotCache, capped
from asyncflow.types import Array


@dataclass(frozen=True, slots=True)
class BatchedPlaces:
    """Places that one decode step writes and reads, the same for every layer."""

    new: KeyPlaces
    blocks_X: Tensor  # int64 [N * B]: blocks of the cache; where a slot has fewer than B, any
    mask_N11L: Tensor  # 0, or -inf beyond a row's own key


class DeviceSlotCache(SlotCache):
    """The cache of an accelerator, whose products of many small matrices are faster than sums of ragged rows."""

    def inputs(self, tokens: Array, slots: Array, positions: Array) -> Array:
        """The step of `step` as one array (int64 [N, 2 + B]): tokens, positions, and blocks of the slots.

        B is a power of two, so that there are few shapes.
        """
        self.make_room(slots, positions)
        most = int(positions.max()) // BLOCK + 1
        num_blocks = min(1 << (most - 1).bit_length(), self._table.shape[1])
        columns: Array = np.column_stack([tokens, positions, self._table[slots, :num_blocks]])
        return columns

    def step(self, slots: Array, positions: Array) -> BatchedPlaces:
        """See `SlotCache.step`."""
        return self.step_of(torch.from_numpy(self.inputs(positions, slots, positions)).to(self.tensor.device))

    def step_of(self, inputs_NX: Tensor) -> BatchedPlaces:
        """The step of these inputs (int64 [N, 2 + B]), on the device alone."""
        positions_N1, blocks_NB = inputs_NX[:, 1:2], inputs_NX[:, 2:]
        device = inputs_NX.device
        heads_K, dims_D = torch.arange(self._kv_heads, device=device), torch.arange(self._head_dim, device=device)
        rows_NK = blocks_NB.gather(1, positions_N1 // BLOCK) * self._kv_heads + heads_K
        lanes_N1 = positions_N1 % BLOCK
        keys_NKD = (rows_NK[:, :, None] * self._head_dim + dims_D) * BLOCK + lanes_N1[:, :, None]
        is_later_NL = torch.arange(blocks_NB.shape[1] * BLOCK, device=device) > positions_N1
        mask_NL = torch.zeros(is_later_NL.shape, dtype=torch.float32, device=device).masked_fill_(is_later_NL, -torch.inf)
        new = KeyPlaces(keys_NKD.flatten(), (rows_NK * BLOCK + lanes_N1).flatten())
        return BatchedPlaces(new, blocks_NB.flatten(), mask_NL[:, None, None])

    def attend(self, layer: int, step: BatchedPlaces, q_NHD: Tensor) -> Tensor:  # type: ignore[override]
        """Attention [N, H * D] of one query for each row to the keys of its slot."""
        num_rows, kv_heads, head_dim = len(q_NHD), self._kv_heads, self._head_dim
        keys, values = (half.index_select(0, step.blocks_X) for half in self.tensor[layer])
        k_NBKDL = keys.view(num_rows, -1, kv_heads, head_dim, BLOCK)
        v_NBKLD = values.view(num_rows, -1, kv_heads, BLOCK, head_dim)
        q_N1KGD = q_NHD.view(num_rows, 1, kv_heads, -1, head_dim)
        scores_NBKGL = q_N1KGD @ k_NBKDL
        scores_NKGL = scores_NBKGL.permute(0, 2, 3, 1, 4).flatten(3).float()
        if self._softcap is None:
            scores_NKGL = scores_NKGL.mul_(self._scale)
        else:
            scores_NKGL = capped(scores_NKGL.mul_(self._scale), self._softcap)
        weights_NKGL = scores_NKGL.add_(step.mask_N11L).softmax(-1).to(q_NHD.dtype)
        weights_NBKGL = weights_NKGL.unflatten(3, (-1, BLOCK)).permute(0, 3, 1, 2, 4)
        return (weights_NBKGL @ v_NBKLD).sum(1).view(num_rows, -1)
