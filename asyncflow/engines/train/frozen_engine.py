"""Log-probs under a model that is not trained: the reference as a task of its own.

consumes: prompts with responses
waits for: nothing but the call before it (one compute thread, which is also the engine's lock)
is unblocked by: each call as it comes
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from asyncflow.engines.train.model.causal_model import FrozenModel
from asyncflow.threads import ComputeThread
from asyncflow.types import Array, Ragged


class FrozenEngine:
    """Implements `LogProbEngine`."""

    def __init__(
        self,
        model_path: Path | str,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        temperature: float = 1.0,
        device: str = "cpu",
        log_prob_chunk_tokens: int = 1024,
        num_threads: int = 1,
        offload: bool = False,
    ) -> None:
        """Load the model at `model_path` (Hugging Face format); see `TorchEngine` for the options. Raises `UserError`."""
        self._model = FrozenModel(
            model_path,
            device=device,
            dtype=getattr(torch, dtype),
            temperature=temperature,
            chunk_tokens=log_prob_chunk_tokens,
            offload=offload,
        )
        self._thread = ComputeThread("frozen-engine", setup=lambda: torch.set_num_threads(num_threads))

    async def log_probs(self, prompt_ids: Array, response_ids: Ragged) -> Ragged:
        """See `LogProbEngine.log_probs`."""
        return await self._thread.run(self._model.response_log_probs, prompt_ids, response_ids)

    async def close(self) -> None:
        """See `LogProbEngine.close`."""
        self._thread.close()
