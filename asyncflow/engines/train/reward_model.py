"""Reward model: a sequence classifier with one label, whose logit for a prompt with its response is the reward.

It computes one sequence at a time, without padding, so that a reward does not depend on other sequences.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from asyncflow.engines.base import ClassifierEngine
from asyncflow.engines.devices import check_device
from asyncflow.threads import ComputeThread
from asyncflow.types import Array, UserError


class RewardModelEngine(ClassifierEngine):
    """`ClassifierEngine` with a Hugging Face sequence classifier, on one device."""

    def __init__(self, model_path: Path | str, *, device: str, dtype: str, num_threads: int) -> None:
        """Load the model at `model_path` (Hugging Face format). Raises `UserError` when it cannot be computed here.

        `dtype`: torch's name of the weights' dtype, such as `bfloat16`. `num_threads`: threads that compute on the CPU.
        """
        check_device(device, "reward.model.device")
        try:
            model = AutoModelForSequenceClassification.from_pretrained(
                str(model_path), dtype=getattr(torch, dtype), local_files_only=True, use_safetensors=True
            )
        except (OSError, ValueError) as error:
            raise UserError(f"the reward model {model_path} cannot be loaded: {error}") from error
        if model.config.num_labels != 1:
            raise UserError(f"the reward model {model_path} has {model.config.num_labels} labels: a reward is one number")
        self._model = model.to(device).eval().requires_grad_(False)
        self._device = torch.device(device)
        self._longest = getattr(model.config, "max_position_embeddings", None)
        self._thread = ComputeThread("reward-model", setup=lambda: torch.set_num_threads(num_threads))

    async def use_threads(self, count: int) -> None:
        """Compute with so many threads from the next score on."""
        await self._thread.run(torch.set_num_threads, count)

    async def score(self, token_ids: Array) -> float:
        """See `ClassifierEngine.score`. Also raises `MemoryError` if the device's memory does not suffice."""
        if not len(token_ids) or (self._longest is not None and len(token_ids) > self._longest):
            raise ValueError(f"{len(token_ids)} tokens, and the reward model takes 1 to {self._longest}")
        return await self._thread.run(self._score, token_ids)

    async def close(self) -> None:
        self._thread.close()

    @torch.inference_mode()
    def _score(self, token_ids: Array) -> float:
        ids_BT = torch.from_numpy(token_ids).to(self._device)[None]
        try:
            return float(self._model(input_ids=ids_BT, use_cache=False).logits[0, 0])
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"{len(token_ids)} tokens: {error}") from error
