"""The processes of one train engine: which is where in the layout, and what they send each other besides tensors.

    rank = (dp_rank * pp + pp_rank) * tp + tp_rank          a mesh (dp, pp, tp)
    leader -- calls (calls.py) --> the other ranks of its data-parallel group
    the same rank of every group <-- small numbers, agreed on --> (how many micro-batches a round has)

consumes: the environment of a worker (RANK, WORLD_SIZE, ...), as `asyncflow train` and torchrun set it
waits for: the other ranks, in each exchange for at most `EXCHANGE_SECONDS`; a follower for its leader's next call, however long
is unblocked by: what they send, or their end, which closes their sockets

Tensors travel by what PyTorch itself chooses for the device (gloo, NCCL, HCCL), calls and numbers by gloo.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from asyncflow.engines.base import EXCHANGE_SECONDS, RANKS_INTERFACES, RANKS_STORE
from asyncflow.engines.devices import own_device
from asyncflow.engines.train.parallel.calls import Call, decode, encode
from asyncflow.transport.torch_store import reason
from asyncflow.types import Layout, RunError, UserError

_PARKED: Final = timedelta(days=30)
"""A follower waits for its leader, and the leader for rows: how long that may take is for the run's watchdog to say."""
_LIMB: Final = 48  # bits of an integer that travel in one int64, so that 2**15 ranks' can be added up


class Ranks:
    """Place of this process among the ranks, and its groups."""

    def __init__(self, layout: Layout, device: str) -> None:
        """Join the others; waits for all of them.

        Raises:
            UserError: `device` is one device, and the layout has several.
            RunError: the environment names no ranks, or not as many as the layout has, or they did not come.
        """
        try:
            self.rank, self.size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        except (KeyError, ValueError) as error:
            raise RunError(
                f"plan.train has {layout.size} ranks, but this process was not started as one of them ({error} is not set): start "
                f"the run with asyncflow train, or each rank with torchrun"
            ) from error
        if self.size != layout.size:
            raise UserError(
                f"plan.train has {layout.size} ranks, but {self.size} were started: start as many, or change plan.train."
            )
        self.layout = layout
        self.device = own_device(device, local_rank, "train.device")
        is_local = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
        if is_local:
            stay_on_loopback()
        with self.named("the first greeting"):
            dist.init_process_group(
                backend_of(self.device),
                init_method=os.environ.get(RANKS_STORE, "env://"),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=EXCHANGE_SECONDS),
            )
            names = ("dp", "pp", "tp")
            self.mesh: DeviceMesh = init_device_mesh(self.device.type, (layout.dp, layout.pp, layout.tp), mesh_dim_names=names)
            self.dp_rank, self.pp_rank, self.tp_rank = (self.mesh.get_local_rank(name) for name in names)
            self._leader, self._calls = self._calls_group()

    @property
    def is_leader(self) -> bool:
        """Whether this rank's engine is called by a loop."""
        return self.pp_rank == self.tp_rank == 0

    def group(self, name: str) -> dist.ProcessGroup:
        """The ranks that differ from this one in their dp, pp or tp rank alone."""
        return self.mesh.get_group(name)

    def broadcast(self, call: Call) -> None:
        """Have the followers make the call, too; for the leader."""
        if self._calls is None:
            return
        content = torch.frombuffer(bytearray(encode(call)), dtype=torch.uint8)
        with self.named("a call to the followers"):
            dist.broadcast(torch.tensor([len(content)]), self._leader, self._calls)
            dist.broadcast(content, self._leader, self._calls)

    def receive(self) -> Call:
        """The leader's next call; for a follower."""
        num_bytes = torch.empty(1, dtype=torch.int64)
        with self.named("the leader's next call"):
            dist.broadcast(num_bytes, self._leader, self._calls)
            content = torch.empty(int(num_bytes), dtype=torch.uint8)
            dist.broadcast(content, self._leader, self._calls)
        return decode(content.numpy().data)

    def largest(self, numbers: Sequence[float], *, of: str | None = None) -> list[float]:
        """Largest value of each number that a rank has, float64, NaN if one is; of all ranks, or of those along an axis."""
        own = torch.tensor(numbers, dtype=torch.float64)
        tensor = torch.stack([own.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf), own.isnan().double()])
        with self.named("what to do together"):
            dist.all_reduce(tensor, dist.ReduceOp.MAX, None if of is None else self.group(of))
        largest, is_nan = tensor
        return list(map(float, largest.where(is_nan == 0, math.nan).tolist()))

    def total(self, numbers: Sequence[int], *, of: str | None = None) -> list[int]:
        """The sums over ranks of integers from 0 to 2**144."""
        limbs = torch.tensor([[number >> shift & (1 << _LIMB) - 1 for shift in (0, _LIMB, 2 * _LIMB)] for number in numbers])
        with self.named("sums"):
            dist.all_reduce(limbs, dist.ReduceOp.SUM, None if of is None else self.group(of))
        return [sum(int(limb) << i * _LIMB for i, limb in enumerate(row)) for row in limbs.tolist()]

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Within it an exchange that fails is a `RunError` that says what it was for."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if not is_lost(error):
                raise
            raise RunError(
                f"rank {self.rank} of {self.size} lost the others over {what} ({reason(error)[:200]}): one of them has ended, or "
                f"said nothing for {EXCHANGE_SECONDS:g} s, and its own last words say why"
            ) from error

    def leave(self) -> None:
        """Let go of the others. A rank that still waits for this one notices it when its process ends, which closes its sockets."""
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()

    def _calls_group(self) -> tuple[int, dist.ProcessGroup | None]:
        """The leader of this rank's data-parallel group, and the group in which it sends its calls; None if it is alone."""
        own: tuple[int, dist.ProcessGroup | None] = (self.rank, None)
        each = self.layout.pp * self.layout.tp
        if each > 1:
            for leader in range(0, self.size, each):  # every rank takes part in the making of every group
                group = dist.new_group(range(leader, leader + each), backend="gloo", timeout=_PARKED)
                if leader == self.dp_rank * each:
                    own = leader, group
        return own


def is_lost(error: BaseException) -> bool:
    """Whether an error says that ranks could not exchange something. Gloo's errors have no type of their own."""
    text = str(error)
    return isinstance(error, dist.DistError) or "gloo/" in text or "Connection closed by peer" in text


def backend_of(device: torch.device) -> str:
    """Backend that torch itself chooses for a device, a plug-in's (HCCL for an NPU) included; gloo for what is in host memory."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.Backend.default_device_backend_map[device.type]}"


def stay_on_loopback() -> None:
    """Have the libraries that connect ranks listen on this machine alone, unless the user has set otherwise."""
    loopback = next((interface for _, interface in socket.if_nameindex() if interface.startswith("lo")), None)
    for name in RANKS_INTERFACES if loopback is not None else ():
        os.environ.setdefault(name, str(loopback))
