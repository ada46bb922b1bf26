"""Log-probs of chosen tokens and entropies from hidden states, without ever holding the logits of all tokens.

For a vocabulary of 150,000, the logits of 10,000 tokens are 6 GB in float32, and their gradient as much again. Here the logits
of a chunk of tokens are made, used and dropped. Their gradient follows from those of the log-probs and, if the loss uses them, of
the entropies, and there are two ways to it:

    token_local_loss           the loss is a sum over tokens: each chunk's loss and gradient are made while its logits are there
    log_probs_and_entropy      any loss (of whole sequences, say): its gradient comes later, and the logits are made again for it

Under tensor parallelism each rank has some rows of the head (`VocabularyShard`), and makes its columns of the logits. One gather
for each chunk exchanges three numbers a token: the log-sum-exp, the expected logit and the target's logit of each shard. All ranks
then compute the same log-probs and entropies, to the bit. In the backward the hidden states' gradients are summed once for all
chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from asyncflow.types import LossSums, is_maximum

# T response tokens, C tokens of a chunk, H hidden elements, V tokens of the vocabulary or of this rank's shard, R ranks.


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyShard:
    """Place in the vocabulary of the head's rows that this rank has; the other ranks of `group` have the other rows.

    Shards may differ in size. All ranks of the group make the same calls, with the same hidden states, targets and chunks.
    """

    group: dist.ProcessGroup
    offset: int  # the token of the shard's first row

    def find(self, targets_C: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Rows of the targets in the shard, int64 [C], and whether they are there, bool [C]; if not, the row has no meaning."""
        rows_C = targets_C - self.offset
        return rows_C.clamp(0, num_rows - 1), (rows_C >= 0) & (rows_C < num_rows)

    def join(self, lse_C: Tensor, expected_C: Tensor, chosen_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-sum-exps, expected logits and target logits over the whole vocabulary, each [C], from those of this rank's shard.

        `chosen_C`: the target's logit; 0 if the target is not in the shard.
        """
        own_3C = torch.stack([lse_C, expected_C, chosen_C])
        all_R = [torch.empty_like(own_3C) for _ in range(self.group.size())]
        dist.all_gather(all_R, own_3C, group=self.group)
        lse_RC, expected_RC, chosen_RC = torch.stack(all_R, dim=1)
        whole_C = lse_RC.logsumexp(0)
        return whole_C, torch.linalg.vecdot((lse_RC - whole_C).exp(), expected_RC, dim=0), chosen_RC.sum(0)


def log_probs_and_entropy(
    hidden_TH: Tensor,
    head_VH: Tensor,
    targets_T: Tensor,
    *,
    chunk_tokens: int,
    shard: VocabularyShard | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs log softmax(hidden head^T)[target] and entropies of the softmax in nats, both float32 [T].

    With `softcap` c the logits are c tanh(hidden head^T / c).

    hidden_TH and head_VH share a floating dtype; the softmax is float32 (float64 for float64). targets_T int64. Both results carry
    a gradient to hidden states and head; the gradient of entropies costs nothing if no loss uses them. At most `chunk_tokens` rows
    of logits exist at a time. With `shard`, head_VH is this rank's part of the head; results and gradient of the hidden states are
    those of the whole head.
    """
    apply: Any = _ChosenLogProbs.apply  # torch has no types for it
    log_probs_T, entropy_T = apply(hidden_TH, head_VH, targets_T, chunk_tokens, shard, softcap)
    return log_probs_T, entropy_T


def token_local_loss(
    hidden_TH: Tensor,
    head_VH: Tensor,
    targets_T: Tensor,
    loss: Callable[[slice, Tensor, Tensor], LossSums],
    *,
    chunk_tokens: int,
    shard: VocabularyShard | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Loss that is a sum over tokens: the scalar, its metrics joined over the chunks, and the detached log-probs (float32 [T]).

    `loss` takes a slice of T with that chunk's log-probs and entropies (leaves that require grad), both as in
    `log_probs_and_entropy`, and may not use other chunks. The gradients for hidden states and head are computed here already, chunk
    by chunk, and the scalar carries them: it can be run backward once. Without grad mode no gradient is computed. `shard` and
    `softcap`: as in `log_probs_and_entropy`.
    """
    has_grad = torch.is_grad_enabled() and (hidden_TH.requires_grad or head_VH.requires_grad)
    dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
    total = hidden_TH.new_zeros((), dtype=dtype)
    metrics: dict[str, Tensor] = {}
    log_probs_T = hidden_TH.new_empty(len(hidden_TH), dtype=dtype)
    grads = (torch.empty_like(hidden_TH), _no_gradient(head_VH, dtype, is_trained=head_VH.requires_grad)) if has_grad else None
    for part in _chunks(len(hidden_TH), chunk_tokens):
        with torch.no_grad():
            log_probs_C, entropy_C, _, p_CV = _softmax(hidden_TH[part], head_VH, targets_T[part], shard, softcap)
            log_probs_T[part] = log_probs_C
        sums = loss(part, log_probs_C.requires_grad_(has_grad), entropy_C.requires_grad_(has_grad))
        total += sums.loss.detach()
        for name, tensor in sums.metrics.items():
            value = tensor.detach()
            if name not in metrics:
                metrics[name] = value
            else:
                metrics[name] = metrics[name].maximum(value) if is_maximum(name) else metrics[name] + value
        if grads is not None:
            grad_C, grad_entropy_C = torch.autograd.grad(sums.loss, (log_probs_C, entropy_C), allow_unused=True)
            bonus = None if grad_entropy_C is None else (grad_entropy_C, entropy_C.detach())
            with torch.no_grad():
                grad_C = torch.zeros_like(log_probs_C) if grad_C is None else grad_C
                inputs = (targets_T[part], hidden_TH[part], head_VH)
                grads[0][part] = _backward(grad_C, bonus, p_CV, *inputs, grads[1], shard, softcap)
        del p_CV  # before the next chunk's logits
    if grads is not None:
        if shard is not None:
            dist.all_reduce(grads[0], group=shard.group)
        apply: Any = _KnownGradients.apply
        total = apply(total, hidden_TH, head_VH, grads[0], None if grads[1] is None else grads[1].to(head_VH.dtype))
    return total, metrics, log_probs_T


def _no_gradient(head_VH: Tensor, dtype: torch.dtype, *, is_trained: bool) -> Tensor | None:
    """Zeros to add the head's gradient to; None for a head that is not trained."""
    return torch.zeros_like(head_VH, dtype=dtype) if is_trained else None


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    """Slices of at most `chunk_tokens` tokens, as few as possible, of even sizes.

    A last chunk of 1 to 3 tokens would be multiplied by another routine, with other bits.
    """
    num_chunks = -(-num_tokens // chunk_tokens)
    ends = [num_tokens * i // num_chunks for i in range(num_chunks + 1)]
    return [slice(begin, end) for begin, end in pairwise(ends)]


def _softmax(
    hidden_CH: Tensor, head_VH: Tensor, targets_C: Tensor, shard: VocabularyShard | None, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs [C] of the targets, entropies [C], log-sum-exps [C] and probabilities [C, V] of one chunk."""
    logits_CV = _logits(hidden_CH, head_VH, softcap)
    lse_C = logits_CV.logsumexp(1)
    p_CV = (logits_CV - lse_C[:, None]).exp_()
    # H = - sum p log p = lse - sum p logit
    expected_C = torch.linalg.vecdot(p_CV, logits_CV)
    if shard is None:
        return logits_CV.gather(1, targets_C[:, None]).squeeze(1) - lse_C, lse_C - expected_C, lse_C, p_CV
    rows_C, is_here_C = shard.find(targets_C, len(head_VH))
    chosen_C = logits_CV.gather(1, rows_C[:, None]).squeeze(1).where(is_here_C, 0.0)
    whole_C, expected_C, chosen_C = shard.join(lse_C, expected_C, chosen_C)
    return chosen_C - whole_C, whole_C - expected_C, whole_C, p_CV.mul_((lse_C - whole_C).exp_()[:, None])


def _logits(hidden_CH: Tensor, head_VH: Tensor, softcap: float | None) -> Tensor:
    """Logits [C, V], float32 or wider."""
    logits_CV = hidden_CH @ head_VH.t()
    if softcap is not None:  # in the dtype of the product, as the model itself
        logits_CV = logits_CV.div_(softcap).tanh_().mul_(softcap)
    return logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))


def _backward(
    grad_C: Tensor,
    bonus: tuple[Tensor, Tensor] | None,
    p_CV: Tensor,
    targets_C: Tensor,
    hidden_CH: Tensor,
    head_VH: Tensor,
    grad_head_VH: Tensor | None,
    shard: VocabularyShard | None,
    softcap: float | None,
) -> Tensor:
    """Gradient [C, H] of the hidden states from that of the log-probs; adds the head's to `grad_head_VH`, unless it is None.

    d log p[target] / d logits = onehot(target) - p, and dH / d logits = - p (log p + H). `bonus`: the gradient of the entropies
    [C] and the entropies [C], if the loss uses them. With `shard` the result is only the shard's share of the gradient. Overwrites
    the probabilities `p_CV`.
    """
    chosen_grad_C = grad_C
    if shard is not None:
        targets_C, is_here_C = shard.find(targets_C, len(head_VH))
        chosen_grad_C = grad_C.where(is_here_C, 0.0)
    bonus_CV = None
    if bonus is not None:
        grad_entropy_C, entropy_C = bonus
        # entr(p) = - p log p, and 0 where p is.
        bonus_CV = torch.special.entr(p_CV).addcmul_(p_CV, entropy_C[:, None], value=-1.0).mul_(grad_entropy_C[:, None])
    grad_logits_CV = p_CV.mul_(-grad_C[:, None]).scatter_add_(1, targets_C[:, None], chosen_grad_C[:, None])
    if bonus_CV is not None:
        grad_logits_CV = grad_logits_CV.add_(bonus_CV)
    if softcap is not None:  # d (c tanh(x / c)) / dx = 1 - tanh(x / c)^2
        grad_logits_CV.mul_(_logits(hidden_CH, head_VH, softcap).div_(softcap).square_().neg_().add_(1.0))
    grad_logits_CV = grad_logits_CV.to(hidden_CH.dtype)
    if grad_head_VH is not None:
        grad_head_VH += grad_logits_CV.t() @ hidden_CH
    return grad_logits_CV @ head_VH


class _ChosenLogProbs(torch.autograd.Function):
    """`log_probs_and_entropy` by chunks. It keeps the log-sum-exp, so the backward makes the logits again, but reduces nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        head_VH: Tensor,
        targets_T: Tensor,
        chunk_tokens: int,
        shard: VocabularyShard | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, float32 [T]."""
        dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
        log_probs_T, entropy_T, lse_T = (hidden_TH.new_empty(len(hidden_TH), dtype=dtype) for _ in range(3))
        for part in _chunks(len(hidden_TH), chunk_tokens):
            found = _softmax(hidden_TH[part], head_VH, targets_T[part], shard, softcap)
            log_probs_T[part], entropy_T[part], lse_T[part], p_CV = found
            del p_CV, found  # before the next chunk's logits
        ctx.save_for_backward(hidden_TH, head_VH, targets_T, lse_T, entropy_T)
        ctx.chunk_tokens, ctx.shard, ctx.softcap = chunk_tokens, shard, softcap
        ctx.set_materialize_grads(False)  # a result that no loss uses has None for a gradient
        return log_probs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        """Gradients of hidden states and, if it is trained, head; None for both if no loss uses log-probs or entropies."""
        hidden_TH, head_VH, targets_T, lse_T, entropy_T = ctx.saved_tensors
        if grad_T is None and grad_entropy_T is None:
            return None, None, None, None, None, None
        grad_T = torch.zeros_like(lse_T) if grad_T is None else grad_T
        grad_hidden_TH = torch.empty_like(hidden_TH)
        grad_head_VH = _no_gradient(head_VH, lse_T.dtype, is_trained=ctx.needs_input_grad[1])
        for part in _chunks(len(hidden_TH), ctx.chunk_tokens):
            p_CV = _logits(hidden_TH[part], head_VH, ctx.softcap).to(lse_T.dtype).sub_(lse_T[part, None]).exp_()
            bonus = None if grad_entropy_T is None else (grad_entropy_T[part], entropy_T[part])
            grad_hidden_TH[part] = _backward(
                grad_T[part], bonus, p_CV, targets_T[part], hidden_TH[part], head_VH, grad_head_VH, ctx.shard, ctx.softcap
            )
        if ctx.shard is not None:
            dist.all_reduce(grad_hidden_TH, group=ctx.shard.group)
        return grad_hidden_TH, None if grad_head_VH is None else grad_head_VH.to(head_VH.dtype), None, None, None, None


class _KnownGradients(torch.autograd.Function):
    """Scalar whose gradients for hidden states and head were computed before."""

    @staticmethod
    def forward(
        ctx: Any, total: Tensor, hidden_TH: Tensor, head_VH: Tensor, grad_hidden_TH: Tensor, grad_head_VH: Tensor | None
    ) -> Tensor:
        """Copy of the scalar `total`."""
        ctx.save_for_backward(grad_hidden_TH, grad_head_VH)
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor | None, None, None]:
        """Known gradients times `grad`, the scalar's own gradient."""
        # In place, since the head's is as large as the head; torch then refuses a second backward.
        grad_hidden_TH, grad_head_VH = ctx.saved_tensors
        return None, grad_hidden_TH.mul_(grad), None if grad_head_VH is None else grad_head_VH.mul_(grad), None, None
