"""Log-probs of chosen tokens and entropies from hidden states, without ever holding the logits of all tokens.

For a vocabulary of 150,000, the logits of 10,000 tokens are 6 GB in float32, and their gradient as much again. Here the logits
of a chunk of tokens are made, used and dropped, and made again for the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# T response tokens, C tokens of a chunk, H hidden elements, V tokens of the vocabulary.


def log_probs_and_entropy(hidden_TH: Tensor, head_VH: Tensor, targets_T: Tensor, *, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """log softmax(hidden head^T)[target] and the entropy of the softmax in nats, both float32 [T].

    hidden_TH and head_VH share a floating dtype; the softmax is float32. targets_T int64. Only the log-probs carry a gradient, to
    both hidden states and head. At most `chunk_tokens` rows of logits exist at a time.
    """
    apply: Any = _ChosenLogProbs.apply  # torch has no types for it
    log_probs_T, entropy_T = apply(hidden_TH, head_VH, targets_T, chunk_tokens)
    return log_probs_T, entropy_T


class _ChosenLogProbs(torch.autograd.Function):
    """d log p[target] / d logits = onehot(target) - p, with p made again from the saved log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, head_VH: Tensor, targets_T: Tensor, chunk_tokens: int) -> tuple[Tensor, Tensor]:
        log_probs_T, entropy_T, lse_T = (hidden_TH.new_empty(len(hidden_TH), dtype=torch.float32) for _ in range(3))
        for begin in range(0, len(hidden_TH), chunk_tokens):
            part = slice(begin, begin + chunk_tokens)
            logits_CV = (hidden_TH[part] @ head_VH.t()).float()
            lse_C = logits_CV.logsumexp(1)
            log_probs_T[part] = logits_CV.gather(1, targets_T[part, None]).squeeze(1) - lse_C
            lse_T[part] = lse_C
            # H = - sum p log p = lse - sum p logit
            p_CV = (logits_CV - lse_C[:, None]).exp_()
            entropy_T[part] = lse_C - torch.linalg.vecdot(p_CV, logits_CV)
        ctx.save_for_backward(hidden_TH, head_VH, targets_T, lse_T)
        ctx.chunk_tokens = chunk_tokens
        ctx.mark_non_differentiable(entropy_T)
        return log_probs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor, _grad_entropy_T: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_TH, head_VH, targets_T, lse_T = ctx.saved_tensors
        grad_hidden_TH = torch.empty_like(hidden_TH)
        grad_head_VH = torch.zeros_like(head_VH, dtype=torch.float32)
        for begin in range(0, len(hidden_TH), ctx.chunk_tokens):
            part = slice(begin, begin + ctx.chunk_tokens)
            grad_logits_CV = (hidden_TH[part] @ head_VH.t()).float()
            grad_logits_CV.sub_(lse_T[part, None]).exp_().mul_(-grad_T[part, None])
            grad_logits_CV.scatter_add_(1, targets_T[part, None], grad_T[part, None])
            grad_CV = grad_logits_CV.to(hidden_TH.dtype)
            grad_hidden_TH[part] = grad_CV @ head_VH
            grad_head_VH += grad_CV.t() @ hidden_TH[part]
        return grad_hidden_TH, grad_head_VH.to(head_VH.dtype), None, None
