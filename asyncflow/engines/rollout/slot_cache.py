"""Keys and values of the active responses, and the attention of one new token for each of them.

A *slot* holds one response, in blocks of `BLOCK` keys. A block's keys lie dimension by dimension (D rows of BLOCK lanes), its
values key by key (BLOCK rows of D). So both halves of attention are weighted sums of rows, which `embedding_bag` computes:

    scores of a block = sum over d of q[d] * keys[d, :]        attended = sum over the keys of weight[key] * values[key, :]

It streams ragged rows, where `bmm` would multiply many tiny padded matrices (two to four times slower with keys in the cache, and
more so in bfloat16). Each sum runs in order over its own rows: the bits of a slot do not depend on the others.

N = slots in a step, H = query heads, K = key/value heads, D = head size, L = keys, B = blocks of the longest slot, M = (slot, head,
block) triples that exist.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asyncflow.types import Array

BLOCK = 32


@dataclass(frozen=True, slots=True)
class Step:
    """Where one decode step reads and writes: the same for every layer."""

    new_keys: Tensor  # int64 [N * K * D]: elements of a layer's keys that the new tokens set
    new_values: Tensor  # int64 [N * K]: rows of a layer's values
    key_rows: Tensor  # int64 [M, D]: rows of the keys of each block
    value_rows: Tensor  # int64 [M * BLOCK]: rows of the values of each block
    value_offsets: Tensor  # int64 [N * H]: where the blocks of each slot and head begin in `value_rows`
    heads: Tensor  # int64 [M]: the row of [N * H] that a block belongs to
    places: Tensor  # int64 [M]: the row of [N * H * B] that a block is
    mask_NL: Tensor  # 0, or -inf beyond a slot's last key


class SlotCache:
    """The cache of `num_slots` slots of `max_context` tokens."""

    def __init__(
        self, *, layers: int, heads: int, kv_heads: int, head_dim: int, num_slots: int, max_context: int, like: Tensor
    ) -> None:
        """`like`: a tensor of the dtype and on the device of the cache."""
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self._blocks = -(-max_context // BLOCK)
        # Zeros, because what lies beyond a slot's last key is multiplied too, by zero.
        shape = (layers, 2, num_slots, kv_heads, self._blocks, BLOCK * head_dim)
        self.tensor = torch.zeros(shape, dtype=like.dtype, device=like.device)

    def copy(self, source: int, first: int, count: int, length: int) -> None:
        """Copy the first `length` keys and values of slot `source` to slots `first` .. `first + count - 1`."""
        used = self.tensor[:, :, :, :, : -(-length // BLOCK)]
        used[:, :, first : first + count] = used[:, :, source : source + 1]

    def fill(self, layer: int, k_LKD: Tensor, v_LKD: Tensor, first: int, count: int) -> None:
        """The keys and values of one layer from position 0 on, for slots `first` .. `first + count - 1`."""
        blocks = -(-len(k_LKD) // BLOCK)
        padding = (0, 0, 0, 0, 0, blocks * BLOCK - len(k_LKD))
        keys, values = (F.pad(x, padding).view(blocks, BLOCK, self._kv_heads, -1) for x in (k_LKD, v_LKD))
        slots = self.tensor[layer, :, first : first + count, :, :blocks]
        slots[0] = keys.permute(2, 0, 3, 1).flatten(2)
        slots[1] = values.permute(2, 0, 1, 3).flatten(2)

    def step(self, positions: Array) -> Step:
        """The step in which slots 0 .. N-1 get a key at `positions` (int64 [N]) and attend to all that they have."""
        num_rows, group = len(positions), self._heads // self._kv_heads
        block, lane = positions // BLOCK, positions % BLOCK
        most = int(block.max()) + 1
        dims, lanes = np.arange(self._head_dim), np.arange(BLOCK)
        first_block = np.arange(num_rows * self._kv_heads) * self._blocks  # of each slot and key head

        new_blocks = first_block + block.repeat(self._kv_heads)
        new_lanes = lane.repeat(self._kv_heads)
        places = np.flatnonzero(np.repeat(np.arange(most) <= block[:, None], self._heads, axis=0))
        heads = places // most
        blocks = first_block[heads // group] + places % most
        offsets = np.zeros(num_rows * self._heads, np.int64)
        np.cumsum(np.repeat(block + 1, self._heads)[:-1] * BLOCK, out=offsets[1:])
        mask = np.where(np.arange(most * BLOCK) > positions[:, None], np.float32(-np.inf), np.float32(0))
        on_device = self._on_device
        return Step(
            new_keys=on_device(((new_blocks[:, None] * self._head_dim + dims) * BLOCK + new_lanes[:, None]).ravel()),
            new_values=on_device(new_blocks * BLOCK + new_lanes),
            key_rows=on_device(blocks[:, None] * self._head_dim + dims),
            value_rows=on_device((blocks[:, None] * BLOCK + lanes).ravel()),
            value_offsets=on_device(offsets),
            heads=on_device(heads),
            places=on_device(places),
            mask_NL=on_device(mask).to(self.tensor.dtype),
        )

    def attend(self, layer: int, step: Step, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        """Store the new keys and values, then attention [N, H * D] of each query (already scaled) to its slot's keys."""
        keys, values = self.tensor[layer].view(2, -1)
        keys[step.new_keys] = k_NKD.reshape(-1)
        values = values.view(-1, self._head_dim)
        values.index_copy_(0, step.new_values, v_NKD.flatten(0, 1))

        q_MD = q_NHD.reshape(-1, self._head_dim).index_select(0, step.heads)
        scores = F.embedding_bag(step.key_rows, keys.view(-1, BLOCK), mode="sum", per_sample_weights=q_MD)
        num_rows, num_keys = step.mask_NL.shape
        scores_NHL = scores.new_zeros(num_rows, self._heads, num_keys)
        scores_NHL.view(-1, BLOCK).index_copy_(0, step.places, scores)
        weights_NHL = scores_NHL.add_(step.mask_NL[:, None]).softmax(-1)
        weights = weights_NHL.view(-1, BLOCK).index_select(0, step.places).view(-1)
        attended = F.embedding_bag(step.value_rows, values, step.value_offsets, mode="sum", per_sample_weights=weights)
        return attended.view(num_rows, -1)

    def _on_device(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self.tensor.device)
