"""Keys and values of the active responses, and the attention of one new token for each of them.

A *slot* holds one response, in blocks of `BLOCK` keys, wherever they lie (PagedAttention, arXiv:2309.06180). Responses to one
prompt share the blocks that it fills: a block is free again when the last slot has left it. A block's keys lie dimension by
dimension (D rows of BLOCK lanes), its values key by key (BLOCK rows of D). So both halves of attention are weighted sums of rows,
which `embedding_bag` computes:

    scores of a block = sum over d of q[d] * keys[d, :]        attended = sum over the keys of weight[key] * values[key, :]

It streams ragged rows, where `bmm` would multiply many tiny padded matrices (two to four times slower with keys in the cache, and
more so in bfloat16). Each sum runs in order over its own rows: the bits of a slot do not depend on the others.

T = tokens that are stored, N = rows of a step, H = query heads, K = key/value heads, D = head size, L = keys, B = blocks of the
longest slot, M = (slot, head, block) triples that exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.types import Array

BLOCK = 32


@dataclass(frozen=True, slots=True)
class KeyPlaces:
    """Places of tokens in the cache of any layer."""

    keys: Tensor  # int64 [T * K * D]: elements of the layer's keys
    values: Tensor  # int64 [T * K]: rows of its values


@dataclass(frozen=True, slots=True)
class StepPlaces:
    """Places that one decode step writes and reads, the same for every layer. Rows are int32, half as many bytes as int64."""

    new: KeyPlaces
    key_rows: Tensor  # int32 [M * D]: rows of the keys of each block
    key_offsets: Tensor  # int32 [N * H * B]: where each block begins in `key_rows`; a block that does not exist has no rows
    value_rows: Tensor  # int32 [M * BLOCK]: rows of the values of each block
    value_offsets: Tensor  # int32 [N * H]: where the blocks of each slot and head begin in `value_rows`
    heads: Tensor  # int64 [M]: the row of [N * H] that a block belongs to
    blocks: Tensor  # int64 [M]: the row of [N * H * B] that a block is
    mask_N1L: Tensor  # 0, or -inf beyond a slot's last key


class SlotCache:
    """The cache of `num_slots` slots of `max_context` tokens. A block that no slot has ever had takes no memory on a CPU."""

    def __init__(self, config: DecoderConfig, *, num_slots: int, max_context: int, like: Tensor) -> None:
        """`config`: of the model, whose layers and heads the cache has. `like`: a tensor of the dtype and on the device of the
        cache."""
        self._head_dim = head_dim = config.head_dim
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._scale = head_dim**-0.5 if config.attention_multiplier is None else config.attention_multiplier
        self._softcap = config.attention_softcap
        per_slot = -(-max_context // BLOCK)
        # Zeros, because what lies beyond a slot's last key is multiplied too, by zero.
        shape = (config.num_hidden_layers, 2, num_slots * per_slot, self._kv_heads, BLOCK * head_dim)
        self.tensor = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self._keys = [layer[0].view(-1, BLOCK) for layer in self.tensor]
        self._values = [layer[1].view(-1, head_dim) for layer in self.tensor]
        self._table = np.zeros((num_slots, per_slot), np.int64)  # blocks of each slot, in order
        self._counts = np.zeros(num_slots, np.int64)  # how many it has
        self._users = np.zeros(num_slots * per_slot, np.int64)  # slots that have a block
        self._free = list(range(num_slots * per_slot - 1, -1, -1))  # those given back last are taken first
        self.most_blocks = 0
        """Blocks that were in use at once, at most."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, over all layers."""
        return self.tensor.nbytes // len(self._users)

    def share(self, source: int, targets: Sequence[int], length: int) -> None:
        """Give other slots, instead of what they have, the first `length` keys and values of slot `source`.

        They have its whole blocks in common; the last one, which each slot goes on to fill, is copied.
        """
        for target in targets:
            self.release(target)
        whole, rest = divmod(length, BLOCK)
        self._users[self._table[source, :whole]] += len(targets)
        self._table[targets, :whole] = self._table[source, :whole]
        self._counts[targets] = whole
        if rest:
            for target in targets:
                self._extend(target, whole + 1)
            self.tensor[:, :, self._table[targets, whole]] = self.tensor[:, :, int(self._table[source, whole]), None]

    def release(self, slot: int, *, clears: bool = False) -> None:
        """Forget what a slot has. `clears`: it may not be finite, so it is overwritten, too."""
        held = self._table[slot, : self._counts[slot]]
        self._users[held] -= 1
        freed = held[self._users[held] == 0].tolist()
        if clears:
            self.tensor[:, :, freed] = 0
        self._free += freed
        self._counts[slot] = 0

    def clear(self) -> None:
        """Forget everything, and what is not finite with it."""
        self.tensor.zero_()
        for slot in range(len(self._table)):
            self.release(slot)

    def make_room(self, slots: Array, positions: Array) -> None:
        """Let `slots` (int64 [T]) have the blocks of tokens at `positions` (int64 [T])."""
        wanted = positions // BLOCK + 1
        for token in np.flatnonzero(wanted > self._counts[slots]).tolist():
            self._extend(int(slots[token]), int(wanted[token]))

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

    def blocks(self, slots: Array, count: int) -> Tensor:
        """The first blocks of `slots` (int64 [P]), which have so many: int64 [P, count]."""
        return torch.from_numpy(self._table[slots, :count]).to(self.tensor.device)

    def read(self, layer: int, blocks_PB: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [P, K, B * BLOCK, D] of one layer in these blocks."""
        shape = (*blocks_PB.shape, self._kv_heads)
        keys, values = (half.index_select(0, blocks_PB.view(-1)) for half in self.tensor[layer])
        k_PBKDL, v_PBKLD = keys.view(*shape, self._head_dim, BLOCK), values.view(*shape, BLOCK, self._head_dim)
        k_PEKD, v_PEKD = k_PBKDL.permute(0, 1, 4, 2, 3).flatten(1, 2), v_PBKLD.transpose(2, 3).flatten(1, 2)
        return k_PEKD.transpose(1, 2), v_PEKD.transpose(1, 2)

    def step(self, slots: Array, positions: Array) -> StepPlaces:
        """The step in which `slots` (int64 [N]) get a key at `positions` (int64 [N]) and attend to all that they have up to there.

        A slot may be there several times, with positions one after another.
        """
        new, group = self.places(slots, positions), self._heads // self._kv_heads
        counts_N = positions // BLOCK + 1
        most = int(counts_N.max())
        exists_NHB = np.repeat(np.arange(most) < counts_N[:, None], self._heads, axis=0)
        blocks = np.flatnonzero(exists_NHB)
        heads = blocks // most
        held = self._table[slots[heads // self._heads], blocks - heads * most]
        blocks_M1 = (held * self._kv_heads + heads % self._heads // group).astype(np.int32)[:, None]
        mask_NL = np.where(np.arange(most * BLOCK) > positions[:, None], np.float32(-np.inf), np.float32(0))
        return StepPlaces(
            new=new,
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

    def _extend(self, slot: int, count: int) -> None:
        """Let a slot have so many blocks. There are enough for all slots, also when they share none."""
        for number in range(int(self._counts[slot]), count):
            block = self._table[slot, number] = self._free.pop()
            self._users[block] = 1
        self._counts[slot] = max(count, self._counts[slot])
        self.most_blocks = max(self.most_blocks, len(self._users) - len(self._free))

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
