"""Training of a Hugging Face model in plain PyTorch, on one device (one_rank.py) or sharded over ranks (many_ranks.py).

Parameters, gradient sums and optimiser state are float32 or wider, whatever `dtype` is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from asyncflow.engines.base import TrainEngineOptions
from asyncflow.engines.devices import check_device
from asyncflow.engines.train.leader_engine import LeaderEngine
from asyncflow.engines.train.one_rank import OneRank
from asyncflow.engines.train.training import PolicyTraining
from asyncflow.types import WeightSource

T = TypeVar("T")


class TorchEngine(LeaderEngine):
    """`TrainEngine` in plain PyTorch."""

    def __init__(self, model_path: Path | str, options: TrainEngineOptions) -> None:
        """Load the model at `model_path` (Hugging Face format); takes seconds, in the calling thread. Waits for the other ranks.

        Raises:
            UserError: the device is not there, or a model cannot be trained here, or not under the layout.
            RunError: the other ranks did not come.
        """
        check_device(options.device, "train.device")
        torch.manual_seed(options.seed)
        training: PolicyTraining
        if options.layout.size == 1:
            training = OneRank(model_path, options)
        else:
            from asyncflow.engines.train.parallel.many_ranks import ManyRanks

            training = ManyRanks(model_path, options)
        super().__init__(training, options)
        self.remark = training.remark

    async def in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Make a call in the compute thread, between those of the engine."""
        return await self._thread.run(call, *arguments)

    async def export_weights(self) -> WeightSource:
        """See `TrainEngine.export_weights`. The weights are float32. With one rank nothing is gathered or, on the CPU, copied."""
        if not isinstance(self.training, OneRank):
            return await super().export_weights()
        return await self._thread.run(self.training.weights)
