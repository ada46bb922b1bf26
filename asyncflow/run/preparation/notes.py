"""Sentences about a configuration that works: what was chosen automatically, and what does not do what it is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncflow.config import Config
from asyncflow.devices import CPU, kind_of
from asyncflow.engines.families import why_alone, why_not_packed
from asyncflow.run.factories import PASS_ENGINES, tokens_per_pass
from asyncflow.run.helper_devices import ON_ONE_MACHINE, num_passing


def pass_note(config: Config, fields: Mapping[str, Any]) -> str:
    """Sentence about the tokens of a pass, where they were chosen automatically, or count for nothing; "" elsewhere."""
    tokens = tokens_per_pass(config, fields)
    is_known = config.train.engine.name in PASS_ENGINES and "model_type" in fields
    if tokens is not None and is_known:
        is_exact = config.train.accumulate == "exact"
        if why := why_alone(fields) or (why_not_packed(fields) if is_exact else ""):
            return f"training passes have one micro-batch each, whatever train.tokens_per_micro_batch says: {why}"
    if config.train.tokens_per_micro_batch != "auto" or tokens is None:
        return ""
    width = f"{fields['hidden_size']} hidden elements on {config.train.device}"
    where = "threads on idle cores (train.helpers)" if kind_of(config.train.device) == CPU else "helpers on idle devices of rollout"
    helped = f", some of them by {num_passing(config)} more {where}" if num_passing(config) else ""
    return f"training passes take up to {tokens:,} packed tokens (train.tokens_per_micro_batch=auto, {width}){helped}"


def advice(config: Config) -> Iterator[str]:
    """Warnings about a configuration that works and does not do what it is for."""
    if config.schedule.name == "sub_step" and config.rollout.num_workers == 1:
        yield (
            "schedule=sub_step lets rollout workers change their weights in turn, and there is one: nothing is generated while it "
            "changes; set rollout.num_workers=2 or more"
        )
    is_wide = config.weight_sync.dtype is None and config.lora is None
    if config.weight_sync.name == "network" and config.rollout.dtype == "bfloat16" and is_wide:
        yield (
            "weights go over the network whole, in float32, and the rollout engine rounds them to bfloat16: with "
            "weight_sync.dtype=bfloat16 most of a version goes as differences, and the engine has the same bits"
        )
    judge = config.reward.model
    threads: dict[str, tuple[int | str, str, bool]] = {
        "rollout.num_threads": (config.rollout.num_threads, config.rollout.device, False),
        "train.num_threads": (config.train.num_threads, config.train.device, True),
        "reward.model.num_threads": (judge.num_threads, judge.device, True) if judge is not None else (1, CPU, True),
    }
    for key, (number, device, has_bits) in threads.items():
        if number == "auto" and config.cluster.name not in ON_ONE_MACHINE:
            yield f"{key}=auto deals out the cores of one machine, and cluster is {config.cluster.name}: it is 1; set a number"
        elif number == "auto" and kind_of(device) != CPU:
            yield f"{key}=auto deals out cores, and its engines compute on {device}: it is 1"
        elif number == "auto" and has_bits and config.train.accumulate == "exact":
            yield f"{key}=auto changes bits, which train.accumulate=exact promises: it is 1; set a number, or accumulate=fp32"
