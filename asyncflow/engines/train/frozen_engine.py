"""Log-probs under a model that is not trained: the reference as a separate task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from asyncflow.engines.base import LogProbEngine, TrainEngineOptions
from asyncflow.engines.devices import check_device
from asyncflow.engines.train.model.causal_model import FrozenModel
from asyncflow.engines.train.model.own_rows import probe
from asyncflow.threads import ComputeThread
from asyncflow.types import Array, Ragged


class FrozenEngine(LogProbEngine):
    """`LogProbEngine` of a model that is not trained, on one device."""

    def __init__(self, model_path: Path | str, options: TrainEngineOptions) -> None:
        """Load the model at `model_path` (Hugging Face format), to keep it as a train engine keeps its reference. Raises
        `UserError` when it cannot be computed here."""
        check_device(options.device, "train.device")
        self._model = FrozenModel(model_path, options)
        # In the policy's dtype, as the train engine finds the way of all its models.
        is_of_policy_s_dtype = options.frozen_dtype in (None, options.dtype)
        probed = self._model if is_of_policy_s_dtype else FrozenModel(model_path, replace(options, frozen_dtype=None))
        probe(probed)
        self._model.way = probed.way
        self._thread = ComputeThread("frozen-engine", setup=lambda: torch.set_num_threads(options.num_threads))

    async def use_threads(self, count: int) -> None:
        """Compute with so many threads from the next call on."""
        await self._thread.run(torch.set_num_threads, count)

    async def log_probs(
        self, prompt_ids: Array, response_ids: Ragged, target_ids: Ragged | None = None, temperature: float | None = None
    ) -> Ragged:
        return await self._thread.run(self._model.response_log_probs, prompt_ids, response_ids, target_ids, temperature)

    async def close(self) -> None:
        self._thread.close()
