"""Low-rank adapters beside whole weights, at 135M parameters on the CPU: memory, time, bytes, log-probs, and what attesting costs.

    OMP_NUM_THREADS=1 python benchmarks/lora.py [--json FILE] [--repeats N] [--only many]

A random Llama of SmolLM2-135M's shapes, rank 16 on all linear layers but the gate's, groups of 8 responses of 12 tokens to a prompt
of 26. Each trainer has a process of its own, whose largest resident memory is taken while it trains, not while it loads. A step has
8 groups.
Whole weights are kept in float32 whatever `train.dtype` is; the base of an adapter is kept in it: with bfloat16 in half of that.
`many`: adapters of several clients in one decode step of 16 slots, by CPU time, beside the same rows from merged weights, which one
engine generates with one after another; and in one training pass, a micro-batch of 4 responses of each, beside a pass for each.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from figures import Figure, finish, parser

from asyncflow.algorithms.grpo import GRPO
from asyncflow.attestation import PROBE_EVERY, new_probing
from asyncflow.config import parse
from asyncflow.engines.base import MicroBatch, SampleKey, Sampling
from asyncflow.types import HeldWeights, LoraSpec, Ragged

PROMPT_TOKENS, RESPONSE_TOKENS, RESPONSES, GROUPS, VOCABULARY = 26, 12, 8, 8, 49152
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
"""Layers of the adapter: without the gate's, so that a version is less than 3% of the whole weights'."""
SPEC = LoraSpec(rank=16, alpha=32.0, targets=TARGETS)


def make_model(folder: Path) -> None:
    """A random model of SmolLM2-135M's shapes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, rms_norm_eps=1e-5, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def micro_batch(rows: Ragged | None = None, logprobs: Ragged | None = None) -> MicroBatch:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCABULARY, PROMPT_TOKENS)
    rows = rows or Ragged.from_arrays([rng.integers(0, VOCABULARY, RESPONSE_TOKENS) for _ in range(RESPONSES)], "int64")
    size = len(rows.values)
    return MicroBatch(
        indices=np.arange(RESPONSES),
        prompt_ids=prompt,
        response_ids=rows,
        loss_mask=Ragged(np.ones(size, np.uint8), rows.offsets),
        rollout_logprobs=logprobs or Ragged(np.full(size, -10.0, np.float32), rows.offsets),
        advantages=rng.normal(size=RESPONSES).astype(np.float32),
        staleness=np.zeros(RESPONSES, np.int64),
    )


def trainer(model: Path, lora: LoraSpec | None, dtype: str = "float32") -> Any:
    from asyncflow.engines.train.torch_engine import TorchEngine
    from asyncflow.run.factories import train_engine_options

    train = {"check_shared_prompt": False, "dtype": dtype}
    config = parse({"model": {"path": str(model)}, "data": {"path": ""}, "train": train})
    return TorchEngine(model, replace(train_engine_options(config), lora=lora, learning_rate=1e-4))


async def train(model: Path, kind: str, dtype: str, repeats: int) -> dict[str, float]:
    """Seconds of a group, of an update, and the largest resident bytes of this process while it trains."""
    engine, batch, groups, updates = trainer(model, SPEC if kind == "adapter" else None, dtype), micro_batch(), [], []
    for number in range(repeats + 1):
        if number == 1:
            Path("/proc/self/clear_refs").write_text("5")  # the largest resident size counts from here on
        start = time.perf_counter()
        await engine.forward_backward([batch], GRPO())
        middle = time.perf_counter()
        await engine.optim_step(RESPONSES * RESPONSE_TOKENS)
        groups.append(middle - start)
        updates.append(time.perf_counter() - middle)
    largest = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return {
        "group": statistics.median(groups[1:]),
        "update": statistics.median(updates[1:]),
        "bytes": 1024.0 * int(largest.split()[1]),
    }


def train_apart(model: Path, kind: str, dtype: str, repeats: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--part", kind, "--dtype", dtype, "--model", str(model), "--repeats", str(repeats)]
    seen: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return seen


async def sync(model: Path, folder: Path, step_seconds: Mapping[str, float]) -> list[Figure]:
    """A version's way from the trainer to the embedded engine, of whole weights and of an adapter. `step_seconds`: of each."""
    import torch

    from asyncflow.attestation import fault_of
    from asyncflow.engines.lora import initial_lora, sum_of_base
    from asyncflow.engines.rollout.decoder_weights import load_tensors
    from asyncflow.engines.rollout.engine import SlotEngine
    from asyncflow.weight_sync.base import WeightSyncOptions
    from asyncflow.weight_sync.shared_memory import SharedMemory

    engine = SlotEngine(model, num_slots=64, max_context=64, lora=SPEC, stop_ids=[])
    shapes: Mapping[str, Any] = {name: tuple(piece.shape) for name, piece in engine._decoder.lora.slices.items()}
    adapter = {name: t + 0.02 * torch.randn(t.shape) for name, t in initial_lora(shapes, SPEC, 0).items()}
    figures, num_bytes, attesting = [], {}, {}
    for kind, tensors in (("whole", load_tensors(model)), ("adapter", adapter)):
        seconds: dict[str, list[float]] = {}
        for attested in ("float32", None):
            options = WeightSyncOptions(directory=folder / f"{kind}-{attested}", attested_dtype=attested, base=None)
            sender, receiver = SharedMemory(options).sender("one"), SharedMemory(options).receiver("one")
            for version in range(1, 5):
                start = time.perf_counter()
                manifest = await sender.publish(version, HeldWeights(tensors))
                published = time.perf_counter()
                arrived = await receiver.fetch(manifest)
                fetched = time.perf_counter()
                await engine.install(version, arrived)
                installed = time.perf_counter()
                engine._decoder.lora.sums() if kind == "adapter" else engine._decoder.sums()
                ended = time.perf_counter()
                if version > 1:  # the first one makes the file
                    times = (published - start, fetched - published, installed - fetched, ended - installed)
                    for name, value in zip(("publish", "fetch", "install", "sums"), times, strict=True):
                        seconds.setdefault(f"{name} {attested}", []).append(value)
            num_bytes[kind] = manifest.num_bytes
            await receiver.close()
            await sender.close()
            shutil.rmtree(options.directory)
        median = {name: statistics.median(values) for name, values in seconds.items()}
        exposed = median["install None"] + median["fetch None"]
        figures.append(Figure(f"a version of {kind}: publish, beside training", 1e3 * median["publish None"], "ms"))
        figures.append(Figure("  fetch and install, during which the worker waits without staleness", 1e3 * exposed, "ms"))
        attesting[kind] = median["publish float32"] - median["publish None"] + median["sums float32"]
        target = "<= 0.01"
        figures.append(Figure("  attesting it, sender and engine / its step", attesting[kind] / step_seconds[kind], "", target))
        probe = await probing(model, engine, SPEC if kind == "adapter" else None)
        figures.append(Figure("  a probe, trainer and engine", 1e3 * probe, "ms"))
        figures.append(
            Figure(
                "  attesting it, and a probe now and then / its step",
                (attesting[kind] + probe / PROBE_EVERY) / step_seconds[kind],
                "",
                target,
            )
        )
    figures.append(Figure("bytes a version, adapter / whole", num_bytes["adapter"] / num_bytes["whole"], "", "<= 0.03"))
    of_attention = sum(4 * tensor.numel() for name, tensor in adapter.items() if ".self_attn." in name)
    figures.append(Figure("  with targets on attention alone", of_attention / num_bytes["whole"], "", "<= 0.03"))
    layers = [tensor for name, tensor in load_tensors(model).items() if tensor.ndim == 2 and "embed" not in name]
    of_all = sum(4 * SPEC.rank * sum(tensor.shape) for tensor in layers)
    figures.append(Figure("  with targets on all linear layers", of_all / num_bytes["whole"], ""))
    figures += await alike(model, folder, engine, adapter)
    assert fault_of(await engine.attest(), 1, {}) != "" and sum_of_base(model, "float32") == engine._base
    figures.append(await decoding(engine, adapter))
    await engine.close()
    return figures


async def probing(model: Path, engine: Any, lora: LoraSpec | None) -> float:
    """Seconds of a probe at both ends: the trainer's log-probs, and the engine's."""
    ids, seconds, train_engine = np.array(new_probing(VOCABULARY, 64, ["float32"]).token_ids), [], trainer(model, lora)
    for _ in range(6):
        start = time.perf_counter()
        await train_engine.log_probs(ids[:1], Ragged.from_arrays([ids[1:]], "int64"))
        await engine.log_probs(ids)
        seconds.append(time.perf_counter() - start)
    await train_engine.close()
    return statistics.median(seconds[1:])


async def alike(model: Path, folder: Path, engine: Any, adapter: Mapping[str, Any]) -> list[Figure]:
    """Largest difference of a sampled token's log-prob, trainer against embedded engine, without an adapter and with one."""
    from asyncflow.engines.lora_files import write_lora

    write_lora(folder / "adapter", SPEC, model, {name: tensor.numpy() for name, tensor in adapter.items()})
    seen = []
    for name, tensors, lora in (("without", {}, None), ("with", adapter, replace(SPEC, path=str(folder / "adapter")))):
        await engine.install(1, tensors)
        sampling, prompt = Sampling(max_new_tokens=RESPONSE_TOKENS), micro_batch().prompt_ids
        made = [r async for r in engine.generate(prompt, samples=range(RESPONSES), sampling=sampling, key=SampleKey(0, 0))]
        made.sort(key=lambda response: response.sample)
        train_engine = trainer(model, lora)
        ids = Ragged.from_arrays([response.token_ids for response in made], "int64")
        theirs = (await train_engine.log_probs(prompt, ids)).values
        ours = np.concatenate([response.logprobs for response in made])
        seen.append(
            Figure(f"largest difference of a log-prob {name} an adapter", float(abs(ours - theirs).max()), "nats", "<= 1e-5")
        )
        await train_engine.close()
    return seen


async def decoding(engine: Any, adapter: Mapping[str, Any]) -> Figure:
    """Seconds of a decode step of 64 slots with an adapter / without, in turn."""
    import torch

    decoder, ratios = engine._decoder, []
    tokens, positions = np.arange(64) % VOCABULARY, np.full(64, 20)
    decoder.lora.install(adapter)

    def seconds(is_used: bool) -> float:
        decoder.lora.use(is_used)
        start = time.perf_counter()
        with torch.inference_mode():
            decoder.decode(tokens, positions)
        return time.perf_counter() - start

    for number in range(22):
        first, second = (seconds(is_used) for is_used in ((True, False) if number % 2 else (False, True)))
        ratios.append(first / second if number % 2 else second / first)
    return Figure("decode step of 64 slots, with an adapter / without", statistics.median(ratios[2:]), "times")


def many(model: Path) -> list[Figure]:
    """Decode steps of 16 slots over 1 to 8 adapters, and what it takes to have another one: loaded, or merged and installed."""
    import torch

    from asyncflow.engines.decoder_config import DecoderConfig
    from asyncflow.engines.lora import initial_lora, merged_lora
    from asyncflow.engines.lora_files import write_lora
    from asyncflow.engines.rollout.decoder import Decoder
    from asyncflow.engines.rollout.decoder_weights import load_tensors

    torch.set_num_threads(1)
    config = DecoderConfig.from_fields(json.loads((model / "config.json").read_text()))
    decoder = Decoder(config, num_slots=16, max_context=64, dtype=torch.float32, device=torch.device("cpu"))
    decoder.install(load_tensors(model))
    shapes: Mapping[str, Any] = {name: tuple(piece.shape) for name, piece in decoder.lora.new(SPEC).slices.items()}
    tensors = {name: t + 0.02 * torch.randn(t.shape) for name, t in initial_lora(shapes, SPEC, 0).items()}

    def load(number: int) -> None:
        adapter = decoder.lora.new(SPEC)
        adapter.copy(tensors)
        decoder.lora.put(number, adapter)

    def seconds(rows: int, num_adapters: int) -> float:
        decoder.adapters[:16] = 1 + np.arange(16) % num_adapters if num_adapters else 0
        start = time.process_time()
        with torch.inference_mode():
            decoder.decode(np.arange(rows), np.full(rows, 20))
        return time.process_time() - start

    loading = []
    for number in range(1, 9):
        start = time.process_time()
        load(number)
        loading.append(time.process_time() - start)
    write_lora(model.parent / "many", SPEC, model, {name: tensor.numpy() for name, tensor in tensors.items()})
    start = time.process_time()
    decoder.install(merged_lora(model, model.parent / "many"))
    merging = time.process_time() - start
    counts = (0, 1, 2, 4, 8)
    taken: dict[tuple[int, int], list[float]] = {}  # by rows and adapters
    for number in range(25):
        for count in counts if number % 2 else counts[::-1]:
            taken.setdefault((16, count), []).append(seconds(16, count))
            if count > 1:
                taken.setdefault((16 // count, 0), []).append(seconds(16 // count, 0))
    median = {kind: statistics.median(values[2:]) for kind, values in taken.items()}
    figures = [Figure("decode step of 16 slots, the base alone", 1e3 * median[16, 0], "ms")]
    for count in counts[1:]:
        figures.append(Figure(f"  adapters in it: {count} / the base alone", median[16, count] / median[16, 0], "times"))
        if count > 1:
            turns = count * median[16 // count, 0] / median[16, 0]
            figures.append(Figure(f"  merged, {count} steps of {16 // count} slots / one of 16", turns, "times"))
    figures.append(Figure("an adapter is loaded, others go on", 1e3 * statistics.median(loading), "ms"))
    figures.append(Figure("an adapter is merged and installed, in an idle engine", 1e3 * merging, "ms"))
    return figures


async def many_trained(model: Path, repeats: int) -> list[Figure]:
    """CPU time of training passes over rows of 2 to 8 adapters, together and one after another."""
    from asyncflow.engines.train.mixed_passes import ShareOfPass, forward_backward

    engines, whole = [trainer(model, SPEC) for _ in range(8)], micro_batch()
    half = Ragged.from_arrays(list(whole.response_ids)[: RESPONSES // 2], "int64")
    size, rows = len(half.values), slice(0, RESPONSES // 2)
    batch = replace(
        whole, indices=whole.indices[rows], response_ids=half, loss_mask=Ragged(np.ones(size, np.uint8), half.offsets),
        rollout_logprobs=Ragged(whole.rollout_logprobs.values[:size], half.offsets), advantages=whole.advantages[rows],
        staleness=whole.staleness[rows],
    )  # fmt: skip
    figures = []
    for count in (2, 4, 8):
        ratios = []
        for number in range(repeats + 1):
            start = time.process_time()
            await forward_backward([ShareOfPass(engine, batch, GRPO()) for engine in engines[:count]])
            middle = time.process_time()
            for engine in engines[:count]:
                await engine.forward_backward([batch], GRPO())
            if number:
                ratios.append((middle - start) / (time.process_time() - middle))
        figures.append(Figure(f"training: one pass of {count} adapters / a pass of each", statistics.median(ratios), "times"))
    for engine in engines:
        await engine.close()
    return figures


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--part", choices=["whole", "adapter"])
    arguments.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments.add_argument("--model", type=Path)
    arguments.add_argument("--only", choices=["many"])
    options = arguments.parse_args()
    if options.part is not None:
        print(json.dumps(asyncio.run(train(options.model, options.part, options.dtype, options.repeats))))
        return 0
    with tempfile.TemporaryDirectory(prefix="asyncflow-lora-", dir="/dev/shm") as scratch:
        model = Path(scratch) / "model"
        make_model(model)
        if options.only is not None:
            return finish([*many(model), *asyncio.run(many_trained(model, options.repeats))], options.json)
        figures, step_seconds = [], dict[str, float]()
        for dtype in ("bfloat16", "float32"):
            whole, adapter = (train_apart(model, kind, dtype, options.repeats) for kind in ("whole", "adapter"))
            step_seconds = {
                kind: GROUPS * each["group"] + each["update"] for kind, each in (("whole", whole), ("adapter", adapter))
            }
            target = "<= 0.45" if dtype == "bfloat16" else None
            figures += [
                Figure(f"resident memory of the trainer, {dtype}, whole", whole["bytes"] / 2**20, "MiB"),
                Figure("  adapter / whole", adapter["bytes"] / whole["bytes"], "", target),
                Figure(f"step of the trainer, {dtype}, whole: 8 groups and an update", step_seconds["whole"], "s"),
                Figure("  adapter / whole", step_seconds["adapter"] / step_seconds["whole"], "", "< 1"),
            ]
        figures += [*asyncio.run(sync(model, Path(scratch), step_seconds)), *many(model)]
        return finish(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
