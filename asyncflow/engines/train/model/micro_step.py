"""Path of micro-batches from their tokens to a loss that can be run backward, the same for every train engine.

    micro-batch -> pack (packing.py) --+--> reference, old policy (tri_model.py) -> log-probs --+
                                       +--> policy (the engine's own) -------> hidden states ---+--> loss, by chunks (log_probs.py)

The engine does the backward pass, the sums of gradients and the update. It also runs the policy, between `given_all` and
`losses`, so that a pipeline may compute these two in different processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncflow.engines.base import MicroBatch, MicroBatchResult
from asyncflow.engines.train.model.log_probs import Head, log_probs_and_entropy, token_local_losses
from asyncflow.engines.train.model.packing import Packed
from asyncflow.engines.train.model.tri_model import TriModel
from asyncflow.types import Array, LossSums, Objective, TokenBatch

# T response tokens, C tokens of a chunk, R rows, H hidden elements, V tokens of the vocabulary.


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Inputs of the loss besides the policy's hidden states; float32 where not noted, on the model's device.

    The suffix gives the shape: T response tokens, R rows. `row_tokens_R`: number of loss tokens of each whole row. `old_T`,
    `ref_T`, `rollout_T`: log-probs of old policy, reference and rollout engine.
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
    examined: tuple[tuple[int, slice], ...] = ()  # rows that are examined token by token: index, and its tokens


@dataclass(frozen=True, slots=True, eq=False)
class PassLoss:
    """Loss of a pass: the sum over its micro-batches, which may be run backward once, and each one's result."""

    total: Tensor
    results: list[MicroBatchResult]

    @property
    def is_finite(self) -> bool:
        """Whether the losses of all micro-batches are finite."""
        return all(result.is_finite for result in self.results)


def given_all(models: TriModel[Any], packed: Packed, micro_batches: Sequence[MicroBatch]) -> list[Given]:
    """Compute the log-probs of the frozen models for a pass, and copy the micro-batches' columns to the device of `packed`.

    Raises `ValueError` for rows that are too stale for the old policy.
    """
    asks_old, asks_reference = models.asked(micro_batches)
    ref_T = models.reference.log_probs(packed) if models.reference is not None and asks_reference else None
    old_T = models.old_model.log_probs(packed) if models.old_model is not None and asks_old else None
    return given_all_frozen(models, packed, micro_batches, old_T, ref_T)


def given_all_frozen(
    models: TriModel[Any], packed: Packed, micro_batches: Sequence[MicroBatch], old_T: Tensor | None, ref_T: Tensor | None
) -> list[Given]:
    """`given_frozen` of each micro-batch of a pass, from log-probs (float32 [T]) of the whole pass."""
    olds, refs = (
        [None] * len(micro_batches) if each is None else each.split_with_sizes(packed.token_counts) for each in (old_T, ref_T)
    )
    parts = packed.parts or (packed,)
    return [given_frozen(models, *each) for each in zip(parts, micro_batches, olds, refs, strict=True)]


def given_frozen(
    models: TriModel[Any], packed: Packed, micro_batch: MicroBatch, old_T: Tensor | None, ref_T: Tensor | None
) -> Given:
    """Inputs of a micro-batch's loss, from known log-probs (float32 [T]) of the frozen models.

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
    if micro_batch.row_tokens is None:
        row_tokens_R = mask_T.new_zeros(len(micro_batch.indices)).index_add(0, packed.row_T, mask_T)
    else:
        row_tokens_R = float_tensor(micro_batch.row_tokens, packed)
    begins = micro_batch.response_ids.offsets.tolist()
    examined = tuple((int(micro_batch.indices[row]), slice(begins[row], begins[row + 1])) for row in micro_batch.examined_rows)
    return Given(packed, rollout_T, mask_T, advantages_T, row_tokens_R, old_T, is_policy_T, is_fresh_T, ref_T, examined)


def losses(known: Sequence[Given], objective: Objective, hidden_TH: Tensor, head: Head) -> PassLoss:
    """Losses of a pass's micro-batches from the policy's hidden states [T, H] and its output layer, with their results.

    With `Head.sums` a micro-batch that is not finite is muted there, and the total is without it.
    Waits for the device once; with `Head.sums` once more for each micro-batch.
    """
    counts = [len(each.packed.targets_T) for each in known]
    targets_T = torch.cat([each.packed.targets_T for each in known]) if len(known) > 1 else known[0].packed.targets_T
    token_figures: list[list[dict[str, Tensor]]] = [[] for _ in known]

    def part_loss(number: int, part: slice, logprobs_C: Tensor, entropy_C: Tensor) -> LossSums:
        own_C, own = logprobs_C.detach(), known[number]
        batch = TokenBatch(
            logprobs_T=logprobs_C,
            old_logprobs_T=own_C if own.old_T is None else torch.where(own.is_policy_T[part], own_C, own.old_T[part]),
            rollout_logprobs_T=own.rollout_T[part],
            ref_logprobs_T=None if own.ref_T is None else own.ref_T[part],
            entropy_T=entropy_C,
            advantages_T=own.advantages_T[part],
            mask_T=own.mask_T[part],
            row_T=own.packed.row_T[part],
            row_tokens_R=own.row_tokens_R,
        )
        sums = objective.loss(batch)
        if own.examined:
            token_figures[number].append(_token_figures(batch, sums))
        return sums

    sums: list[LossSums]
    if objective.is_token_local:
        total, sums, logprobs_T = token_local_losses(hidden_TH, head, targets_T, part_loss, counts)
        return PassLoss(total, _results(known, sums, logprobs_T.split_with_sizes(counts), token_figures))
    logprobs_T, entropy_T = log_probs_and_entropy(hidden_TH, head, targets_T, counts)
    of_micro_batches = zip(logprobs_T.split_with_sizes(counts), entropy_T.split_with_sizes(counts), strict=True)
    sums = [part_loss(number, slice(None), *each) for number, each in enumerate(of_micro_batches)]
    detached = [LossSums(each.loss.detach(), {name: x.detach() for name, x in each.metrics.items()}) for each in sums]
    results = _results(known, detached, logprobs_T.detach().split_with_sizes(counts), token_figures)
    if head.sums is not None:
        for number, result in enumerate(results):
            if not result.is_finite:
                head.sums.mute(number)
        sums = [each for each, result in zip(sums, results, strict=True) if result.is_finite]
    total = torch.stack([each.loss for each in sums]).sum() if len(sums) > 1 else sums[0].loss if sums else logprobs_T.sum() * 0.0
    return PassLoss(total, results)


def _token_figures(batch: TokenBatch, sums: LossSums) -> dict[str, Tensor]:
    """Figures of each token of a loss's input, [C]. The ratio is to the old policy."""
    logprobs_C = batch.logprobs_T.detach()
    reference = {} if batch.ref_logprobs_T is None else {"log-prob of the reference": batch.ref_logprobs_T}
    return {
        "log-prob of the trainer": logprobs_C,
        "ratio": (logprobs_C - batch.old_logprobs_T).exp(),
        "entropy": batch.entropy_T.detach(),
        "advantage": batch.advantages_T,
        **reference,
        **{name: values_C.detach() for name, values_C in sums.tokens.items()},
    }


def _results(
    known: Sequence[Given],
    sums: Sequence[LossSums],
    logprobs: Sequence[Tensor],
    token_figures: Sequence[Sequence[Mapping[str, Tensor]]],
) -> list[MicroBatchResult]:
    """Results of micro-batches, from their own losses and metrics, detached, their log-probs, and the figures of their chunks of
    tokens, in order, where there are any."""
    numbers: list[Tensor] = []
    names: list[list[str]] = []
    for one, of_loss, logprobs_T in zip(known, sums, logprobs, strict=True):
        mask_T, rollout_T = one.mask_T, one.rollout_T
        is_finite = of_loss.loss.isfinite() & logprobs_T.isfinite().all()
        differences_T = (logprobs_T - rollout_T).abs().where(mask_T > 0, 0.0)
        is_equal_T = (logprobs_T == rollout_T) & (mask_T > 0)
        log_ratio_T = (logprobs_T - rollout_T).where(one.is_fresh_T & (mask_T > 0), 0.0)
        metrics = {
            **of_loss.metrics,
            "policy/rollout_logprob_difference": differences_T.sum(),
            "mismatch/logprob_difference": log_ratio_T.abs().sum(),
            "mismatch/kl": (log_ratio_T.expm1() - log_ratio_T).sum(),  # k3, as in algorithms/functional.py
            "mismatch/tokens": (one.is_fresh_T & (mask_T > 0)).sum(),
        }
        names.append(list(metrics))
        numbers += [of_loss.loss, mask_T.sum(), is_finite, is_equal_T.sum(), differences_T.max(), *metrics.values()]
    of_rows = list(_figures_of_rows(known, token_figures))
    figures: list[dict[int, dict[str, list[float]]]] = [{} for _ in known]
    # One transfer for all the numbers: each .item() on its own would wait for the device.
    all_numbers = torch.stack([n.double() for n in numbers])
    if of_rows:
        all_numbers = torch.cat([all_numbers, *(values.double() for *_, values in of_rows)])
    each = iter(all_numbers.tolist())
    results = []
    for one, of_micro_batch, of_tokens in zip(known, names, figures, strict=True):
        loss_sum, loss_tokens, finite, num_equal, difference = (next(each) for _ in range(5))
        results.append(
            MicroBatchResult(
                loss_sum=loss_sum,
                loss_tokens=int(loss_tokens),
                physical_tokens=one.packed.num_tokens - one.packed.fill_tokens,
                metrics={name: next(each) for name in of_micro_batch},
                is_finite=bool(finite),
                logprob_differences=(int(num_equal), difference),
                token_figures=of_tokens,
            )
        )
    for number, index, name, values in of_rows:
        figures[number].setdefault(index, {})[name] = [next(each) for _ in range(len(values))]
    return results


def _figures_of_rows(
    known: Sequence[Given], token_figures: Sequence[Sequence[Mapping[str, Tensor]]]
) -> Iterator[tuple[int, int, str, Tensor]]:
    """Figures of the rows that are examined: micro-batch, index, name, and a number for each of the row's tokens."""
    for number, (one, parts) in enumerate(zip(known, token_figures, strict=True)):
        for name in parts[0] if parts else ():
            values_T = torch.cat([part[name] for part in parts])
            for index, row in one.examined:
                yield number, index, name, values_T[row]


def float_tensor(values: Array, packed: Packed) -> Tensor:
    """Column of a micro-batch, float32, on the device of `packed`."""
    # Copied: what came off a wire may be read-only, which torch cannot express.
    return torch.tensor(values, dtype=torch.float32, device=packed.row_T.device)
