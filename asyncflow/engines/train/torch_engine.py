"""Trains a Hugging Face model in plain PyTorch on one device.

consumes: micro-batches with a loss, optimiser steps, requests for log-probs and weights
waits for: nothing but the call before it (one compute thread, which is also the engine's lock)
is unblocked by: each call as it comes

    micro-batch -> pack (packing.py) -> model to hidden states (attention.py) -> log-probs (log_probs.py) -> loss -> .grad += sums
    optim_step  -> .grad / normaliser -> norm, clip -> AdamW -> .grad cleared

Parameters, gradient sums and optimiser state are float32 whatever `dtype` says. The model stays in evaluation mode: with dropout
the ratio of new to old log-probs would not be 1 where the weights are the same.

Left out: several devices, gradient checkpointing, a reference model, and sums whose bits do not depend on their order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from asyncflow.engines.base import MicroBatch, MicroBatchResult, OptimResult
from asyncflow.engines.train.model.attention import ATTENTION_NAME, check_packable
from asyncflow.engines.train.model.log_probs import log_probs_and_entropy
from asyncflow.engines.train.model.packing import PackedRows, pack_rows
from asyncflow.threads import ComputeThread
from asyncflow.types import Array, LossFunction, Ragged, TokenBatch, UserError

# P packed tokens, T response tokens, R rows, H hidden elements, V tokens of the vocabulary.


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
    ) -> None:
        """Load the model at `model_path` (Hugging Face format); takes seconds, in the calling thread.

        `learning_rate` rises linearly over the first `warmup_steps` updates and stays. `weight_decay` applies to matrices, not to
        biases and norms. `temperature` is that of the rollout's sampling: the policy's distribution is the one sampled from.
        `dtype` is that of the matrix products. At most `log_prob_chunk_tokens` rows of logits exist at a time. `seed` is for losses
        that draw numbers: the engine itself draws none. `num_threads` compute on the CPU.

        Raises:
            UserError: an option lies outside its range, or the model at `model_path` cannot be trained here.
        """
        _check_options(learning_rate, warmup_steps, weight_decay, max_grad_norm, temperature, log_prob_chunk_tokens, dtype, device)
        self.device = device
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._learning_rate = learning_rate
        self._warmup_steps = warmup_steps
        self._max_grad_norm = max_grad_norm
        self._temperature = temperature
        self._chunk_tokens = log_prob_chunk_tokens
        torch.manual_seed(seed)
        self._model = _load_model(model_path).to(device).eval()
        # Each tied weight comes once, under the name that a checkpoint has it by.
        self._parameters: dict[str, Tensor] = dict(self._model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self._parameters.values() if p.ndim > 1], "weight_decay": weight_decay},
                {"params": [p for p in self._parameters.values() if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=learning_rate,
            betas=betas,
            foreach=True,
        )
        self._num_updates = 0
        # The count holds for GEMMs only when it is set inside the thread that calls them.
        self._thread = ComputeThread("train-engine", setup=lambda: torch.set_num_threads(num_threads))

    async def forward_backward(self, micro_batch: MicroBatch, loss: LossFunction) -> MicroBatchResult:
        """See `TrainEngine.forward_backward`. `old_logprobs` are the policy's own, detached: the ratio is exactly 1."""
        return await self._thread.run(self._forward_backward, micro_batch, loss)

    async def optim_step(self, normaliser: int) -> OptimResult:
        """See `TrainEngine.optim_step`. Also skipped when nothing was accumulated. Raises `ValueError` if `normaliser` < 1."""
        if normaliser < 1:
            raise ValueError(f"a step cannot be divided by {normaliser}")
        return await self._thread.run(self._optim_step, normaliser)

    async def discard(self) -> None:
        """See `TrainEngine.discard`."""
        await self._thread.run(self._optimizer.zero_grad)

    async def log_probs(self, micro_batch: MicroBatch) -> Ragged:
        """See `TrainEngine.log_probs`."""
        return await self._thread.run(self._log_probs, micro_batch)

    async def export_weights(self) -> Mapping[str, Tensor]:
        """See `TrainEngine.export_weights`: float32, contiguous; on a CPU engine the weights themselves, not copies."""
        return await self._thread.run(self._export_weights)

    async def save(self, path: Path) -> None:
        """Write config, generation config and float32 weights; the tokenizer's files are the caller's to copy."""
        await self._thread.run(self._model.save_pretrained, path)

    async def close(self) -> None:
        """See `TrainEngine.close`."""
        self._thread.close()

    def _forward_backward(self, micro_batch: MicroBatch, loss: LossFunction) -> MicroBatchResult:
        rows = pack_rows(micro_batch.prompt_ids, micro_batch.response_ids, self.device)
        logprobs_T, entropy_T = self._policy(rows)
        mask_T = self._tensor(micro_batch.loss_mask.values)
        sums = loss(
            TokenBatch(
                logprobs_T=logprobs_T,
                old_logprobs_T=logprobs_T.detach(),
                rollout_logprobs_T=self._tensor(micro_batch.rollout_logprobs.values),
                ref_logprobs_T=None,
                entropy_T=entropy_T,
                advantages_T=self._tensor(micro_batch.advantages)[rows.row_T],
                mask_T=mask_T,
                row_T=rows.row_T,
                num_rows=len(micro_batch.indices),
            )
        )
        is_finite = sums.loss.detach().isfinite() & logprobs_T.detach().isfinite().all()
        # One transfer for all the numbers: each .item() on its own would wait for the device.
        numbers = [sums.loss.detach(), mask_T.sum(), is_finite, *sums.metrics.values()]
        loss_sum, loss_tokens, finite, *metrics = torch.stack([number.double() for number in numbers]).tolist()
        if finite:
            torch.autograd.backward(sums.loss)
        return MicroBatchResult(
            loss_sum=loss_sum,
            loss_tokens=int(loss_tokens),
            physical_tokens=rows.num_tokens,
            metrics=dict(zip(sums.metrics, metrics, strict=True)),
            is_finite=bool(finite),
        )

    def _policy(self, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """Log-probs (float32 [T], with gradient) and entropies (float32 [T], without) of the response tokens."""
        with self._precision():
            hidden_PH = self._model.base_model(
                input_ids=rows.tokens_P[None],
                position_ids=rows.positions_P[None],
                attention_mask=None,
                use_cache=False,
                row_lengths=rows.row_lengths,
            ).last_hidden_state[0]
            hidden_TH = hidden_PH.index_select(0, rows.predict_T)
            if self._temperature != 1.0:
                hidden_TH = hidden_TH / self._temperature
            head_VH = self._model.get_output_embeddings().weight
            return log_probs_and_entropy(
                hidden_TH.to(self._dtype), head_VH.to(self._dtype), rows.targets_T, chunk_tokens=self._chunk_tokens
            )

    def _optim_step(self, normaliser: int) -> OptimResult:
        learning_rate = self._learning_rate * min(1.0, (self._num_updates + 1) / max(1, self._warmup_steps))
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if not gradients:  # every micro-batch was refused
            return OptimResult(grad_norm=0.0, learning_rate=learning_rate, skipped=True)
        torch._foreach_div_(gradients, float(normaliser))
        grad_norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).item()
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            if grad_norm > self._max_grad_norm:
                torch._foreach_mul_(gradients, self._max_grad_norm / grad_norm)
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
            self._num_updates += 1
        self._optimizer.zero_grad()
        return OptimResult(grad_norm=grad_norm, learning_rate=learning_rate, skipped=not is_finite)

    @torch.no_grad()
    def _log_probs(self, micro_batch: MicroBatch) -> Ragged:
        rows = pack_rows(micro_batch.prompt_ids, micro_batch.response_ids, self.device)
        logprobs_T, _ = self._policy(rows)
        return Ragged(logprobs_T.cpu().numpy(), micro_batch.response_ids.offsets)

    def _export_weights(self) -> Mapping[str, Tensor]:
        return {name: parameter.detach().cpu().contiguous() for name, parameter in self._parameters.items()}

    def _tensor(self, values: Array) -> Tensor:
        # Copied: what came off a wire may be read-only, which torch cannot express.
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(torch.device(self.device).type, self._dtype, enabled=self._dtype != torch.float32)


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
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"train.device is {device!r}, but PyTorch sees no GPU here: set it to cpu.")


def _load_model(path: Path | str) -> Any:
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"There is no model in Hugging Face format at {path}: {str(error).splitlines()[0]}") from error
    check_packable(config)
    disable_progress_bar()
    model, report = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=torch.float32, attn_implementation=ATTENTION_NAME, output_loading_info=True
    )
    # Transformers would fill what is missing with random numbers and warn.
    if lacking := sorted([*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]):
        raise UserError(f"The model at {path} lacks {len(lacking)} of its weights, {lacking[0]} the first: get the files again.")
    if model.get_output_embeddings().bias is not None:
        raise UserError(f"The model at {path} has a bias on its output layer, which the trainer does not compute.")
    return model
