"""Weights in the dtype of passes, where they are kept in another one: cast once for each of their values, not in each pass.

    float32 weight --as it is now--> copy that stays --> passes of all threads over this weight, and layers that compute twice
          ^                                                    |
          +----- gradient, cast back, to the pass's thread ----+

A tensor counts its changes, so it is known of each copy whether it is behind: after an update, a restored state, an installed
version.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class CastWeights:
    """Copies of weights in another dtype, on the same device. Nobody may change a weight while somebody computes with its copy."""

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._weights, self._dtype = weights, dtype
        self._copies: dict[str, tuple[int, Tensor]] = {}
        self._lock = threading.Lock()

    def of(self, name: str, parameter: Tensor) -> Tensor:
        """A weight in the dtype of passes; a gradient of it goes to `parameter`, which has that weight's memory."""
        if parameter.dtype == self._dtype:
            return parameter
        with self._lock:
            copy = self._copy(name)
        if not (torch.is_grad_enabled() and parameter.requires_grad):
            return copy
        apply: Any = _Copy.apply  # torch has no types for it
        made: Tensor = apply(parameter, copy)
        return made

    @torch.no_grad()
    def _copy(self, name: str) -> Tensor:
        weight = self._weights[name]
        changes, copy = self._copies.get(name, (-1, None))
        if copy is None:
            copy = weight.to(self._dtype)
        elif changes != weight._version:
            copy.copy_(weight)  # in the same memory: no pass is under way whose backward would need what was there
        self._copies[name] = weight._version, copy
        return copy


class _Copy(torch.autograd.Function):
    """A weight's copy, as if it were cast here."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None
