"""A server of the Tinker API: its parts, wired, from a run's configuration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

from asyncflow.config import Config, parse
from asyncflow.engines.base import TrainEngine
from asyncflow.engines.rollout.decoder import load_tensors
from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.engines.train import TRAIN_ENGINES
from asyncflow.model_folder import read_json
from asyncflow.registry import build
from asyncflow.run.factories import train_engine_options
from asyncflow.service.tinker.checkpoint_store import CheckpointStore
from asyncflow.service.tinker.results import Results
from asyncflow.service.tinker.samplers import Samplers
from asyncflow.service.tinker.sessions import Bounds, Sessions
from asyncflow.service.tinker.trained_model import BaseModel, MakeEngine
from asyncflow.settings import apply_override
from asyncflow.types import UserError

KEY_PREFIX: Final = "tml-"
"""Of keys: the SDK takes no others."""
DEFAULT_CONTEXT: Final = 2048
KEPT_SNAPSHOTS: Final = 4
KEPT_BYTES: Final = 64 << 20
OPEN_RESULTS: Final = 20_000


def config_of_model(folder: str, overrides: Sequence[str]) -> Config:
    """Configuration for a model's folder alone. A run's data and reward are not used here, but every configuration has them.

    Raises `UserError`.
    """
    tree: dict[str, Any] = {
        "run": {"name": Path(folder).name},
        "model": {"path": folder},
        "data": {"path": "generated:arithmetic", "prompt_template": "{question}\n"},
        "reward": {"scorer": "final_answer"},
        "train": {"accumulate": "fp32"},
    }
    for override in overrides:
        apply_override(tree, override)
    return parse(tree)


def base_model(config: Config, name: str | None) -> BaseModel:
    """Base model of a server: that of the configuration, under a name of its own or by its path. Raises `UserError`."""
    folder = Path(config.model.path)
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


def engine_maker(config: Config) -> MakeEngine:
    """Maker of the models' train engines. Raises `UserError` for a layout over several processes."""
    if config.layout.size > 1:
        raise UserError("asyncflow serve --tinker trains each model in its own process, on one device: leave out plan.train")
    options = replace(
        train_engine_options(config),
        temperature=1.0,
        old="rollout",
        is_corrected=False,
        has_reference=False,
        check_shared_prompt=False,
    )

    def make(folder: Path | None) -> TrainEngine:
        path = Path(config.model.path) if folder is None else folder
        arguments: dict[str, Any] = {**config.train.engine.options, "model_path": path, "options": options}
        return cast(TrainEngine, build("train engine", config.train.engine.name, arguments, TRAIN_ENGINES))

    return make


@asynccontextmanager
async def sessions_of(
    config: Config, base: BaseModel, folder: Path, *, num_samplers: int, bounds: Bounds
) -> AsyncIterator[Sessions]:
    """Sessions over the model of a configuration, whose checkpoints lie in `folder`. Loads `num_samplers` rollout engines."""
    if config.rollout.engine.name != "slots":
        raise UserError("asyncflow serve --tinker samples by the embedded engine: set rollout.engine to slots")
    make_engine = engine_maker(config)

    def make_sampler() -> SlotEngine:
        return SlotEngine(
            base.folder,
            num_slots=config.rollout.num_slots,
            max_context=base.max_context,
            dtype=config.rollout.dtype,
            device=config.rollout.device,
            num_threads=config.rollout.num_threads,
        )

    try:
        engines = [await asyncio.to_thread(make_sampler) for _ in range(num_samplers)]
    except ValueError as error:
        raise UserError(f"the rollout engine cannot generate with the model {base.folder}: {error}") from error
    sessions = Sessions(
        base,
        make_engine,
        store=CheckpointStore(folder, KEPT_SNAPSHOTS),
        samplers=Samplers(engines, base.folder, load_tensors, bounds.queue),
        results=Results(kept_bytes=KEPT_BYTES, largest_number=OPEN_RESULTS),
        bounds=bounds,
    )
    try:
        yield sessions
    finally:
        await sessions.close()
