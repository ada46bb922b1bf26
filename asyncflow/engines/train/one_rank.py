"""Training on one device, with its helpers: of a critic (critic_engine.py), and of a policy if `TorchEngine` has one rank.

micro-batches -> pack (packing.py) -> passes (passes.py), some of them in helpers (helpers.py) -> gradient sums (accumulate.py)
                                                                                                    |
AdamW <- clip, norm <- sums / normaliser (optim_step) <---------------------------------------------+
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from asyncflow.devices import CPU
from asyncflow.engines.base import MicroBatch, MicroBatchResult, OptimResult, TrainEngineOptions
from asyncflow.engines.lora_files import write_lora
from asyncflow.engines.train.accumulate import Accumulator
from asyncflow.engines.train.device_weights import CopyStream, DeviceWeights
from asyncflow.engines.train.helpers import Helpers
from asyncflow.engines.train.model.tri_model import TriModel
from asyncflow.engines.train.optimizer import Optimizer
from asyncflow.engines.train.passes import Frozen, Passes
from asyncflow.engines.train.state import EngineState, fingerprint_of
from asyncflow.engines.train.summed_passes import ModelPasses
from asyncflow.engines.train.training import PolicyTraining, Training
from asyncflow.types import Array, HeldWeights, Ragged, WeightSource

P = TypeVar("P", bound=ModelPasses)


class OneModel(Training, Generic[P]):
    """`Training` of one model on one device: its passes, some of them in helpers, its optimiser, and the state of both."""

    helpers: Helpers[P] | None

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        options: TrainEngineOptions,
        passes: P,
        of_helper: Callable[[TrainEngineOptions], P],
        old: Frozen | None = None,
    ) -> None:
        """`parameters`: float32, tied ones once. `of_helper`: makes passes over the weights of `passes`, for another thread, maybe
        on another device. `old`: the old policy, if it is a separate model."""
        self._parameters, self._device = parameters, options.device
        self.passes: P = passes
        self._sums: Accumulator = passes.sums
        self._optimizer = Optimizer(parameters, options)
        self._state = EngineState(parameters, self._optimizer, None if old is None else old.parameters)
        self.helpers = None
        if options.helpers:
            others = [of_helper(replace(options, device=device)) for device in options.helpers]
            self.helpers = Helpers(others, options.num_threads)
            if not any(each.is_apart for each in others):  # another device would have to be sent what a piece reads
                self._sums.pieces = self._optimizer.pieces = self.helpers.pieces()
                for each in (passes, *others):
                    each.summed.share(self.helpers.pieces())

    def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Any) -> list[MicroBatchResult]:
        """See `TrainEngine.forward_backward`. Raises `RunError` when sharing the prompt changes the numbers."""
        packed = [self.passes.pack(each) for each in micro_batches]

        def compute(passes: P, number: int) -> list[MicroBatchResult]:
            return passes.compute(micro_batches[cut[number]], packed[cut[number]], objective)

        if self.helpers is None:
            cut = self.passes.summed.cut(packed)
            results = [compute(self.passes, number) for number in range(len(cut))]
        else:
            cut = self.passes.summed.cut(packed, 1 + self.helpers.allowed)
            results = self.helpers.compute(len(cut), compute, self.passes)
        return [result for of_pass in results for result in of_pass]

    def begin_step(self) -> None:
        super().begin_step()
        self._changed()

    def load_state(self, folder: Path) -> None:
        super().load_state(folder)
        self._changed()

    def fingerprint(self) -> Mapping[str, str]:
        tensors: dict[str, Tensor] = {f"weights/{name}": parameter for name, parameter in self._parameters.items()}
        tensors |= {f"optimizer/{name}/{kind}": state for name, kind, state in self._optimizer.states()}
        return fingerprint_of(tensors.items())

    def weights(self) -> WeightSource:
        """See `TrainEngine.export_weights`. Call it in the compute thread: copies from a device wait for that thread's work."""
        device = torch.device(self._device)
        if device.type == CPU:
            return HeldWeights(self._parameters)
        return DeviceWeights(self._parameters, CopyStream(device))

    def _update(self, normaliser: int) -> OptimResult:
        for passes in self._of_helpers:
            self._sums.join(passes.sums)
        self._changed()
        gradients = self._sums.gradients(normaliser)  # empty if no micro-batch was finite
        result = self._optimizer.update(gradients, self._sums.norm(gradients))
        self._sums.clear()
        return result

    def _clear(self) -> None:
        for passes in (self.passes, *self._of_helpers):
            passes.sums.clear()
        self._changed()

    @property
    def _of_helpers(self) -> Sequence[P]:
        return () if self.helpers is None else self.helpers.passes

    def _changed(self) -> None:
        """Note that the weights of the model, or of the old one, may have changed."""
        for passes in self._of_helpers:
            passes.is_behind = True


class OneRank(OneModel[Passes], PolicyTraining):
    """`PolicyTraining` in plain PyTorch, on one device."""

    models: TriModel[Frozen]

    def __init__(self, model_path: Path | str, options: TrainEngineOptions) -> None:
        """Load the model at `model_path` (Hugging Face format). Raises `UserError` when it cannot be trained here."""
        self._model_path, self._lora = Path(model_path), options.lora
        first = Passes(model_path, options)
        self.policy, self.models, self.remark = first.policy, first.models, first.remark
        of_helper = partial(Passes, model_path, first=first)
        super().__init__(self.policy.parameters, options, first, of_helper, self.models.old_model)
        self.specs = HeldWeights(self.policy.parameters).specs

    def _response_log_probs(
        self, prompt_ids: Array, response_ids: Ragged, target_ids: Ragged | None, temperature: float | None
    ) -> Ragged:
        return self.policy.response_log_probs(prompt_ids, response_ids, target_ids, temperature)

    def _trained(self) -> Iterable[Tensor]:
        return self.policy.parameters.values()

    def _whole(self, name: str) -> Tensor:
        return self.policy.parameters[name].detach()

    def save(self, path: Path) -> None:
        if self._lora is None:
            self.policy.module.save_pretrained(path)
        else:
            write_lora(path, self._lora, self._model_path, {name: self._whole(name).cpu().numpy() for name in self.specs})
