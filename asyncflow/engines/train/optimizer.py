"""AdamW with warm-up and clip: from a step's gradients to the next weights.

    gradients, their norm (accumulate.py) -> clip -> AdamW at this update's learning rate -> parameters, in place

The number of updates is part of the state, as the moments are: the warm-up depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from asyncflow.engines.base import OptimResult, TrainEngineOptions

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
PIECE_ELEMENTS: Final = 2**26
"""Parameters whose state is on the device at the same time, if it is kept in host memory: half a GiB of state."""


class Optimizer:
    """AdamW over named parameters, which updates them from the gradients in their `.grad`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], options: TrainEngineOptions) -> None:
        """`parameters`: float32, tied ones once."""
        self.num_updates = 0
        self._host: dict[tuple[nn.Parameter, str], Tensor] = {}  # offloaded state
        self._parameters = parameters
        self._learning_rate, self._warmup_steps = options.learning_rate, options.warmup_steps
        self._max_grad_norm = options.max_grad_norm
        self._offloads = options.offload_optimizer and any(p.device.type != "cpu" for p in parameters.values())
        self.adamw = torch.optim.AdamW(
            [
                {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": options.weight_decay},
                {"params": [p for p in parameters.values() if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=options.learning_rate,
            betas=options.betas,
            foreach=True,
        )

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return self._learning_rate * min(1.0, (self.num_updates + 1) / max(1, self._warmup_steps))

    def update(self, gradients: list[Tensor], grad_norm: float) -> OptimResult:
        """Clip `gradients`, which the parameters' `.grad` holds and whose norm is `grad_norm`, and update the parameters.

        Skips the update, and changes nothing, if there are no gradients or their norm is not finite.
        """
        learning_rate = self.learning_rate
        if not gradients or not math.isfinite(grad_norm):
            return OptimResult(grad_norm=grad_norm, learning_rate=learning_rate, skipped=True)
        if grad_norm > self._max_grad_norm:
            torch._foreach_mul_(gradients, self._max_grad_norm / grad_norm)
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        if self._offloads:
            self._step_by_piece()
        else:
            self.adamw.step()
        self.num_updates += 1
        return OptimResult(grad_norm=grad_norm, learning_rate=learning_rate)

    def make_states(self, num_updates: int) -> None:
        """Set the state to that after `num_updates` updates, with zeros for moments; the caller fills them in through `states`."""
        self.num_updates = num_updates
        self.adamw.state.clear()
        for parameter in self._parameters.values() if num_updates else ():
            device = "cpu" if self._offloads else parameter.device
            moments = {kind: torch.zeros_like(parameter, device=device) for kind in MOMENTS}
            self.adamw.state[parameter] = {"step": torch.tensor(float(num_updates)), **moments}

    def _step_by_piece(self) -> None:
        """Update some parameters at a time, with their state brought from host memory and back. The bits are the same."""
        gradients = {p: p.grad for p in self._parameters.values() if p.grad is not None}
        for parameter in gradients:
            parameter.grad = None  # AdamW updates what has a gradient
        for piece in _pieces(list(gradients)):
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


def _pieces(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters in order, in pieces of at most `PIECE_ELEMENTS` elements; a larger parameter is a piece alone."""
    piece: list[nn.Parameter] = []
    for parameter in parameters:
        if piece and sum(p.numel() for p in (*piece, parameter)) > PIECE_ELEMENTS:
            yield piece
            piece = []
        piece.append(parameter)
    if piece:
        yield piece
