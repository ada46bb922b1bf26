"""Trains a Hugging Face model with DeepSpeed's ZeRO: what is cut over the data-parallel processes depends on the stage.

consumes, waits for, is unblocked by: as leader_engine.py says; every process leads a data-parallel group of its own

    stage    1: the optimiser's state    2: the gradient sums, too    3: the weights, too

    micro-batch -> pack (packing.py) -> policy -> loss (micro_step.py) -> backward, sums over the processes: DeepSpeed
    weights <- AdamW <- clip <- sums / normaliser: DeepSpeed, whose "loss scale" the normaliser is

DeepSpeed divides by a loss scale once, between the sums and the clip; so that is where the normaliser goes in, and the backward
passes have a scale of 1. It also averages over the processes, which the scale takes back.

Written against DeepSpeed 0.19.8. Gradients are added up until `step` (`managed_gradient_accumulation` false), and some of what its
public functions leave out is done as its own code does it (each place of `Zero` says so).

Left out: `accumulate: exact` (ZeRO adds in its own order), tensor and pipeline parallel, old policy and reference cut over ranks
(each process holds them whole), bfloat16 with stage 1 (DeepSpeed's optimiser for it neither scales nor skips: stage 2 holds less).
"""

from __future__ import annotations

import importlib
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncflow.engines.base import MicroBatch, MicroBatchResult, OptimResult, TrainEngineOptions
from asyncflow.engines.devices import check_device
from asyncflow.engines.train.checks import check_deepspeed, model_fields
from asyncflow.engines.train.gathered_state import GatheredState, loaded
from asyncflow.engines.train.leader_engine import LeaderEngine
from asyncflow.engines.train.model import micro_step
from asyncflow.engines.train.model.causal_model import FrozenModel, load_module, recompute_activations
from asyncflow.engines.train.model.check_sharing import check_shared_log_probs
from asyncflow.engines.train.model.hf_files import write_model
from asyncflow.engines.train.model.log_probs import log_probs_and_entropy
from asyncflow.engines.train.model.packing import Packed, pack_thrifty
from asyncflow.engines.train.model.tri_model import OLD_MODELS, TriModel
from asyncflow.engines.train.optimizer import MOMENTS, Optimizer
from asyncflow.engines.train.parallel.ranks import Ranks
from asyncflow.engines.train.parallel.single_rank import joined
from asyncflow.engines.train.state import fingerprint_of
from asyncflow.types import Array, Objective, Ragged, TensorSpec

# T response tokens, H hidden elements, V tokens of the vocabulary.


class DeepSpeedEngine(LeaderEngine):
    """Implements `TrainEngine`."""

    def __init__(
        self, model_path: Path | str, options: TrainEngineOptions, *, stage: int = 2, zero: Mapping[str, Any] | None = None
    ) -> None:
        """Load the model at `model_path` (Hugging Face format); takes seconds, in the calling thread.

        `stage`: of ZeRO. `zero`: more keys of DeepSpeed's own section `zero_optimization`.

        Raises:
            UserError: DeepSpeed or the device is not there, an option is none of its own, or a model cannot be trained here.
        """
        check_deepspeed(options, model_fields(model_path), stage=stage)
        check_device(options.device, "train.device")
        ranks = joined(options.layout, options.device)
        training = DeepSpeedTraining(Path(model_path), options, ranks, stage, zero or {})
        super().__init__(training, options, ranks if ranks.size > 1 else None)


class DeepSpeedTraining:
    """Implements `Training`. Every process makes every call at the same time."""

    def __init__(self, model_path: Path, options: TrainEngineOptions, ranks: Ranks, stage: int, zero: Mapping[str, Any]) -> None:
        """See `DeepSpeedEngine`."""
        self._options, self._model_path, self._ranks = options, model_path, ranks
        self._device, self.data_parallel_rank = str(ranks.device), ranks.dp_rank
        self._is_to_check = options.check_shared_prompt
        torch.manual_seed(options.seed)
        self._policy = _Policy(load_module(model_path, torch.float32), options)
        self.specs = {name: TensorSpec.of(parameter) for name, parameter in sorted(self._policy.parameters_by_name.items())}
        self._optimizer = Optimizer(self._policy.parameters_by_name, options)
        arguments = (self._policy, self._policy.parameters_by_name, self._optimizer.adamw, options, ranks.device, stage)
        self._zero = Zero(*arguments, zero)
        self._weights = _Weights(self._zero, list(self.specs))
        self._state = GatheredState(is_writer=ranks.rank == 0)
        self._num_added = self._fill_tokens = 0

        frozen_dtype = getattr(torch, options.frozen_dtype or options.dtype)
        frozen = partial(
            FrozenModel,
            model_path,
            device=self._device,
            dtype=frozen_dtype,
            temperature=options.temperature,
            chunk_tokens=options.log_prob_chunk_tokens,
            offload=options.offload,
        )
        old_model = frozen() if options.old in OLD_MODELS else None
        reference = frozen() if options.has_reference else None
        self._models = TriModel(self._weights, options.old, old_model, reference, is_corrected=options.is_corrected)

    def begin_step(self) -> None:
        """See `TrainEngine.begin_step`."""
        self._state.begin_step()
        self._models.begin_step()

    def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[MicroBatchResult]:
        """See `TrainEngine.forward_backward`.

        A micro-batch that is not finite in one process is added by none: the others of its place in the turn are told as not
        finite, too. Raises `RunError` when sharing the prompt gives other log-probs than not sharing it.
        """
        num_places = int(self._ranks.largest([len(micro_batches)])[0])
        padded = [*micro_batches, *[None] * (num_places - len(micro_batches))]
        results = [self._forward_backward(micro_batch, objective) for micro_batch in padded]
        return [result for result in results if result is not None]

    def optim_step(self, normaliser: int) -> OptimResult:
        """See `TrainEngine.optim_step`."""
        self._models.before_update()
        learning_rate = self._optimizer.learning_rate
        (fill_tokens,) = self._ranks.total([self._fill_tokens])
        self._fill_tokens = 0
        if not self._num_added:  # every micro-batch was refused
            return OptimResult(grad_norm=0.0, learning_rate=learning_rate, skipped=True, fill_tokens=fill_tokens)
        self._num_added = 0
        grad_norm, is_done = self._zero.step(normaliser, learning_rate)
        self._optimizer.num_updates += is_done
        return OptimResult(grad_norm, learning_rate, skipped=not is_done, fill_tokens=fill_tokens)

    def discard(self) -> None:
        """See `TrainEngine.discard`."""
        self._models.before_update()  # the version rises all the same
        self._num_added = self._fill_tokens = 0
        self._zero.forget()

    @torch.no_grad()
    def log_probs(self, prompt_ids: Array, response_ids: Ragged) -> Ragged:
        """See `LogProbEngine.log_probs`. With stage 3 all processes call at the same time."""
        packed = pack_thrifty(prompt_ids, response_ids, self._device)
        return Ragged(self._policy_log_probs(packed).cpu().numpy(), response_ids.offsets)

    def gather(self, name: str) -> Tensor | None:
        """See `Training.gather`."""
        tensor = self._weights[name]
        return tensor.detach().cpu().contiguous() if self.data_parallel_rank == 0 else None

    def fingerprint(self) -> Mapping[str, str]:
        """See `TrainEngine.fingerprint`."""
        step = torch.tensor(float(self._optimizer.num_updates))
        steps = {f"optimizer/{name}/step": step for name in self.specs if step}
        of_state = (pair for pair in self._everything() if not pair[0].startswith("old/"))
        hashes = fingerprint_of(chain(steps.items(), of_state))
        return hashes if self.data_parallel_rank == 0 else {}

    def save(self, path: Path) -> None:
        """See `TrainEngine.save`."""
        tensors = ((name, self._weights[name]) for name in self.specs)
        if self.data_parallel_rank == 0:
            write_model(path, self._model_path, tensors)
        else:
            for _ in tensors:
                pass  # taking part

    def save_state(self, folder: Path) -> Future[None]:
        """See `TrainEngine.save_state`: rank 0 writes, see gathered_state.py."""
        return self._state.save(self._everything(), self._optimizer.num_updates, folder)

    @torch.no_grad()
    def load_state(self, folder: Path) -> None:
        """See `TrainEngine.load_state`."""
        self._optimizer.num_updates = count = self._state.load(folder)
        self._zero.make_states(count)
        old = self._models.old_model
        for name, spec in self.specs.items():
            self._zero.set(name, loaded(f"weights/{name}", spec.shape, torch.float32, folder))
            for kind in MOMENTS if count else ():
                self._zero.set(name, loaded(f"optimizer/{name}/{kind}", spec.shape, torch.float32, folder), kind)
            if old is not None:
                old.parameters[name].copy_(loaded(f"old/{name}", spec.shape, old.parameters[name].dtype, folder))
        self._zero.refresh()

    def _forward_backward(self, micro_batch: MicroBatch | None, objective: Objective) -> MicroBatchResult | None:
        """One place of a turn; None: this process has no micro-batch for it, and runs a token through every module, times 0."""
        if micro_batch is None:
            nothing = _nothing(self._device)
            self._fill_tokens += nothing.num_tokens
            total = 0.0 * self._zero(nothing, _everything)
            if self._every(True):
                self._add(total)
            return None
        packed = pack_thrifty(micro_batch.prompt_ids, micro_batch.response_ids, self._device)
        if self._is_to_check and packed.layout.has_prompt and self._ranks.size == 1:
            check_shared_log_probs(self._policy_log_probs, micro_batch, self._device, self._policy.dtype)
            self._is_to_check = False
        known = micro_step.given(self._models, packed, micro_batch)
        results: list[MicroBatchResult] = []

        def loss(hidden_TH: Tensor, head_VH: Tensor) -> Tensor:
            made = micro_step.loss(known, objective, hidden_TH, head_VH, chunk_tokens=self._options.log_prob_chunk_tokens)
            results.append(made.result)
            return made.total

        total = self._zero(packed, loss)
        (result,) = results
        if self._every(result.is_finite):
            self._add(total)
            return result
        return replace(result, is_finite=False)

    def _every(self, is_finite: bool) -> bool:
        return not any(self._ranks.largest([not is_finite])) if self._ranks.size > 1 else is_finite

    def _add(self, total: Tensor) -> None:
        self._zero.add(total)
        self._num_added += 1

    def _policy_log_probs(self, packed: Packed) -> Tensor:
        def of_targets(hidden_TH: Tensor, head_VH: Tensor) -> Tensor:
            chunk_tokens = self._options.log_prob_chunk_tokens
            return log_probs_and_entropy(hidden_TH, head_VH, packed.targets_T, chunk_tokens=chunk_tokens)[0]

        return self._zero(packed, of_targets)

    def _everything(self) -> Iterator[tuple[str, Tensor]]:
        """The state's tensors, each gathered when it is its turn."""
        old = self._models.old_model
        for name in self.specs:
            yield f"weights/{name}", self._zero.get(name)
            for kind in MOMENTS if self._optimizer.num_updates else ():
                yield f"optimizer/{name}/{kind}", self._zero.get(name, kind)
            if old is not None:
                yield f"old/{name}", old.parameters[name]


class Zero:
    """Trains the parameters of `module`, which is called through it. Every process does every call at the same time."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        adamw: torch.optim.Optimizer,
        options: TrainEngineOptions,
        device: torch.device,
        stage: int,
        zero: Mapping[str, Any],
    ) -> None:
        """Hand `module` over to DeepSpeed, and `parameters` (float32, those of `adamw`), which it cuts as `stage` says."""
        os.environ.setdefault("LOCAL_RANK", "0")  # it looks for it even where it is told the device
        deepspeed = importlib.import_module("deepspeed")
        deepspeed.utils.logger.setLevel("WARNING")
        self._utils, self._parameters, self._size = deepspeed.utils, parameters, dist.get_world_size()
        config = _config(options, stage, zero)
        which = Namespace(device_rank=device.index or 0)
        # On a CPU it would compile, for a minute or so, a collective in shared memory, which serves its inference alone.
        with patch.object(importlib.import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None):
            self._engine, *_ = deepspeed.initialize(which, model=module, optimizer=adamw, config=config, dist_init_required=False)
        self._optimizer, self._adamw, self._is_whole = self._engine.optimizer, adamw, stage < 3
        self._is_offloaded = "offload_optimizer" in config["zero_optimization"]
        self._optimizer.override_loss_scale(1.0)
        self.make_states(0)

    def __call__(self, *arguments: Any) -> Tensor:
        """The module's forward pass."""
        return self._engine(*arguments)

    def add(self, total: Tensor) -> None:
        """Run a loss backward, and add the gradients to the step's sums."""
        self._engine.backward(total)

    def step(self, normaliser: int, learning_rate: float) -> tuple[float, bool]:
        """Divide the sums, clip, update, forget the sums. The norm before the clip, and whether it was finite and all was done."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        # DeepSpeed's sums are averages over the processes.
        self._optimizer.override_loss_scale(normaliser / self._size)
        self._engine.step()
        self._optimizer.override_loss_scale(1.0)
        return float(self._engine.get_global_grad_norm()), self._engine.was_step_applied()

    def forget(self) -> None:
        """Forget the sums: what DeepSpeed's own `step` does where it finds an overflow."""
        zero = self._optimizer
        zero.zero_grad()
        zero.averaged_gradients = {}
        if self._is_whole:
            zero.all_grad_tensors = {}
            zero._release_preflattened_grad_buffers()
            zero.micro_step_id = -1  # the first of a step is copied to host memory, and not added to what lies there
            zero._offload_accumulated_param_ids = set()
        if self._is_offloaded:
            zero.reset_cpu_buffers()

    def get(self, name: str, kind: str = "") -> Tensor:
        """A whole weight, float32, or the optimiser's state of that `kind` for it, gathered from all processes."""
        parameter = self._parameters[name]
        if kind:
            return self._utils.safe_get_full_optimizer_state(parameter, kind)
        return self._utils.safe_get_full_fp32_param(parameter)

    def set(self, name: str, whole: Tensor, kind: str = "") -> None:
        """Put a whole tensor in the place of what `get` gives; `refresh` follows when all are there."""
        parameter, of_kind = self._parameters[name], [kind] if kind else []
        if self._is_whole:
            put = self._utils.safe_set_full_optimizer_state if kind else self._utils.safe_set_full_fp32_param
            put(parameter, whole.to(parameter.device), *of_kind)
            return
        # DeepSpeed's own function for the whole refuses what does not divide by the processes.
        size = self._utils.safe_get_local_fp32_param(parameter).numel()
        padded = torch.zeros(size * self._size, dtype=whole.dtype)
        padded[: whole.numel()] = whole.flatten()
        put = self._utils.safe_set_local_optimizer_state if kind else self._utils.safe_set_local_fp32_param
        put(parameter, padded[dist.get_rank() * size :][:size], *of_kind)

    def refresh(self) -> None:
        """The module computes with the weights as they were set: what DeepSpeed's own `step` does after an update."""
        if self._is_whole:
            self._optimizer.update_lp_params()
            return
        for number in range(len(self._optimizer.fp16_groups)):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if whole := self._optimizer.persistent_parameters:
            whole[0].all_gather(whole)

    def make_states(self, num_updates: int) -> None:
        """Be where so many updates have been made, with moments that are yet to be filled in."""
        zero = self._optimizer
        flat = zero.single_partition_of_fp32_groups if self._is_whole else zero.fp32_partitioned_groups_flat
        for partition in flat:
            moments = {kind: torch.zeros_like(partition, requires_grad=False) for kind in MOMENTS}
            self._adamw.state[partition] = {"step": torch.tensor(float(num_updates)), **moments}
        if self._is_whole:
            # By itself it looks for them after the first group's first update, when the others have none yet.
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()


def _config(options: TrainEngineOptions, stage: int, zero: Mapping[str, Any]) -> dict[str, Any]:
    section: dict[str, Any] = {"overlap_comm": False, **zero, "stage": stage}
    if options.offload_optimizer:
        section["offload_optimizer"] = {"device": "cpu", **section.get("offload_optimizer", {})}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # `step` says where a step ends, not a count
        "gradient_clipping": options.max_grad_norm,
        "zero_optimization": section,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": options.dtype == "bfloat16", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": None,
    }


class _Policy(nn.Module):
    """A model as DeepSpeed must see it: whatever uses a weight is the forward pass of the module that holds it.

    With stage 3 a weight is whole only then. Its output layer is replaced by one that hands its weight to a function.
    """

    def __init__(self, module: Any, options: TrainEngineOptions) -> None:
        super().__init__()
        self.module = module.eval()
        self.dtype, self._temperature = getattr(torch, options.dtype), options.temperature
        module.set_output_embeddings(_Head(module.get_output_embeddings().weight))
        if options.activation_checkpointing:
            for layer in module.base_model.layers:
                recompute_activations(layer)
        self.parameters_by_name = dict(module.named_parameters())

    def forward(self, packed: Packed, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """`function` of the hidden states [T, H] that predict the response tokens, temperature applied, and of the head [V, H]."""
        inputs = {"input_ids": packed.tokens_P[None], "position_ids": packed.positions_P[None], "layout": packed.layout}
        outputs = self.module.base_model(**inputs, attention_mask=None, use_cache=False)
        hidden_TH = packed.predicting(outputs.last_hidden_state[0])
        if self._temperature != 1.0:
            hidden_TH = hidden_TH / self._temperature
        return self.module.get_output_embeddings()(hidden_TH, function)


class _Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden_TH: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return function(hidden_TH, self.weight)


def _everything(hidden_TH: Tensor, head_VH: Tensor) -> Tensor:
    """A number that every weight takes part in."""
    return (hidden_TH @ head_VH.t()).float().sum()


def _nothing(device: str) -> Packed:
    one = np.zeros(1, np.int64)
    return pack_thrifty(one, Ragged.from_arrays([one], "int64"), device)


class _Weights(Mapping[str, Tensor]):
    """The float32 weights by name, each gathered from all processes when it is asked for: all ask alike."""

    def __init__(self, zero: Zero, names: Sequence[str]) -> None:
        self._zero, self._names = zero, names

    def __getitem__(self, name: str) -> Tensor:
        return self._zero.get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Itself, as `CausalModel` calls it."""
        return self
