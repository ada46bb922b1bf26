"""Log-probs of chosen tokens and entropies from hidden states, without ever holding the logits of all tokens.

For a vocabulary of 150,000, the logits of 10,000 tokens are 6 GB in float32, and their gradient as much again. Here the logits
of a chunk of tokens are made, used and dropped. Their gradient follows from those of the log-probs and, if the loss uses them, of
the entropies, and there are two ways to it:

    token_local_losses         the loss is a sum over tokens: each chunk's loss and gradient are made while its logits are there
    log_probs_and_entropy      any loss (of whole sequences, say): its gradient comes later, and the logits are made again for it

Under tensor parallelism each rank has some rows of the head (`VocabularyShard`), and makes its columns of the logits. One gather
for each chunk exchanges three numbers a token: the log-sum-exp, the expected logit and the target's logit of each shard. All ranks
then compute the same log-probs and entropies, to the bit. In the backward the hidden states' gradients are summed once for all
chunks.

Several micro-batches may come end to end (`counts`). All but the matrix products is then computed micro-batch by micro-batch, and
rows of a product do not depend on the others, so each one's numbers have the bits that they have alone. The head's gradient mixes
rows: `Head.sums` takes it from each micro-batch by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from asyncflow.engines.cuts import cut_by_size
from asyncflow.engines.train.model.products import over_rows, rows_by, rows_by_transposed
from asyncflow.engines.train.model.rank_sums import summed
from asyncflow.types import LossSums, is_maximum

if TYPE_CHECKING:
    from asyncflow.engines.train.pass_gradients import PassGradients

# T response tokens, C tokens of a chunk or more, H hidden elements, V tokens of the vocabulary or of this rank's shard, R ranks.

LEAST_ROWS: Final = 4
"""Rows of a matrix product from which on a row's bits do not depend on the others: with fewer, another routine is taken."""


class Chunk(NamedTuple):
    """Tokens of one micro-batch whose logits exist at the same time. `is_whole`: it has no others. `is_last`: of its chunks."""

    number: int
    tokens: slice
    is_whole: bool
    is_last: bool

    def within(self, rows: slice) -> slice:
        """Place of the chunk in the logits of all tokens `rows`, which are made together."""
        return slice(self.tokens.start - rows.start, self.tokens.stop - rows.start)


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


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """Output layer as a pass uses it: its weight, with `shard` this rank's rows of it.

    At most `chunk_tokens` rows of logits exist at a time. With `softcap` c the logits are c tanh(hidden weight^T / c). `sums` get
    the weight's gradient, micro-batch by micro-batch, and autograd gets none.
    """

    weight_VH: Tensor
    chunk_tokens: int
    shard: VocabularyShard | None = None
    softcap: float | None = None
    sums: PassGradients | None = None

    def taken_by(self, sums: PassGradients) -> Head:
        """The same layer, whose gradient goes to `sums`."""
        return replace(self, weight_VH=self.weight_VH.detach(), sums=sums)


def log_probs_and_entropy(
    hidden_TH: Tensor, head: Head, targets_T: Tensor, counts: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs log softmax(hidden head^T)[target] and entropies of the softmax in nats, both float32 [T].

    Hidden states and head share a floating dtype; the softmax is float32 (float64 for float64). targets_T int64. Both results carry
    a gradient to hidden states and head; the gradient of entropies costs nothing if no loss uses them. With `Head.shard` results
    and gradient of the hidden states are those of the whole head. `counts`: tokens of each micro-batch; None: it is one.
    """
    chunks = _chunks(counts or [len(hidden_TH)], head.chunk_tokens)
    apply: Any = _ChosenLogProbs.apply  # torch has no types for it
    log_probs_T, entropy_T = apply(hidden_TH, head.weight_VH, targets_T, chunks, head)
    return log_probs_T, entropy_T


def token_local_losses(
    hidden_TH: Tensor,
    head: Head,
    targets_T: Tensor,
    loss: Callable[[int, slice, Tensor, Tensor], LossSums],
    counts: Sequence[int],
) -> tuple[Tensor, list[LossSums], Tensor]:
    """Losses that are sums over tokens, of micro-batches of `counts` tokens: the scalar that is the sum over all, each one's own
    numbers, detached, its metrics joined over its chunks, and the detached log-probs (float32 [T]).

    `loss` takes a micro-batch's number and a slice of its tokens, with that chunk's log-probs and entropies (leaves that require
    grad), both as in `log_probs_and_entropy`, and may not use other chunks. The gradients for hidden states and head are computed
    here already, chunk by chunk, and the scalar carries them: it can be run backward once. Without grad mode no gradient is
    computed. `Head.sums` get the head's gradient at once; a micro-batch whose loss or log-probs are not finite is then muted, and
    its hidden states get a gradient of 0.
    """
    head_VH, sums_of_head = head.weight_VH, head.sums
    has_grad = torch.is_grad_enabled() and (hidden_TH.requires_grad or head_VH.requires_grad)
    dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
    losses = [LossSums(hidden_TH.new_zeros((), dtype=dtype), {}) for _ in counts]
    log_probs_T = hidden_TH.new_empty(len(hidden_TH), dtype=dtype)
    gradients = _Gradients(hidden_TH, head, dtype, is_head_trained=head_VH.requires_grad) if has_grad else None
    begins = [0, *accumulate(counts)]
    for rows, together in _chunks(counts, head.chunk_tokens):
        with torch.no_grad():
            logits_CV = _logits(hidden_TH[rows], head)
            p_CV = torch.empty_like(logits_CV)
        for chunk in together:
            number, tokens, own = chunk.number, chunk.tokens, chunk.within(rows)
            with torch.no_grad():
                log_probs_C, entropy_C, _ = _softmax(logits_CV[own], p_CV[own], targets_T[tokens], head)
                log_probs_T[tokens] = log_probs_C
            part = slice(tokens.start - begins[number], tokens.stop - begins[number])
            sums = loss(number, part, log_probs_C.requires_grad_(has_grad), entropy_C.requires_grad_(has_grad))
            losses[number] = _added(losses[number], sums)
            if has_grad:
                grad_C, grad_entropy_C = torch.autograd.grad(sums.loss, (log_probs_C, entropy_C), allow_unused=True)
                bonus = None if grad_entropy_C is None else (grad_entropy_C, entropy_C.detach())
                with torch.no_grad():
                    grad_C = torch.zeros_like(log_probs_C) if grad_C is None else grad_C
                    _to_grad_logits(grad_C, bonus, p_CV[own], targets_T[tokens], logits_CV[own], head)
            if sums_of_head is not None and chunk.is_last:
                of_micro_batch = log_probs_T[begins[number] : begins[number + 1]]
                if not bool(losses[number].loss.isfinite() & of_micro_batch.isfinite().all()):
                    sums_of_head.mute(number)
        del logits_CV  # before the products, which may copy the gradient to fill its rows up
        if gradients is not None:
            gradients.add(p_CV, rows, together)
        del p_CV  # before the next chunk's logits
    total = torch.stack([sums.loss for sums in losses]).sum() if len(losses) > 1 else losses[0].loss
    if gradients is not None:
        for number in range(len(counts)) if sums_of_head is not None else ():
            if sums_of_head is not None and sums_of_head.is_muted(number):
                gradients.of_hidden_TH[begins[number] : begins[number + 1]] = 0.0
        apply: Any = _KnownGradients.apply
        total = apply(total, hidden_TH, head_VH, *gradients.whole())
    return total, losses, log_probs_T


def _added(sums: LossSums, more: LossSums) -> LossSums:
    metrics = dict(sums.metrics)
    for name, tensor in more.metrics.items():
        value = tensor.detach()
        if name not in metrics:
            metrics[name] = value
        else:
            metrics[name] = metrics[name].maximum(value) if is_maximum(name) else metrics[name] + value
    return LossSums(sums.loss + more.loss.detach(), metrics)


class _Gradients:
    """Gradients of hidden states and head, from those of the logits, chunk by chunk. `Head.sums` get the head's: at once, or, of
    one of several chunks of a micro-batch, summed over these."""

    def __init__(self, hidden_TH: Tensor, head: Head, dtype: torch.dtype, *, is_head_trained: bool) -> None:
        """`dtype`: of sums over chunks. `is_head_trained`: whether autograd wants the head's, too."""
        self._hidden_TH, self._head, self._dtype = hidden_TH, head, dtype
        self.of_hidden_TH = torch.empty_like(hidden_TH)
        self._sum_VH = self._zeros() if is_head_trained and head.sums is None else None

    @torch.no_grad()
    def add(self, grad_CV: Tensor, rows: slice, together: Sequence[Chunk]) -> None:
        """Take the gradient of the logits [C, V] of chunks, whose tokens are `rows`."""
        grad_CV, hidden_CH = grad_CV.to(self._hidden_TH.dtype), self._hidden_TH[rows]
        self.of_hidden_TH[rows] = rows_by(_enough(grad_CV), self._head.weight_VH)[: len(grad_CV)]
        if self._head.sums is not None:
            self._hand_over(self._head.sums, grad_CV, hidden_CH, [(chunk, chunk.within(rows)) for chunk in together])
        elif self._sum_VH is not None:
            self._sum_VH += over_rows(grad_CV, hidden_CH)

    def whole(self) -> tuple[Tensor, Tensor | None]:
        """Gradients of hidden states [T, H], over all shards, and head [V, H], None if autograd does not want it."""
        if self._head.shard is not None:
            self.of_hidden_TH = summed(self.of_hidden_TH, self._head.shard.group)
        return self.of_hidden_TH, None if self._sum_VH is None else self._sum_VH.to(self._head.weight_VH.dtype)

    def _hand_over(self, sums: PassGradients, grad_CV: Tensor, hidden_CH: Tensor, together: Sequence[tuple[Chunk, slice]]) -> None:
        if whole := [(each.number, own) for each, own in together if each.is_whole and not sums.is_muted(each.number)]:
            sums.add_head(grad_CV, hidden_CH, whole)
        for each, own in together:
            if each.is_whole:
                continue
            if self._sum_VH is None:
                self._sum_VH = self._zeros()
            self._sum_VH += over_rows(grad_CV[own], hidden_CH[own])
            if each.is_last:
                if not sums.is_muted(each.number):
                    sums.add_head_whole(each.number, self._sum_VH.to(self._head.weight_VH.dtype))
                self._sum_VH = None

    def _zeros(self) -> Tensor:
        return torch.zeros_like(self._head.weight_VH, dtype=self._dtype)


def _chunks(counts: Sequence[int], chunk_tokens: int) -> list[tuple[slice, list[Chunk]]]:
    """Chunks of at most `chunk_tokens` tokens, as few as possible for each micro-batch, of even sizes; those whose logits are
    made together are in one list, and have at most `chunk_tokens` tokens, too. With each list its tokens' places among all.

    A last chunk of 1 to 3 tokens would be multiplied by another routine, with other bits.
    """
    chunks: list[Chunk] = []
    for number, (begin, end) in enumerate(pairwise([0, *accumulate(counts)])):
        num_chunks = -(-(end - begin) // chunk_tokens)
        ends = [begin + (end - begin) * i // num_chunks for i in range(num_chunks + 1)] if num_chunks else [begin]
        chunks += [Chunk(number, slice(first, last), num_chunks == 1, last == end) for first, last in pairwise(ends)]
    lists = cut_by_size(chunks, lambda chunk: chunk.tokens.stop - chunk.tokens.start, chunk_tokens)
    return [(slice(together[0].tokens.start, together[-1].tokens.stop), together) for together in lists]


def _softmax(logits_CV: Tensor, p_CV: Tensor, targets_C: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs [C] of the targets, entropies [C] and log-sum-exps [C] of one chunk. Writes the probabilities to `p_CV`."""
    lse_C = logits_CV.logsumexp(1)
    torch.sub(logits_CV, lse_C[:, None], out=p_CV).exp_()
    # H = - sum p log p = lse - sum p logit
    # A product of vectors is one of matrices on an accelerator, whose kernels are slow for those of one row.
    expected_C = torch.linalg.vecdot(p_CV, logits_CV) if p_CV.is_cpu else (p_CV * logits_CV).sum(1)
    if head.shard is None:
        return logits_CV.gather(1, targets_C[:, None]).squeeze(1) - lse_C, lse_C - expected_C, lse_C
    rows_C, is_here_C = head.shard.find(targets_C, len(head.weight_VH))
    chosen_C = logits_CV.gather(1, rows_C[:, None]).squeeze(1).where(is_here_C, 0.0)
    whole_C, expected_C, chosen_C = head.shard.join(lse_C, expected_C, chosen_C)
    p_CV.mul_((lse_C - whole_C).exp_()[:, None])
    return chosen_C - whole_C, whole_C - expected_C, whole_C


def _logits(hidden_CH: Tensor, head: Head) -> Tensor:
    """Logits [C, V], float32 or wider."""
    if head.sums is not None and len(hidden_CH) >= LEAST_ROWS:
        logits_CV = head.sums.product(hidden_CH, head.weight_VH)
    else:
        logits_CV = rows_by_transposed(_enough(hidden_CH), head.weight_VH)[: len(hidden_CH)]
    if head.softcap is not None:  # in the dtype of the product, as the model itself
        logits_CV = logits_CV.div_(head.softcap).tanh_().mul_(head.softcap)
    return logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))


def _enough(rows_CX: Tensor) -> Tensor:
    """Rows, at least `LEAST_ROWS` of them."""
    missing = LEAST_ROWS - len(rows_CX)
    return rows_CX if missing <= 0 else torch.cat([rows_CX, rows_CX.new_zeros(missing, rows_CX.shape[1])])


def _to_grad_logits(
    grad_C: Tensor,
    bonus: tuple[Tensor, Tensor] | None,
    p_CV: Tensor,
    targets_C: Tensor,
    logits_CV: Tensor,
    head: Head,
) -> None:
    """Turn the probabilities `p_CV` into the gradient of the logits before the cap, from that of the log-probs, in place.

    d log p[target] / d logits = onehot(target) - p, and dH / d logits = - p (log p + H). `bonus`: the gradient of the entropies
    [C] and the entropies [C], if the loss uses them. `logits_CV`: with the cap. With `Head.shard` the result is this rank's part.
    """
    chosen_grad_C = grad_C
    if head.shard is not None:
        targets_C, is_here_C = head.shard.find(targets_C, len(head.weight_VH))
        chosen_grad_C = grad_C.where(is_here_C, 0.0)
    bonus_CV = None
    if bonus is not None:
        grad_entropy_C, entropy_C = bonus
        # entr(p) = - p log p, and 0 where p is.
        bonus_CV = torch.special.entr(p_CV).addcmul_(p_CV, entropy_C[:, None], value=-1.0).mul_(grad_entropy_C[:, None])
    p_CV.mul_(-grad_C[:, None]).scatter_add_(1, targets_C[:, None], chosen_grad_C[:, None])
    if bonus_CV is not None:
        p_CV.add_(bonus_CV)
    if head.softcap is not None:  # d (c tanh(x / c)) / dx = 1 - tanh(x / c)^2
        p_CV.mul_((logits_CV / head.softcap).square_().neg_().add_(1.0))


class _ChosenLogProbs(torch.autograd.Function):
    """`log_probs_and_entropy` by chunks. It keeps the log-sum-exp, so the backward makes the logits again, but reduces nothing."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, head_VH: Tensor, targets_T: Tensor, chunks: list[tuple[slice, list[Chunk]]], head: Head
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, float32 [T]. `head_VH`: the head's weight, for autograd."""
        dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
        log_probs_T, entropy_T, lse_T = (hidden_TH.new_empty(len(hidden_TH), dtype=dtype) for _ in range(3))
        for rows, together in chunks:
            logits_CV = _logits(hidden_TH[rows], head)
            for chunk in together:
                tokens, own_CV = chunk.tokens, logits_CV[chunk.within(rows)]
                found = _softmax(own_CV, torch.empty_like(own_CV), targets_T[tokens], head)
                log_probs_T[tokens], entropy_T[tokens], lse_T[tokens] = found
            del logits_CV, own_CV  # before the next chunk's logits
        ctx.save_for_backward(hidden_TH, head_VH, targets_T, lse_T, entropy_T)
        ctx.chunks, ctx.head = chunks, head
        ctx.set_materialize_grads(False)  # a result that no loss uses has None for a gradient
        return log_probs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """Gradients of hidden states and, if it is trained, head; None for both if no loss uses log-probs or entropies."""
        hidden_TH, head_VH, targets_T, lse_T, entropy_T = ctx.saved_tensors
        if grad_T is None and grad_entropy_T is None:
            return None, None, None, None, None
        grad_T = torch.zeros_like(lse_T) if grad_T is None else grad_T
        head = replace(ctx.head, weight_VH=head_VH)
        gradients = _Gradients(hidden_TH, head, lse_T.dtype, is_head_trained=ctx.needs_input_grad[1])
        for rows, together in ctx.chunks:
            logits_CV = _logits(hidden_TH[rows], head).to(lse_T.dtype)
            p_CV = torch.empty_like(logits_CV)
            for chunk in together:
                tokens, own = chunk.tokens, chunk.within(rows)
                torch.sub(logits_CV[own], lse_T[tokens, None], out=p_CV[own]).exp_()
                bonus = None if grad_entropy_T is None else (grad_entropy_T[tokens], entropy_T[tokens])
                _to_grad_logits(grad_T[tokens], bonus, p_CV[own], targets_T[tokens], logits_CV[own], head)
            del logits_CV  # before the products, which may copy the gradient to fill its rows up
            gradients.add(p_CV, rows, together)
            del p_CV  # before the next chunk's logits
        return *gradients.whole(), None, None, None


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
