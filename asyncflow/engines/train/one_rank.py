"""Training on one device: of a critic (critic_engine.py), and of a policy if `TorchEngine` has one rank.

micro-batch -> pack (packing.py) --+--> reference, old policy (tri_model.py) -> log-probs --+
                                   +--> policy (causal_model.py) ------> hidden states -----+--> loss, by chunks (log_probs.py)
                                                                                            |
AdamW <- clip, norm <- sums / normaliser (optim_step) <- gradient sums (accumulate.py) <----+ backward

A policy's micro-batches go through it several in a pass (`tokens_per_pass`). With exact sums each one's gradient is taken by itself
(pass_gradients.py), so that no bit depends on the company.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asyncflow.devices import CPU
from asyncflow.engines.base import MicroBatch, MicroBatchResult, OptimResult, TrainEngineOptions
from asyncflow.engines.lora_files import write_lora
from asyncflow.engines.train.accumulate import ExactAccumulator, make_accumulator, order_free_norm
from asyncflow.engines.train.device_weights import CopyStream, DeviceWeights
from asyncflow.engines.train.model import micro_step
from asyncflow.engines.train.model.causal_model import CausalModel, FrozenModel, PassOptions, SharedBaseModel
from asyncflow.engines.train.model.check_sharing import check_sharing
from asyncflow.engines.train.model.own_rows import probe
from asyncflow.engines.train.model.packing import Packed, cut_into_passes, joined
from asyncflow.engines.train.model.tri_model import TriModel
from asyncflow.engines.train.optimizer import Optimizer
from asyncflow.engines.train.pass_gradients import PassGradients
from asyncflow.engines.train.pass_gradients import probe as probe_passes
from asyncflow.engines.train.state import EngineState, fingerprint_of
from asyncflow.engines.train.training import PolicyTraining, Training
from asyncflow.types import Array, HeldWeights, Objective, Ragged, WeightSource

Frozen = FrozenModel | SharedBaseModel


class OneModel(Training):
    """`Training` of one model on one device: its gradient sums, its optimiser, and the state of both."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], options: TrainEngineOptions, old: Frozen | None = None) -> None:
        """`parameters`: float32, tied ones once. `old`: the old policy, if it is a separate model."""
        self._parameters, self._device = parameters, options.device
        self._sums = make_accumulator(options.accumulate, parameters)
        self._optimizer = Optimizer(parameters, options)
        self._state = EngineState(parameters, self._optimizer, None if old is None else old.parameters)

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

    def _add(self, loss: Tensor) -> None:
        """Run a finite loss backward, and add the gradients to the step's sums."""
        torch.autograd.backward(loss)
        self._sums.add()

    def _update(self, normaliser: int) -> OptimResult:
        gradients = self._sums.gradients(normaliser)  # empty if no micro-batch was finite
        result = self._optimizer.update(gradients, order_free_norm(gradients))
        self._sums.clear()
        return result

    def _clear(self) -> None:
        self._sums.clear()


class OneRank(OneModel, PolicyTraining):
    """`PolicyTraining` in plain PyTorch, on one device."""

    models: TriModel[Frozen]

    def __init__(self, model_path: Path | str, options: TrainEngineOptions) -> None:
        """Load the model at `model_path` (Hugging Face format). Raises `UserError` when it cannot be trained here."""
        self._chunk_tokens = options.log_prob_chunk_tokens
        self._is_to_check = options.check_shared_prompt
        self._model_path, self._lora, passes = Path(model_path), options.lora, PassOptions.of(options)
        if self._lora is None:
            self.policy = CausalModel(model_path, passes, device=options.device)
        else:
            self.policy = CausalModel(
                model_path, passes, device=options.device, weights_dtype=passes.dtype, lora=self._lora, seed=options.seed
            )
        self.remark = probe(self.policy) if self.policy.way != "packed" else ""
        if self._lora is None:
            way, of_frozen = self.policy.way, PassOptions.of_frozen(options)
            frozen = partial(FrozenModel, model_path, of_frozen, device=options.device, offload=options.offload, way=way)
            self.models = TriModel(self.policy, options, frozen)
        else:
            shared = partial(SharedBaseModel, self.policy)
            self.models = TriModel(self.policy, options, partial(shared, has_adapter=True), partial(shared, has_adapter=False))
        super().__init__(self.policy.parameters, options, self.models.old_model)
        self._tokens_per_pass = options.tokens_per_pass
        self._gradients: PassGradients | None = None
        if self._tokens_per_pass is not None:
            self._prepare_passes()
        self.specs = HeldWeights(self.policy.parameters).specs

    def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[MicroBatchResult]:
        """See `TrainEngine.forward_backward`. Raises `RunError` when sharing the prompt changes the numbers."""
        packed = [self.policy.pack(each.prompt_ids, each.response_ids, each.target_ids) for each in micro_batches]
        results: list[MicroBatchResult] = []
        for of_pass in cut_into_passes(packed, self._tokens_per_pass):
            results += self._pass(micro_batches[of_pass], packed[of_pass], objective)
        return results

    def log_probs(self, prompt_ids: Array, response_ids: Ragged, target_ids: Ragged | None = None) -> Ragged:
        return self.policy.response_log_probs(prompt_ids, response_ids, target_ids)

    def gather(self, name: str) -> Tensor:
        return self.policy.parameters[name].detach().cpu().contiguous()

    def save(self, path: Path) -> None:
        if self._lora is None:
            self.policy.module.save_pretrained(path)
        else:
            write_lora(path, self._lora, self._model_path, {name: self.gather(name).numpy() for name in self.specs})

    def _prepare_passes(self) -> None:
        """Make ready for passes of several micro-batches; with exact sums only if no bit depends on them."""
        if self.policy.way != "packed":
            self._tokens_per_pass = None
        if self._tokens_per_pass is None or not isinstance(self._sums, ExactAccumulator):
            return
        if not (why := PassGradients.why_not(self.policy)):
            gradients = self._gradients = PassGradients(self.policy, self._sums)
            if not probe_passes(self.policy, self._sums, gradients):
                why = "on this machine a micro-batch among others has other bits than alone"
        if why:
            self._tokens_per_pass = self._gradients = None
            self.remark = f"{self.remark}\n" * bool(self.remark) + (
                f"micro-batches are computed one by one, since train.accumulate=exact promises bits: {why}"
            )

    def _pass(self, micro_batches: Sequence[MicroBatch], packed: Sequence[Packed], objective: Objective) -> list[MicroBatchResult]:
        """Compute micro-batches together, and add their gradients to the sums: of all that are finite."""
        together = joined(packed)
        shared = next((batch for batch, p in zip(micro_batches, packed, strict=True) if p.layout.has_prompt), None)
        if self._is_to_check and shared is not None:
            check_sharing(self.policy, shared)
            self._is_to_check = False
        known = micro_step.given_all(self.models, together, micro_batches)
        of_head: dict[str, Any] = {"chunk_tokens": self._chunk_tokens, "softcap": self.policy.softcap}
        if self._gradients is not None:
            with self._gradients.of(together):
                hidden_TH, head_VH = self.policy.hidden(together)
                made = micro_step.losses(known, objective, hidden_TH, head_VH.detach(), head_sums=self._gradients, **of_head)
                torch.autograd.backward(made.total)
            return made.results
        made = micro_step.losses(known, objective, *self.policy.hidden(together), **of_head)
        if made.is_finite:
            self._add(made.total)
        elif len(micro_batches) > 1:  # a weight's gradient mixes all rows: once more, each by itself
            del made
            return [self._pass([one], [p], objective)[0] for one, p in zip(micro_batches, packed, strict=True)]
        return made.results
