"""Decode steps that were recorded once and are replayed (CUDA graphs): a small model's launches take longer than its arithmetic.

A step's shape is its number of rows and of blocks a row has. A shape that comes often is recorded, with all that is computed from
its inputs to the output layer's; what is recorded reads weights and cache where they lie, and installs write them there.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from asyncflow.engines.devices import recorder_of
from asyncflow.engines.rollout.adapter_bank import INSTALLED
from asyncflow.engines.rollout.low_rank import AdapterRows
from asyncflow.types import Array

RECORDED_AFTER: Final = 3
"""Steps of one shape until it is recorded, which takes as long as some steps."""
MOST_RECORDED: Final = 64
"""Shapes that are recorded, at most: each keeps memory for a step's activations and for its launches."""

GraphShape = tuple[tuple[int, ...], int]  # of the inputs; the number of adapters, 0 or 1
INSTALLED_EVERYWHERE: Final = AdapterRows(INSTALLED)
"""Adapter that rows may have in a recorded step: others come and go."""

Compute = Callable[[Tensor, tuple[AdapterRows, ...]], Tensor]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recorded step: writes `output` from `inputs` when it is replayed."""

    recording: Any
    inputs_NX: Tensor
    output_NE: Tensor


class StepGraphs:
    """Recorded steps, by shape and adapters."""

    def __init__(self, compute: Compute, device: torch.device) -> None:
        """`compute`: inputs (int64 [N, X]: token, position and blocks of each row), adapters of the rows -> [N, E]."""
        self._compute, self._device = compute, device
        self._recorder = recorder_of(device)
        self._seen: Counter[GraphShape] = Counter()
        self._recorded: dict[GraphShape, RecordedStep] = {}

    def __call__(self, inputs: Array, adapted: tuple[AdapterRows, ...]) -> Tensor:
        """Inputs of the output layer for the rows of this step: [N, E], which last until the next call."""
        if (step := self._step(inputs, adapted)) is None:
            return self.compute(inputs, adapted)
        step.inputs_NX.copy_(torch.from_numpy(inputs))
        step.recording.replay()
        return step.output_NE

    def compute(self, inputs: Array, adapted: tuple[AdapterRows, ...]) -> Tensor:
        """The same, launched operation by operation."""
        return self._compute(torch.from_numpy(inputs).to(self._device), adapted)

    def _step(self, inputs: Array, adapted: tuple[AdapterRows, ...]) -> RecordedStep | None:
        """The recorded step of this shape; None: there is none, or not yet."""
        if self._recorder is None or any(rows != INSTALLED_EVERYWHERE for rows in adapted):
            return None
        shape = inputs.shape, len(adapted)
        if shape not in self._recorded and len(self._recorded) < MOST_RECORDED:
            self._seen[shape] += 1
            if self._seen[shape] > RECORDED_AFTER:
                self._record(shape, inputs, adapted)
        return self._recorded.get(shape)

    def _record(self, shape: GraphShape, inputs: Array, adapted: tuple[AdapterRows, ...]) -> None:
        assert self._recorder is not None
        inputs_NX = torch.from_numpy(inputs).to(self._device)
        try:
            with self._recorder.recorded() as recording:
                output_NE = self._compute(inputs_NX, adapted)
        except RuntimeError as error:
            log.warning("decode steps are launched one operation at a time from now on: they cannot be recorded (%s)", error)
            self._recorder = None
            self._recorded.clear()
            return
        self._recorded[shape] = RecordedStep(recording, inputs_NX, output_NE)
