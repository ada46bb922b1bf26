"""Checks of what DeepSpeed and Megatron-Core cannot do, as train/checks.py has them for the engine in plain PyTorch. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Final

from asyncflow.engines.base import TrainEngineOptions
from asyncflow.engines.families import check_family
from asyncflow.types import UserError

ZERO_STAGES: Final = (1, 2, 3)


def check_deepspeed(
    options: TrainEngineOptions, fields: Mapping[str, Any], *, stage: int = 2, zero: Mapping[str, Any] | None = None
) -> None:
    """Check that `DeepSpeedEngine` can train this model (`fields`: its config.json) with these options.

    `stage`: ZeRO's. `zero` is taken, as the engine takes it, but not checked. Raises `UserError`, also if DeepSpeed is not
    installed.
    """
    _check_trains_whole(options, "deepspeed")
    if stage not in ZERO_STAGES:
        raise UserError(f"train.engine.stage is one of {', '.join(map(str, ZERO_STAGES))}, those of ZeRO, but is {stage!r}.")
    if options.layout.tp > 1 or options.layout.pp > 1:
        raise UserError("The deepspeed engine is data parallel only: set plan.train.tp and pp to 1, or train.engine to torch.")
    if options.accumulate != "fp32":
        raise UserError("The deepspeed engine adds gradients in an order of its own: set train.accumulate to fp32.")
    if stage == 1 and options.dtype == "bfloat16":
        raise UserError(
            "DeepSpeed cannot skip a step in bfloat16 with stage 1: set train.engine.stage to 2, which takes less memory."
        )
    _check_installed("deepspeed", "deepspeed")
    check_family(fields)


def _check_trains_whole(options: TrainEngineOptions, engine: str) -> None:
    if options.lora is not None:
        raise UserError(f"The {engine} engine trains no low-rank adapters: leave out model.lora, or set train.engine to torch.")


def check_megatron(options: TrainEngineOptions, fields: Mapping[str, Any]) -> None:
    """Check that `MegatronEngine` can train this model (`fields`: its config.json) with these options.

    Raises `UserError`, also if Megatron-Core is not installed.
    """
    _check_trains_whole(options, "megatron")
    if options.accumulate != "fp32":
        raise UserError("The megatron engine adds gradients as they come: set train.accumulate to fp32.")
    if options.no_weight_decay is not None:
        raise UserError("The megatron engine has names of its own for parameters: leave out train.no_weight_decay.")
    if options.offload_optimizer:
        raise UserError("The megatron engine keeps the optimiser on the device: set train.offload_optimizer to false.")
    if options.offload:
        raise UserError("The megatron engine keeps old policy and reference on the device: set train.offload to false.")
    _check_installed("megatron", "megatron.core")
    check_family(fields)
    if fields.get("attention_bias") or fields.get("mlp_bias"):
        raise UserError("The megatron engine has no biases on output and MLP projections, which this model has: choose another.")
    for what, number, name, parts in (
        ("layers", fields["num_hidden_layers"], "pp", options.layout.pp),
        ("key heads", fields.get("num_key_value_heads") or fields["num_attention_heads"], "tp", options.layout.tp),
        ("elements of the MLP", fields["intermediate_size"], "tp", options.layout.tp),
    ):
        if number % parts:
            raise UserError(f"plan.train.{name}={parts} does not divide the model's {number} {what}: take one that does.")


def _check_installed(engine: str, package: str) -> None:
    outermost = package.partition(".")[0]
    if importlib.util.find_spec(outermost) is None or importlib.util.find_spec(package) is None:
        raise UserError(f"train.engine is {engine}, which is not installed: pip install 'asyncflow-rl[{engine}]'.")
