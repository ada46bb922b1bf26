"""What filling the micro-batches of a pipeline's turn to one length would cost. CPU, float32, two stages on gloo, a core each.

    OMP_NUM_THREADS=1 python benchmarks/pipeline.py [--json FILE] [--turns N]

A random Qwen2 of 6.1M parameters (6 layers, hidden 256, vocabulary 1024) in two stages. A turn has four micro-batches, each four
responses to a prompt of 64 tokens, in rows; lengths are log-normal, 128 tokens on average. The same turns are computed

    as they are  every micro-batch at its own length
    filled       each up to the longest of its turn, by a segment that stands for nothing (`train.pipeline_fill`)

one after the other, in turn, forward and backward (1F1B). Told are the medians of the ratios within each turn, in seconds on the
clock and in tokens, and how far the gradients of the two are apart. See docs/decisions/0007-pipelines-are-filled.md.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
from figures import Figure, finish, parser
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncflow.engines.train.model.attention import ATTENTION_NAME
from asyncflow.engines.train.model.log_probs import Head, log_probs_and_entropy
from asyncflow.engines.train.model.packing import Packed, filled_alike, pack
from asyncflow.engines.train.parallel.pipeline import Pipeline
from asyncflow.engines.train.parallel.stages import keep_stage
from asyncflow.types import Ragged

NUM_STAGES = 2
MICRO_BATCHES = 4
HIDDEN_SIZE = 256
VOCABULARY_SIZE = 1024


@dataclass
class Stage:
    """Implements `StageModel`."""

    module: Any
    dtype: torch.dtype = torch.float32

    def stage_forward(self, packed: Packed, hidden_PH: Tensor | None) -> Tensor:
        inputs = {"input_ids": packed.tokens_P[None]} if hidden_PH is None else {"inputs_embeds": hidden_PH[None]}
        outputs = self.module.model(
            **inputs, position_ids=packed.positions_P[None], layout=packed.layout, attention_mask=None, use_cache=False
        )
        return outputs.last_hidden_state[0]


def new_model() -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM._from_config(config, attn_implementation=ATTENTION_NAME).eval()


def new_turn(seed: int) -> list[Packed]:
    rng = np.random.default_rng(seed)
    turn = []
    for _ in range(MICRO_BATCHES):
        lengths = np.clip(rng.lognormal(np.log(128) - 0.5 * 0.8**2, 0.8, 4), 1, 1024).astype(int)
        responses = Ragged.from_arrays([rng.integers(0, VOCABULARY_SIZE, n) for n in lengths], "int64")
        turn.append(pack(rng.integers(0, VOCABULARY_SIZE, 64), responses, is_shared=False))
    return turn


def measure(rank: int, store: str, turns: int) -> list[tuple[float, float, float]]:
    """For each turn the ratios filled / as it is in seconds and in tokens, and the distance of this stage's gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_STAGES)
    module = new_model()
    stage = keep_stage(module, rank, NUM_STAGES)
    assert dist.group.WORLD is not None
    pipeline = Pipeline(dist.group.WORLD, stage, hidden_size=HIDDEN_SIZE, device="cpu", timeout_seconds=120)

    def timed(turn: Sequence[Packed]) -> tuple[float, Tensor]:
        def loss(i: int, hidden_PH: Tensor) -> Tensor:
            hidden_TH = turn[i].predicting(hidden_PH)
            return log_probs_and_entropy(hidden_TH, Head(module.lm_head.weight, 1024), turn[i].targets_T)[0].sum()

        module.zero_grad()
        dist.barrier()
        begun = time.perf_counter()
        pipeline.forward_backward(Stage(module), turn, loss)
        dist.barrier()
        seconds = time.perf_counter() - begun
        return seconds, torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])

    timed(new_turn(0))  # warms up
    found = []
    for seed in range(1, turns + 1):
        turn = new_turn(seed)
        even = filled_alike(turn)
        (seconds, gradient), (filled_seconds, filled_gradient) = timed(turn), timed(even)
        tokens, filled_tokens = (sum(packed.num_tokens for packed in packs) for packs in (turn, even))
        distance = (torch.linalg.vector_norm(gradient - filled_gradient) / torch.linalg.vector_norm(gradient)).item()
        found.append((filled_seconds / seconds, filled_tokens / tokens, distance))
    dist.destroy_process_group()
    return found


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--turns", type=int, default=15)
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(NUM_STAGES, mp_context=context) as processes:
            runs = [processes.submit(measure, rank, f"{folder}/store", args.turns) for rank in range(NUM_STAGES)]
            stages = [np.array(run.result()) for run in runs]
    seconds, tokens, _ = np.median(stages[0], axis=0)
    return finish(
        [
            Figure("seconds, filled / as they are", float(seconds), "x", ">= 1.0"),
            Figure("tokens computed, filled / as they are", float(tokens), "x"),
            Figure("gradients, filled against as they are", float(max(s[:, 2].max() for s in stages)), "relative", "<= 1e-5"),
        ],
        args.json,
    )


if __name__ == "__main__":
    sys.exit(main())
