"""What policy, old policy and reference cost together: one micro-step of the tri-model against its three parts, CPU, one thread.

    OMP_NUM_THREADS=1 python benchmarks/tri_model.py [--json FILE] [--repeats N]

A random Qwen2 of 4.3M parameters, a prompt of 128 tokens with 8 responses of 64, GRPO with a KL term. In turn, repeat by repeat:

    tri-model        one `forward_backward`, with the old policy (`train.old=previous`, rows of staleness 1) and the reference fused
    its parts        one `forward_backward` of the policy alone, then the log-probs of two models

The ratio is the median over the repeats, of CPU seconds of the process, which a busy machine disturbs less than wall-clock seconds.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from figures import Figure, finish, parser

from asyncflow.algorithms.grpo import GRPO
from asyncflow.config import parse
from asyncflow.engines.base import MicroBatch
from asyncflow.engines.train.random_model import make_random_model
from asyncflow.engines.train.torch_engine import TorchEngine
from asyncflow.run.factories import train_engine_options
from asyncflow.types import Ragged

PROMPT_TOKENS, RESPONSE_TOKENS, RESPONSES = 128, 64, 8


def micro_batch() -> MicroBatch:
    rng = np.random.default_rng(0)
    responses = Ragged.from_arrays([rng.integers(0, 256, RESPONSE_TOKENS) for _ in range(RESPONSES)], "int64")
    size = len(responses.values)
    return MicroBatch(
        indices=np.arange(RESPONSES),
        prompt_ids=rng.integers(0, 256, PROMPT_TOKENS),
        response_ids=responses,
        loss_mask=Ragged(np.ones(size, np.uint8), responses.offsets),
        rollout_logprobs=Ragged(np.full(size, -5.0, np.float32), responses.offsets),
        advantages=rng.normal(size=RESPONSES).astype(np.float32),
        staleness=np.ones(RESPONSES, np.int64),
    )


async def measure(model: Path, repeats: int) -> list[Figure]:
    config = parse({"model": {"path": str(model)}, "data": {"path": ""}, "train": {"check_shared_prompt": False}})
    alone = train_engine_options(config)
    policy, three = TorchEngine(model, alone), TorchEngine(model, replace(alone, old="previous", has_reference=True))
    stale, fresh = micro_batch(), replace(micro_batch(), staleness=np.zeros(RESPONSES, np.int64))
    with_kl, without = GRPO(kl_coefficient=0.1), GRPO()

    async def together() -> float:
        start = time.process_time()
        await three.forward_backward([stale], with_kl)
        return time.process_time() - start

    async def parts() -> float:
        start = time.process_time()
        await policy.forward_backward([fresh], without)
        for _ in range(2):
            await policy.log_probs(fresh.prompt_ids, fresh.response_ids)
        return time.process_time() - start

    seconds: list[tuple[float, float]] = []
    for repeat in range(repeats + 2):
        if repeat % 2:
            whole, apart = await together(), await parts()
        else:
            apart, whole = await parts(), await together()
        seconds.append((whole, apart))
    seconds = seconds[2:]  # the first ones warm up
    return [
        Figure("one micro-step of the tri-model", 1e3 * statistics.median(whole for whole, _ in seconds), "ms"),
        Figure("  policy forward and backward, and two forwards", 1e3 * statistics.median(apart for _, apart in seconds), "ms"),
        Figure("  the one / the other", statistics.median(whole / apart for whole, apart in seconds), "times", "<= 1.05"),
    ]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=40)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_random_model("random:qwen2-small", Path(folder), ["Tom has 7 coins."], seed=0)
        return finish(asyncio.run(measure(Path(folder), options.repeats)), options.json)


if __name__ == "__main__":
    sys.exit(main())
