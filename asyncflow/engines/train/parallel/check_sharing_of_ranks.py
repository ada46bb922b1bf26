"""Check that sharing the prompt changes nothing for a model that is sharded over ranks; check_sharing.py is for one device.

    each data-parallel group's micro-batch, or nothing --both ways--> log-probs, compared in the group
                                                                  --> gradients of their sum over groups, compared over all ranks

The step's sums of gradients stay as they are. If one rank finds a fault, all say so and none goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from asyncflow.engines.base import MicroBatch
from asyncflow.engines.train.accumulate import largest_magnitude, norm_of, sum_of_squares
from asyncflow.engines.train.model.check_sharing import both_ways, gradient_fault, log_prob_fault, refuse
from asyncflow.engines.train.model.packing import INERT_TOKENS, Packed, pack_inert
from asyncflow.engines.train.parallel.fsdp import Sums
from asyncflow.engines.train.parallel.pipeline import Pipeline
from asyncflow.engines.train.parallel.ranks import Ranks
from asyncflow.engines.train.parallel.sharded_model import ShardedModel
from asyncflow.types import RunError

# P packed tokens, T response tokens, H hidden elements.


def check_sharing(
    policy: ShardedModel, pipeline: Pipeline, sums: Sums, ranks: Ranks, counted: Sequence[str], micro_batch: MicroBatch | None
) -> None:
    """Make the passes on all ranks, those without a micro-batch too.

    `counted`: the parameters whose parts no rank before this one has, too. Raises `RunError` if log-probs or gradients differ by
    more than rounding explains, on this rank or another.
    """

    def computed(packed: Packed) -> tuple[Tensor, dict[str, Tensor]]:
        """Log-probs (float32 [T]) on each stage's CPU, and this rank's parts of the gradients of their sum, over all groups."""
        made: list[Tensor] = []
        is_inert = not len(packed.targets_T)

        def loss(_: int, hidden_PH: Tensor) -> Tensor:
            if is_inert:
                return policy.nothing(hidden_PH)
            log_probs_T = policy.log_probs(packed, hidden_PH)
            made.append(log_probs_T.detach())
            return log_probs_T.sum()

        def before_backward(_: int) -> None:
            sums.before_backward(is_muted=is_inert, is_aside=True)

        pipeline.forward_backward(policy, [packed], loss, before_backward)
        gradients = sums.take()
        if (tied := policy.stage.tied_name) is not None:
            pipeline.add_tied_(gradients[tied])
        return pipeline.log_probs_from_last(made[0] if made else None, len(packed.targets_T)), gradients

    shared, rows = (pack_inert(INERT_TOKENS, policy.device),) * 2 if micro_batch is None else both_ways(micro_batch, policy.device)
    (shared_T, gradients), (rows_T, expected) = (computed(packed) for packed in (shared, rows))
    fault = "" if micro_batch is None else log_prob_fault(shared_T, rows_T, shared, micro_batch, policy.dtype)
    names = [name for name in counted if name in expected]
    distance = norm_over(ranks, [gradients[name] - expected[name] for name in names])
    size = norm_over(ranks, [expected[name] for name in names])
    (is_fault,) = ranks.largest([bool(fault)])
    refuse(fault or ("" if is_fault else gradient_fault(distance, size, policy.dtype)))
    if is_fault:
        raise RunError("sharing the prompt gives another log-prob on another rank, which says for which row")


def norm_over(ranks: Ranks, parts: Sequence[Tensor]) -> float:
    """2-norm of tensors of which each rank has its own parts."""
    (largest,) = ranks.largest([largest_magnitude(parts)])
    (squares,) = ranks.total([sum_of_squares(parts, largest)])
    return norm_of(squares, largest)
