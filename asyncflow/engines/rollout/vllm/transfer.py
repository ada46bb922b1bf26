"""Transfer of weights from the engine's memory into a vLLM server that is paused: start, update, finish, under one version.

    shared_memory   the server's processes map the file (in_vllm/asyncflow_vllm.py): any device, this machine
    nccl            vLLM's own engine: broadcast from a GPU of this process's own to those of the server

vLLM's third way, CUDA IPC, is left out: over HTTP its handles travel as pickles, which nothing here sends or reads.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from asyncflow.engines.rollout.vllm.client import ServerLost, VllmClient
from asyncflow.engines.rollout.vllm.options import VllmOptions
from asyncflow.engines.rollout.vllm.weights import WeightsFile
from asyncflow.threads import ComputeThread
from asyncflow.types import UserError

if TYPE_CHECKING:
    from torch import Tensor


class Transfer(ABC):
    """Way of the weights to all servers of an engine."""

    backend: str
    """Name of the transfer in vLLM's factory."""

    @abstractmethod
    async def send(self, client: VllmClient, file: WeightsFile) -> None:
        """Give a paused server what the file holds. Whatever it raises leaves the server unusable."""


class SharedMemoryTransfer(Transfer):
    """Transfer by a file in shared memory, which the server's processes map."""

    backend = "asyncflow"

    async def send(self, client: VllmClient, file: WeightsFile) -> None:
        assert file.version is not None, "`write` first"
        await client.start_weight_update()
        await client.update_weights(file.description())
        await client.finish_weight_update(file.version)


class NcclTransfer(Transfer):
    """Transfer by NCCL: this process is rank 0 of a group with each server's workers. Needs vLLM beside AsyncFlow, and a GPU that
    no server uses.

    Written against vLLM 0.32.0; run by nobody yet (docs/vllm.md).
    """

    backend = "nccl"

    def __init__(self, device: str, tensor_parallel: int, deadline_seconds: float) -> None:
        """Raises `UserError` when vLLM cannot be imported here."""
        try:
            from vllm.distributed.weight_transfer import base, nccl_engine
        except ImportError as error:
            raise UserError(
                f"rollout.engine.transfer=nccl needs vLLM in AsyncFlow's own environment ({error}): install it there, or take "
                f"shared_memory"
            ) from error
        self._nccl, self._meta = nccl_engine, base.ParamMeta
        self._device, self._deadline_seconds = device, deadline_seconds
        self._num_workers = tensor_parallel
        self._senders: WeakKeyDictionary[VllmClient, Any] = WeakKeyDictionary()

    async def send(self, client: VllmClient, file: WeightsFile) -> None:
        assert file.version is not None, "`write` first"
        calls = _Calls(client, asyncio.get_running_loop(), file.version, self._deadline_seconds)
        try:
            # Of its own: a thread that stays in NCCL for ever neither keeps the process nor stands in the next one's way.
            with closing(ComputeThread("weights by NCCL")) as thread:
                async with asyncio.timeout(self._deadline_seconds):
                    await thread.run(self._send, client, calls, file.tensors())
        except TimeoutError as error:
            raise ServerLost(f"{client.address} did not take the weights by NCCL within {self._deadline_seconds:g} s") from error
        except Exception as error:  # NCCL's, CUDA's, a socket's, the server's own
            raise ServerLost(f"{client.address} did not take the weights by NCCL: {error or type(error).__name__}") from error

    def _send(self, client: VllmClient, calls: _Calls, tensors: Mapping[str, Tensor]) -> None:
        import torch

        torch.accelerator.set_device_index(torch.device(self._device).index or 0)
        source = _Source(tensors, self._device, self._meta)
        sender = self._senders.get(client)
        if sender is None:
            with closing(socket.create_server(("127.0.0.1", 0))) as free:
                port = free.getsockname()[1]
            info = self._nccl.NCCLTrainerInitInfo(
                rank=0, master_address="127.0.0.1", master_port=port, world_size=1 + self._num_workers
            )
            sender = self._nccl.NCCLTrainerWeightTransferEngine.trainer_init(info, client=calls, source=source)
            self._senders[client] = sender
        sender.client, sender.source = calls, source
        sender.send_weights()


def transfer_of(options: VllmOptions) -> Transfer:
    """Transfer that is chosen. Raises `UserError` where it cannot be had."""
    if options.transfer == "nccl":
        return NcclTransfer(options.sends_from, options.tensor_parallel, options.deadline_seconds)
    return SharedMemoryTransfer()


class _Calls:
    """vLLM's `VLLMWeightSyncClient`, for a thread: the same server, over the engine's own connection."""

    def __init__(self, client: VllmClient, loop: asyncio.AbstractEventLoop, version: int, deadline_seconds: float) -> None:
        self._client, self._loop, self._version, self._deadline_seconds = client, loop, version, deadline_seconds

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._wait(self._client.init_weight_transfer_engine(init_info))

    def start_weight_update(self) -> None:
        self._wait(self._client.start_weight_update())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._wait(self._client.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._wait(self._client.finish_weight_update(self._version))

    def _wait(self, call: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(call, self._loop).result(self._deadline_seconds)


class _Source:
    """vLLM's `WeightSource`: tensors that are moved to the device one at a time."""

    def __init__(self, tensors: Mapping[str, Tensor], device: str, meta: Any) -> None:
        # Packed one behind another, each has to begin at a multiple of its elements' size.
        self._tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
        self._device, self._meta = device, meta

    def metadata(self) -> list[Any]:
        return [self._meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors.items():
            yield name, tensor.to(self._device)
