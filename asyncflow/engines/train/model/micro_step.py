"""Path of a micro-batch from its tokens to a loss that can be run backward, the same for every train engine.

    micro-batch -> pack (packing.py) --+--> reference, old policy (tri_model.py) -> log-probs --+
                                       +--> policy (the engine's own) -------> hidden states ---+--> loss, by chunks (log_probs.py)

The engine does the backward pass, the sums of gradients and the update. It also runs the policy, between `given` and `loss`, so
that a pipeline may compute these two in different processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncflow.engines.base import MicroBatch, MicroBatchResult
from asyncflow.engines.train.model.log_probs import VocabularyShard, log_probs_and_entropy, token_local_loss
from asyncflow.engines.train.model.packing import Packed
from asyncflow.engines.train.model.tri_model import TriModel
from asyncflow.types import Array, LossSums, Objective, TokenBatch

# T response tokens, C tokens of a chunk, R rows, H hidden elements, V tokens of the vocabulary.


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Inputs of the loss besides the policy's hidden states; float32 where not noted, on the model's device.

    The suffix gives the shape: T response tokens, R rows. `row_tokens_R`: number of loss tokens of each row. `old_T`, `ref_T`,
    `rollout_T`: log-probs of old policy, reference and rollout engine.
    """

    packed: Packed
    rollout_T: Tensor
    mask_T: Tensor
    advantages_T: Tensor
    row_tokens_R: Tensor
    old_T: Tensor | None  # None: the policy itself is the old policy, for all rows
    is_policy_T: Tensor  # bool: whether the policy itself is the token's old policy
    is_fresh_T: Tensor  # bool: whether the staleness, as the rollout engine reports it, is 0: sampled by the step's first weights
    ref_T: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class MicroLoss:
    """Loss of a micro-batch. `total` may be run backward once, and only if `result.is_finite`."""

    total: Tensor
    result: MicroBatchResult


def given(models: TriModel[Any], packed: Packed, micro_batch: MicroBatch) -> Given:
    """Compute the log-probs of the frozen models, and copy the micro-batch's columns to the device of `packed`.

    Raises `ValueError` for rows that are too stale for the old policy.
    """
    old_T, ref_T = None, None
    if models.reference is not None and micro_batch.ref_logprobs is None:
        ref_T = models.reference.log_probs(packed)
    if models.old_model is not None and models.asks_old_model(micro_batch):
        old_T = models.old_model.log_probs(packed)
    return given_frozen(models, packed, micro_batch, old_T, ref_T)


def given_frozen(
    models: TriModel[Any], packed: Packed, micro_batch: MicroBatch, old_T: Tensor | None, ref_T: Tensor | None
) -> Given:
    """Inputs of the loss, as `given` returns them, from known log-probs (float32 [T]) of the frozen models.

    `old_T`, `ref_T`: of old model and reference; None if there is no such model, or if its log-probs are not needed.
    """
    if micro_batch.ref_logprobs is not None:
        ref_T = float_tensor(micro_batch.ref_logprobs.values, packed)
    columns = micro_batch.rollout_logprobs.values, micro_batch.loss_mask.values, micro_batch.token_advantages
    rollout_T, mask_T, advantages_T = (float_tensor(values, packed) for values in columns)
    is_policy = models.is_policy(micro_batch)
    is_policy_T = torch.from_numpy(is_policy).to(packed.row_T.device)[packed.row_T]
    if is_policy.all():
        old_T = None
    elif models.old_model is None:
        old_T = rollout_T
    is_fresh_T = torch.from_numpy(micro_batch.staleness == 0).to(packed.row_T.device)[packed.row_T]
    row_tokens_R = mask_T.new_zeros(len(micro_batch.indices)).index_add(0, packed.row_T, mask_T)
    return Given(packed, rollout_T, mask_T, advantages_T, row_tokens_R, old_T, is_policy_T, is_fresh_T, ref_T)


def loss(
    known: Given,
    objective: Objective,
    hidden_TH: Tensor,
    head_VH: Tensor,
    *,
    chunk_tokens: int,
    shard: VocabularyShard | None = None,
    softcap: float | None = None,
) -> MicroLoss:
    """Loss from the policy's hidden states [T, H] and its output layer [V, H], with the numbers of its result.

    `chunk_tokens`: rows of logits that exist at a time, at most. With `shard`, `head_VH` is this rank's part of the output layer.
    `softcap`: see `log_probs_and_entropy`.
    Waits for the device once.
    """
    targets_T = known.packed.targets_T
    of_head: dict[str, Any] = {"chunk_tokens": chunk_tokens, "shard": shard, "softcap": softcap}

    def part_loss(part: slice, logprobs_C: Tensor, entropy_C: Tensor) -> LossSums:
        own_C = logprobs_C.detach()
        return objective.loss(
            TokenBatch(
                logprobs_T=logprobs_C,
                old_logprobs_T=own_C if known.old_T is None else torch.where(known.is_policy_T[part], own_C, known.old_T[part]),
                rollout_logprobs_T=known.rollout_T[part],
                ref_logprobs_T=None if known.ref_T is None else known.ref_T[part],
                entropy_T=entropy_C,
                advantages_T=known.advantages_T[part],
                mask_T=known.mask_T[part],
                row_T=known.packed.row_T[part],
                row_tokens_R=known.row_tokens_R,
            )
        )

    metrics: Mapping[str, Tensor]
    if objective.is_token_local:
        total, metrics, logprobs_T = token_local_loss(hidden_TH, head_VH, targets_T, part_loss, **of_head)
    else:
        logprobs_T, entropy_T = log_probs_and_entropy(hidden_TH, head_VH, targets_T, **of_head)
        sums = part_loss(slice(None), logprobs_T, entropy_T)
        total, logprobs_T = sums.loss, logprobs_T.detach()
        metrics = {name: value.detach() for name, value in sums.metrics.items()}
    return MicroLoss(total, _result(known, total.detach(), metrics, logprobs_T))


def _result(known: Given, total: Tensor, metrics: Mapping[str, Tensor], logprobs_T: Tensor) -> MicroBatchResult:
    rollout_T, mask_T = known.rollout_T, known.mask_T
    is_finite = total.isfinite() & logprobs_T.isfinite().all()
    differences_T = (logprobs_T - rollout_T).abs().where(mask_T > 0, 0.0)
    is_equal_T = (logprobs_T == rollout_T) & (mask_T > 0)
    log_ratio_T = (logprobs_T - rollout_T).where(known.is_fresh_T & (mask_T > 0), 0.0)
    metrics = {
        **metrics,
        "policy/rollout_logprob_difference": differences_T.sum(),
        "mismatch/logprob_difference": log_ratio_T.abs().sum(),
        "mismatch/kl": (log_ratio_T.expm1() - log_ratio_T).sum(),  # k3, as in algorithms/functional.py
        "mismatch/tokens": (known.is_fresh_T & (mask_T > 0)).sum(),
    }
    # One transfer for all the numbers: each .item() on its own would wait for the device.
    numbers = [total, mask_T.sum(), is_finite, is_equal_T.sum(), differences_T.max(), *metrics.values()]
    loss_sum, loss_tokens, finite, num_equal, difference, *values = torch.stack([n.double() for n in numbers]).tolist()
    return MicroBatchResult(
        loss_sum=loss_sum,
        loss_tokens=int(loss_tokens),
        physical_tokens=known.packed.num_tokens - known.packed.fill_tokens,
        metrics=dict(zip(metrics, values, strict=True)),
        is_finite=bool(finite),
        logprob_differences=(int(num_equal), difference),
    )


def float_tensor(values: Array, packed: Packed) -> Tensor:
    """Column of a micro-batch, float32, on the device of `packed`."""
    # Copied: what came off a wire may be read-only, which torch cannot express.
    return torch.tensor(values, dtype=torch.float32, device=packed.row_T.device)
