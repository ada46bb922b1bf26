"""Passes of one trained model in one thread: what goes through it together, and the sums that its gradients go to.

    micro-batches --cut--> passes --loss, backward--> gradients (pass_gradients.py, or autograd's) --> sums (accumulate.py)

A model that takes packed sequences has several micro-batches in one sequence. With exact sums each one's gradient is taken by
itself, so that no bit depends on the company: if that is so on this machine. A model that takes batches of rows (own_rows.py) has
the rows of several micro-batches in one batch, with plain sums alone: there the last bits of a row depend on those beside it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from asyncflow.devices import CPU
from asyncflow.engines.base import MicroBatch, MicroBatchResult
from asyncflow.engines.train.accumulate import ExactAccumulator, PlainAccumulator
from asyncflow.engines.train.model.causal_model import CausalModel
from asyncflow.engines.train.model.micro_step import PassLoss
from asyncflow.engines.train.model.packing import Packed, cut_into_batches, cut_into_passes
from asyncflow.engines.train.pass_gradients import PassGradients
from asyncflow.engines.train.pass_probe import OTHER_BITS, ProbeLoss, one_by_one, probe
from asyncflow.engines.train.pieces import Pieces


class SummedPasses:
    """Passes of a model, and their `sums`. `most_tokens`: of a pass of several micro-batches; None: each is a pass of its own.
    `remark`: why each is, where exact sums do not allow more; "" elsewhere."""

    def __init__(
        self,
        model: CausalModel,
        sums: ExactAccumulator | PlainAccumulator,
        most_tokens: int | None,
        loss: ProbeLoss,
        *,
        has_head: bool = True,
        first: SummedPasses | None = None,
    ) -> None:
        """`loss`: of the probe's passes, `has_head`: whether these use the output layer. `first`: compute as that one has found to
        be right on this machine."""
        self.model, self.sums, self.most_tokens, self.remark = model, sums, most_tokens, ""
        self._gradients: PassGradients | None = None
        if first is not None:
            self.most_tokens = first.most_tokens
            if first._gradients is not None:
                self._gradients = PassGradients(model, sums, has_head=has_head)
        elif most_tokens is not None:
            self._prepare(loss, has_head=has_head)

    @property
    def may_join(self) -> bool:
        """Whether a pass may have other rows besides: with exact sums no bit may depend on them."""
        return self.most_tokens is not None or not isinstance(self.sums, ExactAccumulator)

    def cut(self, packed: Sequence[Packed], num_threads: int = 1) -> list[slice]:
        """Neighbouring micro-batches that are computed in one pass each, by so many threads at the same time."""
        if self.model.way == "packed" or self.most_tokens is None:
            return cut_into_passes(packed, self.most_tokens, num_threads)
        return cut_into_batches(packed, self.most_tokens, num_threads)

    def backward(self, together: Packed, loss: Callable[[PassGradients | None], PassLoss]) -> PassLoss | None:
        """Compute a pass's loss, and add its gradients to the sums: those of all micro-batches that are finite. None: nothing is
        added, since plain sums mix all rows and one of several micro-batches is not finite, so each is to be a pass of its own."""
        if self._gradients is not None:
            with self._gradients.of(together):
                made = loss(self._gradients)
                torch.autograd.backward(made.total)
            return made
        made = loss(None)
        if made.is_finite:
            torch.autograd.backward(made.total)
            self.sums.add()
        elif len(made.results) > 1:
            return None
        return made

    def share(self, pieces: Pieces) -> None:
        """Leave pieces of a pass to others."""
        if self._gradients is not None:
            self._gradients.pieces = pieces

    def _prepare(self, loss: ProbeLoss, *, has_head: bool) -> None:
        """Make ready for passes of several micro-batches; with exact sums only if no bit depends on them."""
        exact = self.sums if isinstance(self.sums, ExactAccumulator) else None
        if self.model.way != "packed":
            if exact and self.model.way == "batched":
                self.remark = one_by_one("in a batch the last bits of its rows depend on one another")
            if exact or self.model.way == "alone":
                self.most_tokens = None
            return
        if not (exact or self.model.device.type == CPU):
            return
        if not (why := PassGradients.why_not(self.model, has_head=has_head)):
            gradients = self._gradients = PassGradients(self.model, self.sums, has_head=has_head)
            if exact and not probe(self.model, exact, gradients, loss):
                why = OTHER_BITS
        if why and exact:
            self.most_tokens = self._gradients = None
            self.remark = one_by_one(why)


class ModelPasses(ABC):
    """Passes of a policy, or of a critic, in one thread. `summed`: how they are cut, and where their gradients go."""

    summed: SummedPasses
    is_apart = False
    """Whether these are on another device than the weights."""
    is_behind = False
    """Whether the weights may have changed since the last pass, where there are copies of them."""

    @property
    def sums(self) -> ExactAccumulator | PlainAccumulator:
        """Sums that the gradients go to."""
        return self.summed.sums

    @abstractmethod
    def pack(self, micro_batch: MicroBatch) -> Packed:
        """Packed tokens of a micro-batch, on the model's device."""

    @abstractmethod
    def compute(self, micro_batches: Sequence[MicroBatch], packed: Sequence[Packed], objective: Any) -> list[MicroBatchResult]:
        """Compute micro-batches together, and add their gradients to the sums: of all that are finite. `packed`: on the device of
        the weights."""
