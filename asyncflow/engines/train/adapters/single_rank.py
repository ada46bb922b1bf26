"""For libraries that want process groups even where there is one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from asyncflow.engines.devices import check_device
from asyncflow.engines.train.parallel.ranks import Ranks, backend_of, stay_on_loopback
from asyncflow.types import Layout


def joined(layout: Layout, device: str) -> Ranks:
    """The ranks of a layout, or a lone one. Raises as `Ranks`."""
    return Ranks(layout, device) if layout.size > 1 else SingleRank(layout, device)


class SingleRank(Ranks):
    """The only rank. Its groups are real ones, which nobody else can join."""

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

    def leave(self) -> None:
        """Do nothing: there are no others; see above why the group stays."""
