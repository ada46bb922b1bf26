"""vLLM's half of AsyncFlow's vLLM engine (`asyncflow/engines/rollout/vllm/engine.py`). Imported by vLLM's processes.

    FileWeights     a weight-transfer engine, `asyncflow` in vLLM's factory: reads the weights from memory that it maps
    Extension       for --worker-extension-cls: names this module to vLLM's workers, which registers the engine; has each tell what
                    it computes with
    RequireKey      for --middleware: no route without the run's key (vLLM's own --api-key leaves the development routes open);
                    and two routes more, SETTINGS and SUMS

Nothing of AsyncFlow is imported here: it need not be installed beside vLLM, and its transformers is another one.
"""

from __future__ import annotations

import hmac
import json
import math
import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import asyncflow_loading
import asyncflow_sums
import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

SETTINGS, SUMS = "/asyncflow/settings", "/asyncflow/sums"


class Extension:
    """Adds a method to vLLM's workers, which import the module that it is in."""

    get_model: Any
    model_config: Any

    def asyncflow_sums(self, seed: int, lora_id: int | None, has_weights: bool) -> dict[str, Any]:
        """Sums of what this worker computes with (asyncflow_sums.py)."""
        return asyncflow_sums.attested(self.get_model(), self.model_config.dtype, seed, lora_id, has_weights)


@dataclass
class FileInit(WeightTransferInitInfo):
    """Initialisation without a rendezvous: the weights are read from a file."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """A whole model: `tensors` are (Hugging Face name, shape, first byte) in the file at `path`, all of one dtype but those in
    `dtype_names`."""

    path: str
    num_bytes: int
    dtype_name: str
    tensors: list[tuple[str, list[int], int]]
    dtype_names: dict[str, str] = field(default_factory=dict)


class FileWeights(WeightTransferEngine):
    """Loads checkpoints that another process of this user holds in memory, layer by layer.

    Each worker of a tensor-parallel instance maps the same bytes, and takes its part of every tensor.
    """

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Do nothing: files need no connection."""

    def start_weight_update(self) -> None:
        """Begin an update: until `finish_weight_update` the model computes nothing, and its tensors are replaced, layer by layer.

        A layer of which an update that failed has loaded a part would count that part as this update's, so it is ended first.
        """
        if any(get_layerwise_info(layer).can_load() for layer in self.model.modules()):
            finalize_layerwise_reload(self.model, self.model_config)
        initialize_layerwise_reload(self.model)
        # A CPU's kernel for experts packs their weights when it is made, and not when they are loaded again (vLLM 0.32.0): it would
        # read unpacked ones as packed. So it is made anew. Elsewhere recorded graphs have the addresses of the first.
        if not torch.accelerator.is_available():
            for layer in self.model.modules():
                if isinstance(method := getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod):
                    method.moe_kernel = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a whole model. The base class's waits for an accelerator, and there may be none."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Raises `ValueError` for a file that is not this user's own, or not as long as it was said to be."""
        mapped = _mapped(update_info.path, update_info.num_bytes)
        buffer = torch.frombuffer(mapped, dtype=torch.uint8)
        self.model.load_weights(_tensors(buffer, update_info))

    def finish_weight_update(self) -> None:
        """Have the model compute again, with the new weights."""
        finalize_layerwise_reload(self.model, self.model_config)
        # An output layer that shares the embedding's weight is not loaded by itself, so the reload leaves its packed copy as it was
        # (vLLM 0.32.0, CPU): all logits would come from the head of the weights before. Elsewhere this does nothing.
        for layer in self.model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if type(method) is UnquantizedEmbeddingMethod:
                method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Do nothing: nothing is held."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """AsyncFlow's half writes the file."""
        raise NotImplementedError("AsyncFlow writes the weights itself (asyncflow/engines/rollout/vllm/weights.py)")


def _mapped(path: str, num_bytes: int) -> mmap.mmap:
    """The file's bytes; what would write to them writes to a copy of its own."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise ValueError(f"{path} is not a file of this user's own")
        if status.st_size != num_bytes:
            raise ValueError(f"{path} has {status.st_size:,} bytes and was said to have {num_bytes:,}")
        return mmap.mmap(fd, num_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)


def _tensors(buffer: Tensor, update: FileUpdate) -> Iterator[tuple[str, Tensor]]:
    for name, shape, begin in update.tensors:
        dtype: torch.dtype = getattr(torch, update.dtype_names.get(name, update.dtype_name))
        end = begin + math.prod(shape) * dtype.itemsize
        yield name, buffer[begin:end].view(dtype).view(shape)


class RequireKey:
    """ASGI middleware: a request without the key of `VLLM_API_KEY` is refused, whatever it asks for."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self._expected):
            if scope["type"] == "http" and scope["path"] == SETTINGS:
                await _answer(send, 200, _settings(scope["app"].state.vllm_config))
            elif scope["type"] == "http" and scope["path"] == SUMS:
                await _answer(send, *await _sums(scope["app"].state, parse_qs(scope["query_string"].decode())))
            else:
                await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(send, 401, {"error": "the key is missing, or another one"})


def _settings(config: Any) -> dict[str, Any]:
    """Settings of the server that AsyncFlow relies on (vLLM's own /server_info looks for compilers, and may fail)."""
    return {
        "max_model_len": config.model_config.max_model_len,
        "logprobs_mode": config.model_config.logprobs_mode,
        "enable_chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "device_type": config.device_config.device_type,
        "enable_eplb": config.parallel_config.enable_eplb,
    }


async def _sums(state: Any, query: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
    """Status, and sums of what each worker computes with, for requests that name the adapter `lora`; with `weights`=1 of the
    model's too."""
    lora_id = None
    try:
        if "lora" in query:
            request = state.openai_serving_models.lora_requests.get(query["lora"][0])
            if request is not None:
                await state.engine_client.add_lora(request)  # as a request that names it does: a worker may have put it aside
            lora_id = 0 if request is None else request.lora_int_id
        asked = (int(query["seed"][0]), lora_id, query["weights"] == ["1"])
        return 200, {"workers": await state.engine_client.collective_rpc("asyncflow_sums", args=asked)}
    except Exception as error:
        if getattr(state.engine_client, "errored", False):  # it has died, and generates nothing: this server is lost
            return 503, {"error": f"{type(error).__name__}: {error}"}
        # Of another vLLM than this was written against, maybe: it generates all the same.
        return 200, {"workers": [{"why": f"{type(error).__name__}: {error}"}]}


async def _answer(send: Any, status: int, content: dict[str, Any]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


WeightTransferEngineFactory.register_engine("asyncflow", FileWeights)
asyncflow_loading.watch_loading()
