"""Decode steps that were recorded once and are replayed (CUDA graphs): a small model's launches take longer than its arithmetic.

A step's shape is its number of rows and of blocks a row has. A shape that comes often is recorded, with all that is computed from
its inputs to the output layer's; what is recorded reads weights and cache where they lie, and installs write them there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from asyncflow.engines.devices import step_recorder
from asyncflow.engines.rollout.adapter_bank import INSTALLED
from asyncflow.engines.rollout.low_rank import AdapterRows
from asyncflow.types import Array

RECORDED_AFTER: Final = 3
"""Steps of one shape until it is recorded, which takes as long as some steps."""

INSTALLED_EVERYWHERE: Final = AdapterRows(INSTALLED)
"""What rows may have in a recorded step: others' adapters come and go."""

Shape = tuple[tuple[int, ...], int]  # of the inputs; the number of adapters, 0 or 1
Compute = Callable[[Tensor, tuple[AdapterRows, ...]], Tensor]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded step: writes `output` from `inputs` when it is replayed."""

    graph: Any
    inputs_NX: Tensor
    output_NE: Tensor


class StepGraphs:
    """Recorded steps, by shape and adapters."""

    def __init__(self, compute: Compute, device: torch.device) -> None:
        """`compute`: inputs (int64 [N, 2 + B], see `DeviceCache.inputs`), adapters of the rows -> [N, E]."""
        self._compute, self._device = compute, device
        self._recorder = step_recorder(device)
        self._seen: Counter[Shape] = Counter()
        self._recorded: dict[Shape, Recorded] = {}

    def __call__(self, inputs: Array, adapted: tuple[AdapterRows, ...]) -> Tensor:
        """What is computed from these inputs: [N, E], which lasts until the next call."""
        can_be_recorded = self._recorder is not None and all(rows == INSTALLED_EVERYWHERE for rows in adapted)
        key = inputs.shape, len(adapted)
        recorded = self._recorded.get(key) if can_be_recorded else None
        if recorded is None:
            self._seen[key] += can_be_recorded
            if self._seen[key] <= RECORDED_AFTER or not can_be_recorded:
                return self._compute(torch.from_numpy(inputs).to(self._device), adapted)
            recorded = self._recorded[key] = self._record(inputs, adapted)
        recorded.inputs_NX.copy_(torch.from_numpy(inputs))
        recorded.graph.replay()
        return recorded.output_NE

    def _record(self, inputs: Array, adapted: tuple[AdapterRows, ...]) -> Recorded:
        assert self._recorder is not None
        inputs_NX = torch.from_numpy(inputs).to(self._device)
        graph, recording = self._recorder()
        with recording:
            output_NE = self._compute(inputs_NX, adapted)
        return Recorded(graph, inputs_NX, output_NE)
