"""What a rank of the torch engine holds: as it loads, state per rank under FSDP, a step's peak with and without savings of memory.

    OMP_NUM_THREADS=1 python benchmarks/parallel.py [--json FILE] [--ranks N]

A random Llama of 12 layers and 9.6M parameters, whose embedding is a hundredth of it; micro-batches of a prompt of 128 tokens and 8
responses of 64, CPU, gloo. Bytes are those of tensors, as PyTorch's allocator counts them:

    state           float32 parameters, gradient sums (float64 with `exact`) and optimiser state, while sums are there
    loading         how much the process's resident memory grew at most while it loaded the model from bfloat16 files, their mapped
                    pages included, which the processes of one machine share (of Linux's own counts; after a small model)
    peak            the most that was allocated at a time during a step (2 micro-batches, clip, update), state included

Where the optimiser's state is offloaded, what a device would hold is told: the peak without what then lies in host memory (on a CPU
all of it is host memory; `train.offload_optimizer` moves nothing there unless it is made to, as here).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from figures import Figure, finish, parser
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile

from asyncflow.algorithms.grpo import GRPO
from asyncflow.config import parse
from asyncflow.engines.base import RANKS_STORE, MicroBatch, TrainEngineOptions
from asyncflow.engines.train.one_rank import OneRank
from asyncflow.engines.train.parallel.fsdp import ExactSums
from asyncflow.engines.train.parallel.many_ranks import ManyRanks
from asyncflow.run.factories import train_engine_options
from asyncflow.types import Layout, Ragged

PROMPT_TOKENS, RESPONSE_TOKENS, RESPONSES = 128, 64, 8


def make_model(folder: Path, num_layers: int = 12) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": num_layers, "vocab_size": 400}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def micro_batch(seed: int) -> MicroBatch:
    rng = np.random.default_rng(seed)
    responses = Ragged.from_arrays([rng.integers(0, 400, RESPONSE_TOKENS) for _ in range(RESPONSES)], "int64")
    size = len(responses.values)
    return MicroBatch(
        indices=np.arange(RESPONSES),
        prompt_ids=rng.integers(0, 400, PROMPT_TOKENS),
        response_ids=responses,
        loss_mask=Ragged(np.ones(size, np.uint8), responses.offsets),
        rollout_logprobs=Ragged(np.full(size, -6.0, np.float32), responses.offsets),
        advantages=rng.normal(size=RESPONSES).astype(np.float32),
        staleness=np.zeros(RESPONSES, np.int64),
    )


def options(model: Path, **changes: Any) -> TrainEngineOptions:
    config = parse({"model": {"path": str(model)}, "data": {"path": ""}, "train": {"check_shared_prompt": False}})
    return replace(train_engine_options(config), **changes)


def measure(model: Path, layout: Layout, changes: dict[str, Any]) -> tuple[int, int, int]:
    """Of this process: the bytes of its state, the peak of a step's, and what loading took."""
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is that of now
    before_loading = resident("VmRSS")
    training: Any = (OneRank if layout.size == 1 else ManyRanks)(model, options(model, layout=layout, **changes))
    loading = resident("VmHWM") - before_loading
    training._optimizer._offloads = changes.get("offload_optimizer", False)
    rank = training.data_parallel_rank or 0

    def accumulate() -> None:
        training.begin_step()
        training.forward_backward([micro_batch(2 * rank), micro_batch(2 * rank + 1)], GRPO())

    accumulate()
    training.optim_step(100)
    before = held(training, has_sums=False)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        accumulate()
        state = held(training)
        training.optim_step(100)
    now = peak = 0
    for event in seen.profiler.kineto_results.events():  # in order of time
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    in_host = sum(tensor.nbytes for tensor in training._optimizer._host.values())
    if layout.size > 1:
        training.close()
    return state, before + peak - in_host, loading


def resident(which: str) -> int:
    """Bytes of this process's resident memory: now (`VmRSS`), or at the highest (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))


def held(training: Any, *, has_sums: bool = True) -> int:
    """Bytes of parameters, optimiser state and sums."""
    parts = (training._policy.parts if hasattr(training, "_policy") else training.policy.parameters).values()
    tensors = [*parts, *(state for _, _, state in training._optimizer.states())]
    if isinstance(training._sums, ExactSums):
        sums = [unit.sums_E for unit in training._sums._units]
    else:
        sums = [*getattr(training._sums, "_sums", {}).values(), *(part.grad for part in parts)]
    return sum(tensor.nbytes for tensor in (*tensors, *(sums if has_sums else ())) if tensor is not None)


def serve(rank: int, size: int, store: str, jobs: list[tuple[Path, Layout, dict[str, Any]]], answers: Any) -> None:
    """A rank's own process: every measurement, one after the other."""
    torch.set_num_threads(1)
    for number, (model, layout, changes) in enumerate(jobs):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ.update({name: str(value) for name, value in numbers.items()} | {RANKS_STORE: f"file://{store}-{number}"})
        answers.put((number, *measure(model, layout, changes)))


def on_ranks(size: int, store: str, jobs: list[tuple[Path, Layout, dict[str, Any]]]) -> list[tuple[int, int, int]]:
    """Largest values of any rank, by measurement."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=serve, args=(rank, size, store, jobs, answers)) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        seen = [answers.get(timeout=600) for _ in range(size * len(jobs))]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return [tuple(max(answer[i] for answer in seen if answer[0] == number) for i in (1, 2, 3)) for number in range(len(jobs))]


SAVINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "activation_checkpointing": {"activation_checkpointing": True},
    "offload_optimizer": {"offload_optimizer": True},
    "both": {"activation_checkpointing": True, "offload_optimizer": True},
}


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=4)
    given = arguments.parse_args()
    layout, mib = Layout(dp=given.ranks), 2**20
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model)
        make_model(small := Path(folder) / "small", num_layers=1)  # for what is loaded once, such as libraries
        whole = sum(4 * tensor.numel() for tensor in load_file(model / "model.safetensors").values())
        kinds = {
            f"{kind}, {name}": {"accumulate": kind, **savings} for kind in ("fp32", "exact") for name, savings in SAVINGS.items()
        }
        (alone, ranks) = (
            on_ranks(
                which.size,
                f"{folder}/store{which.size}",
                [(small, which, {}), *((model, which, changes) for changes in kinds.values())],
            )[1:]
            for which in (Layout(), layout)
        )
    figures = [Figure("parameters of the model, float32", whole / mib, "MiB")]
    figures.append(Figure("  memory taken to load them: one process", alone[0][2] / whole, "times"))
    figures.append(Figure(f"  each of {layout.size} ranks", ranks[0][2] / whole, "times", "<= 0.8"))
    for name, one, many in zip(kinds, alone, ranks, strict=True):
        if name.endswith("as it is"):
            kind = name.partition(",")[0]
            figures.append(Figure(f"state of one process, {kind}", one[0] / mib, "MiB"))
            figures.append(Figure(f"  of each of {layout.size} ranks / of one process", many[0] / one[0], "times", "<= 0.3"))
    for name, one, many in zip(kinds, alone, ranks, strict=True):
        figures.append(Figure(f"peak of a step, {name}: one process", one[1] / mib, "MiB"))
        figures.append(Figure(f"  each of {layout.size} ranks", many[1] / mib, "MiB"))
    return finish(figures, given.json)


if __name__ == "__main__":
    sys.exit(main())
