"""Checks of what a train engine cannot do. They run before a run starts, and again when the engine is built. No torch.

    check(options of every train engine, the model's config.json, the engine's own options) -> UserError, or nothing

An engine without a check here refuses a run when the engine is built, in its worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncflow.engines.base import TrainEngineOptions
from asyncflow.engines.families import check_family, check_layout, check_weights_kind
from asyncflow.model_folder import read_json
from asyncflow.types import UserError


def model_fields(model_path: Path | str) -> Mapping[str, Any]:
    """Fields of the `config.json` in the folder `model_path`. Raises `UserError` if there is none."""
    fields = read_json(Path(model_path) / "config.json")
    if not fields:
        raise UserError(f"There is no model in Hugging Face format at {model_path}: it has no config.json.")
    return fields


def check_outside(options: TrainEngineOptions, fields: Mapping[str, Any]) -> None:
    """Check that a process from outside can train with these options. Raises `UserError`."""
    check_family(fields)
    if options.layout.size > 1:
        raise UserError(
            f"train.engine=outside has no devices of its own to shard a model over: leave out plan.train, which asks for "
            f"{options.layout.size}; trainers outside share the groups of a step as they like"
        )
    if options.has_reference or options.old not in ("current", "rollout"):
        raise UserError(
            "train.engine=outside computes no reference and no old policy: set train.old=current or rollout, and leave out KL "
            "terms, or compute the reference by a worker of its own (train.reference=task)"
        )


def check_torch(options: TrainEngineOptions, fields: Mapping[str, Any]) -> None:
    """Check that `TorchEngine` can train this model (`fields`: its config.json) with these options. Raises `UserError`."""
    check_weights_kind(fields)
    if options.layout.size > 1:
        check_family(fields)
        check_layout(fields, options.layout)
