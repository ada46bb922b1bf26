"""Both halves on one accelerator: the embedded rollout engine beside transformers, training passes beside the device's products.

    python benchmarks/on_device.py [--device cuda] [--parts engine passes] [--repeats N] [--tiny] [--json FILE]

A model of the shape of Qwen2.5-0.5B, with random weights, in bfloat16 (`--tiny`: a small one, to try the program on a CPU).

engine     64 prompts of 128 tokens, 256 new tokens each, sampled at temperature 1, no end tokens: SlotEngine with a slot for each,
           and transformers' generate(), one batch of all, with the log-probs of the sampled tokens, in turns; new tokens a second.
           Then a decode step of 64 slots in the middle of a response: recorded and replayed, and launched kernel by kernel
passes     8 groups of 8 responses of 128 to 256 tokens to a prompt of 128, plain sums, passes of as many groups as the
           configuration's default takes; packed tokens a second, and 6 operations for each parameter and packed token over those a
           second of a product of matrices of 8192 x 8192. Then the kernels and calls that take the most time (`--profile`)

The first turn warms up. Ratios are medians of the ratios within each turn.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from figures import Figure, finish, parser
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from asyncflow.algorithms.grpo import GRPO
from asyncflow.config import load
from asyncflow.devices import CUDA
from asyncflow.engines.base import MicroBatch, SampleKey, Sampling
from asyncflow.engines.devices import accelerators
from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.engines.rollout.step_graphs import StepGraphs
from asyncflow.engines.train.one_rank import OneRank
from asyncflow.model_folder import read_json
from asyncflow.run.factories import tokens_per_pass, train_engine_options
from asyncflow.types import Ragged

ROOT = Path(__file__).parents[1]
BFLOAT16 = torch.bfloat16
STEPS = 20


@dataclass(frozen=True)
class Size:
    """Shape of the model, and of the work."""

    shape: dict[str, int]
    prompts: int
    prompt: int
    new: int
    product: int


LARGE = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
SMALL = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = {False: Size(LARGE, 64, 128, 256, 8192), True: Size(SMALL, 4, 16, 16, 256)}


def write_model(size: Size, folder: Path, device: str) -> Path:
    torch.manual_seed(0)
    fields = {**size.shape, "num_key_value_heads": 2, "max_position_embeddings": 32768, "tie_word_embeddings": True}
    with torch.device(device):
        Qwen2ForCausalLM(Qwen2Config(**fields)).to(BFLOAT16).save_pretrained(folder)
    return folder


def seconds(call: Callable[[], object], device: str) -> float:
    """Seconds until the device is done with a call's work."""
    driver = torch.get_device_module(device)
    driver.synchronize()
    began = time.perf_counter()
    call()
    driver.synchronize()
    return time.perf_counter() - began


async def generated(engine: SlotEngine, prompts: list[np.ndarray], new: int) -> None:
    async def one(number: int) -> None:
        sampling, key = Sampling(max_new_tokens=new), SampleKey(seed=0, prompt_index=number)
        async for response in engine.generate(prompts[number], samples=[0], sampling=sampling, key=key):
            assert len(response.token_ids) == new

    await asyncio.gather(*(one(number) for number in range(len(prompts))))


def rollout(path: Path, size: Size, device: str, repeats: int) -> list[Figure]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 1000, size.prompt) for _ in range(size.prompts)]
    engine = SlotEngine(
        path,
        num_slots=size.prompts,
        max_context=size.prompt + size.new,
        dtype="bfloat16",
        device=device,
        stop_ids=(),
    )
    model = Qwen2ForCausalLM.from_pretrained(path, dtype=BFLOAT16).to(device).eval()
    tokens = torch.tensor(np.stack(prompts), device=device)
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=size.new, min_new_tokens=size.new, pad_token_id=0)
    config.output_logits = config.return_dict_in_generate = True

    def generate() -> None:
        made = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
        for position, logits in enumerate(made.logits, size.prompt):
            logits.float().log_softmax(-1).gather(1, made.sequences[:, position, None])

    with asyncio.Runner() as runner, torch.inference_mode():
        turns = [
            (seconds(lambda: runner.run(generated(engine, prompts, size.new)), device), seconds(generate, device))
            for _ in range(repeats + 1)
        ][1:]
        decoder, slots = engine._decoder, np.arange(size.prompts)
        positions = np.full(size.prompts, size.prompt + size.new // 2)

        def steps() -> None:
            for _ in range(STEPS):
                decoder.decode(slots, positions)

        steps()  # is recorded now, where the device can
        replayed = seconds(steps, device)
        with patch.object(StepGraphs, "__call__", StepGraphs.compute):
            launched = seconds(steps, device)
        runner.run(engine.close())
    count = size.prompts * size.new
    return [
        Figure("engine", count / statistics.median(ours for ours, _ in turns), "tokens a second"),
        Figure("generate()", count / statistics.median(theirs for _, theirs in turns), "tokens a second"),
        Figure("engine / generate()", statistics.median(theirs / ours for ours, theirs in turns), "x", ">= 2.5"),
        Figure("a decode step", replayed / STEPS * 1e3, "ms"),
        Figure("launched kernel by kernel / replayed", launched / replayed, "x"),
    ]


def groups(size: Size) -> list[MicroBatch]:
    rng = np.random.default_rng(0)

    def group(number: int) -> MicroBatch:
        lengths = rng.integers(size.new // 2, size.new, 8)
        responses = Ragged.from_arrays([rng.integers(5, 1000, length) for length in lengths], "int64")
        ones = np.ones(len(responses.values), np.uint8)
        return MicroBatch(
            indices=np.arange(8 * number, 8 * number + 8),
            prompt_ids=rng.integers(5, 1000, size.prompt),
            response_ids=responses,
            loss_mask=Ragged(ones, responses.offsets),
            rollout_logprobs=Ragged(-ones.astype(np.float32), responses.offsets),
            advantages=rng.normal(size=8).astype(np.float32),
            staleness=np.zeros(8, np.int64),
        )

    return [group(number) for number in range(8)]


def training(path: Path, size: Size, device: str, repeats: int, *, has_profile: bool) -> list[Figure]:
    config = load(ROOT / "recipes/quickstart.yaml", [f"train.device={device}", "train.dtype=bfloat16", "train.accumulate=fp32"])
    most = tokens_per_pass(config, read_json(path / "config.json"))
    engine = OneRank(path, replace(train_engine_options(config), tokens_per_pass=most, check_shared_prompt=False))
    batches = groups(size)
    num_tokens = sum(len(batch.prompt_ids) + len(batch.response_ids.values) for batch in batches)
    num_parameters = sum(parameter.numel() for parameter in engine.policy.parameters.values())
    left, right = (torch.randn(size.product, size.product, device=device, dtype=BFLOAT16) for _ in range(2))

    def products() -> None:
        for _ in range(STEPS):
            left @ right

    turns = []
    for _ in range(repeats + 1):
        turns.append((seconds(lambda: engine.forward_backward(batches, GRPO()), device), seconds(products, device)))
        engine.discard()
    took, of_products = np.array(turns[1:]).T
    rates = STEPS * 2.0 * size.product**3 / of_products
    if has_profile:
        activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if device == CUDA else [])]
        with torch.profiler.profile(activities=activities) as profile:
            seconds(lambda: engine.forward_backward(batches, GRPO()), device)
        for key in ("self_device_time_total", "self_cpu_time_total"):
            print(profile.key_averages().table(sort_by=key, row_limit=20, max_name_column_width=80))
    print(
        f"passes of up to {most} tokens; {num_tokens} packed tokens; "
        f"products at {np.median(rates) / 1e12:.1f} T operations a second"
    )
    return [
        Figure("passes", num_tokens / float(np.median(took)), "packed tokens a second"),
        Figure("share of the products' rate", float(np.median(6.0 * num_parameters * num_tokens / took / rates)), ""),
    ]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--device", default=CUDA)
    arguments.add_argument("--parts", nargs="+", choices=["engine", "passes"], default=["engine", "passes"])
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--tiny", action="store_true", help="a small model")
    arguments.add_argument("--profile", action="store_true", help="tell what takes the time of the passes")
    chosen = arguments.parse_args()
    size = SIZES[chosen.tiny]
    print(*(f"{name}: {maker}" for name, maker in accelerators()))
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="asyncflow-") as folder:
        path = write_model(size, Path(folder), chosen.device)
        if "engine" in chosen.parts:
            figures += rollout(path, size, chosen.device, chosen.repeats)
        if "passes" in chosen.parts:
            figures += training(path, size, chosen.device, chosen.repeats, has_profile=chosen.profile)
    return finish(figures, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
