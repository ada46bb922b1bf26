"""Training of a Hugging Face model with DeepSpeed's ZeRO, which shards it over the data-parallel processes.

    sharded in stage    1: the optimiser's state    2: the gradient sums, too    3: the weights, too

    micro-batch -> pack (packing.py) -> policy -> loss (micro_step.py) -> backward, sums over the processes: DeepSpeed
    weights <- AdamW <- clip <- sums / normaliser: DeepSpeed, whose "loss scale" the normaliser is

DeepSpeed divides by a loss scale once, between the sums and the clip. The normaliser is passed as this scale, and the backward
passes have a scale of 1. DeepSpeed also averages over the processes; the scale is divided by their number to undo that.

Written against DeepSpeed 0.19.8. Gradients are added up until `step` (`managed_gradient_accumulation` false). Some things that its
public functions do not do are done as its own code does them (the methods of `Zero` name these places).

Left out: `accumulate: exact` (ZeRO adds in its own order); tensor and pipeline parallelism; old policy and reference sharded over
ranks (each process holds them whole); bfloat16 with stage 1 (DeepSpeed's optimiser for it neither scales nor skips; stage 2 takes
less memory).
"""

from __future__ import annotations

import importlib
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncflow.engines.base import Hyperparameters, MicroBatch, MicroBatchResult, OptimResult, TrainEngineOptions
from asyncflow.engines.devices import check_device
from asyncflow.engines.train.adapters.checks import check_deepspeed
from asyncflow.engines.train.adapters.gathered import GatheredTraining, loaded
from asyncflow.engines.train.checks import model_fields
from asyncflow.engines.train.leader_engine import LeaderEngine
from asyncflow.engines.train.model import micro_step
from asyncflow.engines.train.model.causal_model import FrozenModel, load_module, recompute_activations
from asyncflow.engines.train.model.check_sharing import check_shared_log_probs
from asyncflow.engines.train.model.log_probs import Head, log_probs_and_entropy
from asyncflow.engines.train.model.packing import Packed, cut_into_passes, joined, pack_thrifty
from asyncflow.engines.train.model.tri_model import TriModel
from asyncflow.engines.train.optimizer import MOMENTS, Optimizer
from asyncflow.types import Array, Objective, Ragged, TensorSpec, UserError

# T response tokens, H hidden elements, V tokens of the vocabulary.


class DeepSpeedEngine(LeaderEngine):
    """`TrainEngine` that trains with DeepSpeed's ZeRO, data parallel only."""

    def __init__(
        self, model_path: Path | str, options: TrainEngineOptions, *, stage: int = 2, zero: Mapping[str, Any] | None = None
    ) -> None:
        """Load the model at `model_path` (Hugging Face format); takes seconds, in the calling thread.

        `stage`: ZeRO's. `zero`: more keys for DeepSpeed's own section `zero_optimization`.

        Raises `UserError` if DeepSpeed or the device is not there, the engine does not have an option, or a model cannot be trained
        here.
        """
        check_deepspeed(options, model_fields(model_path), stage=stage)
        check_device(options.device, "train.device")
        super().__init__(DeepSpeedTraining(Path(model_path), options, stage, zero or {}), options)


class DeepSpeedTraining(GatheredTraining):
    """`PolicyTraining` with DeepSpeed. Every process makes every call at the same time."""

    def __init__(self, model_path: Path, options: TrainEngineOptions, stage: int, zero: Mapping[str, Any]) -> None:
        """Load the model and hand it to DeepSpeed; the arguments are those of `DeepSpeedEngine`."""
        super().__init__(model_path, options)
        self._device = str(self._ranks.device)
        self._is_to_check = options.check_shared_prompt
        torch.manual_seed(options.seed)
        self._policy = _Policy(load_module(model_path, torch.float32), options)
        self.specs = {name: TensorSpec.of(parameter) for name, parameter in sorted(self._policy.parameters_by_name.items())}
        self._optimizer = Optimizer(self._policy.parameters_by_name, options)
        self._zero = Zero(self._policy, self._optimizer.adamw, options, self._ranks.device, stage, zero)
        self._weights = _WeightsOnRead(self._zero)
        self._num_added = self._fill_tokens = 0

        frozen = partial(FrozenModel, model_path, replace(options, device=self._device))
        self.models = TriModel(self._weights, options, frozen)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[MicroBatchResult]:
        """See `TrainEngine.forward_backward`.

        The n-th passes of all processes are computed together. If a micro-batch of one of them is not finite, nothing of them is
        added, and all are reported as not finite. On a single process, raises `RunError` when sharing the prompt changes the
        log-probs.
        """
        packed = [pack_thrifty(each.prompt_ids, each.response_ids, self._device, each.target_ids) for each in micro_batches]
        passes = cut_into_passes(packed, self._options.tokens_per_pass)
        num_passes = int(self._ranks.largest([len(passes)])[0])
        made = [self._forward_backward(micro_batches[part], packed[part], objective) for part in passes]
        for _ in range(num_passes - len(passes)):
            self._take_part()
        return [result for results in made for result in results]

    def _update(self, normaliser: int) -> OptimResult:
        learning_rate = self._optimizer.learning_rate
        (fill_tokens,) = self._ranks.total([self._fill_tokens])
        self._fill_tokens = 0
        if not self._num_added:  # no micro-batch was finite
            return OptimResult(grad_norm=0.0, learning_rate=learning_rate, skipped=True, fill_tokens=fill_tokens)
        self._num_added = 0
        grad_norm, is_done = self._zero.step(normaliser, learning_rate)
        self._optimizer.num_updates += is_done
        return OptimResult(grad_norm, learning_rate, skipped=not is_done, fill_tokens=fill_tokens)

    def set_hyperparameters(self, chosen: Hyperparameters) -> None:
        """Raises `UserError`: DeepSpeed's optimiser keeps those that it was made with."""
        raise UserError("the DeepSpeed engine takes no hyperparameters update by update: take train.engine=torch")

    def _clear(self) -> None:
        self._num_added = self._fill_tokens = 0
        self._zero.forget()

    @torch.no_grad()
    def _response_log_probs(
        self, prompt_ids: Array, response_ids: Ragged, target_ids: Ragged | None, temperature: float | None
    ) -> Ragged:
        """See `LogProbEngine.log_probs`. With stage 3 all processes call at the same time."""
        packed = replace(pack_thrifty(prompt_ids, response_ids, self._device, target_ids), temperature=temperature)
        return Ragged(self._policy_log_probs(packed).cpu().numpy(), response_ids.offsets)

    def _trained(self) -> Iterator[Tensor]:
        for parameter in self._policy.parameters_by_name.values():
            yield parameter  # in stage 3 nothing, but for small ones, which are always whole
            if (part := getattr(parameter, "ds_tensor", None)) is not None:
                yield part  # of which stage 3 gathers it

    def _weight(self, name: str) -> Tensor:
        return self._weights[name]

    def _load(self, num_updates: int, folder: Path) -> None:
        self._optimizer.num_updates = num_updates
        self._zero.make_states(num_updates)
        old = self.models.old_model
        for name, spec in self.specs.items():
            self._zero.set(name, loaded(f"weights/{name}", spec.shape, torch.float32, folder))
            for kind in MOMENTS if num_updates else ():
                self._zero.set(name, loaded(f"optimizer/{name}/{kind}", spec.shape, torch.float32, folder), kind)
            if old is not None:
                old.parameters[name].copy_(loaded(f"old/{name}", spec.shape, old.parameters[name].dtype, folder))
        self._zero.refresh()

    def _forward_backward(
        self, micro_batches: Sequence[MicroBatch], packed: Sequence[Packed], objective: Objective
    ) -> list[MicroBatchResult]:
        """Compute a pass together with the other processes."""
        shared = next((batch for batch, one in zip(micro_batches, packed, strict=True) if one.layout.has_prompt), None)
        if self._is_to_check and shared is not None and self._ranks.size == 1:
            check_shared_log_probs(self._policy_log_probs, shared, self._device, self._policy.dtype)
            self._is_to_check = False
        together = joined(packed)
        known = micro_step.given_all(self.models, together, micro_batches)
        results: list[MicroBatchResult] = []

        def loss(hidden_TH: Tensor, head_VH: Tensor) -> Tensor:
            made = micro_step.losses(known, objective, hidden_TH, Head(head_VH, self._options.log_prob_chunk_tokens))
            results.extend(made.results)
            return made.total

        total = self._zero(together, loss)
        is_finite = self._every(all(result.is_finite for result in results))
        if is_finite:
            self._add(total)
        return [replace(result, is_finite=is_finite) for result in results]

    def _take_part(self) -> None:
        """Run one token through every module, with a loss of 0, while other processes have a pass and this one has none."""
        nothing = _nothing(self._device)
        self._fill_tokens += nothing.num_tokens
        total = 0.0 * self._zero(nothing, _everything)
        if self._every(True):
            self._add(total)

    def _every(self, is_finite: bool) -> bool:
        return not any(self._ranks.largest([not is_finite])) if self._ranks.size > 1 else is_finite

    def _add(self, total: Tensor) -> None:
        self._zero.add(total)
        self._num_added += 1

    def _policy_log_probs(self, packed: Packed) -> Tensor:
        def of_targets(hidden_TH: Tensor, head_VH: Tensor) -> Tensor:
            return log_probs_and_entropy(hidden_TH, Head(head_VH, self._options.log_prob_chunk_tokens), packed.targets_T)[0]

        return self._zero(packed, of_targets)

    def _everything(self) -> Iterator[tuple[str, Tensor]]:
        old = self.models.old_model
        for name in self.specs:
            yield f"weights/{name}", self._zero.get(name)
            for kind in MOMENTS if self._optimizer.num_updates else ():
                yield f"optimizer/{name}/{kind}", self._zero.get(name, kind)
            if old is not None:
                yield f"old/{name}", old.parameters[name]


class Zero:
    """DeepSpeed's engine around a policy, which is called through it. Every process makes every call at the same time."""

    def __init__(
        self,
        policy: _Policy,
        adamw: torch.optim.Optimizer,
        options: TrainEngineOptions,
        device: torch.device,
        stage: int,
        zero: Mapping[str, Any],
    ) -> None:
        """Hand the policy and its parameters (float32, those of `adamw`) to DeepSpeed, which shards them as `stage` says.

        `zero`: more keys for DeepSpeed's section `zero_optimization`.
        """
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed needs it even if it is given the device
        deepspeed = importlib.import_module("deepspeed")
        deepspeed.utils.logger.setLevel("WARNING")
        self._utils, self._parameters, self._size = deepspeed.utils, policy.parameters_by_name, dist.get_world_size()
        config = _config(options, stage, zero)
        which = Namespace(device_rank=device.index or 0)
        # On a CPU, DeepSpeed would compile, for about a minute, a collective in shared memory, which only its inference uses.
        with patch.object(importlib.import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None):
            self._engine, *_ = deepspeed.initialize(which, model=policy, optimizer=adamw, config=config, dist_init_required=False)
        self._optimizer, self._adamw, self._is_whole = self._engine.optimizer, adamw, stage < 3
        self._is_offloaded = "offload_optimizer" in config["zero_optimization"]
        self._optimizer.override_loss_scale(1.0)
        self.make_states(0)

    def __call__(self, *arguments: Any) -> Tensor:
        """Run the module's forward pass."""
        return self._engine(*arguments)

    def add(self, total: Tensor) -> None:
        """Run a loss backward, and add the gradients to the step's sums."""
        self._engine.backward(total)

    def step(self, normaliser: int, learning_rate: float) -> tuple[float, bool]:
        """Divide the sums by `normaliser`, clip, update, clear the sums.

        Returns the norm before the clip, and whether the update was made: False if the norm was not finite.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        # DeepSpeed's sums are averages over the processes.
        self._optimizer.override_loss_scale(normaliser / self._size)
        self._engine.step()
        self._optimizer.override_loss_scale(1.0)
        return float(self._engine.get_global_grad_norm()), self._engine.was_step_applied()

    def forget(self) -> None:
        """Clear the sums without an update, as DeepSpeed's own `step` does when it finds an overflow."""
        zero = self._optimizer
        zero.zero_grad()
        zero.averaged_gradients = {}
        if self._is_whole:
            zero.all_grad_tensors = {}
            zero._release_preflattened_grad_buffers()
            zero.micro_step_id = -1  # so the first gradients of a step replace those in host memory, and are not added
            zero._offload_accumulated_param_ids = set()
        if self._is_offloaded:
            zero.reset_cpu_buffers()

    def get(self, name: str, kind: str = "") -> Tensor:
        """Whole weight `name`, float32, or the optimiser's state of that `kind` for it, gathered from all processes."""
        parameter = self._parameters[name]
        if kind:
            return self._utils.safe_get_full_optimizer_state(parameter, kind)
        return self._utils.safe_get_full_fp32_param(parameter)

    def set(self, name: str, whole: Tensor, kind: str = "") -> None:
        """Replace what `get` returns by the tensor `whole`. Call `refresh` after all tensors are set."""
        parameter, of_kind = self._parameters[name], [kind] if kind else []
        if self._is_whole:
            put = self._utils.safe_set_full_optimizer_state if kind else self._utils.safe_set_full_fp32_param
            put(parameter, whole.to(parameter.device), *of_kind)
            return
        # DeepSpeed's own function for whole tensors refuses sizes that the number of processes does not divide.
        size = self._utils.safe_get_local_fp32_param(parameter).numel()
        padded = torch.zeros(size * self._size, dtype=whole.dtype)
        padded[: whole.numel()] = whole.flatten()
        put = self._utils.safe_set_local_optimizer_state if kind else self._utils.safe_set_local_fp32_param
        put(parameter, padded[dist.get_rank() * size :][:size], *of_kind)

    def refresh(self) -> None:
        """Make the module compute with the weights that were set, as DeepSpeed's own `step` does after an update."""
        if self._is_whole:
            self._optimizer.update_lp_params()
            return
        for number in range(len(self._optimizer.fp16_groups)):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if whole := self._optimizer.persistent_parameters:
            whole[0].all_gather(whole)

    def make_states(self, num_updates: int) -> None:
        """Set the optimiser's state to that after `num_updates` updates, with zeros for moments; `set` fills these in."""
        zero = self._optimizer
        flat = zero.single_partition_of_fp32_groups if self._is_whole else zero.fp32_partitioned_groups_flat
        for partition in flat:
            moments = {kind: torch.zeros_like(partition, requires_grad=False) for kind in MOMENTS}
            self._adamw.state[partition] = {"step": torch.tensor(float(num_updates)), **moments}
        if self._is_whole:
            # DeepSpeed alone would link the states after the first group's first update, when the other groups have none yet.
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()


def _config(options: TrainEngineOptions, stage: int, zero: Mapping[str, Any]) -> dict[str, Any]:
    section: dict[str, Any] = {"overlap_comm": False, **zero, "stage": stage}
    if options.offload_optimizer:
        section["offload_optimizer"] = {"device": "cpu", **section.get("offload_optimizer", {})}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # the call of `step` ends a step, not a count of micro-batches
        "gradient_clipping": options.max_grad_norm or 0.0,  # 0: off
        "zero_optimization": section,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": options.dtype == "bfloat16", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": None,
    }


class _Policy(nn.Module):
    """Model in the form that DeepSpeed needs: each weight is used only in the forward pass of the module that holds it.

    In stage 3 a weight is whole only during that pass. The output layer is replaced by a module that hands its weight to a
    function.
    """

    def __init__(self, module: Any, options: TrainEngineOptions) -> None:
        super().__init__()
        self.module = module.eval()
        self.dtype, self._temperature = getattr(torch, options.dtype), options.temperature
        module.set_output_embeddings(_LossHead(module.get_output_embeddings().weight))
        if options.activation_checkpointing:
            for layer in module.base_model.layers:
                recompute_activations(layer)
        self.parameters_by_name = dict(module.named_parameters())

    def forward(self, packed: Packed, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Result of `function`, called with the hidden states [T, H] and the head [V, H].

        The hidden states are those that predict the response tokens, with the temperature applied.
        """
        inputs = {"input_ids": packed.tokens_P[None], "position_ids": packed.positions_P[None], "layout": packed.layout}
        outputs = self.module.base_model(**inputs, attention_mask=None, use_cache=False)
        hidden_TH = packed.predicting(outputs.last_hidden_state[0], packed.temperature or self._temperature)
        return self.module.get_output_embeddings()(hidden_TH, function)


class _LossHead(nn.Module):
    """Output layer that hands its weight to a function, which computes the loss from it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden_TH: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return function(hidden_TH, self.weight)


def _everything(hidden_TH: Tensor, head_VH: Tensor) -> Tensor:
    """Scalar that depends on every weight, so that every process takes part in the backward pass."""
    return (hidden_TH @ head_VH.t()).float().sum()


def _nothing(device: str) -> Packed:
    one = np.zeros(1, np.int64)
    return pack_thrifty(one, Ragged.from_arrays([one], "int64"), device)


class _WeightsOnRead:
    """Float32 weights by name, each gathered when it is read. All processes read the same names in the same order."""

    def __init__(self, zero: Zero) -> None:
        self._zero = zero
        self.parameters = self  # under the name that they have in `CausalModel`

    def __getitem__(self, name: str) -> Tensor:
        return self._zero.get(name)
