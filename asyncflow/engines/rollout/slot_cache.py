"""Keys and values of the active responses on a CPU, and the attention of one new token for each of them.

A block's keys lie dimension by dimension (D rows of BLOCK lanes), its values key by key (BLOCK rows of D). So both halves of
attention are weighted sums of rows, which `embedding_bag` computes:

    scores of a block = sum over d of q[d] * keys[d, :]        attended = sum over the keys of weight[key] * values[key, :]

It streams ragged rows, where `bmm` would multiply many tiny padded matrices (two to four times slower with keys in the cache, and
more so in bfloat16). Each sum runs in order over its own rows: the bits of a slot do not depend on the others.

T = tokens that are stored, N = rows of a step, H = query heads, K = key/value heads, D = head size, L = keys, B = blocks of the
longest slot, M = (slot, head, block) triples that exist.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.engines.rollout.key_cache import BLOCK, AttendRows, KeyCache, Store
from asyncflow.types import Array


@dataclass(frozen=True, slots=True)
class KeyPlaces:
    """Places of tokens in the cache of any layer."""

    keys: Tensor  # int64 [T * K * D]: elements of the layer's keys
    values: Tensor  # int64 [T * K]: rows of its values


@dataclass(frozen=True, slots=True)
class StepPlaces:
    """Places that one decode step reads, the same for every layer. Rows are int32, half as many bytes as int64."""

    key_rows: Tensor  # int32 [M * D]: rows of the keys of each block
    key_offsets: Tensor  # int32 [N * H * B]: where each block begins in `key_rows`; a block that does not exist has no rows
    value_rows: Tensor  # int32 [M * BLOCK]: rows of the values of each block
    value_offsets: Tensor  # int32 [N * H]: where the blocks of each slot and head begin in `value_rows`
    heads: Tensor  # int64 [M]: the row of [N * H] that a block belongs to
    blocks: Tensor  # int64 [M]: the row of [N * H * B] that a block is
    mask_N1L: Tensor  # 0, or -inf beyond a slot's last key


class SlotCache(KeyCache):
    """`KeyCache` in an order that sums over ragged rows read."""

    def __init__(self, config: DecoderConfig, *, num_slots: int, max_context: int, like: Tensor) -> None:
        super().__init__(config, num_slots=num_slots, max_context=max_context, like=like)
        self._keys = [layer[0].view(-1, BLOCK) for layer in self.tensor]
        self._values = [layer[1].view(-1, self._head_dim) for layer in self.tensor]

    def storing(self, slots: Array, positions: Array) -> Store:
        places = self.places(slots, positions)
        return lambda layer, k_TKD, v_TKD: self.store(layer, places, k_TKD, v_TKD)

    def attending(self, slots: Array, positions: Array) -> AttendRows:
        step = self.step(slots, positions)
        return lambda layer, q_NHD: self.attend(layer, step, q_NHD)

    def places(self, slots: Array, positions: Array) -> KeyPlaces:
        """Places of the tokens at `positions` (int64 [T]) of `slots` (int64 [T]), for which there are blocks then."""
        self.make_room(slots, positions)
        heads, dims = np.arange(self._kv_heads), np.arange(self._head_dim)
        blocks_TK = self._table[slots, positions // BLOCK][:, None] * self._kv_heads + heads
        lanes_T1 = (positions % BLOCK)[:, None]
        keys_TKD = (blocks_TK[:, :, None] * self._head_dim + dims) * BLOCK + lanes_T1[:, :, None]
        return KeyPlaces(self._on_device(keys_TKD), self._on_device(blocks_TK * BLOCK + lanes_T1))

    def store(self, layer: int, places: KeyPlaces, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """The keys and values of one layer for the tokens at `places`."""
        self._keys[layer].view(-1).index_copy_(0, places.keys, k_TKD.reshape(-1))
        self._values[layer].index_copy_(0, places.values, v_TKD.flatten(0, 1))

    def read(self, layer: int, blocks_PB: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [P, K, B * BLOCK, D] of one layer in these blocks."""
        shape = (*blocks_PB.shape, self._kv_heads)
        keys, values = (half.index_select(0, blocks_PB.view(-1)) for half in self.tensor[layer])
        k_PBKDL, v_PBKLD = keys.view(*shape, self._head_dim, BLOCK), values.view(*shape, BLOCK, self._head_dim)
        # One block alone would not be copied, and the kernel sums in an order that depends on how the keys lie.
        k_PBLKD, v_PBLKD = k_PBKDL.permute(0, 1, 4, 2, 3).contiguous(), v_PBKLD.transpose(2, 3).contiguous()
        return k_PBLKD.flatten(1, 2).transpose(1, 2), v_PBLKD.flatten(1, 2).transpose(1, 2)

    def step(self, slots: Array, positions: Array) -> StepPlaces:
        """The step of `attending`."""
        self.make_room(slots, positions)
        group = self._heads // self._kv_heads
        counts_N = positions // BLOCK + 1
        most = int(counts_N.max())
        exists_NHB = np.repeat(np.arange(most) < counts_N[:, None], self._heads, axis=0)
        blocks = np.flatnonzero(exists_NHB)
        heads = blocks // most
        held = self._table[slots[heads // self._heads], blocks - heads * most]
        blocks_M1 = (held * self._kv_heads + heads % self._heads // group).astype(np.int32)[:, None]
        mask_NL = np.where(np.arange(most * BLOCK) > positions[:, None], np.float32(-np.inf), np.float32(0))
        return StepPlaces(
            key_rows=self._on_device(blocks_M1 * self._head_dim + np.arange(self._head_dim, dtype=np.int32)),
            key_offsets=self._on_device((_begins(exists_NHB.ravel()) * self._head_dim).astype(np.int32)),
            value_rows=self._on_device(blocks_M1 * BLOCK + np.arange(BLOCK, dtype=np.int32)),
            value_offsets=self._on_device((_begins(np.repeat(counts_N, self._heads)) * BLOCK).astype(np.int32)),
            heads=self._on_device(heads),
            blocks=self._on_device(blocks),
            mask_N1L=torch.from_numpy(mask_NL[:, None]).to(self.tensor),
        )

    def attend(self, layer: int, step: StepPlaces, q_NHD: Tensor) -> Tensor:
        """Attention [N, H * D] of one query for each slot to the slot's keys."""
        q_MD = q_NHD.reshape(-1, self._head_dim).index_select(0, step.heads)
        scores_NHL = _sums(self._keys[layer], step.key_rows, step.key_offsets, q_MD).view(*q_NHD.shape[:2], -1)
        if self._softcap is None:
            weights_NHL = torch.add(step.mask_N1L, scores_NHL, alpha=self._scale).softmax(-1)
        else:
            weights_NHL = capped(scores_NHL.mul_(self._scale), self._softcap).add_(step.mask_N1L).softmax(-1)
        weights = weights_NHL.view(-1, BLOCK).index_select(0, step.blocks)
        return _sums(self._values[layer], step.value_rows, step.value_offsets, weights).view(len(q_NHD), -1)

    def _on_device(self, array: Array) -> Tensor:
        return torch.from_numpy(array.ravel()).to(self.tensor.device)


def capped(scores: Tensor, cap: float) -> Tensor:
    """cap * tanh(scores / cap), in place: Gemma 2's soft cap (arXiv:2408.00118, section 2)."""
    return scores.div_(cap).tanh_().mul_(cap)


def _begins(counts: Array) -> Array:
    """First positions of pieces of these lengths when they lie one after another."""
    return np.cumsum(counts) - counts


def _sums(table: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of `rows` of `table`: one for each piece of them that begins at an offset, 0 for an empty piece."""
    return torch.embedding_bag(table, rows, offsets, per_sample_weights=weights.view(-1))[0]
