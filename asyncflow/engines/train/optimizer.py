"""AdamW, its warm-up and its clip: from a step's gradients to the next weights.

    gradients, their norm (accumulate.py) -> clip -> AdamW at this update's learning rate -> parameters, in place

The count of updates is state as the moments are: the warm-up depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from asyncflow.engines.base import OptimResult, TrainEngineOptions


class Optimizer:
    """Updates named parameters from what their `.grad` holds."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], options: TrainEngineOptions) -> None:
        """`parameters`: float32, tied ones once."""
        self.num_updates = 0
        self._parameters = parameters
        self._learning_rate, self._warmup_steps = options.learning_rate, options.warmup_steps
        self._max_grad_norm = options.max_grad_norm
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
        """That of the next update."""
        return self._learning_rate * min(1.0, (self.num_updates + 1) / max(1, self._warmup_steps))

    def update(self, gradients: list[Tensor], grad_norm: float) -> OptimResult:
        """Clip `gradients`, which are what the parameters' `.grad` holds and whose norm is `grad_norm`, and step.

        Skipped, and nothing is changed, if there are none or their norm is not finite.
        """
        learning_rate = self.learning_rate
        if not gradients or not math.isfinite(grad_norm):
            return OptimResult(grad_norm=grad_norm, learning_rate=learning_rate, skipped=True)
        if grad_norm > self._max_grad_norm:
            torch._foreach_mul_(gradients, self._max_grad_norm / grad_norm)
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self.num_updates += 1
        return OptimResult(grad_norm=grad_norm, learning_rate=learning_rate)

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """(parameter's name, kind of state, tensor) of every parameter that was ever updated."""
        for name, parameter in self._parameters.items():
            for kind, state in self.adamw.state[parameter].items():
                yield name, kind, state
