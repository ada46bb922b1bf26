"""Options of the engines in a worker's own process, below `rollout.engine`, checked before a run starts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from asyncflow.devices import CPU, kind_of
from asyncflow.engines.base import RolloutEngineOptions
from asyncflow.types import LoraSpec, UserError

Speculation = Literal["auto"] | int
"""Drafts of a slot in each step: as many as pay, or so many at most wherever there are any; 0: none."""
PREFILL_CHUNK = 256
"""Tokens of prompts and observations that a step computes on a CPU: enough for full speed, few enough to stay in its cache."""
PREFILL_CHUNK_OF_DEVICES = 4096
"""The same on an accelerator, where a step that is not recorded (step_graphs.py) takes as long for many tokens as for few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRoom:
    """Room of an engine for low-rank adapters beside what is installed: how many at once, and their largest rank."""

    number: int
    rank: int


NO_ROOM: Final = AdapterRoom(number=0, rank=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOptions(RolloutEngineOptions):
    """Options of `SlotEngine`.

    `num_parked`: slots of the cache beyond `num_slots`. `lora`: versions are low-rank adapters over the model; `version` has the
    one in `lora.path`, if there is one. `speculation`: whether few slots have draft tokens verified (drafts.py). `prefill_chunk`:
    tokens of prompts and observations that a step computes beside the slots' own, some; None: as many as the device is fast with.
    No bit depends on either. `adapter_room`: for adapters that are loaded beside what is installed.
    """

    lora: LoraSpec | None = None
    speculation: Speculation = 0
    prefill_chunk: int | None = None
    adapter_room: AdapterRoom = NO_ROOM

    @property
    def tokens_of_prompts(self) -> int:
        """Tokens of prompts and observations that a step computes: `prefill_chunk`, or what the device is fast with."""
        return self.prefill_chunk or (PREFILL_CHUNK if kind_of(self.device) == CPU else PREFILL_CHUNK_OF_DEVICES)


def check(
    *,
    speculation: object = 0,
    prefill_chunk: object = None,
    adapter_room: object = NO_ROOM,
    **_others: object,
) -> None:
    """Raises `UserError` for a value that means nothing."""
    if not isinstance(adapter_room, AdapterRoom):
        raise UserError("rollout.engine.adapter_room is for servers, which have adapters of several clients: leave it out")
    if speculation != "auto" and (not isinstance(speculation, int) or isinstance(speculation, bool) or speculation < 0):
        raise UserError(f"rollout.engine.speculation is {speculation!r}: take auto, or a number of draft tokens; 0 is none")
    if prefill_chunk is not None and (not isinstance(prefill_chunk, int) or isinstance(prefill_chunk, bool) or prefill_chunk < 1):
        raise UserError(f"rollout.engine.prefill_chunk is {prefill_chunk!r}: take a number of tokens, such as {PREFILL_CHUNK}")


def check_transformers(*, has_lora: bool = False, **_others: object) -> None:
    """Raises `UserError` for a low-rank adapter, which `TransformersEngine` does not apply."""
    if has_lora:
        raise UserError(
            "rollout.engine=transformers applies no low-rank adapters: take slots or vllm, or leave out model.lora (`asyncflow "
            "merge` makes a whole model of an adapter)"
        )
