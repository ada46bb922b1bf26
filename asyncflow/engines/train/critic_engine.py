"""Critic's engine: values of responses, and the training of the model that computes them, on one device.

consumes: prompts with responses; micro-batches with returns and a loss; optimiser steps
waits for: the call before it (one compute thread, which is also the engine's lock)
is unblocked by: each call as it comes

    micro-batch -> pack (packing.py) -> model (value_model.py) -> values, loss -> backward -> gradient sums (accumulate.py) -> AdamW

Left out: a critic that is sharded over several devices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from asyncflow.engines.base import MicroBatch, MicroBatchResult, OptimResult, TrainEngineOptions
from asyncflow.engines.devices import check_device
from asyncflow.engines.train.accumulate import make_accumulator, order_free_norm
from asyncflow.engines.train.model.packing import pack_thrifty
from asyncflow.engines.train.model.value_model import ValueModel
from asyncflow.engines.train.optimizer import Optimizer
from asyncflow.engines.train.state import EngineState, fingerprint_of
from asyncflow.threads import ComputeThread
from asyncflow.types import Array, Ragged, ValueBatch, ValueObjective

# T response tokens, R rows.


class TorchCritic:
    """`CriticEngine` in plain PyTorch, on one device."""

    def __init__(self, model_path: Path | str, options: TrainEngineOptions) -> None:
        """Load the model at `model_path` (Hugging Face format), with its value head if it has one.

        Options for several devices or for other models (`layout`, `old`, `has_reference`) have no effect. Raises `UserError` when
        the model cannot be trained here.
        """
        check_device(options.device, "train.critic.device")
        torch.manual_seed(options.seed)
        self._device = options.device
        dtype = getattr(torch, options.dtype)
        self.model = ValueModel(model_path, device=options.device, dtype=dtype, recomputes=options.activation_checkpointing)
        self._sums = make_accumulator(options.accumulate, self.model.parameters)
        self._optimizer = Optimizer(self.model.parameters, options)
        self._state = EngineState(self.model.parameters, self._optimizer)
        self._thread = ComputeThread("critic-engine", setup=lambda: torch.set_num_threads(options.num_threads))

    async def values(self, prompt_ids: Array, response_ids: Ragged) -> Ragged:
        """See `CriticEngine.values`."""
        return await self._thread.run(self.model.response_values, prompt_ids, response_ids)

    async def begin_step(self) -> None:
        """See `TrainEngine.begin_step`."""
        await self._thread.run(self._state.begin_step)

    async def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: ValueObjective) -> list[MicroBatchResult]:
        """See `CriticEngine.forward_backward`. Raises `ValueError` for a micro-batch without values."""
        return [await self._thread.run(self._forward_backward, micro_batch, objective) for micro_batch in micro_batches]

    async def optim_step(self, normaliser: int) -> OptimResult:
        """See `TrainEngine.optim_step`. Raises `ValueError` if `normaliser` < 1."""
        if normaliser < 1:
            raise ValueError(f"a step cannot be divided by {normaliser}")
        return await self._thread.run(self._optim_step, normaliser)

    async def discard(self) -> None:
        """See `TrainEngine.discard`."""
        await self._thread.run(self._sums.clear)

    async def fingerprint(self) -> Mapping[str, str]:
        """See `TrainEngine.fingerprint`."""
        return await self._thread.run(self._fingerprint)

    async def save(self, path: Path) -> None:
        """See `CriticEngine.save`."""
        await self._thread.run(self.model.save, path)

    async def save_state(self, folder: Path) -> Awaitable[None]:
        """See `TrainEngine.save_state`."""
        return asyncio.wrap_future(await self._thread.run(self._state.save, folder))

    async def load_state(self, folder: Path) -> None:
        """See `TrainEngine.load_state`."""
        await self._thread.run(self._state.load, folder)

    async def close(self) -> None:
        """Stop the compute thread."""
        self._thread.close()

    def _forward_backward(self, micro_batch: MicroBatch, objective: ValueObjective) -> MicroBatchResult:
        if micro_batch.values is None:
            raise ValueError(f"the micro-batch of row {micro_batch.indices[0]} has no values, which its returns were made from")
        packed = pack_thrifty(micro_batch.prompt_ids, micro_batch.response_ids, self._device)
        mask_T = self._tensor(micro_batch.loss_mask.values)
        values_T = self.model.values(packed)
        sums = objective.loss(
            ValueBatch(
                values_T=values_T,
                old_values_T=self._tensor(micro_batch.values.values),
                returns_T=self._tensor(micro_batch.token_advantages),
                mask_T=mask_T,
                row_T=packed.row_T,
                row_tokens_R=mask_T.new_zeros(len(micro_batch.indices)).index_add(0, packed.row_T, mask_T),
            )
        )
        # One transfer for all the numbers: each .item() on its own would wait for the device.
        is_finite = sums.loss.detach().isfinite() & values_T.detach().isfinite().all()
        numbers = [sums.loss.detach(), mask_T.sum(), is_finite, *sums.metrics.values()]
        loss_sum, loss_tokens, finite, *metrics = torch.stack([number.double() for number in numbers]).tolist()
        if finite:
            torch.autograd.backward(sums.loss)
            self._sums.add()
        return MicroBatchResult(
            loss_sum=loss_sum,
            loss_tokens=int(loss_tokens),
            physical_tokens=packed.num_tokens,
            metrics=dict(zip(sums.metrics, metrics, strict=True)),
            is_finite=bool(finite),
        )

    def _optim_step(self, normaliser: int) -> OptimResult:
        gradients = self._sums.gradients(normaliser)  # empty if no micro-batch was finite
        result = self._optimizer.update(gradients, order_free_norm(gradients))
        self._sums.clear()
        return result

    def _fingerprint(self) -> Mapping[str, str]:
        tensors: dict[str, Tensor] = {f"weights/{name}": parameter for name, parameter in self.model.parameters.items()}
        tensors |= {f"optimizer/{name}/{kind}": state for name, kind, state in self._optimizer.states()}
        return fingerprint_of(tensors.items())

    def _tensor(self, values: Array) -> Tensor:
        # Copied: what came off a wire may be read-only, which torch cannot express.
        return torch.tensor(values, dtype=torch.float32, device=self._device)
