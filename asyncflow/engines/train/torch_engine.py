"""Trains a Hugging Face model in plain PyTorch on one device.

consumes: micro-batches with a loss, optimiser steps, requests for log-probs and weights
waits for: nothing but the call before it (one compute thread, which is also the engine's lock)
is unblocked by: each call as it comes

    micro-batch -> pack (packing.py) --+--> reference, old policy (tri_model.py) -> log-probs --+
                                       +--> policy (causal_model.py) ------> hidden states -----+--> loss, by chunks (log_probs.py)
                                                                                                |
    AdamW <- clip, norm <- sums / normaliser (optim_step) <- gradient sums (accumulate.py) <----+ backward

Parameters, gradient sums and optimiser state are float32 or more whatever `dtype` says.

Left out: several devices, gradient checkpointing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncflow.engines.base import MicroBatch, MicroBatchResult, OptimResult, TrainEngineOptions
from asyncflow.engines.devices import check_device
from asyncflow.engines.train.accumulate import make_accumulator, order_free_norm
from asyncflow.engines.train.model import micro_step
from asyncflow.engines.train.model.causal_model import CausalModel, FrozenModel
from asyncflow.engines.train.model.check_sharing import check_sharing
from asyncflow.engines.train.model.packing import pack_thrifty
from asyncflow.engines.train.model.tri_model import OLD_MODELS, TriModel
from asyncflow.engines.train.optimizer import Optimizer
from asyncflow.threads import ComputeThread
from asyncflow.types import Array, HeldWeights, Objective, Ragged, WeightSource


class TorchEngine:
    """Implements `TrainEngine`."""

    def __init__(
        self,
        model_path: Path | str,
        options: TrainEngineOptions,
    ) -> None:
        """Load the model at `model_path` (Hugging Face format); takes seconds, in the calling thread.

        Raises:
            UserError: the device is not there, or a model cannot be trained here.
        """
        check_device(options.device, "train.device")
        self.device, self.data_parallel_rank = options.device, 0
        self._chunk_tokens = options.log_prob_chunk_tokens
        self._is_to_check = options.check_shared_prompt
        torch.manual_seed(options.seed)
        computing: dict[str, Any] = {
            "device": options.device,
            "temperature": options.temperature,
            "chunk_tokens": options.log_prob_chunk_tokens,
        }
        self._policy = CausalModel(model_path, dtype=getattr(torch, options.dtype), **computing)

        frozen_dtype = getattr(torch, options.frozen_dtype or options.dtype)
        frozen = partial(FrozenModel, model_path, dtype=frozen_dtype, offload=options.offload, **computing)
        old_model = frozen() if options.old in OLD_MODELS else None
        reference = frozen() if options.has_reference else None
        self._models = TriModel(self._policy, options.old, old_model, reference, is_corrected=options.is_corrected)
        self._sums = make_accumulator(options.accumulate, self._policy.parameters)
        self._optimizer = Optimizer(self._policy.parameters, options)
        # The count holds for GEMMs only when it is set inside the thread that calls them.
        self._thread = ComputeThread("train-engine", setup=lambda: torch.set_num_threads(options.num_threads))

    async def follow(self, objective: Objective, busy: Callable[[str], AbstractContextManager[object]]) -> None:
        """See `TrainEngine.follow`: an engine on one device has no followers."""

    async def begin_step(self) -> None:
        """See `TrainEngine.begin_step`."""
        await self._thread.run(self._models.begin_step)

    async def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[MicroBatchResult]:
        """See `TrainEngine.forward_backward`. Raises `RunError` when sharing the prompt gives other numbers than not sharing it."""
        return [await self._thread.run(self._forward_backward, micro_batch, objective) for micro_batch in micro_batches]

    async def optim_step(self, normaliser: int) -> OptimResult:
        """See `TrainEngine.optim_step`. Also skipped when nothing was accumulated. Raises `ValueError` if `normaliser` < 1."""
        if normaliser < 1:
            raise ValueError(f"a step cannot be divided by {normaliser}")
        return await self._thread.run(self._optim_step, normaliser)

    async def discard(self) -> None:
        """See `TrainEngine.discard`."""
        await self._thread.run(self._discard)

    async def log_probs(self, prompt_ids: Array, response_ids: Ragged) -> Ragged:
        """See `LogProbEngine.log_probs`: under the policy's current weights."""
        return await self._thread.run(self._policy.response_log_probs, prompt_ids, response_ids)

    async def export_weights(self) -> WeightSource:
        """See `TrainEngine.export_weights`: float32; on a CPU engine the weights themselves, not copies."""
        return HeldWeights(self._policy.parameters)

    async def fingerprint(self) -> Mapping[str, str]:
        """See `TrainEngine.fingerprint`."""
        return await self._thread.run(self._fingerprint)

    async def save(self, path: Path) -> None:
        """Write config, generation config and float32 weights; the tokenizer's files are the caller's to copy."""
        await self._thread.run(self._policy.module.save_pretrained, path)

    async def close(self) -> None:
        """See `TrainEngine.close`."""
        self._thread.close()

    def _forward_backward(self, micro_batch: MicroBatch, objective: Objective) -> MicroBatchResult:
        packed = pack_thrifty(micro_batch.prompt_ids, micro_batch.response_ids, self.device)
        if self._is_to_check and packed.layout.has_prompt:
            check_sharing(self._policy, micro_batch)
            self._is_to_check = False
        known = micro_step.given(self._models, packed, micro_batch)
        hidden_TH, head_VH = self._policy.hidden(packed)
        micro_loss = micro_step.loss(known, objective, hidden_TH, head_VH, chunk_tokens=self._chunk_tokens)
        if micro_loss.result.is_finite:
            torch.autograd.backward(micro_loss.total)
            self._sums.add()
        return micro_loss.result

    def _optim_step(self, normaliser: int) -> OptimResult:
        self._models.before_update()
        gradients = self._sums.gradients(normaliser)  # none if every micro-batch was refused
        result = self._optimizer.update(gradients, order_free_norm(gradients))
        self._sums.clear()
        return result

    def _discard(self) -> None:
        self._models.before_update()  # the version rises all the same
        self._sums.clear()

    def _fingerprint(self) -> Mapping[str, str]:
        tensors: dict[str, Tensor] = {f"weights/{name}": parameter for name, parameter in self._policy.parameters.items()}
        tensors |= {f"optimizer/{name}/{kind}": state for name, kind, state in self._optimizer.states()}
        return {name: hashlib.sha256(tensor.detach().cpu().numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}
