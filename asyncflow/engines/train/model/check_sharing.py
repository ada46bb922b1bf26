"""Check that sharing the prompt changes nothing: a micro-batch is computed with and without sharing, and compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from asyncflow.engines.base import MicroBatch
from asyncflow.engines.train.accumulate import order_free_norm
from asyncflow.engines.train.model.log_probs import log_probs_and_entropy
from asyncflow.engines.train.model.packing import Packed, pack
from asyncflow.types import RunError

if TYPE_CHECKING:
    from asyncflow.engines.train.model.causal_model import CausalModel

# T response tokens.

TOLERANCES = {torch.float32: (1e-3, 1e-3), torch.bfloat16: (0.25, 0.1)}
"""Tolerances by the dtype of the passes: difference of a token's log-prob in nats, and relative distance of the gradients.

Rounding alone gives 1e-5 and 1e-6 in float32. In bfloat16 it gives up to 0.09 and 0.04: a gradient of a sum of log-probs is small
beside its addends. If a response sees another response, a trained model's differences are 0.25 and 1 or more; those of a model of
random weights are 0.3 and 0.02.
"""

_ADVICE = "that is a fault of the attention on this device, to be reported; train.responses_per_micro_batch=1 trains without it"


def check_sharing(policy: CausalModel, micro_batch: MicroBatch) -> None:
    """Compare the log-probs of a micro-batch, and the gradient of their sum, with and without a shared prompt.

    Raises `RunError` if they differ by more than rounding explains.
    """
    shared, rows = both_ways(micro_batch, policy.device)
    (shared_T, gradients), (rows_T, expected) = (_computed(policy, packed) for packed in (shared, rows))
    distance, size = map(order_free_norm, ([a - b for a, b in zip(gradients, expected, strict=True)], expected))
    if not (rows_T.isfinite().all() and math.isfinite(size)):
        return  # the weights or the batch are broken without sharing, too; the check of the loss reports it
    refuse(log_prob_fault(shared_T, rows_T, shared, micro_batch, policy.dtype) or gradient_fault(distance, size, policy.dtype))


def check_shared_log_probs(
    log_probs: Callable[[Packed], Tensor], micro_batch: MicroBatch, device: str | torch.device, dtype: torch.dtype
) -> None:
    """Compare only the log-probs of a micro-batch, with and without a shared prompt.

    For engines whose gradients cannot be computed from the parameters alone. `log_probs` gives the policy's, float32 [T], and
    `dtype` is that of its passes.

    Raises `RunError` if they differ by more than rounding explains.
    """
    shared, rows = both_ways(micro_batch, device)
    with torch.no_grad():
        refuse(log_prob_fault(log_probs(shared), log_probs(rows), shared, micro_batch, dtype))


def both_ways(micro_batch: MicroBatch, device: str | torch.device) -> tuple[Packed, Packed]:
    """Micro-batch packed twice: with one shared prompt, and with a prompt for each row."""
    shared, rows = (pack(micro_batch.prompt_ids, micro_batch.response_ids, device, is_shared=way) for way in (True, False))
    return shared, rows


def log_prob_fault(shared_T: Tensor, rows_T: Tensor, packed: Packed, micro_batch: MicroBatch, dtype: torch.dtype) -> str:
    """Description of the worst log-prob, if it differs by more than rounding explains; else "".

    `shared_T`, `rows_T`: log-probs float32 [T] with and without sharing. `packed`: the micro-batch with the shared prompt.
    """
    if not rows_T.isfinite().all():
        return ""
    differences_T = (shared_T - rows_T).abs()
    worst = int(differences_T.nan_to_num(nan=torch.inf).argmax())
    if differences_T[worst] <= TOLERANCES[dtype][0]:
        return ""
    row = int(micro_batch.indices[int(packed.row_T[worst])])
    return f"the log-prob {shared_T[worst]:.6f} for a token of row {row}, where the row alone has {rows_T[worst]:.6f}"


def gradient_fault(distance: float, size: float, dtype: torch.dtype) -> str:
    """Description of a wrong gradient; "" if rounding explains the difference.

    `distance`: norm of the difference between the gradients with and without sharing. `size`: norm of the one without.
    """
    if not math.isfinite(size) or distance <= TOLERANCES[dtype][1] * size:
        return ""
    return f"a gradient {distance:.3g} away from that of the rows alone, whose norm is {size:.3g}"


def refuse(fault: str) -> None:
    """Raise `RunError` with the description of a fault, unless it is empty."""
    if fault:
        raise RunError(f"sharing the prompt gives {fault}: {_ADVICE}")


def _computed(policy: CausalModel, packed: Packed) -> tuple[Tensor, tuple[Tensor, ...]]:
    logprobs_T, _ = log_probs_and_entropy(*policy.hidden(packed), packed.targets_T)
    return logprobs_T.detach(), torch.autograd.grad(logprobs_T.sum(), list(policy.parameters.values()))
