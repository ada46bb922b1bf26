"""Critic's engine: values of responses, and the training of the model that computes them, on one device.

    micro-batches -> pass (summed_passes.py) -> the model's layers -> hidden_TH -> . head_1H -> values_T -> losses -> one_rank.py
                     some in helpers

The value before a response token comes from the same hidden state that predicts the token. A new head is zero, so the first values
are all 0 and favour nothing. The language model's own output layer is not a part of it, unless it is tied to the embedding.

Left out: a critic that is sharded over several devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from asyncflow.attestation import CRITIC_DTYPE, Attestation
from asyncflow.bit_sums import sum_of
from asyncflow.engines.base import CriticEngine, MicroBatch, MicroBatchResult, TrainEngineOptions
from asyncflow.engines.devices import check_device
from asyncflow.engines.train.accumulate import make_accumulator
from asyncflow.engines.train.leader_engine import TrainingEngine
from asyncflow.engines.train.model.causal_model import CausalModel
from asyncflow.engines.train.model.micro_step import PassLoss, float_tensor
from asyncflow.engines.train.model.own_rows import probe
from asyncflow.engines.train.model.packing import Packed, joined
from asyncflow.engines.train.one_rank import OneModel
from asyncflow.engines.train.pass_gradients import PassGradients
from asyncflow.engines.train.pass_probe import ProbePass
from asyncflow.engines.train.summed_passes import ModelPasses, SummedPasses
from asyncflow.types import Array, HeldWeights, Ragged, UserError, ValueBatch, ValueObjective, WeightSource

HEAD: Final = "value_head.weight"
HEAD_FILE: Final = "value_head.safetensors"

# T response tokens, R rows, H hidden elements.


class TorchCritic(TrainingEngine["CriticTraining"], CriticEngine):
    """`CriticEngine` in plain PyTorch, on one device."""

    def __init__(self, model_path: Path | str, options: TrainEngineOptions) -> None:
        """Load the model at `model_path` (Hugging Face format), with its value head if it has one.

        Options for several devices or for other models (`layout`, `old`, `has_reference`) have no effect. Raises `UserError` when
        the model cannot be trained here.
        """
        check_device(options.device, "train.critic.device")
        torch.manual_seed(options.seed)
        training = CriticTraining(model_path, options)
        super().__init__(training, options)
        self.remark = training.remark

    async def values(self, prompt_ids: Array, response_ids: Ragged) -> Ragged:
        return await self._thread.run(self.training.values, prompt_ids, response_ids)

    async def export_weights(self) -> WeightSource:
        return await self._thread.run(self.training.weights)

    async def install(self, tensors: Mapping[str, Tensor]) -> None:
        await self._thread.run(self.training.install, tensors)

    async def attest(self) -> Attestation:
        return await self._thread.run(self.training.attest)


class CriticTraining(OneModel["CriticPasses"]):
    """`Training` of a model of values."""

    def __init__(self, model_path: Path | str, options: TrainEngineOptions) -> None:
        """Load the model, see `TorchCritic`."""
        first = CriticPasses(model_path, options)
        self.model: ValueModel = first.model
        self.remark: str = "\n".join(filter(None, (first.model.remark, first.summed.remark)))
        super().__init__(self.model.parameters, options, first, partial(CriticPasses, model_path, first=first))

    @torch.no_grad()
    def values(self, prompt_ids: Array, response_ids: Ragged) -> Ragged:
        """See `CriticEngine.values`. The layout is the same as in training, so that the bits are the same."""
        packed = self.model.pack(prompt_ids, response_ids)
        return Ragged(self.model.values(packed).cpu().numpy(), response_ids.offsets)

    @torch.no_grad()
    def install(self, tensors: Mapping[str, Tensor]) -> None:
        """See `CriticEngine.install`."""
        theirs, own = HeldWeights(tensors).specs, HeldWeights(self.model.parameters).specs
        if theirs != own:
            name = min(name for name in {**theirs, **own} if theirs.get(name) != own.get(name))
            raise ValueError(f"{name} is not the critic's: what came is {theirs.get(name)}, and the model has {own.get(name)}")
        for name, parameter in self.model.parameters.items():
            parameter.copy_(tensors[name])

    @torch.no_grad()
    def attest(self) -> Attestation:
        """See `CriticEngine.attest`."""
        dtype = getattr(torch, CRITIC_DTYPE)
        return Attestation([([name], sum_of(name, weight.to(dtype))) for name, weight in self.model.parameters.items()])

    def save(self, path: Path) -> None:
        """Write the model in Hugging Face format to the folder `path`, and its head to `HEAD_FILE` there."""
        self.model.module.save_pretrained(path)
        save_file({HEAD: self.model.parameters[HEAD].detach().cpu().contiguous()}, path / HEAD_FILE)


class CriticPasses(ModelPasses):
    """`ModelPasses` of a critic."""

    def __init__(self, model_path: Path | str, options: TrainEngineOptions, first: CriticPasses | None = None) -> None:
        """Load the model, see `TorchCritic`. `first`: compute with its weights, in another thread on the same device."""
        self.model: ValueModel = ValueModel(model_path, options, None if first is None else first.model)
        with self.model.head_of_probe():
            self.summed = SummedPasses(
                self.model,
                make_accumulator(options.accumulate, self.model.parameters),
                options.tokens_per_pass,
                self._probe_loss,
                has_head=False,
                first=None if first is None else first.summed,
            )

    def pack(self, micro_batch: MicroBatch) -> Packed:
        return self.model.pack(micro_batch.prompt_ids, micro_batch.response_ids)

    def compute(
        self, micro_batches: Sequence[MicroBatch], packed: Sequence[Packed], objective: ValueObjective
    ) -> list[MicroBatchResult]:
        """See `CriticEngine.forward_backward`. Raises `ValueError` for a micro-batch without values."""
        together = joined(packed)

        def loss(gradients: PassGradients | None) -> PassLoss:
            values = self.model.values(together, gradients).split_with_sizes(together.token_counts)
            made = [self._loss(*each, objective) for each in zip(micro_batches, packed, values, strict=True)]
            for number, (_, result) in enumerate(made):
                if gradients is not None and not result.is_finite:
                    gradients.mute(number)
            finite = [loss for loss, result in made if result.is_finite]
            return PassLoss(torch.stack(finite).sum() if finite else values[0].sum() * 0.0, [result for _, result in made])

        if (made := self.summed.backward(together, loss)) is not None:
            return made.results
        return [self.compute([one], [p], objective)[0] for one, p in zip(micro_batches, packed, strict=True)]

    @staticmethod
    def _loss(
        micro_batch: MicroBatch, packed: Packed, values_T: Tensor, objective: ValueObjective
    ) -> tuple[Tensor, MicroBatchResult]:
        """Loss of a micro-batch, with its result."""
        if micro_batch.values is None:
            raise ValueError(f"the micro-batch of row {micro_batch.indices[0]} has no values, which its returns were made from")
        mask_T = float_tensor(micro_batch.loss_mask.values, packed)
        sums = objective.loss(
            ValueBatch(
                values_T=values_T,
                old_values_T=float_tensor(micro_batch.values.values, packed),
                returns_T=float_tensor(micro_batch.token_advantages, packed),
                mask_T=mask_T,
                row_T=packed.row_T,
                row_tokens_R=mask_T.new_zeros(len(micro_batch.indices)).index_add(0, packed.row_T, mask_T),
            )
        )
        # One transfer for all the numbers: each .item() on its own would wait for the device.
        is_finite = sums.loss.detach().isfinite() & values_T.detach().isfinite().all()
        numbers = [sums.loss.detach(), mask_T.sum(), is_finite, *sums.metrics.values()]
        loss_sum, loss_tokens, finite, *metrics = torch.stack([number.double() for number in numbers]).tolist()
        return sums.loss, MicroBatchResult(
            loss_sum=loss_sum,
            loss_tokens=int(loss_tokens),
            physical_tokens=packed.num_tokens,
            metrics=dict(zip(sums.metrics, metrics, strict=True)),
            is_finite=bool(finite),
        )

    def _probe_loss(self, probes: ProbePass, packed: Packed, gradients: PassGradients | None) -> Tensor:
        return probes.of_values(packed, self.model.values(packed, gradients), gradients)


class ValueModel(CausalModel):
    """Causal language model with a value head, `HEAD` [1, H], instead of its output layer."""

    def __init__(self, path: Path | str, options: TrainEngineOptions, first: ValueModel | None = None) -> None:
        """Load the model as `CausalModel` does, and its head from `HEAD_FILE` in the same folder, if that is there. `first`: take
        that one's, whatever becomes of them.

        Raises `UserError` if there is no such model, if it cannot be trained here, or if the head has a wrong shape.
        """
        super().__init__(path, replace(options, lora=None), first=first)
        self.remark = probe(self) if first is None else ""
        prefix = self.module.base_model_prefix + "."
        self.parameters = {name: p for name, p in self.parameters.items() if name.startswith(prefix)}
        if first is not None:
            self.parameters[HEAD] = nn.Parameter(first.parameters[HEAD].data)
            return
        size = self.module.config.hidden_size
        self.parameters[HEAD] = nn.Parameter(torch.zeros(1, size, device=self.device))
        if (file := Path(path) / HEAD_FILE).exists():
            head_1H = load_file(file)[HEAD]
            if head_1H.shape != (1, size):
                raise UserError(f"{file} has a value head of shape {tuple(head_1H.shape)}, and the model needs (1, {size}).")
            with torch.no_grad():
                self.parameters[HEAD].copy_(head_1H)

    def values(self, packed: Packed, gradients: PassGradients | None = None) -> Tensor:
        """Values (float32 [T], with gradient) before the response tokens. `gradients`: where the head's goes in a pass.

        A product with a vector would add up a row's elements in an order that depends on the number of rows.
        """
        hidden_TH, head_1H = self._states(packed, self._cast()).float(), self.parameters[HEAD]
        if gradients is not None:
            return gradients.weighted(HEAD, hidden_TH, head_1H, packed.token_counts)
        return (hidden_TH * head_1H).sum(-1)

    @contextmanager
    def head_of_probe(self) -> Iterator[None]:
        """Context with another head: a new one is zero, and passes no gradient on."""
        head_1H = self.parameters[HEAD].data
        self.parameters[HEAD].data = torch.linspace(-1, 1, head_1H.numel(), device=head_1H.device)[None]
        try:
            yield
        finally:
            self.parameters[HEAD].data = head_1H
