"""Under a layout, too, sharing the prompt must change nothing: check_sharing.py for a model that is cut over ranks.

    each data-parallel group's micro-batch, or nothing --both ways--> log-probs, compared in the group
                                                                  --> gradients of their sum over groups, compared over all ranks

consumes: a micro-batch of each data-parallel group that has one whose prompt is shared
waits for: the other ranks, in every pass and exchange
is unblocked by: the same check there

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


class SharingCheck:
    """One rank's half of the check."""

    def __init__(self, policy: ShardedModel, pipeline: Pipeline, sums: Sums, ranks: Ranks, counted: Sequence[str]) -> None:
        """`counted`: the parameters whose parts no rank before this one has, too."""
        self._policy, self._pipeline, self._sums, self._ranks, self._counted = policy, pipeline, sums, ranks, counted

    def run(self, micro_batch: MicroBatch | None) -> None:
        """Make the passes on all ranks, those without a micro-batch too.

        Raises:
            RunError: log-probs or gradients differ by more than rounding explains, on this rank or another.
        """
        device, dtype = self._policy.device, self._policy.dtype
        shared, rows = (pack_inert(INERT_TOKENS, device),) * 2 if micro_batch is None else both_ways(micro_batch, device)
        (shared_T, gradients), (rows_T, expected) = (self._computed(packed) for packed in (shared, rows))
        fault = "" if micro_batch is None else log_prob_fault(shared_T, rows_T, shared, micro_batch, dtype)
        names = [name for name in self._counted if name in expected]
        distance = self._norm([gradients[name] - expected[name] for name in names])
        size = self._norm([expected[name] for name in names])
        (is_fault,) = self._ranks.largest([bool(fault)])
        refuse(fault or ("" if is_fault else gradient_fault(distance, size, dtype)))
        if is_fault:
            raise RunError("sharing the prompt gives another log-prob on another rank, which says for which row")

    def _computed(self, packed: Packed) -> tuple[Tensor, dict[str, Tensor]]:
        """Log-probs (float32 [T]) on each stage's CPU, and this rank's parts of the gradients of their sum, over all groups."""
        made: list[Tensor] = []
        is_inert = not len(packed.targets_T)

        def loss(_: int, hidden_PH: Tensor) -> Tensor:
            if is_inert:
                return self._policy.nothing(hidden_PH)
            log_probs_T = self._policy.log_probs(packed, hidden_PH)
            made.append(log_probs_T.detach())
            return log_probs_T.sum()

        def before_backward(_: int) -> None:
            self._sums.before_backward(is_muted=is_inert, is_aside=True)

        self._pipeline.forward_backward(self._policy, [packed], loss, before_backward)
        gradients = self._sums.take()
        if (tied := self._policy.stage.tied_name) is not None:
            self._pipeline.add_tied_(gradients[tied])
        return self._pipeline.log_probs_from_last(made[0] if made else None, len(packed.targets_T)), gradients

    def _norm(self, parts: Sequence[Tensor]) -> float:
        """Over all ranks."""
        (largest,) = self._ranks.largest([largest_magnitude(parts)])
        (squares,) = self._ranks.total([sum_of_squares(parts, largest)])
        return norm_of(squares, largest)
