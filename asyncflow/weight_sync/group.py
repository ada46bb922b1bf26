"""A process group for broadcasts: rank 0 sends a file's bytes in chunks, all others receive them.

It is no part of torch.distributed's one default group per process, which belongs to code that shards a model. Members find each
other through a store that is the sender's own service, so that nothing listens but what the backend opens for its bulk data:
gloo on loopback when all are on one machine. Between machines gloo and NCCL listen on the network interface that
`GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME` names, without credentials: it should be one that only the cluster reaches.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from asyncflow.transport.torch_store import RendezvousStore
from asyncflow.types import Array

CHUNK_BYTES = 4 << 20
_IN_FLIGHT = 2  # chunks: one arrives while the one before it is copied and hashed


class Group:
    """Group of processes that broadcast. Calls block; they raise `RuntimeError`, and close the group, when a member is gone, or
    silent for `timeout_seconds`."""

    def __init__(
        self, store: RendezvousStore, rank: int, size: int, *, device: str, timeout_seconds: float, is_local: bool
    ) -> None:
        """Waits for the other members, and keeps the `store`. `is_local`: all are on this machine."""
        self._device, self._timeout = torch.device(device), timedelta(seconds=timeout_seconds)
        self._store: RendezvousStore | None = store  # the backend refers to it, in C++
        self._backend = _backend(store, rank, size, self._device, self._timeout, is_local)
        self._under_way: deque[tuple[Any, Tensor]] = deque()
        num_buffers = _IN_FLIGHT if rank else 0
        self._buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=self._device) for _ in range(num_buffers)]

    def send(self, file: Array) -> None:
        """The sender's part: uint8 [num_bytes]."""
        with self._closed_by_errors():
            for begin in range(0, len(file), CHUNK_BYTES):
                self._start(torch.from_numpy(file[begin : begin + CHUNK_BYTES]).to(self._device))
                if len(self._under_way) == _IN_FLIGHT:
                    self._finish()
            while self._under_way:
                self._finish()

    def receive(self, num_bytes: int, write: Callable[[Array], None]) -> None:
        """A receiver's part. `write` is given the bytes in order, uint8 [n] each, and must copy them."""
        with self._closed_by_errors():
            for number, begin in enumerate(range(0, num_bytes, CHUNK_BYTES)):
                self._start(self._buffers[number % _IN_FLIGHT][: num_bytes - begin])
                if len(self._under_way) == _IN_FLIGHT:
                    write(self._finish().cpu().numpy())
            while self._under_way:
                write(self._finish().cpu().numpy())

    def close(self) -> None:
        """Hang up on the other members, which then raise at once."""
        # The connections close with the last reference to them, also one in an exception's traceback.
        self._under_way.clear()
        self._backend = self._store = None

    def _start(self, chunk: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        self._under_way.append((self._backend.broadcast([chunk], options), chunk))

    def _finish(self) -> Tensor:
        self._under_way[0][0].wait()
        return self._under_way.popleft()[1]

    @contextlib.contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def _backend(store: RendezvousStore, rank: int, size: int, device: torch.device, timeout: timedelta, is_local: bool) -> Any:
    """The library that torch itself chooses for a device, a plug-in's (HCCL for an NPU) included."""
    name = dist.Backend.default_device_backend_map[device.type]
    if name == "gloo" and is_local:
        options = cast(Any, dist.ProcessGroupGloo)._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout, options._threads = timeout, _IN_FLIGHT
        return cast(Any, dist.ProcessGroupGloo)(store, rank, size, options)
    if name == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    if name == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    return dist.Backend._plugins[name.upper()].creator_fn(store, rank, size, timeout)
