"""Sharing the prompt must change nothing: a micro-batch is computed both ways, and compared."""

from __future__ import annotations

import math

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


def check_sharing(policy: CausalModel, micro_batch: MicroBatch) -> None:
    """Compare the log-probs of a micro-batch, and the gradient of their sum, with and without a shared prompt.

    Raises:
        RunError: they differ by more than rounding explains.
    """
    layouts = [pack(micro_batch.prompt_ids, micro_batch.response_ids, policy.device, is_shared=way) for way in (True, False)]
    (shared_T, gradients), (rows_T, expected) = (_both(policy, packed) for packed in layouts)
    logprob_limit, gradient_limit = TOLERANCES[policy.dtype]
    differences_T = (shared_T - rows_T).abs()
    worst = int(differences_T.nan_to_num(nan=torch.inf).argmax())
    distance, size = (
        torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in tensors])).item()
        for tensors in ([a - b for a, b in zip(gradients, expected, strict=True)], expected)
    )
    if not (rows_T.isfinite().all() and math.isfinite(size)):
        return  # the weights or the batch are broken either way, which is told where the loss is looked at
    row = int(micro_batch.indices[int(layouts[0].row_T[worst])])
    if not differences_T[worst] <= logprob_limit:
        what = f"the log-prob {shared_T[worst]:.6f} for a token of row {row}, where the row alone has {rows_T[worst]:.6f}"
    elif not distance <= gradient_limit * size:
        what = f"a gradient {distance:.3g} away from that of the rows alone, whose norm is {size:.3g}"
    else:
        return
    raise RunError(
        f"sharing the prompt gives {what}: that is a fault of the attention on this device, to be reported; "
        f"train.responses_per_micro_batch=1 trains without it"
    )


def _both(policy: CausalModel, packed: Packed) -> tuple[Tensor, tuple[Tensor, ...]]:
    hidden_TH, head_VH = policy.hidden(packed)
    logprobs_T, _ = log_probs_and_entropy(hidden_TH, head_VH, packed.targets_T, chunk_tokens=policy.chunk_tokens)
    return logprobs_T.detach(), torch.autograd.grad(logprobs_T.sum(), list(policy.parameters.values()))
