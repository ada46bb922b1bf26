"""A process's part of each weight and of its optimiser state, exchanged by Hugging Face names.

    weights (float32), moments, the old policy's --sent by the stage that has them--> all stages --gathered over tp--> whole ones
    whole tensors of a checkpoint --sharded (origins.py)--> the same, in place

Megatron keeps up to three of Hugging Face's tensors as one weight, which is sent as one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from asyncflow.engines.train.adapters.gathered import loaded
from asyncflow.engines.train.adapters.megatron.origins import Origin, stage_origins
from asyncflow.engines.train.adapters.megatron.stage import MegatronStage
from asyncflow.engines.train.optimizer import MOMENTS, Optimizer
from asyncflow.types import Layout, TensorSpec


class StageTensors:
    """Process's part of a model's state. All processes of a data-parallel group make the same calls in the same order."""

    def __init__(
        self,
        policy: MegatronStage,
        masters: Mapping[str, Tensor],
        optimizer: Optimizer,
        old_model: MegatronStage | None,
        layout: Layout,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Set up the names. `masters`: float32 weights by Megatron's name; `shapes`: of all whole tensors, by Hugging Face name."""
        self._policy, self._masters, self._optimizer, self._old_model = policy, masters, optimizer, old_model
        self._num_shards, self._shapes = layout.tp, shapes
        self._stages = stage_origins(policy.config, layout.pp)
        # The last stage's copy of a tied embedding is not a separate weight.
        tied = (layout.pp - 1, "output_layer.weight") if policy.config.tie_word_embeddings else None
        self._places = [(i, name) for i, stage in enumerate(self._stages) for name in stage if (i, name) != tied]
        self._place_of = {source: (i, name) for i, name in self._places for source in self._stages[i][name].names}
        self.specs = {name: TensorSpec(shapes[name], "float32") for name in self._place_of}
        # Tensors that were gathered together with the last one asked for. They cannot be of an earlier update: the first weight of
        # an export, the embedding, is gathered alone, and replaces them.
        self._rest: dict[str, Tensor] = {}

    def is_own(self, name: str, origin: Origin) -> bool:
        """Whether this process is the one of the group that counts the weight `name` (Megatron's) in the norm."""
        return not (origin.cut == "whole" and self._policy.tp > 0) and (self._policy.stage, name) in self._places

    def weight(self, name: str) -> Tensor:
        """Whole float32 tensor of that Hugging Face name, gathered from all processes of the group."""
        found = self._rest if name in self._rest else self._gather(*self._place_of[name], "weights")
        self._rest = {other: tensor for other, tensor in found.items() if other != name}
        return found[name]

    def everything(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the state by name, each gathered when the iteration comes to it."""
        for stage, name in self._places:
            for kind in self._kinds():
                for source, tensor in self._gather(stage, name, kind).items():
                    yield _state_name(source, kind), tensor

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Copy this process's parts of the state in `folder`. Raises `RunError` if a tensor is missing or has another shape."""
        for name, origin in self._policy.origins.items():
            for kind in self._kinds():
                part = self._kept(name, kind)
                whole = [loaded(_state_name(source, kind), self._shapes[source], part.dtype, folder) for source in origin.names]
                part.copy_(origin.shard(whole, self._policy.tp, self._num_shards))

    def _kinds(self) -> list[str]:
        return ["weights", *(MOMENTS if self._optimizer.num_updates else ()), *(["old"] if self._old_model else [])]

    @torch.no_grad()
    def _gather(self, stage: int, name: str, kind: str) -> dict[str, Tensor]:
        """Whole tensors, by Hugging Face name, of a stage's weight `name` (Megatron's); `kind`: `weights`, a moment, or `old`."""
        origin, group = self._stages[stage][name], self._policy.core.pp_group
        if stage == self._policy.stage:
            own = self._kept(name, kind).detach().contiguous()
        else:
            whole = [torch.empty(self._shapes[source], device="meta") for source in origin.names]
            dtype = self._old_model.dtype if kind == "old" and self._old_model else torch.float32
            own = torch.empty(origin.shard(whole, 0, self._num_shards).shape, dtype=dtype, device=self._policy.device)
        dist.broadcast(own, dist.get_global_rank(group, stage), group=group)
        shards = [torch.empty_like(own) for _ in range(self._num_shards)]
        dist.all_gather(shards, own, group=self._policy.core.tp_group)
        return dict(zip(origin.names, origin.join(shards), strict=True))

    def _kept(self, name: str, kind: str) -> Tensor:
        """Part of a tensor that this process keeps: the weight (float32), the optimiser's state, or the old policy's weight."""
        if kind == "old" and self._old_model is not None:
            return self._old_model.weights[name]
        master = self._masters[name]
        return master if kind == "weights" else self._optimizer.adamw.state[master][kind]


def _state_name(name: str, kind: str) -> str:
    """Name of a tensor in the files of state.py."""
    return f"optimizer/{name}/{kind}" if kind in MOMENTS else f"{kind}/{name}"
