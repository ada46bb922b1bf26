"""Passes of a policy in one thread: the models that compute them, and the sums that their gradients go to.

    micro-batches -> joined (packing.py) --+--> reference, old policy (tri_model.py) -> log-probs --+
                                           +--> policy (causal_model.py) ------> hidden states -----+--> loss, by chunks -> backward
                                                                                                    sums (accumulate.py) <----+

Gradients of matrices are pieces of a pass, which others may compute (pass_gradients.py, helpers.py). A second `Passes` over the
same weights computes beside the first one, in another thread, with gradients and sums of its own. On another device it has copies
of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from asyncflow.engines.base import MicroBatch, MicroBatchResult, TrainEngineOptions
from asyncflow.engines.train.accumulate import make_accumulator
from asyncflow.engines.train.model import micro_step
from asyncflow.engines.train.model.causal_model import CausalModel, FrozenModel, SharedBaseModel
from asyncflow.engines.train.model.check_sharing import check_sharing
from asyncflow.engines.train.model.own_rows import probe
from asyncflow.engines.train.model.packing import Packed, joined
from asyncflow.engines.train.model.tri_model import TriModel
from asyncflow.engines.train.pass_gradients import PassGradients
from asyncflow.engines.train.pass_probe import ProbePass
from asyncflow.engines.train.summed_passes import ModelPasses, SummedPasses
from asyncflow.types import Objective

Frozen = FrozenModel | SharedBaseModel


class Passes(ModelPasses):
    """`ModelPasses` of a policy, with its frozen models."""

    def __init__(self, model_path: Path | str, options: TrainEngineOptions, first: Passes | None = None) -> None:
        """Load the model at `model_path` (Hugging Face format). Raises `UserError` when it cannot be trained here.

        `first`: compute with its weights, whatever becomes of them, and as it has found to be right on this machine. On another
        device than that one's, `is_behind` says that the weights there have changed.
        """
        self.device: str = options.device
        self.is_behind = True
        self._first = first
        self.is_apart = first is not None and first.device != self.device
        self.policy: CausalModel = CausalModel(model_path, options, first=None if first is None else first.policy)
        self.remark = probe(self.policy) if first is None else ""
        self.models: TriModel[Frozen]
        if options.lora is None:
            made = [] if first is None else first.models.frozen  # in the order in which they were made
            firsts = iter([each for each in made if isinstance(each, FrozenModel)])

            def frozen() -> Frozen:
                model = FrozenModel(model_path, options, first=next(firsts, None))
                model.way = self.policy.way
                return model

            self.models = TriModel(self.policy, options, frozen)
        else:
            shared = partial(SharedBaseModel, self.policy)
            old = None if first is None or self.is_apart else first.models.old_model  # whose adapter is the same memory here
            self.models = TriModel(
                self.policy, options, partial(shared, has_adapter=True, first=old), partial(shared, has_adapter=False)
            )
        self._is_to_check = options.check_shared_prompt and first is None
        self.summed = SummedPasses(
            self.policy,
            make_accumulator(options.accumulate, self.policy.parameters),
            options.tokens_per_pass,
            self._probe_loss,
            first=None if first is None else first.summed,
        )
        self.remark = "\n".join(filter(None, (self.remark, self.summed.remark)))

    def pack(self, micro_batch: MicroBatch) -> Packed:
        return self.policy.pack(micro_batch.prompt_ids, micro_batch.response_ids, micro_batch.target_ids)

    def compute(
        self, micro_batches: Sequence[MicroBatch], packed: Sequence[Packed], objective: Objective
    ) -> list[MicroBatchResult]:
        if not self.is_apart:
            return self._compute(micro_batches, packed, objective)
        device = self.policy.device
        with nullcontext() if device.index is None else torch.get_device_module(device.type).device(device.index):
            if self.is_behind:
                self._catch_up()
            return self._compute(micro_batches, [self.pack(each) for each in micro_batches], objective)

    def _compute(
        self, micro_batches: Sequence[MicroBatch], packed: Sequence[Packed], objective: Objective
    ) -> list[MicroBatchResult]:
        together = joined(packed)
        shared = next((batch for batch, p in zip(micro_batches, packed, strict=True) if p.layout.has_prompt), None)
        if self._is_to_check and shared is not None:
            check_sharing(self.policy, shared)
            self._is_to_check = False
        known = micro_step.given_all(self.models, together, micro_batches)

        def loss(gradients: PassGradients | None) -> micro_step.PassLoss:
            hidden_TH, head = self.policy.hidden(together)
            return micro_step.losses(known, objective, hidden_TH, head if gradients is None else head.taken_by(gradients))

        if (made := self.summed.backward(together, loss)) is not None:
            return made.results
        return [self._compute([one], [p], objective)[0] for one, p in zip(micro_batches, packed, strict=True)]

    @torch.no_grad()
    def _catch_up(self) -> None:
        """Copy what has changed since the last call: the weights of the policy, and of the old one. The reference's never do."""
        first = self._first
        assert first is not None, "there is a device to copy from"
        for own, source in ((self.policy, first.policy), (self.models.old_model, first.models.old_model)):
            if own is not None and source is not None and own.is_copy:  # with `offload` an old one's memory is the same
                for name, parameter in own.parameters.items():
                    parameter.copy_(source.parameters[name])
        self.is_behind = False

    def _probe_loss(self, probes: ProbePass, packed: Packed, gradients: PassGradients | None) -> Tensor:
        hidden_TH, head = self.policy.hidden(packed)
        return probes.of_log_probs(packed, hidden_TH, head if gradients is None else head.taken_by(gradients))
