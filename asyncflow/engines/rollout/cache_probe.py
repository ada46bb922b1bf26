"""Whether a model's cache is right: log-probs of responses that are generated with it, beside those of one forward pass.

    requests of a few tokens --> [ the engine's own batches, with the cache ] --> responses and their log-probs
                                 [ a row's one forward pass, without it ] ------> the same tokens' log-probs

Families have caches of their own: keys, windows of them, recurrent states. One that is wrong in a batch, or after a row has ended,
changes what is sampled, and the log-probs are those of another model's distribution. Neither sums of the weights nor the probe of
an install (asyncflow/attestation.py) see that: both do without the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final

import numpy as np

from asyncflow.engines.base import Response, SampleKey, Sampling
from asyncflow.engines.rollout.requests import SlotRequest
from asyncflow.engines.rollout.threaded import Rows, noise_keys
from asyncflow.types import Array

TOLERANCES: Final = {"float32": 1e-3, "bfloat16": 0.25}
"""Nats by which a token's log-prob may differ, by the model's dtype, as the trainer's check of its own rows has them. Rounding
alone gives 1e-5 and 0.05, with a router that decides otherwise up to 0.2; rwkv's wrong cache gives 1.4."""
PROMPTS: Final = ((5, (6, 6)), (5, (3,)), (1, (4, 2)))
"""Requests: tokens of the prompt, and of each response. The first two make one batch, in which a row ends before the others. A
prompt of one token is shorter than any convolution, and looks like a decode step."""
PAST: Final = 3
"""Tokens before a window's end at which a response begins that goes beyond it."""
WINDOWS: Final = ("sliding_window", "attention_window_size", "attention_chunk_size", "window_size", "keep_window_size")
"""Fields of a model's configuration that say after how many tokens a cache forgets."""
LONGEST_WINDOW: Final = 1024
"""Longer windows are not tried: their prompts would take seconds, where the rest takes a few tokens."""


def windows_of(config: Any) -> list[int]:
    """Windows of a model's configuration that are tried, in tokens."""
    sizes = {getattr(config, name, None) for name in WINDOWS}
    return sorted(size for size in sizes if isinstance(size, int) and PAST < size <= LONGEST_WINDOW)


def largest_difference(
    rows: Rows, log_probs: Callable[[Array], Array], *, vocab_size: int, max_context: int, windows: Collection[int] = ()
) -> float:
    """Largest difference (nats) of a response's log-probs from those of its own forward pass. `log_probs`: of a sequence's tokens
    after the first, without a cache. Raises what generating raises.

    Call it in the thread that generates, while nothing else does.
    """
    largest = 0.0
    for prompt, made in _generated(rows, vocab_size, max_context, windows):
        expected = log_probs(np.concatenate([prompt, made.token_ids]))[len(prompt) - 1 :]
        largest = max(largest, float(np.nan_to_num(np.abs(expected - made.logprobs), nan=np.inf).max()))
    return largest


def _generated(rows: Rows, vocab_size: int, max_context: int, windows: Collection[int]) -> list[tuple[Array, Response]]:
    """Prompts, and a response to each."""
    beyond = [(size - PAST, (2 * PAST, 2 * PAST)) for size in windows]
    taken: list[tuple[Array, Response | Exception]] = []
    for number, (length, counts) in enumerate((*PROMPTS, *beyond)):
        prompt = np.arange(1 + number, 1 + number + length) * 7919 % vocab_size
        for sample, count in enumerate(counts):
            if length + count <= max_context:
                key = noise_keys(SampleKey(0, number), [sample])[0]
                request = SlotRequest(prompt, Sampling(1.0, count, stop_ids=()), deque([(sample, key)]))
                request.deliver = partial(_take, taken, prompt)
                rows.submit(request)
    try:
        while rows.is_busy:
            rows.step()
    except Exception as error:
        rows.fail(error)  # no row of these is left for the next batch
        raise
    return [(prompt, made) for prompt, made in taken if isinstance(made, Response)]


def _take(taken: list[tuple[Array, Response | Exception]], prompt: Array, made: Response | Exception) -> None:
    taken.append((prompt, made))
