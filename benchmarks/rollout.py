"""The embedded rollout engine beside transformers, and the cost of installing weights. CPU, float32, one core.

    OMP_NUM_THREADS=1 python benchmarks/rollout.py [--json FILE] [--repeats N] [--only NAME ...] [--model PATH] [--tails NAME ...]

One process, one random Qwen3 of 4.2M parameters, 64 requests (64 prompts of 32-64 tokens, 16-128 new tokens each, seeded), sampled
at temperature 1; and a model of SmolLM2-135M's shape with random weights, 16 requests (prompts of 24-48 tokens, 8-48 new tokens).
End tokens are off, so that everybody makes the same numbers of tokens:

    engine       SlotEngine, a slot for each request
    generate     transformers' generate(), one batch of all, left-padded, to the longest length; only the wanted tokens are counted
    continuous   transformers' continuous batching (add_request for each request), its manager warm
    floor        the engine's own matrix products alone, for the prompts and for every token, at its batch sizes

All return the log-probs of the sampled tokens, which training needs; `generate_ids_only` is generate() without them. The process
has a rollout worker's environment: the allocator keeps freed memory, which makes all of them some 6% faster. Repeats are
interleaved; a rate is the median of the repeats, a ratio the median of the ratios within each repeat.

The speed-up is also given in CPU seconds of the process, which a busy machine disturbs less than wall-clock seconds.

Install, with the model of 4.2M: the same weights, into the engine's buffers (with the hop to the engine's thread), beside a memcpy
of their bytes; and again with the first token after it, whose pass packs the weights, less a first token without an install.

Shared prompts: 16 responses of 64 tokens to one prompt of 512, in slots that have the prompt's keys in common, and in slots that
have a copy each; the same decode steps, one of the one kind and one of the other in turn; and the resident memory of both caches.
With the model above, and with one of SmolLM2-135M's shape and random weights.

Tail: whole batches with `speculation: auto` and without, in turn; the tail is the time from the moment in which nine tenths of the
responses are there until all are. The same tokens and log-probs to the bit, or it stops. The quickstart's model on the quickstart's
prompts (`quickstart`), and, with `--model` (the folder of recipes/models/make_smollm2.py), SmolLM2-135M: on the recipe's sums at
temperature 1 (`sums`), on word problems at 0.7 (`words`), and, one response each, greedily, as an evaluation (`greedy`). It would
talk on until it is cut off, so each of its responses has a limit of its own: lognormal, 48 tokens in the median, 192 at most.

Gap: eight responses are under way when a prompt of 512 tokens comes; the longest time between two of their tokens, with the prompt
computed in one pass, and in pieces (`prefill_chunk` 256, the default, and 128); and the longest time without a prompt. With the
model of 4.2M, and the one of `--model`.
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
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil
import torch
import transformers
from figures import Figure, begin_again_as, finish, parser
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.generation import ContinuousBatchingConfig

from asyncflow.config import load
from asyncflow.data import arithmetic, sums
from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.engines.base import SampleKey, Sampling, Timing
from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.engines.rollout.decoder import Decoder
from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.engines.rollout.linears import padded
from asyncflow.engines.rollout.slot_options import PREFILL_CHUNK
from asyncflow.run.worker_start import generating

ROOT = Path(__file__).parent.parent
Model: TypeAlias = Qwen3ForCausalLM | LlamaForCausalLM


@dataclass(frozen=True)
class Load:
    """Requests to all contenders: how many, their prompts' and new tokens' fewest and most, drawn evenly."""

    requests: int
    prompt: tuple[int, int]
    new: tuple[int, int]

    @property
    def context(self) -> int:
        return self.prompt[1] + self.new[1]


LOADS = {"4.2M": Load(64, (32, 64), (16, 128)), "135M": Load(16, (24, 48), (8, 48))}


def new_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


def new_smollm2() -> LlamaForCausalLM:
    torch.manual_seed(0)
    fields = {name: value for name, value in SMOLLM2.items() if name != "model_type"}
    return LlamaForCausalLM(LlamaConfig(**fields)).eval()


async def run_engine(engine: SlotEngine, prompts: list[np.ndarray], lengths: list[int]) -> int:
    async def one(index: int) -> int:
        sampling, key = Sampling(max_new_tokens=lengths[index]), SampleKey(seed=0, prompt_index=index)
        return sum([len(r.token_ids) async for r in engine.generate(prompts[index], samples=[0], sampling=sampling, key=key)])

    return sum(await asyncio.gather(*(one(index) for index in range(len(prompts)))))


def run_generate(model: Model, prompts: list[np.ndarray], lengths: list[int], with_logprobs: bool) -> int:
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
    prefills = [PREFILL_CHUNK] * (prompt_tokens // PREFILL_CHUNK) + [prompt_tokens % PREFILL_CHUNK]
    decodes = [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    for rows in [*prefills, *decodes]:
        for layer in decoder.layers:
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                assert linear.weight is not None
                linear(rows_of(linear.weight.shape[1])[: padded(rows)])
    assert decoder.lm_head.weight is not None
    for rows in [len(lengths), *decodes]:
        decoder.lm_head(rows_of(decoder.lm_head.weight.shape[1])[: padded(rows)])
    return sum(lengths)


@cache
def rows_of(width: int) -> torch.Tensor:
    return torch.randn(PREFILL_CHUNK, width)


def compare(engine: SlotEngine, model: Model, load: Load, repeats: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """New tokens per second, and per CPU second, of each contender in each repeat."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1024, rng.integers(*load.prompt, endpoint=True)) for _ in range(load.requests)]
    lengths = rng.integers(*load.new, load.requests, endpoint=True).tolist()
    sampled = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=load.new[1], eos_token_id=-1, pad_token_id=0)
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


def measure_install(engine: SlotEngine, model: Model) -> dict[str, float]:
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


def resident_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's pages that are in memory, by the highest bit of each one's entry (Linux, proc_pid_pagemap(5))."""
    page = os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(tensor.data_ptr() // page * 8)
        entries = np.frombuffer(file.read(tensor.nbytes // page * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * page


def compare_sharing(fields: dict[str, Any]) -> tuple[float, float, float]:
    """Blocks of the cache, seconds of a decode step, and resident memory of the cache, of slots that share a prompt's keys, over
    those of slots with copies."""
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
    resident = [resident_bytes(decoder.cache.tensor) for decoder in decoders]
    return shared / copied, float(np.median(seconds[0] / seconds[1])), resident[0] / resident[1]


def texts(name: str, num_prompts: int) -> list[str]:
    """The first questions of a data set of the recipes."""
    rows = {"sums": sums, "arithmetic": arithmetic}[name].as_examples(0, "train", num_prompts)
    return [str(row.get("prompt") or row["question"]) for row in rows]


TAIL = "tail, with drafts / without"


def compare_tails(model: Path, prompts: list[np.ndarray], group: int, sampling: Sampling, repeats: int) -> dict[str, float]:
    """Tail and whole batch with drafts / without, and the share of right drafts. With `sampling.max_new_tokens` above 64 each
    response has a limit of its own, drawn by seed."""
    context = max(map(len, prompts)) + sampling.max_new_tokens
    drawn = np.random.default_rng(0).lognormal(np.log(48), 0.7, (len(prompts), group)).clip(8, sampling.max_new_tokens).astype(int)
    limits = drawn if sampling.max_new_tokens > 64 else np.full_like(drawn, sampling.max_new_tokens)
    arguments: dict[str, Any] = {"num_slots": group * len(prompts), "max_context": context, "num_threads": 1}
    engines = [SlotEngine(model, **arguments, speculation=speculation) for speculation in ("auto", 0)]

    async def batch(engine: SlotEngine, num_prompts: int) -> tuple[dict[tuple[int, int], bytes], np.ndarray]:
        made, seconds, began = {}, [], time.perf_counter()

        async def one(index: int, sample: int) -> None:
            limited = replace(sampling, max_new_tokens=int(limits[index, sample]))
            async for r in engine.generate(prompts[index], samples=[sample], sampling=limited, key=SampleKey(0, index)):
                made[index, sample] = r.token_ids.tobytes() + r.logprobs.tobytes()
                seconds.append(time.perf_counter() - began)

        await asyncio.gather(*(one(index, sample) for index in range(num_prompts) for sample in range(group)))
        return made, np.sort(seconds)

    tails, wholes, steps = [], [], list[Timing]()
    with asyncio.Runner() as runner:
        for repeat in range(repeats + 1):  # the first warms up, with one prompt
            made, seconds = zip(*(runner.run(batch(engine, len(prompts) if repeat else 1)) for engine in engines), strict=True)
            assert made[0] == made[1], "drafts changed a response"
            steps += engines[0].timings()
            if repeat:
                tails.append(np.divide(*(each[-1] - each[len(each) * 9 // 10 - 1] for each in seconds)))
                wholes.append(seconds[0][-1] / seconds[1][-1])
        for engine in engines:
            runner.run(engine.close())
    drafts, accepted = (sum(getattr(step, name) for step in steps) for name in ("drafts", "accepted"))
    return {
        TAIL: float(np.median(tails)),
        "whole batch, with drafts / without": float(np.median(wholes)),
        "drafts that were right": accepted / max(drafts, 1),
    }


TAILS = ("quickstart", "sums", "words", "greedy")


def tails(model: Path | None, repeats: int, chosen: list[str]) -> list[Figure]:
    tiny = ROOT / "recipes" / "models" / "tiny-arithmetic"
    encode = CheckpointTokenizer(tiny).encode
    prompts = [encode(f"{text}\n") for text in texts("arithmetic", 32)]
    cases = {"quickstart": (tiny, prompts, 8, Sampling(1.0, 64), max(repeats, 9))}
    if model is not None:
        chat = CheckpointTokenizer(model).encode_chat
        by_name = {name: [chat(text) for text in texts(name, 32)] for name in ("sums", "arithmetic")}
        cases |= {
            "sums": (model, by_name["sums"][:4], 8, Sampling(1.0, 192), repeats),
            "words": (model, by_name["arithmetic"][:4], 8, Sampling(0.7, 192), repeats),
            "greedy": (model, by_name["arithmetic"], 1, Sampling(0.0, 192), repeats),
        }
    figures = []
    for name, case in cases.items():
        if name in chosen:
            made = compare_tails(*case)
            figures += [Figure(f"{name}: {what}", made[what], "", "<= 0.7" if what == TAIL else None) for what in made]
    return figures


def longest_gaps(model: Path, repeats: int) -> dict[str, float]:
    """Longest seconds between two tokens of a running response, by what was computed beside it."""
    running, arriving = np.arange(8), np.random.default_rng(0).integers(0, 1024, 512)
    found: dict[str, list[float]] = {}

    async def gap(chunk: int, arrives: bool) -> float:
        ends: list[float] = []
        engine = SlotEngine(model, num_slots=16, max_context=600, num_threads=1, stop_ids=(), speculation=0, prefill_chunk=chunk)
        step = engine._slots.step

        def timed() -> None:
            step()
            ends.append(time.perf_counter())

        engine._slots.step = timed  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sampled(engine, running, 40))
            while len(ends) < 8:
                await asyncio.sleep(0.001)
            if arrives:
                await sampled(engine, arriving, 2)
        await engine.close()
        return float(np.diff(ends[4:]).max())

    async def sampled(engine: SlotEngine, prompt: np.ndarray, length: int) -> None:
        async for _ in engine.generate(prompt, samples=range(8), sampling=Sampling(1.0, length), key=SampleKey(0, len(prompt))):
            pass

    for repeat in range(repeats + 1):  # the first warms up
        for name, chunk, arrives in (("one pass", 512, True), ("256", 256, True), ("128", 128, True), ("none", 256, False)):
            seconds = asyncio.run(gap(chunk, arrives))
            if repeat:
                found.setdefault(name, []).append(seconds)
    return {name: statistics.median(each) for name, each in found.items()}


def gaps(model: Path | None, repeats: int) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        new_model().save_pretrained(folder)
        by_model = {"4.2M": longest_gaps(Path(folder), repeats)}
    if model is not None:
        by_model["135M"] = longest_gaps(model, repeats)
    figures = []
    for name, found in by_model.items():
        figures += [Figure(f"{name}: longest gap, {how}", 1e3 * seconds, "ms") for how, seconds in found.items()]
        figures += [
            Figure(f"{name}: longest gap, pieces of {chunk} / one pass", found[chunk] / found["one pass"], "")
            for chunk in ("256", "128")
        ]
    return figures


def speedup(rates: dict[str, np.ndarray]) -> float:
    """Median over the repeats of the engine's rate over the better of the two others."""
    return float(np.median(rates["engine"] / np.maximum(rates["generate"], rates["continuous"])))


def compare_engines(repeats: int) -> list[Figure]:
    """Rates of all contenders, with both models, and installs of the smaller one."""
    figures = []
    for name, make in {"4.2M": new_model, "135M": new_smollm2}.items():
        model, load = make(), LOADS[name]
        print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters, {load}, {repeats} repeats")
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            engine = SlotEngine(Path(folder), num_slots=load.requests, max_context=load.context, num_threads=1, stop_ids=())
        figures += engine_figures(name, *compare(engine, model, load, repeats))
        if name == "4.2M":
            figures += install_figures(engine, model)
        asyncio.run(engine.close())
    return figures


def engine_figures(model: str, rates: dict[str, np.ndarray], cpu_rates: dict[str, np.ndarray]) -> list[Figure]:
    def over(name: str) -> float:
        return float(np.median(rates["engine"] / rates[name]))

    return [
        *(Figure(f"{model}: rollout, {name}", float(np.median(values)), "new tokens/s") for name, values in rates.items()),
        Figure(f"{model}: engine / generate(), with log-probs", over("generate"), ""),
        Figure(f"{model}: engine / generate(), token ids alone", over("generate_ids_only"), ""),
        Figure(f"{model}: engine / continuous batching", over("continuous"), ""),
        Figure(f"{model}: engine / floor", over("floor"), ""),
        Figure(f"{model}: engine / the better of the two", speedup(rates), "", ">= 2.5"),
        Figure(f"{model}: the same in CPU seconds", speedup(cpu_rates), ""),
    ]


def install_figures(engine: SlotEngine, model: Model) -> list[Figure]:
    install = measure_install(engine, model)
    print(", ".join(f"{name} {install[name] * 1e3:.2f} ms" for name in ("prepare", "install", "memcpy", "first tokens", "tokens")))
    return [
        Figure("install / memcpy of the same bytes", install["install"] / install["memcpy"], "", "<= 3.0"),
        Figure("prepare (beside generation) / memcpy", install["prepare"] / install["memcpy"], ""),
        Figure("first tokens after an install / later ones", install["first tokens"] / install["tokens"], ""),
        Figure("resident memory per install, over 100", install["slope"] / 2**20, "MiB", "<= 0.1"),
    ]


def compare_prompts() -> list[Figure]:
    """Slots that share a prompt's keys, and slots with copies."""
    sharing = {"4.2M": compare_sharing(json.loads(new_model().config.to_json_string())), "135M": compare_sharing(SMOLLM2)}
    return [
        *(Figure(f"cache, shared prompt / copies, {name}", each[0], "", "<= 0.25") for name, each in sharing.items()),
        *(Figure(f"decode step, shared prompt / copies, {name}", each[1], "", "<= 0.8") for name, each in sharing.items()),
        *(Figure(f"cache's memory, shared prompt / copies, {name}", each[2], "", "<= 0.25") for name, each in sharing.items()),
    ]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--model", type=Path, metavar="PATH")
    arguments.add_argument("--tails", nargs="+", choices=TAILS, default=TAILS)
    names = ["engines", "prompts", "tails", "gaps"]
    arguments.add_argument("--only", nargs="+", choices=names, default=names)
    given = arguments.parse_args()
    begin_again_as(generating(load(ROOT / "recipes/quickstart.yaml")))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    parts: dict[str, Callable[[], list[Figure]]] = {
        "engines": lambda: compare_engines(given.repeats),
        "prompts": compare_prompts,
        "tails": lambda: tails(given.model, given.repeats, given.tails),
        "gaps": lambda: gaps(given.model, given.repeats),
    }
    return finish([figure for name in given.only for figure in parts[name]()], given.json)


if __name__ == "__main__":
    sys.exit(main())
