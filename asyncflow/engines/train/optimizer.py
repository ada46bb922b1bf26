"""AdamW with a learning-rate schedule and a clip: from a step's gradients to the next weights.

    gradients, their norm (accumulate.py) -> clip -> AdamW at this update's learning rate -> parameters, in place

The number of updates is part of the state, as the moments are: the learning rate depends on it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, compress
from operator import not_
from typing import Any, Final

import torch
from torch import Tensor, nn

from asyncflow.devices import CPU
from asyncflow.engines.base import Hyperparameters, OptimResult, TrainEngineOptions
from asyncflow.engines.cuts import cut_by_size
from asyncflow.engines.train.pieces import AT_ONCE, Pieces

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
PIECE_ELEMENTS: Final = 2**26
"""Parameters whose state is on the device at the same time, if it is kept in host memory: half a GiB of state."""
CACHED_ELEMENTS: Final = 2**18
"""Elements that a CPU updates at once: AdamW's ten operations go over them and their state, 4 MiB, while these are in its cache."""


class Optimizer:
    """AdamW over named parameters, which updates them from the gradients in their `.grad`."""

    pieces: Pieces = AT_ONCE
    """Pieces by which a CPU clips and updates."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], options: TrainEngineOptions) -> None:
        """`parameters`: float32, tied ones once."""
        self.num_updates = 0
        self._host: dict[tuple[nn.Parameter, str], Tensor] = {}  # offloaded state
        self._parameters = parameters
        self._options = options
        self._max_grad_norm = math.inf if options.max_grad_norm is None else options.max_grad_norm
        self._is_on_cpu = all(p.device.type == CPU for p in parameters.values())
        self._offloads = options.offload_optimizer and not self._is_on_cpu
        decays = [has_weight_decay(name, p, options.no_weight_decay) for name, p in parameters.items()]
        self.adamw = torch.optim.AdamW(
            [
                {"params": list(compress(parameters.values(), decays)), "weight_decay": options.weight_decay},
                {"params": list(compress(parameters.values(), map(not_, decays))), "weight_decay": 0.0},
            ],
            lr=options.learning_rate,
            betas=options.betas,
            eps=options.epsilon,
            foreach=True,
        )

    def set_hyperparameters(self, chosen: Hyperparameters) -> None:
        """Use these in all updates from now on. Which parameters have weight decay stays as it is."""
        self._options = replace(
            self._options, learning_rate=chosen.learning_rate, learning_rate_schedule="constant", warmup_steps=0
        )
        self._max_grad_norm = math.inf if chosen.max_grad_norm is None else chosen.max_grad_norm
        decaying, others = self.adamw.param_groups
        decaying["weight_decay"] = chosen.weight_decay
        for group in (decaying, others):
            group["betas"], group["eps"] = chosen.betas, chosen.epsilon

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return learning_rate_at(self.num_updates, self._options)

    def update(self, gradients: list[Tensor], grad_norm: float) -> OptimResult:
        """Clip `gradients`, which the parameters' `.grad` holds and whose norm is `grad_norm`, and update the parameters.

        Skips the update, and changes nothing, if there are no gradients or their norm is not finite.
        """
        learning_rate = self.learning_rate
        if not gradients or not math.isfinite(grad_norm):
            return OptimResult(grad_norm=grad_norm, learning_rate=learning_rate, skipped=True)
        clip = min(1.0, self._max_grad_norm / grad_norm) if grad_norm else 1.0
        if clip < 1 and (self._offloads or not self._is_on_cpu):
            torch._foreach_mul_(gradients, clip)
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        if self._offloads:
            self._step_by_piece()
        elif self._is_on_cpu:
            self._step_in_cache(clip)
        else:
            self.adamw.step()
        # Copies of weights know by it that they are behind (model/cast_weights.py), and not every kernel of every device counts.
        torch.autograd.graph.increment_version(list(self._parameters.values()))
        self.num_updates += 1
        return OptimResult(grad_norm=grad_norm, learning_rate=learning_rate)

    def make_states(self, num_updates: int) -> None:
        """Set the state to that after `num_updates` updates, with zeros for moments; the caller fills them in through `states`."""
        self.num_updates = num_updates
        self.adamw.state.clear()
        for parameter in self._parameters.values() if num_updates else ():
            self.adamw.state[parameter] = _state(parameter, num_updates, CPU if self._offloads else parameter.device)

    def _step_in_cache(self, clip: float) -> None:
        """Clip and AdamW's step over pieces that fit the cache, of large parameters and of several small ones. The bits are the
        same."""
        state = self.adamw.state
        for group in self.adamw.param_groups:
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in updated:
                if not state[parameter]:
                    state[parameter] = _state(parameter, 0, parameter.device)
            pieces = chain.from_iterable(_ParameterPiece(p, p.grad, **state[p]).cut() for p in updated)
            for together in cut_by_size(pieces, lambda piece: piece.parameter.numel(), CACHED_ELEMENTS):
                self.pieces.add(partial(_update, together, group, clip))
            self.pieces.end()
            for parameter in updated:
                state[parameter]["step"] += 1

    def _step_by_piece(self) -> None:
        """Update some parameters at a time, with their state brought from host memory and back. The bits are the same."""
        gradients = {p: p.grad for p in self._parameters.values() if p.grad is not None}
        for parameter in gradients:
            parameter.grad = None  # AdamW updates what has a gradient
        for piece in cut_by_size(list(gradients), Tensor.numel, PIECE_ELEMENTS):
            for parameter in piece:
                parameter.grad = gradients.pop(parameter)
                for kind, state in self.adamw.state[parameter].items():
                    if kind in MOMENTS:
                        self.adamw.state[parameter][kind] = state.to(parameter.device, non_blocking=True)
            self.adamw.step()
            for parameter in piece:
                parameter.grad = None
                self.adamw.state[parameter] |= {kind: self._host_copy(parameter, kind) for kind in MOMENTS}

    def _host_copy(self, parameter: nn.Parameter, kind: str) -> Tensor:
        state: Tensor = self.adamw.state[parameter][kind]
        if (parameter, kind) not in self._host:
            self._host[parameter, kind] = torch.empty_like(state, device="cpu", pin_memory=not state.is_cpu)
        return self._host[parameter, kind].copy_(state)

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Triples (parameter's name, kind of state, tensor) for every parameter that was ever updated."""
        for name, parameter in self._parameters.items():
            for kind, state in self.adamw.state[parameter].items():
                yield name, kind, state


def learning_rate_at(update: int, options: TrainEngineOptions) -> float:
    """Learning rate of an update, the first of which is 0.

    It rises to `learning_rate` in the last update of the warm-up, and falls from there, to `min_learning_rate` when `num_updates`
    are made: linearly, or by the half of a cosine (arXiv:1608.03983, eq. 5, without restarts).
    """
    if update < options.warmup_steps or options.learning_rate_schedule == "constant":
        return options.learning_rate * min(1.0, (update + 1) / max(1, options.warmup_steps))
    done = min(1.0, (update - options.warmup_steps) / max(1, options.num_updates - options.warmup_steps))
    left = 1 - done if options.learning_rate_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return options.min_learning_rate + (options.learning_rate - options.min_learning_rate) * left


def has_weight_decay(name: str, parameter: Tensor, exceptions: Sequence[str] | None) -> bool:
    """Whether weight decay applies to a parameter. `exceptions`: `TrainEngineOptions.no_weight_decay`."""
    if exceptions is None:
        return parameter.ndim > 1
    return not any(re.search(pattern, name) for pattern in exceptions)


def _state(parameter: nn.Parameter, num_updates: int, device: torch.device | str) -> dict[str, Tensor]:
    """State of a parameter after so many updates, with zeros for moments."""
    moments = {kind: torch.zeros_like(parameter, device=device) for kind in MOMENTS}
    return {"step": torch.tensor(float(num_updates)), **moments}


@dataclass(frozen=True, slots=True)
class _ParameterPiece:
    """A parameter, or some of its elements, with what AdamW reads and writes. `step`: number of the updates before."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor

    def cut(self) -> list[_ParameterPiece]:
        """Pieces of at most `CACHED_ELEMENTS`, views; itself, if a tensor is not contiguous."""
        tensors = (self.parameter, self.gradient, self.exp_avg, self.exp_avg_sq)
        if self.parameter.numel() <= CACHED_ELEMENTS or not all(tensor.is_contiguous() for tensor in tensors):
            return [self]
        flat = [torch.split(tensor.detach().view(-1), CACHED_ELEMENTS) for tensor in tensors]
        return [_ParameterPiece(p, g, first, second, self.step) for p, g, first, second in zip(*flat, strict=True)]


@torch.no_grad()
def _update(together: Sequence[_ParameterPiece], group: Mapping[str, Any], clip: float) -> None:
    """Clip and AdamW's step over some pieces."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    for piece in together:  # as torch's AdamW computes it, to the bit, in fewer calls
        step, gradient, second = piece.step.item() + 1, piece.gradient, piece.exp_avg_sq
        if clip < 1:
            gradient.mul_(clip)
        if group["weight_decay"]:
            piece.parameter.mul_(1 - lr * group["weight_decay"])
        piece.exp_avg.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = second.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        piece.parameter.addcdiv_(piece.exp_avg, root, value=-lr / (1 - beta1**step))
