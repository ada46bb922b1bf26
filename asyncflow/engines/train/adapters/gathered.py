"""Training whose tensors a library keeps in its own form: gathered by name, one at a time, and written by rank 0.

    tensors, whole, by Hugging Face name --copies in the writer's host memory--> the files of state.py, and back

So another engine can load the state, under any layout. The price: the process that writes holds the weights and the optimiser's
state, 12 bytes a parameter, in its host memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from asyncflow.engines.base import TrainEngineOptions
from asyncflow.engines.devices import check_device
from asyncflow.engines.train.model.weight_files import write_model
from asyncflow.engines.train.optimizer import Optimizer
from asyncflow.engines.train.parallel.ranks import Ranks, backend_of, stay_on_loopback
from asyncflow.engines.train.state import StateWriter, fingerprint_of, load_tensors_into
from asyncflow.engines.train.training import PolicyTraining
from asyncflow.types import Layout


class GatheredTraining(PolicyTraining):
    """`PolicyTraining` in one process of a layout. All processes with `_gathers` gather the same tensors, in the same order."""

    _optimizer: Optimizer

    def __init__(self, model_path: Path, options: TrainEngineOptions) -> None:
        """Join the other ranks. Raises as `Ranks`."""
        self._model_path, self._options = model_path, options
        is_alone = options.layout.size == 1
        self._ranks = (SingleRank if is_alone else Ranks)(options.layout, options.device)
        self.ranks = None if is_alone else self._ranks
        self.data_parallel_rank = self._ranks.dp_rank if self._ranks.is_leader else None
        self._is_writer, self._gathers = self._ranks.rank == 0, True
        self._random = torch.get_rng_state()

    @abstractmethod
    def _weight(self, name: str) -> Tensor:
        """Whole float32 weight, gathered."""

    @abstractmethod
    def _everything(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the state by name, each gathered when the iteration comes to it."""

    @abstractmethod
    def _load(self, num_updates: int, folder: Path) -> None:
        """Restore the tensors of the state in `folder`, after so many updates."""

    def begin_step(self) -> None:
        """Remember the random generator's state: a state that is saved within a step holds the one at the step's start."""
        self._random = torch.get_rng_state()
        self.models.begin_step()

    def _whole(self, name: str) -> Tensor | None:
        tensor = self._weight(name) if self._gathers else None
        return tensor.detach() if tensor is not None and self._is_writer else None

    def fingerprint(self) -> Mapping[str, str]:
        if not self._gathers:
            return {}
        step = torch.tensor(float(self._optimizer.num_updates))
        steps = {f"optimizer/{name}/step": step for name in self.specs if step}
        of_state = (pair for pair in self._everything() if not pair[0].startswith("old/"))
        hashes = fingerprint_of(chain(steps.items(), of_state))
        return hashes if self._is_writer else {}

    def save(self, path: Path) -> None:
        tensors = ((name, self._weight(name)) for name in self.specs if self._gathers)
        if self._is_writer:
            write_model(path, self._model_path, tensors)
        else:
            for _ in tensors:
                pass  # takes part in gathering

    def save_state(self, folder: Path) -> Future[None]:
        """See `TrainEngine.save_state`. In a process that does not write, the future is done at once."""
        held = {name: tensor.detach().cpu() for name, tensor in self._everything() if self._is_writer} if self._gathers else {}
        if self._is_writer:
            own = {"updates": torch.tensor([self._optimizer.num_updates]), "random/0/cpu": self._random}
            return StateWriter().begin(held, folder, own=own)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @torch.no_grad()
    def load_state(self, folder: Path) -> None:
        updates, self._random = torch.zeros(1, dtype=torch.int64), torch.get_rng_state()
        load_tensors_into({"updates": updates, "random/0/cpu": self._random}, folder)
        torch.set_rng_state(self._random)
        self._load(int(updates), folder)


def loaded(name: str, shape: tuple[int, ...], dtype: torch.dtype, folder: Path) -> Tensor:
    """Whole tensor `name` of the state in `folder`, on the CPU. Raises `RunError` if there is none of that shape."""
    tensor = torch.empty(shape, dtype=dtype)
    load_tensors_into({name: tensor}, folder)
    return tensor


class SingleRank(Ranks):
    """The only rank, for libraries that want process groups even where there is one process. Nobody else can join its groups."""

    def __init__(self, layout: Layout, device: str) -> None:
        """Raises `UserError` if there is no such device."""
        check_device(device, "train.device")
        self.rank, self.size, self.layout, self.device = 0, 1, layout, torch.device(device)
        stay_on_loopback()
        if not dist.is_initialized():  # by an engine before this one: libraries keep its groups
            stores: Any = dist  # torch does not say that it exports them
            dist.init_process_group(backend_of(self.device), store=stores.HashStore(), rank=0, world_size=1)
        self.mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "pp", "tp"))
        self.dp_rank = self.pp_rank = self.tp_rank = 0
        self._leader, self._calls = 0, None
