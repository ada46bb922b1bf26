"""A process of its own with a cache of keys: prints its blocks in use and its resident memory, as shares of the cache.

python cache_memory.py
"""

from __future__ import annotations

import json
import os

import numpy as np
import psutil
import torch

from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.engines.rollout.slot_cache import SlotCache

SLOTS, CONTEXT, LAYERS, HEADS, SIZE = 32, 256, 4, 8, 64
FIELDS = {"model_type": "qwen2", "vocab_size": 8, "hidden_size": HEADS * SIZE, "intermediate_size": 8}
CONFIG = DecoderConfig.from_fields(
    {**FIELDS, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
)


def write(cache: SlotCache, slot: int, first: int, end: int) -> None:
    store, tokens = cache.storing(np.full(end - first, slot), np.arange(first, end)), torch.ones(end - first, HEADS, SIZE)
    for layer in range(LAYERS):
        store(layer, tokens, tokens)


def main() -> None:
    process, warm = psutil.Process(), SlotCache(CONFIG, num_slots=1, max_context=CONTEXT, like=torch.zeros(1))
    write(warm, 0, 0, CONTEXT)
    before, found = process.memory_info().rss, {}
    cache = SlotCache(CONFIG, num_slots=SLOTS, max_context=CONTEXT, like=torch.zeros(1))

    def note(name: str) -> None:
        taken = (process.memory_info().rss - before) / cache.tensor.nbytes
        found[name] = cache.most_blocks / len(cache._users), taken

    note("new")
    write(cache, 0, 0, 70)
    cache.share(0, [1, 2, 3], 70)
    note("shared")
    cache.release(2)
    write(cache, 2, 0, 70)  # a copy of its own
    note("copied")
    cache.clear()
    note("cleared")
    if not (child := os.fork()):
        cache.tensor[0, 0, 0, 0] = 1.0
        os._exit(0)
    os.waitpid(child, 0)
    is_own = not cache.tensor[0, 0, 0, 0].item()
    for slot in range(SLOTS):
        write(cache, slot, 0, CONTEXT)
    note("full")
    print(json.dumps({"seen": found, "is_own": is_own}))


if __name__ == "__main__":
    main()
