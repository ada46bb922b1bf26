"""Shared-prompt attention against packed rows: speed, saved activations, memory over accumulated groups. CPU, float32, one core.

    OMP_NUM_THREADS=1 python benchmarks/shared_prompt.py [--json FILE] [--repeats N]

A random Qwen2 of 5.0M parameters (4 layers, hidden 256, 4 heads of 64 on 2 key heads, feed-forward 1280, vocabulary 1024: about the
proportions of the 0.5B one, but that attention, where sharing saves less, has a larger share), a token-local loss, forward and
backward of one group:

    shared       the prompt once, [x_p, r_1 .. r_K]
    rows         each response with its own copy of the prompt, unpadded, in one packed sequence

Both go through the same attention function. The token ratio K (Lp + Lr) / (Lp + K Lr) is what rows compute over what sharing
computes, outside attention and output layer. Repeats are interleaved; a speed-up is the median of the ratios within each repeat. It
is to be reached in CPU seconds, which of one thread are what a clock shows on a machine that does nothing else; the clock is told,
too. The C library is told to keep freed memory: it would map tensors of the size that rows have anew each time, at a cost that
has nothing to do with what is compared (and that makes speed-ups above the token ratio).

Saved activations: all storages that autograd keeps for the backward, each counted once, without the weights.

16K context: a tiny Qwen2, groups of one prompt and two responses, 12,288 + 2 x 4,096 tokens on average, accumulated one after
another. Peak resident memory after eight over that after one, both less what was resident before. Here the C library is told to
give freed memory back, so that what is resident is what is held, and not also what lies in pieces.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil
import torch
from figures import Figure, finish, parser
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncflow.engines.train.model.attention import ATTENTION_NAME
from asyncflow.engines.train.model.log_probs import Head, token_local_losses
from asyncflow.engines.train.model.packing import Packed, pack, token_ratio
from asyncflow.types import LossSums, Ragged

CASES = {(512, 64, 16): 5.4, (1024, 128, 8): 4.0, (256, 256, 16): 1.7, (128, 128, 32): 1.75, (64, 512, 8): 1.0}
"""The speed-up to reach for each (Lp, Lr, K): 0.9 of the token ratio."""

VOCABULARY_SIZE = 1024

KEEPS_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
RETURNS_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}

R = TypeVar("R")


def in_own_process(environment: dict[str, str], work: Callable[..., R], *arguments: object) -> R:
    """The C library reads such settings when a process starts."""
    os.environ.update(environment)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        result = process.submit(work, *arguments).result()
    for name in environment:
        del os.environ[name]
    return result


def new_model(num_layers: int, hidden_size: int, num_heads: int, num_key_heads: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden_size,
        intermediate_size=5 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_heads,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM._from_config(config, attn_implementation=ATTENTION_NAME).eval()


def new_group(prompt_length: int, lengths: list[int], seed: int, *, is_shared: bool) -> Packed:
    rng = np.random.default_rng(seed)
    responses = Ragged.from_arrays([rng.integers(0, VOCABULARY_SIZE, n) for n in lengths], "int64")
    return pack(rng.integers(0, VOCABULARY_SIZE, prompt_length), responses, is_shared=is_shared)


def forward(model: Qwen2ForCausalLM, packed: Packed) -> Tensor:
    hidden_PH = model.model(
        input_ids=packed.tokens_P[None], position_ids=packed.positions_P[None], use_cache=False, layout=packed.layout
    ).last_hidden_state[0]
    return token_local_losses(
        packed.predicting(hidden_PH),
        Head(model.lm_head.weight, 1024),
        packed.targets_T,
        lambda _number, _part, log_probs_C, _entropy_C: LossSums(loss=-log_probs_C.sum(), metrics={}),
        packed.token_counts,
    )[0]


def compare_speed(model: Qwen2ForCausalLM, shared: Packed, rows: Packed, repeats: int) -> tuple[float, float]:
    """Median ratios of rows to shared, in wall-clock and in CPU seconds."""

    def timed(packed: Packed) -> np.ndarray:
        model.zero_grad()
        start = np.array([time.perf_counter(), time.process_time()])
        torch.autograd.backward(forward(model, packed))
        return np.array([time.perf_counter(), time.process_time()]) - start

    timed(shared)  # warms up
    ratios = [timed(rows) / timed(shared) for _ in range(repeats)]
    wall, cpu = np.median(ratios, axis=0)
    return float(wall), float(cpu)


def saved_bytes(model: Qwen2ForCausalLM, packed: Packed) -> int:
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = forward(model, packed)  # as long as it is held, no storage is freed and counted under another's address
    total = sum(size for address, size in saved.items() if address not in weights)
    del loss
    return total


def long_context_peaks() -> tuple[int, int]:
    """Bytes by which the peak resident memory rises for one group, and for eight of them."""
    torch.set_num_threads(1)
    model = new_model(num_layers=2, hidden_size=64, num_heads=2, num_key_heads=1)
    rng = np.random.default_rng(0)
    torch.autograd.backward(forward(model, new_group(64, [32, 32], 0, is_shared=True)))  # allocates the gradients
    gc.collect()
    before = psutil.Process().memory_info().rss
    peaks = []
    for seed in range(8):
        cut = int(rng.integers(-1024, 1024))  # ragged, and of the same number of tokens
        torch.autograd.backward(forward(model, new_group(12288, [4096 + cut, 4096 - cut], seed, is_shared=True)))
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
    return peaks[0], peaks[-1]


def compare(repeats: int) -> list[Figure]:
    torch.set_num_threads(1)
    model = new_model(num_layers=4, hidden_size=256, num_heads=4, num_key_heads=2)
    figures = [Figure("parameters", sum(p.numel() for p in model.parameters()), "")]
    for (prompt_length, length, num_responses), target in CASES.items():
        lengths = [length] * num_responses
        shared, rows = (new_group(prompt_length, lengths, 0, is_shared=is_shared) for is_shared in (True, False))
        ratio = token_ratio(prompt_length, lengths)
        wall, cpu = compare_speed(model, shared, rows, repeats)
        saved, saved_by_rows = saved_bytes(model, shared), saved_bytes(model, rows)
        case = f"{prompt_length} + {num_responses} x {length}"
        figures += [
            Figure(f"{case}: token ratio", ratio, ""),
            Figure(f"{case}: speed-up", cpu, "", f">= {target}"),
            Figure(f"{case}: speed-up by the clock", wall, ""),
            Figure(f"{case}: saved activations", saved / 2**20, "MiB"),
            Figure(f"{case}: saved / (saved by rows / token ratio)", saved / (saved_by_rows / ratio), "", "<= 1.1"),
        ]
    return figures


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=7)
    given = arguments.parse_args()
    figures = in_own_process(KEEPS_FREED_MEMORY, compare, given.repeats)
    one, eight = in_own_process(RETURNS_FREED_MEMORY, long_context_peaks)
    figures += [
        Figure("16K context: peak of one group", one / 2**20, "MiB"),
        Figure("16K context: peak of eight groups / of one", eight / one, "", "<= 1.05"),
    ]
    return finish(figures, given.json)


if __name__ == "__main__":
    sys.exit(main())
