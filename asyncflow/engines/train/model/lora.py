"""Low-rank adapters in transformers' modules: y = x W^T + (alpha / rank) (x A^T) B^T, to the last digit as PEFT computes it.

    linear layer --forward--> x W^T --hook--> + scaling (x A^T) B^T          A, B: `lora_A`, `lora_B`, children of the layer

A layer keeps its place and its weight's name, so all that reads a model by names stays as it is; what is trained is another set of
named parameters. With the adapter switched off the model is its base, which is the reference of a KL term; with an older adapter's
values it is an old policy. Both share the base's memory.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN  # by which PEFT names layers, too

from asyncflow.engines.lora_files import linear_of, lora_shapes
from asyncflow.engines.train.model.packing import INERT_TOKENS
from asyncflow.types import LoraSpec, UserError

_MAY_BE_READ: Final = ("dt_proj", "x_proj", "out_proj")
"""Layers of Mamba's kind, by the ends of their names, whose weight the mixer's code may multiply with by itself, on some devices
only: an adapter would have no effect."""
_OF_EXPERTS: Final = ("gate_proj", "up_proj", "down_proj")
"""Names of linear layers that PEFT (0.21) takes for experts, where transformers fuses these as it does Qwen2-MoE's."""


@dataclass(frozen=True, slots=True, eq=False)
class RowsOfAdapter:
    """Place of packed rows in a pass, and the adapter that computes them: its matrices by name, in the
    dtype of the pass."""

    place: slice
    weights: Mapping[str, Tensor]
    scaling: float


class LoraSwitch:
    """Whether a model computes with its adapter, or, with `rows`, with those of others."""

    is_on = True
    rows: Sequence[RowsOfAdapter] = ()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context inside which the model is its base."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True

    @contextmanager
    def mixed(self, rows: Sequence[RowsOfAdapter]) -> Iterator[None]:
        """Context inside which a pass, forward and backward, has rows of these adapters, which are all of its rows."""
        self.rows = rows
        try:
            yield
        finally:
            self.rows = ()


def shapes_for(module: Any, spec: LoraSpec) -> dict[str, tuple[int, int]]:
    """Shapes of an adapter's tensors for transformers' causal language model, by name.

    Raises `UserError` for a target that the model does not have, or that an adapter would have no effect on.
    """
    head = module.get_output_embeddings()
    linears = {name: each for name, each in module.named_modules() if isinstance(each, nn.Linear) and each is not head}
    for name, why in [(name, why) for name in linears if (why := _why_none(module, name))]:
        del linears[name]
        if spec.targets and spec.has_target(name):
            raise UserError(f"model.lora.targets: {name} gets no adapter: {why}; take the others")
    return lora_shapes({name: (each.out_features, each.in_features) for name, each in linears.items()}, spec)


def _why_none(module: Any, name: str) -> str:
    """Reason for which a linear layer gets no adapter; empty for one that gets it."""
    parent, _, child = name.rpartition(".")
    if child in _MAY_BE_READ and f"self.{child}.weight" in _source(type(module.get_submodule(parent))):
        return "a Mamba layer multiplies with its weight by itself, so that it would have no effect"
    if child in _OF_EXPERTS and _MODEL_TO_CONVERSION_PATTERN.get(module.config.model_type) == "qwen2_moe":
        return "in PEFT's files its name would stand for the experts, which are one tensor"
    return ""


def _source(layer: type) -> str:
    try:
        return inspect.getsource(layer)
    except (OSError, TypeError):  # of a program without its source
        return ""


def add_lora(module: Any, shapes: Mapping[str, Any], spec: LoraSpec, place: Callable[[Any], None] | None = None) -> LoraSwitch:
    """Add an adapter to transformers' causal language model, or to a stage of it, in place, without values; freeze all else.

    `shapes`: of the whole adapter. `place` shards the matrices of a layer that is sharded itself.
    """
    module.requires_grad_(False)
    switch, targets = LoraSwitch(), {linear_of(name) for name in shapes}
    for name, linear in [each for each in module.named_modules() if each[0] in targets]:
        for part, inputs, outputs in (("lora_A", linear.in_features, spec.rank), ("lora_B", spec.rank, linear.out_features)):
            with torch.device("meta"):  # so that no random number is drawn
                made = nn.Linear(inputs, outputs, bias=False)
            made.weight = nn.Parameter(torch.empty(made.weight.shape, device=linear.weight.device))
            linear.add_module(part, made)
        if place is not None:
            place(linear)
        # Before other hooks, of tensor parallelism, take the layer's output.
        linear.register_forward_hook(_hook(switch, name, spec.scaling), prepend=True)
    return switch


def _hook(switch: LoraSwitch, name: str, scaling: float) -> Callable[[Any, Any, Tensor], Tensor]:
    def with_adapter(linear: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if switch.rows:
            return _mixed(linear, name, inputs[0], output, switch.rows)
        added: Tensor = output + linear.lora_B(linear.lora_A(inputs[0])) * scaling if switch.is_on else output
        return added

    return with_adapter


def _mixed(linear: Any, name: str, x_1PI: Tensor, output_1PO: Tensor, rows: Sequence[RowsOfAdapter]) -> Tensor:
    """Output of packed rows, each part of them with an adapter of its own, or none in this layer. A part's bits are those that it
    has alone: no product is of fewer rows than a micro-batch alone would be filled up to."""
    parts = []
    for one in rows:
        place = one.place
        own_1RO, a, b = output_1PO[:, place], *(one.weights.get(f"{name}.{part}.weight") for part in ("lora_A", "lora_B"))
        if a is not None and b is not None:
            num_rows, x_1RI = own_1RO.shape[1], x_1PI[:, place]
            if num_rows < INERT_TOKENS:
                x_1RI = nn.functional.pad(x_1RI, (0, 0, 0, INERT_TOKENS - num_rows))
            inner = functional_call(linear.lora_A, {"weight": a}, x_1RI)
            own_1RO = own_1RO + functional_call(linear.lora_B, {"weight": b}, inner)[:, :num_rows] * one.scaling
        parts.append(own_1RO)
    return torch.cat(parts, 1)


class SharedBase(ABC):
    """Policy's base with another adapter than the policy's: none, or a copy of its own. It needs no second model."""

    def __init__(self, parts: Mapping[str, Tensor], switch: LoraSwitch, *, has_adapter: bool) -> None:
        """`parts`: memory of the policy's adapter, or of this process's part of it, by name. `has_adapter`: keep a copy of it."""
        self._parts, self._switch = parts, switch
        self.parameters: Mapping[str, Tensor] = {}
        if has_adapter:
            self.parameters = {name: part.detach().clone() for name, part in parts.items()}

    def within(self) -> AbstractContextManager[None]:
        """Context inside which the policy computes as this model. No pass of the policy may be between forward and backward."""
        return self._with_adapter() if self.parameters else self._switch.off()

    @abstractmethod
    def _with_adapter(self) -> AbstractContextManager[None]:
        """Context inside which the policy computes with the adapter of `parameters`. Where versions are read from the memory of
        its own beside passes, nothing is written there."""

    @torch.no_grad()
    def move_from(self, policy: object) -> None:
        """Copy the policy's present adapter."""
        for name, own in self.parameters.items():
            own.copy_(self._parts[name].detach())
