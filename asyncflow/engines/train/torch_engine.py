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
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from asyncflow.engines.base import MicroBatch, MicroBatchResult, OptimResult
from asyncflow.engines.train.accumulate import make_accumulator, order_free_norm
from asyncflow.engines.train.model.causal_model import CausalModel, FrozenModel
from asyncflow.engines.train.model.check_sharing import check_sharing
from asyncflow.engines.train.model.log_probs import log_probs_and_entropy, token_local_loss
from asyncflow.engines.train.model.packing import Packed, pack_thrifty
from asyncflow.engines.train.model.tri_model import OLD_MODELS, OLDS, Old, TriModel
from asyncflow.threads import ComputeThread
from asyncflow.types import Array, LossSums, Objective, Ragged, TokenBatch, UserError

# T response tokens, C tokens of a chunk, R rows.


class TorchEngine:
    """Implements `TrainEngine`."""

    def __init__(
        self,
        model_path: Path | str,
        *,
        learning_rate: float = 1e-6,
        warmup_steps: int = 0,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        temperature: float = 1.0,
        seed: int = 0,
        device: str = "cpu",
        dtype: Literal["float32", "bfloat16"] = "float32",
        log_prob_chunk_tokens: int = 1024,
        num_threads: int = 1,
        accumulate: Literal["exact", "fp32"] = "fp32",
        old: Old = "current",
        is_corrected: bool = False,
        has_reference: bool = False,
        frozen_dtype: Literal["float32", "bfloat16"] | None = None,
        offload: bool = False,
        check_shared_prompt: bool = True,
    ) -> None:
        """Load the model at `model_path` (Hugging Face format); takes seconds, in the calling thread.

        `learning_rate` rises linearly over the first `warmup_steps` updates and stays. `weight_decay` applies to matrices, not to
        biases and norms. `temperature` is that of the rollout's sampling: the policy's distribution is the one sampled from.
        `dtype` is that of the forward and backward passes. At most `log_prob_chunk_tokens` rows of logits exist at a time. `seed`
        is for losses that draw numbers: the engine itself draws none. `num_threads` compute on the CPU.

        `accumulate`: how gradients add up, see accumulate.py. `old`, `is_corrected`: see tri_model.py. `has_reference`: keep the
        model as it is now as the reference. Old policy and reference are kept in `frozen_dtype` (by default `dtype`); `offload`: in
        host memory. `check_shared_prompt`: the first micro-batch whose prompt is shared is computed unshared, too, and compared.

        Raises:
            UserError: an option lies outside its range, or a model cannot be trained here.
        """
        _check_options(learning_rate, warmup_steps, weight_decay, max_grad_norm, temperature, log_prob_chunk_tokens, dtype, device)
        if old not in OLDS:
            raise UserError(f"train.old must be one of {', '.join(OLDS)}, but is {old!r}.")
        self.device, self.data_parallel_rank = device, 0
        self._learning_rate = learning_rate
        self._warmup_steps = warmup_steps
        self._max_grad_norm = max_grad_norm
        self._chunk_tokens = log_prob_chunk_tokens
        self._is_to_check = check_shared_prompt
        torch.manual_seed(seed)
        computing: dict[str, Any] = {"device": device, "temperature": temperature, "chunk_tokens": log_prob_chunk_tokens}
        self._policy = CausalModel(model_path, dtype=getattr(torch, dtype), **computing)

        frozen = partial(FrozenModel, model_path, dtype=getattr(torch, frozen_dtype or dtype), offload=offload, **computing)
        old_model, reference = frozen() if old in OLD_MODELS else None, frozen() if has_reference else None
        self._models = TriModel(self._policy, old, old_model, reference, is_corrected=is_corrected)
        self._sums = make_accumulator(accumulate, self._policy.parameters)
        parameters = list(self._policy.parameters.values())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
                {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=learning_rate,
            betas=betas,
            foreach=True,
        )
        self._num_updates = 0
        # The count holds for GEMMs only when it is set inside the thread that calls them.
        self._thread = ComputeThread("train-engine", setup=lambda: torch.set_num_threads(num_threads))

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

    async def export_weights(self) -> Mapping[str, Tensor]:
        """See `TrainEngine.export_weights`: float32, contiguous; on a CPU engine the weights themselves, not copies."""
        return await self._thread.run(self._export_weights)

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
        ref_T = self._reference_log_probs(micro_batch, packed)
        rollout_T, mask_T = self._tensor(micro_batch.rollout_logprobs.values), self._tensor(micro_batch.loss_mask.values)
        old_T, is_policy_T = self._models.old_log_probs(packed, micro_batch, rollout_T)
        advantages_T = self._tensor(micro_batch.advantages)[packed.row_T]
        row_tokens_R = mask_T.new_zeros(len(micro_batch.indices)).index_add(0, packed.row_T, mask_T)

        def part_loss(part: slice, logprobs_C: Tensor, entropy_C: Tensor) -> LossSums:
            own_C = logprobs_C.detach()
            return objective.loss(
                TokenBatch(
                    logprobs_T=logprobs_C,
                    old_logprobs_T=own_C if old_T is None else torch.where(is_policy_T[part], own_C, old_T[part]),
                    rollout_logprobs_T=rollout_T[part],
                    ref_logprobs_T=None if ref_T is None else ref_T[part],
                    entropy_T=entropy_C,
                    advantages_T=advantages_T[part],
                    mask_T=mask_T[part],
                    row_T=packed.row_T[part],
                    row_tokens_R=row_tokens_R,
                )
            )

        hidden_TH, head_VH = self._policy.hidden(packed)
        metrics: Mapping[str, Tensor]
        if objective.is_token_local:
            total, metrics, logprobs_T = token_local_loss(
                hidden_TH, head_VH, packed.targets_T, part_loss, chunk_tokens=self._chunk_tokens
            )
        else:
            logprobs_T, entropy_T = log_probs_and_entropy(hidden_TH, head_VH, packed.targets_T, chunk_tokens=self._chunk_tokens)
            sums = part_loss(slice(None), logprobs_T, entropy_T)
            total, metrics, logprobs_T = sums.loss, sums.metrics, logprobs_T.detach()
        return self._backward(packed, total, metrics, logprobs_T, rollout_T, mask_T)

    def _backward(
        self, packed: Packed, total: Tensor, metrics: Mapping[str, Tensor], logprobs_T: Tensor, rollout_T: Tensor, mask_T: Tensor
    ) -> MicroBatchResult:
        """Add the gradient to the step's sums, if loss and log-probs are finite."""
        is_finite = total.detach().isfinite() & logprobs_T.isfinite().all()
        differences_T = (logprobs_T - rollout_T).abs().where(mask_T > 0, 0.0)
        is_equal_T = (logprobs_T == rollout_T) & (mask_T > 0)
        # One transfer for all the numbers: each .item() on its own would wait for the device.
        numbers = [total.detach(), mask_T.sum(), is_finite, is_equal_T.sum(), differences_T.max(), *metrics.values()]
        known = torch.stack([number.double() for number in numbers]).tolist()
        loss_sum, loss_tokens, finite, num_equal, difference, *values = known
        if finite:
            torch.autograd.backward(total)
            self._sums.add()
        return MicroBatchResult(
            loss_sum=loss_sum,
            loss_tokens=int(loss_tokens),
            physical_tokens=packed.num_tokens,
            metrics=dict(zip(metrics, values, strict=True)),
            is_finite=bool(finite),
            logprob_differences=(int(num_equal), difference),
        )

    def _reference_log_probs(self, micro_batch: MicroBatch, packed: Packed) -> Tensor | None:
        if micro_batch.ref_logprobs is not None:
            return self._tensor(micro_batch.ref_logprobs.values)
        return self._models.reference_log_probs(packed)

    def _optim_step(self, normaliser: int) -> OptimResult:
        self._models.before_update()
        learning_rate = self._learning_rate * min(1.0, (self._num_updates + 1) / max(1, self._warmup_steps))
        gradients = self._sums.gradients(normaliser)
        if not gradients:  # every micro-batch was refused
            return OptimResult(grad_norm=0.0, learning_rate=learning_rate, skipped=True)
        grad_norm = order_free_norm(gradients)
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            if grad_norm > self._max_grad_norm:
                torch._foreach_mul_(gradients, self._max_grad_norm / grad_norm)
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
            self._num_updates += 1
        self._sums.clear()
        return OptimResult(grad_norm=grad_norm, learning_rate=learning_rate, skipped=not is_finite)

    def _discard(self) -> None:
        self._models.before_update()  # the version rises all the same
        self._sums.clear()

    def _export_weights(self) -> Mapping[str, Tensor]:
        return {name: parameter.detach().cpu().contiguous() for name, parameter in self._policy.parameters.items()}

    def _fingerprint(self) -> Mapping[str, str]:
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._policy.parameters.items():
            tensors[f"weights/{name}"] = parameter
            tensors |= {f"optimizer/{name}/{kind}": state for kind, state in self._optimizer.state[parameter].items()}
        return {name: hashlib.sha256(tensor.detach().cpu().numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}

    def _tensor(self, values: Array) -> Tensor:
        # Copied: what came off a wire may be read-only, which torch cannot express.
        return torch.tensor(values, dtype=torch.float32, device=self.device)


def _check_options(
    learning_rate: float,
    warmup_steps: int,
    weight_decay: float,
    max_grad_norm: float,
    temperature: float,
    log_prob_chunk_tokens: int,
    dtype: str,
    device: str,
) -> None:
    for name, value in (("learning_rate", learning_rate), ("max_grad_norm", max_grad_norm), ("temperature", temperature)):
        if not 0 < value < math.inf:
            raise UserError(f"train.{name} must be a number above 0, but is {value}.")
    for name, value in (("warmup_steps", warmup_steps), ("weight_decay", weight_decay)):
        if not 0 <= value < math.inf:
            raise UserError(f"train.{name} must be a number from 0 up, but is {value}.")
    if log_prob_chunk_tokens < 1:
        raise UserError(f"train.log_prob_chunk_tokens must be at least 1, but is {log_prob_chunk_tokens}.")
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"train.dtype must be float32 or bfloat16, but is {dtype!r}.")
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda", "npu"):
        raise UserError(f"train.device must be cpu, cuda or npu, perhaps with a number (cuda:1), but is {device!r}.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"train.device is {device!r}, but PyTorch sees no GPU here: set it to cpu.")
    if kind == "npu" and importlib.util.find_spec("torch_npu") is None:
        raise UserError(f"train.device is {device!r}, and torch_npu, which drives NPUs, is not installed: set it to cpu.")
