"""Cache of keys and values in blocks: which blocks each slot has. How they lie in a block, and how they are attended to, is a
matter of the device (slot_cache.py, device_cache.py).

A *slot* holds one response, in blocks of `BLOCK` keys, wherever they lie (PagedAttention, arXiv:2309.06180). Responses to one
prompt share the blocks that it fills: a block is free again when the last slot has left it.

T = tokens that are stored, N = rows of a decode step, H = query heads, K = key/value heads, D = head size.
"""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from asyncflow.devices import CPU
from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.types import Array

BLOCK = 32

Store = Callable[[int, Tensor, Tensor], None]
"""Writes keys and values [T, K, D] of one layer where they belong: layer, k_TKD, v_TKD."""
AttendRows = Callable[[int, Tensor], Tensor]
"""Attention [N, H * D] of one layer's queries [N, H, D] to the keys of their slots: layer, q_NHD."""


class KeyCache(ABC):
    """The cache of `num_slots` slots of `max_context` tokens. A block that no slot has ever had takes no memory on a CPU, but for
    the page that it may share with one."""

    def __init__(self, config: DecoderConfig, *, num_slots: int, max_context: int, like: Tensor) -> None:
        """`config`: of the model, whose layers and heads the cache has. `like`: a tensor of the dtype and on the device of the
        cache."""
        self._head_dim = head_dim = config.head_dim
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._scale = head_dim**-0.5 if config.attention_multiplier is None else config.attention_multiplier
        self._softcap = config.attention_softcap
        per_slot = -(-max_context // BLOCK)
        # Zeros, because what lies beyond a slot's last key is multiplied too, by zero.
        shape = (config.num_hidden_layers, 2, num_slots * per_slot, BLOCK * self._kv_heads * head_dim)
        self.tensor = _zeros(shape, like)
        """Keys and values of each layer and block: [layers, 2, blocks, elements]."""
        self._table = np.zeros((num_slots, per_slot), np.int64)  # blocks of each slot, in order
        self._counts = np.zeros(num_slots, np.int64)  # how many it has
        self._users = np.zeros(num_slots * per_slot, np.int64)  # slots that have a block
        self._free = list(range(num_slots * per_slot - 1, -1, -1))  # those given back last are taken first
        self.most_blocks = 0
        """Blocks that were in use at once, at most: the first ones of the cache. No other one was ever written to, since those that
        were given back are taken first."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, over all layers."""
        return self.tensor.nbytes // len(self._users)

    @abstractmethod
    def storing(self, slots: Array, positions: Array) -> Store:
        """Let `slots` (int64 [T]) have blocks for tokens at `positions` (int64 [T]), and say where these belong."""

    @abstractmethod
    def attending(self, slots: Array, positions: Array) -> AttendRows:
        """Let `slots` (int64 [N]) have blocks for tokens at `positions` (int64 [N]), and say how these attend to all keys of their
        slots up to their own.

        A slot may be there several times, with positions one after another.
        """

    @abstractmethod
    def read(self, layer: int, blocks_PB: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [P, K, B * BLOCK, D] of one layer in these blocks (int64 [P, B])."""

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
        self.tensor[:, :, : self.most_blocks] = 0  # the others have no memory yet
        for slot in range(len(self._table)):
            self.release(slot)

    def make_room(self, slots: Array, positions: Array) -> None:
        """Let `slots` (int64 [T]) have the blocks of tokens at `positions` (int64 [T])."""
        wanted = positions // BLOCK + 1
        for token in np.flatnonzero(wanted > self._counts[slots]).tolist():
            self._extend(int(slots[token]), int(wanted[token]))

    def blocks(self, slots: Array, count: int) -> Tensor:
        """The first blocks of `slots` (int64 [P]), which have so many: int64 [P, count]."""
        return torch.from_numpy(self._table[slots, :count]).to(self.tensor.device)

    def _extend(self, slot: int, count: int) -> None:
        """Let a slot have so many blocks. There are enough for all slots, also when they share none."""
        for number in range(int(self._counts[slot]), count):
            block = self._table[slot, number] = self._free.pop()
            self._users[block] = 1
        self._counts[slot] = max(count, self._counts[slot])
        self.most_blocks = max(self.most_blocks, len(self._users) - len(self._free))


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros, on a CPU in pages that come when they are first written to. `torch.zeros` writes to each of them, and so does malloc
    where it keeps memory that was freed (run/worker_start.py)."""
    num_bytes = math.prod(shape) * like.element_size()
    if like.device.type != CPU or not num_bytes:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    # Private: what a process that is forked writes is its own. It begins at a page, and goes when the tensor goes.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)
