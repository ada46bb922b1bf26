"""Sharing the prompt must change nothing: a micro-batch is computed both ways, and compared."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from asyncflow.engines.base import MicroBatch
from asyncflow.engines.train.model.causal_model import CausalModel
from asyncflow.engines.train.model.log_probs import log_probs_and_entropy
from asyncflow.engines.train.model.packing import Packed, pack
from asyncflow.types import RunError

# T response tokens.

TOLERANCES = {torch.float32: (1e-3, 1e-3), torch.bfloat16: (0.25, 0.01)}
"""By the dtype of the passes: nats that a token's log-prob may differ by, and the gradients' distance relative to the norm.

What rounding makes of them, seen on small models: 1e-5 and 1e-6 in float32, 0.09 and 0.003 in bfloat16. A response that sees
another one makes 0.3 and 0.02 or more.
"""

_ADVICE = "that is a fault of the attention on this device, to be reported; train.responses_per_micro_batch=1 trains without it"


def check_sharing(policy: CausalModel, micro_batch: MicroBatch) -> None:
    """Compare the log-probs of a micro-batch, and the gradient of their sum, with and without a shared prompt.

    Raises:
        RunError: they differ by more than rounding explains.
    """
    shared, rows = both_ways(micro_batch, policy.device)
    (shared_T, gradients), (rows_T, expected) = (_computed(policy, packed) for packed in (shared, rows))
    distance, size = (
        torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in tensors])).item()
        for tensors in ([a - b for a, b in zip(gradients, expected, strict=True)], expected)
    )
    if not (rows_T.isfinite().all() and math.isfinite(size)):
        return  # the weights or the batch are broken either way, which is told where the loss is looked at
    refuse(log_prob_fault(shared_T, rows_T, shared, micro_batch, policy.dtype) or gradient_fault(distance, size, policy.dtype))


def check_shared_log_probs(
    log_probs: Callable[[Packed], Tensor], micro_batch: MicroBatch, device: str | torch.device, dtype: torch.dtype
) -> None:
    """`check_sharing` without the gradients, for a model that is more than its parameters. `log_probs` (float32 [T]): the policy's.

    Raises:
        RunError: they differ by more than rounding explains.
    """
    shared, rows = both_ways(micro_batch, device)
    with torch.no_grad():
        refuse(log_prob_fault(log_probs(shared), log_probs(rows), shared, micro_batch, dtype))


def both_ways(micro_batch: MicroBatch, device: str | torch.device) -> tuple[Packed, Packed]:
    """The micro-batch packed with a shared prompt, and with one for each row."""
    shared, rows = (pack(micro_batch.prompt_ids, micro_batch.response_ids, device, is_shared=way) for way in (True, False))
    return shared, rows


def log_prob_fault(shared_T: Tensor, rows_T: Tensor, packed: Packed, micro_batch: MicroBatch, dtype: torch.dtype) -> str:
    """The worst log-prob, if it differs by more than rounding explains; else nothing. `packed`: with the shared prompt."""
    if not rows_T.isfinite().all():
        return ""
    differences_T = (shared_T - rows_T).abs()
    worst = int(differences_T.nan_to_num(nan=torch.inf).argmax())
    if differences_T[worst] <= TOLERANCES[dtype][0]:
        return ""
    row = int(micro_batch.indices[int(packed.row_T[worst])])
    return f"the log-prob {shared_T[worst]:.6f} for a token of row {row}, where the row alone has {rows_T[worst]:.6f}"


def gradient_fault(distance: float, size: float, dtype: torch.dtype) -> str:
    """What is wrong with a gradient that is so far from that of the rows, whose norm is `size`; nothing if rounding explains it."""
    if not math.isfinite(size) or distance <= TOLERANCES[dtype][1] * size:
        return ""
    return f"a gradient {distance:.3g} away from that of the rows alone, whose norm is {size:.3g}"


def refuse(fault: str) -> None:
    """Raises `RunError` if there is one."""
    if fault:
        raise RunError(f"sharing the prompt gives {fault}: {_ADVICE}")


def _computed(policy: CausalModel, packed: Packed) -> tuple[Tensor, tuple[Tensor, ...]]:
    hidden_TH, head_VH = policy.hidden(packed)
    logprobs_T, _ = log_probs_and_entropy(hidden_TH, head_VH, packed.targets_T, chunk_tokens=policy.chunk_tokens)
    return logprobs_T.detach(), torch.autograd.grad(logprobs_T.sum(), list(policy.parameters.values()))
