"""Training on one device, as `TorchEngine` does it in its thread if there is one rank.

    micro-batch -> pack (packing.py) --+--> reference, old policy (tri_model.py) -> log-probs --+
                                       +--> policy (causal_model.py) ------> hidden states -----+--> loss, by chunks (log_probs.py)
                                                                                                |
    AdamW <- clip, norm <- sums / normaliser (optim_step) <- gradient sums (accumulate.py) <----+ backward

consumes, waits for: each call's arguments, and nothing else
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from asyncflow.devices import CPU
from asyncflow.engines.base import MicroBatch, MicroBatchResult, OptimResult, TrainEngineOptions
from asyncflow.engines.train.accumulate import make_accumulator, order_free_norm
from asyncflow.engines.train.device_weights import CopyStream, DeviceWeights
from asyncflow.engines.train.model import micro_step
from asyncflow.engines.train.model.causal_model import CausalModel, FrozenModel, PassOptions
from asyncflow.engines.train.model.check_sharing import check_sharing
from asyncflow.engines.train.model.packing import pack_thrifty
from asyncflow.engines.train.model.tri_model import OLD_MODELS, TriModel
from asyncflow.engines.train.optimizer import Optimizer
from asyncflow.engines.train.state import EngineState, fingerprint_of
from asyncflow.types import Array, HeldWeights, Objective, Ragged, TensorSpec, WeightSource


class OneRank:
    """`Training` in plain PyTorch, on one device."""

    data_parallel_rank: int | None = 0

    def __init__(self, model_path: Path | str, options: TrainEngineOptions) -> None:
        """Load the model at `model_path` (Hugging Face format). Raises `UserError` when it cannot be trained here."""
        self._chunk_tokens = options.log_prob_chunk_tokens
        self._is_to_check = options.check_shared_prompt
        self._device = options.device
        dtype, frozen_dtype = (getattr(torch, name) for name in (options.dtype, options.frozen_dtype or options.dtype))
        passes = PassOptions(dtype, options.temperature, options.log_prob_chunk_tokens, options.activation_checkpointing)
        self.policy = CausalModel(model_path, passes, device=options.device)
        passes = replace(passes, dtype=frozen_dtype, recomputes=False)
        frozen = partial(FrozenModel, model_path, passes, device=options.device, offload=options.offload)
        old_model = frozen() if options.old in OLD_MODELS else None
        reference = frozen() if options.has_reference else None
        self.models = TriModel(self.policy, options.old, old_model, reference, is_corrected=options.is_corrected)
        self._sums = make_accumulator(options.accumulate, self.policy.parameters)
        self._optimizer = Optimizer(self.policy.parameters, options)
        self._state = EngineState(self.policy.parameters, self._optimizer, None if old_model is None else old_model.parameters)

    def begin_step(self) -> None:
        """See `TrainEngine.begin_step`."""
        self._state.begin_step()
        self.models.begin_step()

    def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[MicroBatchResult]:
        """See `TrainEngine.forward_backward`. Raises `RunError` when sharing the prompt changes the numbers."""
        return [self._forward_backward(micro_batch, objective) for micro_batch in micro_batches]

    def optim_step(self, normaliser: int) -> OptimResult:
        """See `TrainEngine.optim_step`."""
        self.models.before_update()
        gradients = self._sums.gradients(normaliser)  # empty if no micro-batch was finite
        result = self._optimizer.update(gradients, order_free_norm(gradients))
        self._sums.clear()
        return result

    def discard(self) -> None:
        """See `TrainEngine.discard`."""
        self.models.before_update()  # the version rises all the same
        self._sums.clear()

    def log_probs(self, prompt_ids: Array, response_ids: Ragged) -> Ragged:
        """See `LogProbEngine.log_probs`."""
        return self.policy.response_log_probs(prompt_ids, response_ids)

    def weights(self) -> WeightSource:
        """See `TrainEngine.export_weights`. Call it in the compute thread: copies from a device wait for that thread's work."""
        device = torch.device(self._device)
        if device.type == CPU:
            return HeldWeights(self.policy.parameters)
        return DeviceWeights(self.policy.parameters, CopyStream(device))

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """See `Training.specs`."""
        return HeldWeights(self.policy.parameters).specs

    def gather(self, name: str) -> Tensor:
        """See `Training.gather`."""
        return self.policy.parameters[name].detach().cpu().contiguous()

    def fingerprint(self) -> Mapping[str, str]:
        """See `TrainEngine.fingerprint`."""
        tensors: dict[str, Tensor] = {f"weights/{name}": parameter for name, parameter in self.policy.parameters.items()}
        tensors |= {f"optimizer/{name}/{kind}": state for name, kind, state in self._optimizer.states()}
        return fingerprint_of(tensors.items())

    def save(self, path: Path) -> None:
        """See `TrainEngine.save`."""
        self.policy.module.save_pretrained(path)

    def save_state(self, folder: Path) -> Future[None]:
        """See `EngineState.save`."""
        return self._state.save(folder)

    def load_state(self, folder: Path) -> None:
        """See `EngineState.load`."""
        self._state.load(folder)

    def _forward_backward(self, micro_batch: MicroBatch, objective: Objective) -> MicroBatchResult:
        packed = pack_thrifty(micro_batch.prompt_ids, micro_batch.response_ids, self._device)
        if self._is_to_check and packed.layout.has_prompt:
            check_sharing(self.policy, micro_batch)
            self._is_to_check = False
        known = micro_step.given(self.models, packed, micro_batch)
        hidden_TH, head_VH = self.policy.hidden(packed)
        micro_loss = micro_step.loss(known, objective, hidden_TH, head_VH, chunk_tokens=self._chunk_tokens)
        if micro_loss.result.is_finite:
            torch.autograd.backward(micro_loss.total)
            self._sums.add()
        return micro_loss.result
