"""The embedded rollout engine beside transformers, and the cost of installing weights. CPU, float32, one core.

    OMP_NUM_THREADS=1 python benchmarks/rollout.py [--json FILE] [--repeats N]

One process, one random Qwen3 of 4.2M parameters, 64 requests (64 prompts of 32-64 tokens, 16-128 new tokens each, seeded), sampled
at temperature 1. End tokens are off, so that everybody makes the same numbers of tokens:

    engine       SlotEngine, 64 slots
    generate     transformers' generate(), one batch of 64, left-padded, to the longest length; only the wanted tokens are counted
    continuous   transformers' continuous batching (add_request for each request), its manager warm
    floor        the engine's own matrix products alone, for the prompts and for every token, at its batch sizes

All return the log-probs of the sampled tokens, which training needs; `generate_ids_only` is generate() without them. Repeats are
interleaved; a rate is the median of the repeats, a ratio the median of the ratios within each repeat.

The speed-up is also given in CPU seconds of the process, which a busy machine disturbs less than wall-clock seconds.

Install: the same weights, into the engine's buffers (with the hop to the engine's thread), beside one memcpy of their bytes; and
again with the first token after it, whose pass packs the weights, less a first token without an install.

Shared prompts: 16 responses of 64 tokens to one prompt of 512, in slots that have the prompt's keys in common, and in slots that
have a copy each; the same decode steps, one of the one kind and one of the other in turn. With the model above, and with one of
SmolLM2-135M's shape and random weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil
import torch
import transformers
from figures import Figure, finish, parser
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.generation import ContinuousBatchingConfig

from asyncflow.engines.base import SampleKey, Sampling
from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.engines.rollout.decoder import Decoder, padded
from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.engines.rollout.slots import PREFILL_TOKENS

NUM_REQUESTS = 64
MAX_CONTEXT = 192


def new_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


async def run_engine(engine: SlotEngine, prompts: list[np.ndarray], lengths: list[int]) -> int:
    async def one(index: int) -> int:
        sampling, key = Sampling(max_new_tokens=lengths[index]), SampleKey(seed=0, prompt_index=index)
        return sum([len(r.token_ids) async for r in engine.generate(prompts[index], samples=[0], sampling=sampling, key=key)])

    return sum(await asyncio.gather(*(one(index) for index in range(len(prompts)))))


def run_generate(model: Qwen3ForCausalLM, prompts: list[np.ndarray], lengths: list[int], with_logprobs: bool) -> int:
    longest = max(len(p) for p in prompts)
    tokens = torch.tensor(np.stack([np.pad(p, (longest - len(p), 0)) for p in prompts]))
    mask = torch.tensor(np.stack([np.arange(longest) >= longest - len(p) for p in prompts]).astype(np.int64))
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=max(lengths), pad_token_id=0)
    config.output_logits = config.return_dict_in_generate = with_logprobs
    made = model.generate(tokens, attention_mask=mask, generation_config=config)
    if with_logprobs:
        for position, logits in enumerate(made.logits, longest):
            logits.log_softmax(-1).gather(1, made.sequences[:, position, None])
        made = made.sequences
    return sum(min(length, made.shape[1] - longest) for length in lengths)


def run_continuous(manager: Any, prompts: list[np.ndarray], lengths: list[int]) -> int:
    for prompt, length in zip(prompts, lengths, strict=True):
        manager.add_request(prompt.tolist(), max_new_tokens=length, eos_token_id=-1)
    results = [manager.get_result(timeout=60) for _ in prompts]
    assert all(len(result.logprobs) == len(result.generated_tokens) for result in results)
    return sum(len(result.generated_tokens) for result in results)


@torch.inference_mode()
def run_floor(decoder: Decoder, prompts: list[np.ndarray], lengths: list[int]) -> int:
    """The engine's products: all prompts in full passes, then each step with the rows that are still active."""
    prompt_tokens = sum(len(p) for p in prompts)
    prefills = [PREFILL_TOKENS] * (prompt_tokens // PREFILL_TOKENS) + [prompt_tokens % PREFILL_TOKENS]
    decodes = [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    for rows in [*prefills, *decodes]:
        for layer in decoder.layers:
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                assert linear.weight is not None
                linear(INPUTS[linear.weight.shape[1]][: padded(rows)])
    for rows in [NUM_REQUESTS, *decodes]:
        decoder.lm_head(INPUTS[256][: padded(rows)])
    return sum(lengths)


INPUTS = {size: torch.randn(PREFILL_TOKENS, size) for size in (256, 768)}


def compare(engine: SlotEngine, model: Qwen3ForCausalLM, repeats: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """New tokens per second, and per CPU second, of each contender in each repeat."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1024, rng.integers(32, 65)) for _ in range(NUM_REQUESTS)]
    lengths = rng.integers(16, 129, NUM_REQUESTS).tolist()
    sampled = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=128, eos_token_id=-1, pad_token_id=0)
    paged = ContinuousBatchingConfig(page_size=32, num_blocks=512, max_batch_tokens=512, return_logprobs=True)
    rates: dict[str, list[float]] = {}
    cpu_rates: dict[str, list[float]] = {}
    with (
        asyncio.Runner() as runner,
        model.continuous_batching_context_manager(generation_config=sampled, continuous_batching_config=paged) as manager,
    ):
        contenders: dict[str, Callable[[], int]] = {
            "engine": lambda: runner.run(run_engine(engine, prompts, lengths)),
            "generate": lambda: run_generate(model, prompts, lengths, with_logprobs=True),
            "generate_ids_only": lambda: run_generate(model, prompts, lengths, with_logprobs=False),
            "continuous": lambda: run_continuous(manager, prompts, lengths),
            "floor": lambda: run_floor(engine._decoder, prompts, lengths),
        }
        for repeat in range(repeats + 1):  # the first warms up
            for name, run in contenders.items():
                start, cpu_start = time.perf_counter(), time.process_time()
                tokens = run()
                seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
                assert tokens == sum(lengths), f"{name} made {tokens} tokens, not {sum(lengths)}"
                if repeat:
                    rates.setdefault(name, []).append(tokens / seconds)
                    cpu_rates.setdefault(name, []).append(tokens / cpu_seconds)
    wall, cpu = ({name: np.array(values) for name, values in kind.items()} for kind in (rates, cpu_rates))
    return wall, cpu


def measure_install(engine: SlotEngine, model: Qwen3ForCausalLM) -> dict[str, float]:
    """Median seconds of a preparation, an install, a memcpy of as many bytes; bytes by which each of 100 installs grows us."""
    tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    source = torch.randn(sum(tensor.numel() for tensor in tensors.values()))
    target = source.clone()
    seconds: dict[str, list[float]] = {}

    async def timed(name: str, work: Awaitable[object]) -> None:
        start = time.perf_counter()
        await work
        seconds.setdefault(name, []).append(time.perf_counter() - start)

    async def measure() -> float:
        two_tokens = ([np.arange(8)], [2])  # a prefill and a decode step
        resident = []
        for version in range(120):
            await timed("prepare", engine.prepare(version, tensors))
            await timed("install", engine.install(version, tensors))
            await timed("first tokens", run_engine(engine, *two_tokens))
            await timed("tokens", run_engine(engine, *two_tokens))
            start = time.perf_counter()
            target.copy_(source)
            seconds.setdefault("memcpy", []).append(time.perf_counter() - start)
            resident.append(psutil.Process().memory_info().rss)
        return float(np.polyfit(range(100), resident[20:], 1)[0])

    slope = asyncio.run(measure())
    return {**{name: statistics.median(values) for name, values in seconds.items()}, "slope": slope}


SMOLLM2 = {
    **{"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048, "tie_word_embeddings": True},
}


def compare_sharing(fields: dict[str, Any]) -> tuple[float, float]:
    """Blocks of the cache, and seconds of a decode step, of slots that share a prompt's keys, over those of slots with copies."""
    prompt, slots, seconds = np.random.default_rng(0).integers(0, 1024, 512), list(range(16)), np.zeros((2, 64))
    decoders = []
    for _ in range(2):
        config = DecoderConfig.from_fields({**fields, "max_position_embeddings": 576})
        decoder = Decoder(config, num_slots=16, max_context=576, dtype=torch.float32, device=torch.device("cpu"))
        decoder.install({name: torch.randn(shape) * 0.02 for name, shape in decoder.shapes.items()})
        decoders.append(decoder)
    with torch.inference_mode():
        decoders[0].prefill([prompt], [slots])
        for slot in slots:
            decoders[1].prefill([prompt], [[slot]])
        for step in range(64):
            for which, decoder in enumerate(decoders):
                began = time.process_time()
                decoder.decode(np.arange(16), np.full(16, len(prompt) + step))
                seconds[which, step] = time.process_time() - began
    shared, copied = (decoder.cache.most_blocks for decoder in decoders)
    return shared / copied, float(np.median(seconds[0] / seconds[1]))


def speedup(rates: dict[str, np.ndarray]) -> float:
    """Median over the repeats of the engine's rate over the better of the two others."""
    return float(np.median(rates["engine"] / np.maximum(rates["generate"], rates["continuous"])))


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=5)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = new_model()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = SlotEngine(Path(folder), num_slots=NUM_REQUESTS, max_context=MAX_CONTEXT, num_threads=1, stop_ids=())
    rates, cpu_rates = compare(engine, model, given.repeats)
    install = measure_install(engine, model)
    sharing = {"4.2M": compare_sharing(json.loads(model.config.to_json_string())), "135M": compare_sharing(SMOLLM2)}

    def over(name: str) -> float:
        return float(np.median(rates["engine"] / rates[name]))

    figures = [
        *(Figure(f"rollout, {name}", float(np.median(values)), "new tokens/s") for name, values in rates.items()),
        Figure("engine / generate(), with log-probs", over("generate"), ""),
        Figure("engine / generate(), token ids alone", over("generate_ids_only"), ""),
        Figure("engine / continuous batching", over("continuous"), ""),
        Figure("engine / floor", over("floor"), ""),
        Figure("engine / the better of the two", speedup(rates), "", ">= 2.5"),
        Figure("the same in CPU seconds", speedup(cpu_rates), ""),
        Figure("install / memcpy of the same bytes", install["install"] / install["memcpy"], "", "<= 3.0"),
        Figure("prepare (beside generation) / memcpy", install["prepare"] / install["memcpy"], ""),
        Figure("first tokens after an install / later ones", install["first tokens"] / install["tokens"], ""),
        *(Figure(f"cache, shared prompt / copies, {name}", each[0], "", "<= 0.25") for name, each in sharing.items()),
        *(Figure(f"decode step, shared prompt / copies, {name}", each[1], "", "<= 0.8") for name, each in sharing.items()),
        Figure("resident memory per install, over 100", install["slope"] / 2**20, "MiB", "<= 0.1"),
    ]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {given.repeats} repeats")
    print(", ".join(f"{name} {install[name] * 1e3:.2f} ms" for name in ("prepare", "install", "memcpy", "first tokens", "tokens")))
    return finish(figures, given.json)


if __name__ == "__main__":
    sys.exit(main())
