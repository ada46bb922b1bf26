"""What AsyncFlow adds to vLLM's own processes, over stand-ins of vLLM's modules: the key, the routes, the weights.

With vLLM itself: tests/vllm.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncflow.engines.rollout.vllm.process import IN_VLLM

KEY = "the-key-of-this-run"
REGISTERED: dict[str, Any] = {}


class WeightTransferEngine:
    """As much of vLLM's as the engine of ours uses."""

    update_info_cls: Any

    def __init__(self, model: nn.Module) -> None:
        self.model, self.model_config = model, SimpleNamespace(dtype=torch.float32)

    def parse_update_info(self, update_info: dict[str, Any]) -> Any:
        return self.update_info_cls(**update_info)


class UnquantizedEmbeddingMethod:
    """Keeps what it computes with in a copy of the layer's weight."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.packed = layer.weight.detach().clone()


class UnquantizedFusedMoEMethod:
    """Packs a layer's experts when its kernel is made."""

    moe_kernel: object = "made"


class Reload:
    """vLLM's reload, layer by layer."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_half_loaded = self.is_watched = False

    def finalize(self, model: nn.Module, config: Any) -> None:
        self.calls.append("end")
        self.is_half_loaded = False

    def initialize(self, model: nn.Module) -> None:
        assert not self.is_half_loaded
        self.calls.append("begin")

    def info(self, layer: nn.Module) -> Any:
        return SimpleNamespace(can_load=lambda: self.is_half_loaded and isinstance(layer, nn.Embedding))


@pytest.fixture
def reload() -> Reload:
    return Reload()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, reload: Reload) -> Iterator[Any]:
    """The module that vLLM imports."""
    layerwise = {"get_layerwise_info": reload.info}
    of_reload = {"finalize_layerwise_reload": reload.finalize, "initialize_layerwise_reload": reload.initialize}
    factory = SimpleNamespace(register_engine=REGISTERED.__setitem__)
    base = {"WeightTransferEngine": WeightTransferEngine, "WeightTransferInitInfo": object, "WeightTransferUpdateInfo": object}
    for name, own in (
        ("vllm.distributed.weight_transfer.base", base),
        ("vllm.distributed.weight_transfer.factory", {"WeightTransferEngineFactory": factory}),
        (
            "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",
            {"UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethod},
        ),
        ("vllm.model_executor.layers.vocab_parallel_embedding", {"UnquantizedEmbeddingMethod": UnquantizedEmbeddingMethod}),
        ("vllm.model_executor.model_loader.reload", of_reload),
        ("vllm.model_executor.model_loader.reload.layerwise", layerwise),
    ):
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            path = ".".join(parts[:count])
            monkeypatch.setitem(sys.modules, path, sys.modules.get(path) or ModuleType(path))
        for key, value in own.items():
            monkeypatch.setattr(sys.modules[name], key, value, raising=False)
    attested = lambda *asked: {"told": [str(each) for each in asked[1:]]}  # noqa: E731
    monkeypatch.setitem(sys.modules, "asyncflow_sums", SimpleNamespace(attested=attested))
    watched = SimpleNamespace(watch_loading=lambda: setattr(reload, "is_watched", True))
    monkeypatch.setitem(sys.modules, "asyncflow_loading", watched)
    monkeypatch.syspath_prepend(str(IN_VLLM))
    monkeypatch.delitem(sys.modules, "asyncflow_vllm", raising=False)
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    yield importlib.import_module("asyncflow_vllm")
    sys.modules.pop("asyncflow_vllm", None)


def test_what_vllm_loads_is_watched_before_a_model_is_made(module: Any, reload: Reload) -> None:
    assert reload.is_watched


# -- requests ---------------------------------------------------------------------------------------------------------------


class Engine:
    """vLLM's, with two workers."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.errored = False

    async def add_lora(self, request: Any) -> None:
        self.calls.append(request.lora_int_id)

    async def collective_rpc(self, name: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        self.calls.append((name, *args))
        if self.errored:
            raise RuntimeError("EngineCore encountered an issue")
        return [{"weights": []}] * 2


class Server:
    """vLLM's application behind the key, as a client sees it."""

    def __init__(self, module: Any) -> None:
        self.engine, self.passed_on = Engine(), []
        adapters = {"r1": SimpleNamespace(lora_int_id=7)}
        config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=512, logprobs_mode="processed_logprobs"),
            scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
            device_config=SimpleNamespace(device_type="cpu"),
            parallel_config=SimpleNamespace(enable_eplb=False),
        )
        serving = SimpleNamespace(lora_requests=adapters)
        state = SimpleNamespace(vllm_config=config, engine_client=self.engine, openai_serving_models=serving)
        self.app = SimpleNamespace(state=state)
        self.gate = module.RequireKey(self._answer)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.passed_on.append(scope["path"])
        await send({"type": "http.response.start", "status": 204, "headers": []})

    async def ask(self, path: str, key: str | None = KEY, query: str = "", kind: str = "http") -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        scope = {"type": kind, "path": path, "headers": headers, "query_string": query.encode(), "app": self.app}
        if kind == "lifespan":
            del scope["headers"]

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.gate(scope, None, send)
        return sent


def content_of(sent: list[dict[str, Any]]) -> Any:
    return json.loads(sent[1]["body"])


@pytest.mark.parametrize("path", ["/v1/completions", "/asyncflow/settings", "/asyncflow/sums", "/collective_rpc", "/health"])
async def test_whatever_is_asked_for_without_the_key_is_refused(module: Any, path: str) -> None:
    server = Server(module)
    for key in (None, "", "another", KEY[:-1], KEY + "x"):
        sent = await server.ask(path, key)
        assert sent[0]["status"] == 401 and content_of(sent) == {"error": "the key is missing, or another one"}
        assert await server.ask(path, key, kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    assert not server.passed_on and not server.engine.calls
    await server.ask(path, None, kind="lifespan")  # the server's own start
    assert server.passed_on == [path]


async def test_with_the_key_vllm_answers_its_routes_and_ours_are_two(module: Any) -> None:
    server = Server(module)
    assert (await server.ask("/v1/completions"))[0]["status"] == 204 and server.passed_on == ["/v1/completions"]
    sent = await server.ask("/asyncflow/settings")
    assert sent[0]["status"] == 200 and content_of(sent) == {
        **{"max_model_len": 512, "logprobs_mode": "processed_logprobs", "enable_chunked_prefill": True, "device_type": "cpu"},
        **{"enable_eplb": False},
    }
    assert server.passed_on == ["/v1/completions"]


async def test_each_worker_is_asked_for_its_sums_and_an_adapter_is_there_when_it_is(module: Any) -> None:
    server = Server(module)
    found = content_of(await server.ask("/asyncflow/sums", query="seed=5&weights=1"))
    assert found == {"workers": [{"weights": []}] * 2} and server.engine.calls == [("asyncflow_sums", 5, None, True)]
    await server.ask("/asyncflow/sums", query="seed=6&weights=0&lora=r1")
    assert server.engine.calls[1:] == [7, ("asyncflow_sums", 6, 7, False)]
    await server.ask("/asyncflow/sums", query="seed=6&weights=0&lora=gone")
    assert server.engine.calls[3:] == [("asyncflow_sums", 6, 0, False)]  # an adapter that no worker has
    assert content_of(await server.ask("/asyncflow/sums", query="weights=1")) == {"workers": [{"why": "KeyError: 'seed'"}]}
    del server.app.state.openai_serving_models  # another vLLM's
    (told,) = content_of(await server.ask("/asyncflow/sums", query="seed=6&weights=0&lora=r1"))["workers"]
    assert told["why"].startswith("AttributeError: ")
    extension = module.Extension()
    extension.get_model, extension.model_config = lambda: "model", SimpleNamespace(dtype=torch.bfloat16)
    assert extension.asyncflow_sums(5, None, True) == {"told": ["torch.bfloat16", "5", "None", "True"]}


async def test_a_server_whose_engine_has_died_is_lost_and_not_unable_to_tell(module: Any) -> None:
    server = Server(module)
    server.engine.errored = True
    sent = await server.ask("/asyncflow/sums", query="seed=5&weights=1")
    assert sent[0]["status"] == 503 and content_of(sent) == {"error": "RuntimeError: EngineCore encountered an issue"}


# -- weights ----------------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """An embedding and an output layer of its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(4, 3), nn.LayerNorm(3)
        self.embed.quant_method = UnquantizedEmbeddingMethod()
        self.embed.packed = torch.zeros(4, 3)

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)


@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Weights as AsyncFlow's half writes them, and how it tells of them."""
    embedding, bias = torch.arange(12.0, dtype=torch.bfloat16).view(4, 3), torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    content = b"".join(each.view(torch.uint8).numpy().tobytes() for each in (embedding, bias))
    path = tmp_path / "weights"
    path.write_bytes(content)
    tensors = [("embed.weight", [4, 3], 0), ("norm.bias", [3], 24)]
    return path, {"path": str(path), "num_bytes": 30, "dtype_name": "bfloat16", "tensors": tensors}


def test_a_version_is_loaded_from_the_file_that_is_mapped(module: Any, reload: Reload, file: tuple[Path, dict[str, Any]]) -> None:
    path, update = file
    before, model = path.read_bytes(), Model()
    engine = REGISTERED["asyncflow"](model)
    assert isinstance(engine, module.FileWeights)
    engine.init_transfer_engine(engine.init_info_cls())
    engine.start_weight_update()
    engine.update_weights(update)
    assert model.embed.weight.tolist() == torch.arange(12.0).view(4, 3).tolist() and model.norm.bias.tolist() == [1.0, 2.0, 3.0]
    assert not model.embed.packed.any() and reload.calls == ["begin"]
    engine.finish_weight_update()
    assert torch.equal(model.embed.packed, model.embed.weight) and reload.calls == ["begin", "end"]
    module._mapped(str(path), 30)[:] = bytes(30)  # whatever vLLM does to the bytes
    assert path.read_bytes() == before
    engine.shutdown()
    with pytest.raises(NotImplementedError, match="AsyncFlow writes the weights itself"):
        engine.trainer_send_weights(iter(()), None)


def test_what_keeps_a_dtype_of_its_own_is_loaded_in_it(module: Any, reload: Reload, file: tuple[Path, dict[str, Any]]) -> None:
    path, update = file
    bias = torch.tensor([1.1, 2.2, 3.3])
    path.write_bytes(path.read_bytes()[:24] + bias.view(torch.uint8).numpy().tobytes())
    engine = REGISTERED["asyncflow"](Model())
    engine.update_weights({**update, "num_bytes": 36, "dtype_names": {"norm.bias": "float32"}})
    assert torch.equal(engine.model.norm.bias.data, bias)


def test_a_cpu_s_kernel_for_experts_is_made_anew_so_that_it_packs_them(module: Any, reload: Reload) -> None:
    model = Model()
    model.norm.quant_method = method = UnquantizedFusedMoEMethod()
    REGISTERED["asyncflow"](model).start_weight_update()
    assert method.moe_kernel is None


def test_an_update_that_failed_is_ended_before_the_next_begins(module: Any, reload: Reload) -> None:
    engine = REGISTERED["asyncflow"](Model())
    reload.is_half_loaded = True
    engine.start_weight_update()
    assert reload.calls == ["end", "begin"]


def test_a_file_that_is_not_the_one_that_was_told_of_is_refused(
    module: Any, monkeypatch: pytest.MonkeyPatch, file: tuple[Path, dict[str, Any]]
) -> None:
    path, update = file
    engine = REGISTERED["asyncflow"](Model())
    kept = engine.model.embed.weight.detach().clone()
    with pytest.raises(ValueError, match="has 30 bytes and was said to have 1,000"):
        engine.update_weights({**update, "num_bytes": 1000})
    with pytest.raises(ValueError, match="not a file of this user's own"):
        engine.update_weights({**update, "path": str(path.parent)})
    monkeypatch.setattr(os, "getuid", lambda: os.stat(path).st_uid + 1)
    with pytest.raises(ValueError, match="not a file of this user's own"):
        engine.update_weights(update)
    assert torch.equal(engine.model.embed.weight, kept)
