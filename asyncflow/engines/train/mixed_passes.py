"""Passes over rows of several low-rank adapters, each of a train engine of its own, on the base that they have in common.

    engine a: micro-batch, loss --+                                             +--> gradients of a's adapter --> a's sums
    engine b: micro-batch, loss --+--> one pass: base over all rows, each       +--> gradients of b's adapter --> b's sums
                                       adapter over its own rows (lora.py)

Rows do not depend on one another, so each micro-batch has the numbers that it has alone; on a CPU, as far as is known, to the bit.
Sums, optimisers and saved files know nothing of it. The pass is made in the compute thread of the engine whose layers it uses,
while the others make no call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asyncflow.engines.base import MicroBatch, MicroBatchResult, TrainEngine
from asyncflow.engines.train.model import micro_step
from asyncflow.engines.train.model.lora import RowsOfAdapter
from asyncflow.engines.train.model.packing import joined
from asyncflow.engines.train.one_rank import OneRank
from asyncflow.engines.train.torch_engine import TorchEngine
from asyncflow.types import Objective, RunError


@dataclass(frozen=True, slots=True, eq=False)
class ShareOfPass:
    """Micro-batch that is an engine's share of a pass, with its loss."""

    engine: TrainEngine
    micro_batch: MicroBatch
    objective: Objective


def may_join(host: TrainEngine, other: TrainEngine) -> bool:
    """Whether a pass of the first engine may have rows of the second one: adapters over the same base, whose layers the first one's
    has all, with nothing else to compute than the policy. With exact sums only where both make passes of several micro-batches:
    there a micro-batch has been found to have the bits among others that it has alone."""
    one, two = _adapted(host), _adapted(other)
    if one is None or two is None or one is two:
        return False
    policies = one.policy, two.policy
    settings = {(id(each._loaded), each.dtype, each.device, each.temperature) for each in policies}
    are_free = all(each.passes.summed.may_join for each in (one, two))
    return len(settings) == 1 and are_free and one.specs.keys() >= two.specs.keys()


async def forward_backward(shares: Sequence[ShareOfPass]) -> list[MicroBatchResult | RunError]:
    """See `TrainEngine.forward_backward`, for a micro-batch of each of these engines, of which no other call may be under way. The
    first one is the host of the others (`may_join`). A `RunError` is that of a share whose exact sums do not hold its gradient: its
    step cannot be completed. Raises whatever goes wrong with the pass itself; then this is so of all of them."""
    host = shares[0].engine
    assert isinstance(host, TorchEngine), "the host may be joined"
    return await host.in_thread(_compute, shares)


def _compute(shares: Sequence[ShareOfPass]) -> list[MicroBatchResult | RunError]:
    trainings = [found for share in shares if (found := _adapted(share.engine)) is not None]
    assert len(trainings) == len(shares), "all may be joined"
    host, batches = trainings[0].policy, [share.micro_batch for share in shares]
    packed = [host.pack(each.prompt_ids, each.response_ids, each.target_ids) for each in batches]
    together = joined(packed)
    rows = [
        RowsOfAdapter(place, each.policy.adapter_weights(), each.policy.scaling)
        for place, each in zip(together.places, trainings, strict=True)
    ]
    with host.mixed(rows):
        hidden_TH, head = host.hidden(together)
        made = [
            micro_step.losses(micro_step.given_all(training.models, p, [share.micro_batch]), share.objective, own_TH, head)
            for training, p, share, own_TH in zip(
                trainings, packed, shares, hidden_TH.split_with_sizes(together.token_counts), strict=True
            )
        ]
        finite = [(training, loss) for training, loss in zip(trainings, made, strict=True) if loss.is_finite]
        trained = [weight for training, _ in finite for weight in training.policy.parameters.values()]
        if finite:  # the others' weights get no gradient, not even 0 times what is not finite
            torch.autograd.backward(torch.stack([loss.total for _, loss in finite]).sum(), inputs=trained)
    return [_added(training, loss.results[0]) for training, loss in zip(trainings, made, strict=True)]


def _added(training: OneRank, result: MicroBatchResult) -> MicroBatchResult | RunError:
    try:
        if result.is_finite:
            training.passes.sums.add()
    except RunError as error:  # exact sums do not hold it
        return error
    return result


def _adapted(engine: TrainEngine) -> OneRank | None:
    """Training of an engine whose passes may be shared; None for any other."""
    training = engine.training if isinstance(engine, TorchEngine) else None
    if not isinstance(training, OneRank) or training.policy.lora is None or training.policy.way != "packed":
        return None
    return training if training.helpers is None and not training.models.frozen else None
