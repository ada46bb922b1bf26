"""What sums that do not depend on their order cost beside plain ones: whole training steps, CPU, float32, one thread.

    OMP_NUM_THREADS=1 python benchmarks/accumulate.py [--json FILE] [--repeats N]

One random Qwen2 of 5M parameters. A step is 8 micro-batches of 512 tokens (forward, backward, add), the division, the norm, the
clip and AdamW. `exact` and `fp32` take turns micro-batch by micro-batch, and at going first; a ratio is the median over the steps.
It is given in CPU seconds of the process too, which a busy machine disturbs less than wall-clock seconds.

The add alone, on gradients that are no longer in a cache, beside its floor: 4 bytes of the gradient read, 8 of the sum read and
written, at the rate of a memcpy of the sums in the same repeat. `fp32` adds inside the backward pass, which cannot be timed alone.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import transformers
from figures import Figure, finish, parser
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncflow.engines.train.accumulate import make_accumulator, order_free_norm

MICRO_BATCHES = 8
TOKENS = 512


def new_model() -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).eval()


def plain_norm(gradients: list[torch.Tensor]) -> float:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).item()


class Training:
    """A model with its optimiser and one kind of sums."""

    def __init__(self, kind: Literal["exact", "fp32"]) -> None:
        self.model = new_model()
        self.parameters = dict(self.model.named_parameters())
        self.accumulator = make_accumulator(kind, self.parameters)
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-6, foreach=True)
        self.norm: Callable[[list[torch.Tensor]], float] = order_free_norm if kind == "exact" else plain_norm

    def forward_backward(self, tokens_T: torch.Tensor) -> None:
        logits_TV = self.model(input_ids=tokens_T[None], use_cache=False).logits[0]
        torch.autograd.backward(torch.nn.functional.cross_entropy(logits_TV[:-1], tokens_T[1:], reduction="sum"))
        self.accumulator.add()

    def optim_step(self) -> None:
        gradients = self.accumulator.gradients(MICRO_BATCHES * TOKENS)
        torch._foreach_mul_(gradients, min(1.0, 1.0 / self.norm(gradients)))
        self.optimizer.step()
        self.accumulator.clear()


def compare_steps(trainings: dict[str, Training], repeats: int) -> dict[str, np.ndarray]:
    """Wall and CPU seconds of the steps of each kind: [repeats, 2]."""
    batch = [torch.randint(0, 1024, (TOKENS,), generator=torch.Generator().manual_seed(i)) for i in range(MICRO_BATCHES)]
    parts: list[Callable[[Training], None]] = [partial(Training.forward_backward, tokens_T=tokens_T) for tokens_T in batch]
    seconds = {kind: np.zeros((repeats + 1, 2)) for kind in trainings}
    for repeat in range(repeats + 1):  # the first warms up
        for turn, part in enumerate([*parts, Training.optim_step]):
            for kind in sorted(trainings, reverse=(repeat + turn) % 2 == 1):
                start = np.array([time.perf_counter(), time.process_time()])
                part(trainings[kind])
                seconds[kind][repeat] += np.array([time.perf_counter(), time.process_time()]) - start
    return {kind: values[1:] for kind, values in seconds.items()}


def measure_add(training: Training, repeats: int) -> tuple[list[float], list[float]]:
    """Nanoseconds per parameter of an add, and of its floor, repeat by repeat."""
    accumulator, parameters = training.accumulator, training.parameters
    count = sum(p.numel() for p in parameters.values())
    gradients = {name: torch.randn_like(p) for name, p in parameters.items()}
    source, target = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    adds, floors = [], []
    for repeat in range(-1, repeats):
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        start = time.perf_counter()
        target.copy_(source)
        copied = time.perf_counter()
        accumulator.add()
        added = time.perf_counter()
        if repeat >= 0:
            adds.append((added - copied) / count * 1e9)
            floors.append((copied - start) / count * 1e9 * (4 + 8 + 8) / 16)
    accumulator.clear()
    return adds, floors


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=9)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    trainings = {"exact": Training("exact"), "fp32": Training("fp32")}
    seconds = compare_steps(trainings, given.repeats)
    adds, floors = measure_add(trainings["exact"], given.repeats)
    over, cpu_over = np.median(seconds["exact"] / seconds["fp32"], axis=0).tolist()
    figures = [
        *(Figure(f"step, {kind}", float(np.median(values[:, 0])), "s") for kind, values in seconds.items()),
        Figure("add, exact", statistics.median(adds), "ns/parameter"),
        Figure("its floor, by memcpy", statistics.median(floors), "ns/parameter"),
        Figure("step, exact / fp32", over, "", "<= 1.05"),
        Figure("the same in CPU seconds", cpu_over, ""),
    ]
    count = sum(p.numel() for p in trainings["exact"].parameters.values())
    print(f"{count:,} parameters, {MICRO_BATCHES} micro-batches of {TOKENS} tokens a step, {given.repeats} steps of each kind")
    return finish(figures, given.json)


if __name__ == "__main__":
    sys.exit(main())
