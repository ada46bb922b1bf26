"""A server of the Tinker API: its parts, wired, from a run's configuration."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import safe_open
from torch import Tensor

from asyncflow.bit_sums import sum_of
from asyncflow.config import MOST_CHARACTERS, Config, parse
from asyncflow.devices import devices_of
from asyncflow.engines.base import TrainEngine
from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.engines.lora import read_lora
from asyncflow.engines.lora_files import holds_adapter, spec_in
from asyncflow.engines.rollout.decoder_weights import load_tensors
from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.engines.rollout.slot_options import AdapterRoom
from asyncflow.engines.train import TRAIN_ENGINES
from asyncflow.model_folder import read_json, weight_files
from asyncflow.registry import build
from asyncflow.run.factories import train_engine_options
from asyncflow.service.tinker.checkpoint_store import CheckpointStore
from asyncflow.service.tinker.context import BaseModel, Bounds, MakeEngine, ServerContext
from asyncflow.service.tinker.messages import LoraConfig
from asyncflow.service.tinker.results import Results
from asyncflow.service.tinker.samplers import ReadWeights, Samplers
from asyncflow.service.tinker.sessions import Sessions
from asyncflow.service.tinker.training_passes import passes_of
from asyncflow.settings import apply_override
from asyncflow.types import LoraSpec, UserError

KEY_PREFIX: Final = "tml-"
"""Beginning of keys: the SDK takes no others."""
DEFAULT_CONTEXT: Final = 2048
ALPHA: Final = 32.0
"""Alpha of every adapter: clients choose learning rates by it."""
KEPT_SNAPSHOTS: Final = 4
KEPT_BYTES: Final = 64 << 20
OPEN_RESULTS: Final = 20_000


def config_of_model(folder: str, overrides: Sequence[str]) -> Config:
    """Configuration for a model's folder alone. A run's data and reward are not used here, but every configuration has them.

    Raises `UserError`.
    """
    tree: dict[str, Any] = {
        "run": {"name": re.sub(r"[^\w.-]|^[.-]", "_", os.path.basename(os.path.abspath(folder)))[:MOST_CHARACTERS] or "model"},
        "model": {"path": folder},
        "data": {"path": "generated:arithmetic", "prompt_template": "{question}\n"},
        "reward": {"scorer": "final_answer"},
        "train": {"accumulate": "fp32"},
    }
    for override in overrides:
        apply_override(tree, override)
    return parse(tree)


def base_model(config: Config, folder: Path, name: str | None) -> BaseModel:
    """Base model of a server: that of the configuration, whose folder this is, under a name of its own or by its path. Raises
    `UserError`."""
    fields = read_json(folder / "config.json")
    if not fields:
        raise UserError(f"there is no model in Hugging Face format at {folder}")
    positions = int(fields.get("max_position_embeddings", DEFAULT_CONTEXT))
    return BaseModel(
        name=name or config.model.path.rstrip("/"),
        folder=folder,
        vocab_size=int(fields["vocab_size"]),
        max_context=min(config.model.max_context_tokens or DEFAULT_CONTEXT, positions),
    )


def engine_maker(config: Config, base: BaseModel) -> MakeEngine:
    """Maker of the models' train engines. Raises `UserError` for a layout over several processes."""
    if config.layout.size > 1:
        raise UserError("asyncflow serve --tinker trains every model in the server's process, on one device: leave out plan.train")
    options = replace(
        train_engine_options(config, read_json(base.folder / "config.json")),
        temperature=1.0,
        old="rollout",
        is_corrected=False,
        has_reference=False,
        check_shared_prompt=False,
    )

    def make(folder: Path | None, adapter: LoraConfig | None) -> TrainEngine:
        path, own = folder or base.folder, options
        if folder is not None and holds_adapter(folder):
            path, own = base.folder, replace(options, lora=replace(spec_in(folder), path=str(folder)))
        elif folder is None and adapter is not None:
            lora = LoraSpec(adapter.rank, ALPHA, targets_of(base.folder, adapter))
            own = replace(options, lora=lora, seed=options.seed if adapter.seed is None else adapter.seed)
        arguments: dict[str, Any] = {**config.train.engine.options, "model_path": path, "options": own}
        return cast(TrainEngine, build("train engine", config.train.engine.name, arguments, TRAIN_ENGINES))

    return make


def targets_of(base: Path, adapter: LoraConfig) -> tuple[str, ...]:
    """Linear layers of a model that get an adapter, by the last parts of their names; `()`: all but the output layer."""
    if adapter.train_attn and adapter.train_mlp:
        return ()
    targets = set()
    for file in weight_files(base):
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118
                linear, _, kind = name.rpartition(".")
                is_linear = kind == "weight" and ".layers." in name and len(opened.get_slice(name).get_shape()) == 2
                if is_linear and ("attn" in linear or "attention" in linear) == adapter.train_attn:
                    targets.add(linear.rpartition(".")[2])
    if not targets:
        raise UserError(
            "lora_config asks for an adapter of layers that the model does not have: leave train_attn and train_mlp out"
        )
    return tuple(sorted(targets))


def read_weights(folder: Path, dtype: str = "float32") -> ReadWeights:
    """Weights in a checkpoint's folder, of an adapter or of a whole model, for engines of this dtype. Raises `OSError` if they are
    gone."""
    if holds_adapter(folder):
        lora = spec_in(folder)
        tensors = read_lora(folder, lora)
        return ReadWeights(tensors, lora, sums_of(tensors, dtype))
    tensors = load_tensors(folder)
    is_tied = DecoderConfig.from_fields(read_json(folder / "config.json")).tie_word_embeddings
    own = {name: tensor for name, tensor in tensors.items() if not is_tied or name != "lm_head.weight"}
    return ReadWeights(tensors, None, sums_of(own, dtype))


def sums_of(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, int]:
    """Sum of each tensor's bits, as engines of this dtype have it."""
    return {name: sum_of(name, tensor.to(getattr(torch, dtype))) for name, tensor in tensors.items()}


@asynccontextmanager
async def sessions_of(
    config: Config, base: BaseModel, folder: Path, *, num_samplers: int, bounds: Bounds, trains_whole_weights: bool
) -> AsyncIterator[Sessions]:
    """Sessions over the model of a configuration, whose checkpoints lie in `folder`. Loads `num_samplers` rollout engines.

    Each of them has room for several adapters over the base, which it generates with at once, or has one whole model.
    """
    if config.rollout.engine.name != "slots":
        raise UserError("asyncflow serve --tinker samples by the embedded engine: set rollout.engine to slots")
    make_engine = engine_maker(config, base)

    def make_sampler() -> SlotEngine:
        return SlotEngine(
            base.folder,
            num_slots=config.rollout.num_slots,
            max_context=base.max_context,
            dtype=config.rollout.dtype,
            device=devices_of(config.rollout.device)[0],
            num_threads=config.rollout.least_threads,
            adapter_room=AdapterRoom(number=bounds.adapters, rank=bounds.rank),
        )

    try:
        engines = [await asyncio.to_thread(make_sampler) for _ in range(num_samplers)]
    except ValueError as error:
        raise UserError(f"the rollout engine cannot generate with the model {base.folder}: {error}") from error
    context = ServerContext(
        base=base,
        make_engine=make_engine,
        store=CheckpointStore(folder, KEPT_SNAPSHOTS),
        results=Results(kept_bytes=KEPT_BYTES, largest_number=OPEN_RESULTS),
        passes=passes_of(config, bounds.micro_batch_tokens),
        bounds=bounds,
    )
    read = partial(read_weights, dtype=config.rollout.dtype)
    samplers = Samplers(engines, base.folder, read, largest_queue=bounds.queue, num_adapters=bounds.adapters)
    sessions = Sessions(context, samplers, trains_whole_weights=trains_whole_weights)
    try:
        yield sessions
    finally:
        await sessions.close()
