"""DeepSpeed's ZeRO around a module: backward passes, steps, and its tensors by name.

Written against DeepSpeed 0.19.8. Gradients are added up until `step` (`managed_gradient_accumulation` false), and some of what its
public functions leave out is done as its own code does it (each place says so).
"""

from __future__ import annotations

import importlib
import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncflow.engines.base import TrainEngineOptions
from asyncflow.engines.train.optimizer import MOMENTS


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
