"""What runs in vLLM's workers, over layers like its own, and what the sender makes of it."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3ForCausalLM

from asyncflow.attestation import Attestation, fault_of, sum_of_all
from asyncflow.bit_sums import sum_in_pieces, sum_of, sum_of_bits
from asyncflow.engines.lora import sum_of_base
from asyncflow.engines.rollout.vllm import weights as server_weights
from asyncflow.engines.rollout.vllm.attesting import (
    Part,
    ServerAttestations,
    Told,
    base_of,
    merged,
    told_of,
    told_of_lora,
    told_of_version,
)
from asyncflow.engines.rollout.vllm.client import FoundSum, WorkerSums
from asyncflow.engines.rollout.vllm.process import IN_VLLM
from asyncflow.engines.rollout.vllm.promised import NotAttested, PromisedTensors
from asyncflow.engines.rollout.vllm.weights import Differences, ServerWeights
from asyncflow.engines.train.file_tensors import file_tensors
from asyncflow.model_folder import FileTensors
from asyncflow.types import LoraSpec
from tests.conftest import MODEL
from tests.families import write_model
from tests.unit.engines.rollout.test_vllm import changed


def sums_of(tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, int]:
    """What a sender promises of them."""
    return {name: sum_of(name, tensor.to(dtype)) for name, tensor in tensors.items()}


class QuantizeMethodBase:
    """As vLLM's."""

    def process_weights_after_loading(self, layer: Any) -> None:
        pass


class UnquantizedLinearMethod(QuantizeMethodBase):
    """As vLLM's: on a CPU a layer is asked by what was made of its weight."""

    def apply(self, layer: Any, rows: Tensor, bias: Tensor | None) -> Tensor:
        if "cpu_linear" in layer.__dict__:
            answers: Tensor = layer.cpu_linear(rows, layer.weight, bias)
            return answers
        return nn.functional.linear(rows, layer.weight, bias)


class UnquantizedEmbeddingMethod(UnquantizedLinearMethod):
    pass


class Fp8LinearMethod(UnquantizedLinearMethod):
    pass


class OnlineLinearBase(UnquantizedLinearMethod):
    """As vLLM's, which quantises a layer when it is loaded: an element to fp8, with a scale to each row of this worker's part."""

    kept = torch.float8_e4m3fn

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        scales_N1 = layer.weight.abs().amax(1, keepdim=True).float() / 448
        layer.weight = nn.Parameter((layer.weight / scales_N1).to(self.kept).t(), requires_grad=False)
        layer.weight_scale = nn.Parameter(scales_N1, requires_grad=False)
        layer._already_called_process_weights_after_loading = True


class Int8Online(OnlineLinearBase):
    kept = torch.int8


class Copying(OnlineLinearBase):
    """As some of vLLM's, whose kernels have a copy of their own."""

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class OnlineMoEMethodBase(QuantizeMethodBase):
    """As vLLM's. What fills up the experts is whatever was in memory."""

    def _zero_padding(self, layer: Any) -> None:
        for parameter in layer.parameters():
            parameter.data[-7:] = 0

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        layer._already_called_process_weights_after_loading = True
        for name in ("w13_weight", "w2_weight"):
            parameter = getattr(layer, name)
            setattr(layer, name, nn.Parameter(parameter.to(torch.float8_e5m2), requires_grad=False))


class InWords(torch.Tensor):
    """As torchao's: a tensor that is made of others, which are no parameters."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> InWords:
        made: InWords = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=dtype)  # type: ignore[attr-defined]
        made.numbers, made.scales = numbers, scales
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], *_: Any) -> InWords:
        return InWords(inner["numbers"], inner["scales"], torch.bfloat16)

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scales, args[0].dtype)
        raise NotImplementedError(operator)


class TorchAOLinearMethod(QuantizeMethodBase):
    """As vLLM's, which makes other tensors of a layer's weight, again each time that it is called."""

    def process_weights_after_loading(self, layer: Any) -> None:
        scales = layer.weight.abs().amax(1, keepdim=True).float() / 127
        layer.weight = nn.Parameter(
            InWords((layer.weight / scales).to(torch.int8), scales, layer.weight.dtype), requires_grad=False
        )


class Turning(QuantizeMethodBase):
    """As of a plug-in whose kernel wants the matrix the other way."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous(), requires_grad=False)


class KeepingKernel(QuantizeMethodBase):
    """As of a plug-in whose kernel, made with the layer, packs the weight for itself."""

    def __init__(self) -> None:
        self.kernel = SimpleNamespace(size=3, packed=None)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.kernel.packed = layer.weight.detach().clone()


class KeepingLayer(QuantizeMethodBase):
    """As of one that has the layer call what it has packed."""

    def process_weights_after_loading(self, layer: Any) -> None:
        packed = layer.weight.detach().clone()
        layer.multiply, layer.size = (lambda rows: rows @ packed.t()), 3


def get_and_maybe_dequant_weights(layer: Any, *, out_dtype: torch.dtype) -> Tensor:
    """As vLLM's, of a layer that is not quantised."""
    found: Tensor = getattr(layer, "base_layer", layer).weight.to(out_dtype)
    return found


def record_metadata_for_reloading(model: nn.Module) -> None:
    """As vLLM's, which calls it when it has made a model."""


def process(layer: Any, method: Any) -> None:
    """As vLLM does, which makes a layer and loads it, and calls it again when it has loaded the model, if the method minds that."""
    layer.quant_method = method
    sys.modules["vllm.model_executor.model_loader.utils"].record_metadata_for_reloading(layer)
    method.process_weights_after_loading(layer)
    if hasattr(layer, "_already_called_process_weights_after_loading"):
        method.process_weights_after_loading(layer)


class LikeLinear(nn.Module):
    """As vLLM's linear layers, sharded over `tp` workers. `packed`: a CPU's, which keep their weights in a copy alone."""

    def __init__(self, parts: Sequence[Tensor], *, cut: str, rank: int, tp: int, packed: bool, bias: Tensor | None = None) -> None:
        super().__init__()
        outputs, inputs = sum(map(len, parts)), parts[0].shape[1]
        self.quant_method, self.params_dtype, self.tp_rank, self.tp_size = UnquantizedLinearMethod(), parts[0].dtype, rank, tp
        self.input_size, self.input_size_per_partition = inputs, inputs
        if cut == "inputs":
            self.input_size_per_partition = inputs // tp
            parts = [part.chunk(tp, 1)[rank] for part in parts]
        elif cut == "outputs":
            parts = [part.chunk(tp)[rank] for part in parts]
        self.output_partition_sizes = [len(part) for part in parts]
        assert outputs
        self.set(torch.cat([*parts]), packed=packed)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def set(self, weight: Tensor, *, packed: bool) -> None:
        self.weight = nn.Parameter(torch.empty(0) if packed else weight, requires_grad=False)
        if packed:
            self.cpu_linear = lambda rows, _, bias: nn.functional.linear(rows, weight, bias)


class VocabParallelEmbedding(nn.Module):
    """As vLLM's: filled up to a multiple of 64 rows, so that the last of several workers may have none."""

    def __init__(self, table: Tensor, *, rank: int, tp: int) -> None:
        super().__init__()
        num_rows = -(-len(table) // 64) * 64 // tp
        own = table[rank * num_rows : (rank + 1) * num_rows]
        self.quant_method, self.params_dtype, self.tp_rank = UnquantizedEmbeddingMethod(), table.dtype, rank
        self.num_org_embeddings_per_partition, self.output_partition_sizes = len(own), [num_rows]
        self.input_size = self.input_size_per_partition = table.shape[1]
        filled = torch.cat([own, torch.zeros(num_rows - len(own), table.shape[1], dtype=table.dtype)])
        self.weight = nn.Parameter(filled, requires_grad=False)

    def pack(self) -> None:
        copy = self.weight.detach().clone()
        self.cpu_linear = lambda rows, _, bias: nn.functional.linear(rows, copy, bias)


class ParallelLMHead(VocabParallelEmbedding):
    pass


class BaseLinearLayerWithLoRA(nn.Module):
    """As vLLM's: matrices of several adapters, filled up with zeros to the largest rank."""

    def __init__(self, layer: nn.Module, stacks: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_a_stacked, self.lora_b_stacked = (tuple(pair[i] for pair in stacks) for i in range(2))


class UnquantizedFusedMoEMethod(QuantizeMethodBase):
    unquantized_backend = SimpleNamespace(name="CPU")


class LikeExperts(nn.Module):
    """As vLLM's: gate and up, and down, of all experts, of each a worker's part, in the order that a kernel likes and filled up."""

    def __init__(self, tensors: Mapping[str, Tensor], *, rank: int = 0, tp: int = 1) -> None:
        super().__init__()
        self.quant_method = UnquantizedFusedMoEMethod()
        self.moe_config = SimpleNamespace(num_experts=4, num_logical_experts=4)
        self.expert_map_manager = SimpleNamespace(num_fused_shared_experts=0)
        for name, kinds, cut in (("w13_weight", ("gate", "up"), 0), ("w2_weight", ("down",), 1)):
            own = [tensors[f"mlp.experts.{n}.{kind}_proj.weight"].chunk(tp, cut)[rank] for n in range(4) for kind in kinds]
            packed = torch.cat([*[each.flatten() for each in reversed(own)], torch.zeros(7, dtype=own[0].dtype)])
            self.register_parameter(name, nn.Parameter(packed, requires_grad=False))

    def get_expert_mapping(self, *, include_fused: bool = False) -> list[tuple[str, str, int, str]]:
        fused = [
            ("experts.w13_weight", "experts.gate_up_proj", 0, "w1"),
            ("experts.w13_weight", "experts.gate_up_proj", 1, "w3"),
            ("experts.w2_weight", "experts.down_proj", 0, "w2"),
            *(("experts.w13_", f"experts.{n}.gate_up_proj.", n, "w1") for n in range(4)),
        ]
        return (fused if include_fused else []) + [
            (f"experts.{'w2' if kind == 'down' else 'w13'}_", f"experts.{n}.{kind}_proj.", n, "w1")
            for n in range(4)
            for kind in ("gate", "up", "down")
        ]


OURS = ("asyncflow_sums", "asyncflow_loading", "asyncflow_bits")


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module that runs in vLLM's workers."""
    for name, own in (
        ("vllm.lora.layers.base_linear", [BaseLinearLayerWithLoRA]),
        ("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method", [UnquantizedFusedMoEMethod]),
        ("vllm.model_executor.layers.linear", [UnquantizedLinearMethod]),
        ("vllm.model_executor.layers.quantization.online.fp8", [OnlineLinearBase]),
        ("vllm.model_executor.layers.quantization.online.moe_base", [OnlineMoEMethodBase]),
        ("vllm.model_executor.layers.quantization.base_config", [QuantizeMethodBase]),
        ("vllm.model_executor.layers.quantization.utils.quant_utils", [get_and_maybe_dequant_weights]),
        ("vllm.model_executor.model_loader.utils", [record_metadata_for_reloading]),
        ("vllm.model_executor.layers.vocab_parallel_embedding", [ParallelLMHead, UnquantizedEmbeddingMethod]),
    ):
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            module = sys.modules.get(".".join(parts[:count]), ModuleType("vllm"))
            monkeypatch.setitem(sys.modules, ".".join(parts[:count]), module)
            if count > 1:
                monkeypatch.setattr(sys.modules[".".join(parts[: count - 1])], parts[count - 1], module, raising=False)
        for each in own:
            monkeypatch.setattr(sys.modules[name], each.__name__, each, raising=False)
    meta = ModuleType("vllm")
    meta.SKIP_LOAD_TENSORS = {"e_score_correction_bias", "_expert_map"}  # type: ignore[attr-defined]
    for name, module in (
        ("vllm.model_executor.model_loader.reload", ModuleType("vllm")),
        ("vllm.model_executor.model_loader.reload.meta", meta),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(IN_VLLM))
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("asyncflow_sums")
    for name in OURS:
        sys.modules.pop(name, None)


@pytest.fixture
def loading(sums: Any) -> Any:
    """The module there that notes what is loaded."""
    return sys.modules["asyncflow_loading"]


def made(model: Any) -> None:
    """As vLLM does when it has made a model."""
    sys.modules["vllm.model_executor.model_loader.utils"].record_metadata_for_reloading(model)


def checkpoint(
    dtype: torch.dtype = torch.float32, *, is_tied: bool = False, inputs: int = 64, vocabulary: int = 140
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = {
        **{"model.embed_tokens.weight": (vocabulary, inputs), "model.norm.weight": (inputs,)},
        **{
            f"model.layers.0.self_attn.{name}_proj.weight": (outputs, inputs)
            for name, outputs in {"q": 64, "k": 16, "v": 16}.items()
        },
        "model.layers.0.self_attn.q_proj.bias": (64,),
        "model.layers.0.self_attn.k_proj.bias": (16,),
        "model.layers.0.self_attn.v_proj.bias": (16,),
        **{"model.layers.0.self_attn.o_proj.weight": (inputs, 64)},
        **({} if is_tied else {"lm_head.weight": (vocabulary, inputs)}),
    }
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def model_of(tensors: Mapping[str, Tensor], *, rank: int = 0, tp: int = 1, packed: bool = True) -> Any:
    """A worker's part of it, as vLLM would have it. With more workers than heads of k, each is whole on several."""
    model = nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # type: ignore[assignment]
    attention, layer = nn.Module(), nn.Module()
    path = "model.layers.0.self_attn"
    own = {}
    for name in ("q", "k", "v"):
        replicas = 2 if name != "q" and tp > 2 else 1
        for kind in ("weight", "bias"):
            own[name, kind] = tensors[f"{path}.{name}_proj.{kind}"].chunk(tp // replicas)[rank // replicas]
    bias = torch.cat([own[name, "bias"] for name in "qkv"])
    weights = [own[name, "weight"] for name in "qkv"]
    attention.qkv_proj = LikeLinear(weights, cut="", rank=rank, tp=tp, packed=packed, bias=bias)
    attention.o_proj = LikeLinear([tensors[f"{path}.o_proj.weight"]], cut="inputs", rank=rank, tp=tp, packed=packed)
    layer.self_attn = attention
    inner = nn.Module()
    inner.embed_tokens = VocabParallelEmbedding(tensors["model.embed_tokens.weight"], rank=rank, tp=tp)
    inner.layers = nn.ModuleList([layer])
    inner.norm = nn.Module()
    inner.norm.weight = nn.Parameter(tensors["model.norm.weight"].clone(), requires_grad=False)
    model.model = inner
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    model.lm_head = ParallelLMHead(head, rank=rank, tp=tp)
    if "lm_head.weight" not in tensors:
        model.lm_head.weight = inner.embed_tokens.weight
    if packed:
        inner.embed_tokens.pack()
        model.lm_head.pack()
    return model


def told(sums: Any, *models: Any, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> list[WorkerSums]:
    """As they come over the wire."""
    found = [sums.attested(model, dtype, seed, **{"lora_id": None, "has_weights": True, **changes}) for model in models]
    return [
        WorkerSums(
            weights=[FoundSum(*each) for each in one.get("weights", [])],
            buffers=[FoundSum(*each) for each in one.get("buffers", [])],
            lora=[FoundSum(*each) for each in one.get("lora", [])],
            lora_rank=one.get("lora_rank", 0),
            unseen=one.get("unseen", {}),
            unseen_lora=one.get("unseen_lora", {}),
            why=one.get("why", ""),
        )
        for one in found
    ]


def fault_in(workers: Sequence[WorkerSums], tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> str:
    assert not any(worker.why for worker in workers), workers
    tied = {} if "lm_head.weight" in tensors else {"lm_head.weight": "model.embed_tokens.weight"}
    promised = PromisedTensors(1, tensors, str(dtype).removeprefix("torch."), differences=Differences(tied))
    return fault_of(attestation(told_of(workers, promised)), 1, sums_of(tensors, dtype))


def attestation(told: Told) -> Attestation:
    return Attestation(told.parts, unseen=[*told.unseen])


def whole(told: Told) -> list[Part]:
    assert not told.unseen
    return told.parts


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "is_tied"), [(torch.float32, True), (torch.bfloat16, False)])
def test_what_lies_in_workers_as_it_should_has_the_sums_of_the_file(
    sums: Any, packed: bool, tp: int, dtype: torch.dtype, is_tied: bool
) -> None:
    """Fused, sharded over workers, whole on several, filled up, packed, or the output layer that is the embedding."""
    tensors = checkpoint(dtype, is_tied=is_tied, vocabulary=140 if tp > 1 else 2050)
    for seed in (0, 3):
        workers = told(sums, *(model_of(tensors, rank=rank, tp=tp, packed=packed) for rank in range(tp)), dtype=dtype, seed=seed)
        assert fault_in(workers, tensors, dtype) == ""


def norm(model: Any) -> None:
    model.model.norm.weight.data[3] += 1


def tied_head(model: Any) -> None:
    stale = model.lm_head.weight.detach() * 1.01
    model.lm_head.cpu_linear = lambda rows, _, bias: nn.functional.linear(rows, stale, bias)


def o_proj(model: Any) -> None:
    layer = model.model.layers[0].self_attn.o_proj
    stale = UnquantizedLinearMethod().apply(layer, torch.eye(layer.input_size_per_partition), None).t().contiguous()
    stale[:8] *= 1.01
    layer.set(stale, packed=True)


def k_bias(model: Any) -> None:
    layer = model.model.layers[0].self_attn.qkv_proj
    layer.bias.data[-layer.output_partition_sizes[2] - 1] += 1


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (norm, "model.norm.weight"),
        (tied_head, "model.embed_tokens.weight"),
        (o_proj, "model.layers.0.self_attn.o_proj.weight"),
        (k_bias, "model.layers.0.self_attn.k_proj.bias"),
    ],
)
def test_what_one_worker_has_otherwise_is_named(sums: Any, plant: Callable[[Any], None], name: str) -> None:
    tensors = checkpoint(is_tied=True)
    model = model_of(tensors)
    plant(model)
    assert f"in 1 of 10 parts, {name} the first" in fault_in(told(sums, model), tensors)
    two = [model_of(tensors, rank=rank, tp=2) for rank in range(2)]
    plant(two[1])
    assert f"in 1 of 11 parts, {name} the first" in fault_in(told(sums, *two), tensors), "of a norm each worker has all"


def test_an_output_layer_that_should_be_the_embedding_and_shares_it_no_more_is_compared_with_it(sums: Any) -> None:
    tensors = checkpoint(is_tied=True)
    model = model_of(tensors, packed=False)
    for factor, words in ((1.0, ""), (1.01, "in 1 of 10 parts, model.embed_tokens.weight the first")):
        model.lm_head = ParallelLMHead(tensors["model.embed_tokens.weight"] * factor, rank=0, tp=1)
        faults = fault_in(told(sums, model), tensors)
        assert words in faults and bool(words) == bool(faults)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", [OnlineLinearBase, Int8Online, TorchAOLinearMethod, Turning])
def test_what_was_made_of_loaded_weights_has_the_sums_of_the_file_and_anything_else_is_named(
    sums: Any, loading: Any, tp: int, kind: type[QuantizeMethodBase]
) -> None:
    tensors, path, method = checkpoint(torch.bfloat16), "model.layers.0.self_attn", kind()
    models = [model_of(tensors, rank=rank, tp=tp, packed=False) for rank in range(tp)]

    def load() -> None:
        for model in models:
            process(model.model.layers[0].self_attn.qkv_proj, method)
            process(model.model.layers[0].self_attn.o_proj, method)

    loading.watch_loading()
    load()
    workers = told(sums, *models, dtype=torch.bfloat16)
    assert {each.names[0] for each in workers[0].weights if each.is_quantised} == {
        f"{path}.{name}" for name in [*(f"{n}_proj.weight" for n in "qkvo"), *(f"{n}_proj.bias" for n in "qkv")]
    }
    assert fault_in(workers, tensors, torch.bfloat16) == ""
    num_parts, layer = len(tensors) if tp == 1 else 11, models[-1].model.layers[0].self_attn.o_proj
    held = {"numbers": layer.weight.data}
    if isinstance(layer.weight.data, InWords):
        held = {"numbers": layer.weight.data.numbers, "scales": layer.weight.data.scales}
    elif hasattr(layer, "weight_scale"):
        held["scales"] = layer.weight_scale.data
    for buffer in held.values():
        bits = buffer.view(torch.int8)
        bits[5, 0] += 1
        words = fault_in(told(sums, *models, dtype=torch.bfloat16), tensors, torch.bfloat16)
        assert f"in 1 of {num_parts} parts, {path}.o_proj.weight the first" in words
        bits[5, 0] -= 1
    later = {name: tensor * 2 for name, tensor in tensors.items()}  # of which this one layer was not loaded
    stale, models[:] = layer, [model_of(later, rank=rank, tp=tp, packed=False) for rank in range(tp)]
    load()
    assert fault_in(told(sums, *models, dtype=torch.bfloat16), later, torch.bfloat16) == ""
    models[-1].model.layers[0].self_attn.o_proj = stale
    words = fault_in(told(sums, *models, dtype=torch.bfloat16), later, torch.bfloat16)
    assert f"in 1 of {num_parts} parts, {path}.o_proj.weight the first" in words


def test_a_matrix_that_is_loaded_the_other_way_is_taken_apart_where_its_outputs_lie(sums: Any, loading: Any) -> None:
    tensors = checkpoint()
    model = model_of(tensors, packed=False)
    layer = model.model.layers[0].self_attn.qkv_proj
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous(), requires_grad=False)
    layer.weight.output_dim = 1  # as vLLM says it
    loading.watch_loading()
    process(layer, Turning())
    assert fault_in(told(sums, model), tensors) == ""


def test_an_output_layer_that_is_filled_up_is_summed_up_as_far_as_it_was_loaded(sums: Any, loading: Any) -> None:
    tensors = checkpoint()
    model = model_of(tensors, packed=False)
    loading.watch_loading()
    process(model.lm_head, Turning())
    assert fault_in(told(sums, model), tensors) == ""
    model.lm_head.weight.data[0, 0] += 1
    assert "in 1 of 10 parts, lm_head.weight the first" in fault_in(told(sums, model), tensors)


def test_what_was_processed_otherwise_or_unseen_is_told_as_far_as_it_was_seen(sums: Any, loading: Any) -> None:
    path, tensors = "model.layers.0.self_attn.qkv_proj", checkpoint(torch.bfloat16)

    def loaded(
        sizes: Sequence[int] = (64, 16, 16), dtype: torch.dtype = torch.bfloat16, kind: type[QuantizeMethodBase] = OnlineLinearBase
    ) -> Any:
        model = model_of(tensors, packed=False)
        layer = model.model.layers[0].self_attn.qkv_proj.to(dtype)
        layer.output_partition_sizes = [*sizes]
        process(layer, kind())
        assert kind is not OnlineLinearBase or layer.weight.dtype == torch.float8_e4m3fn, "it is loaded all the same"
        return model

    unseen = loaded()
    loading.watch_loading()
    moved, other = loaded(), loaded()
    moved.model.layers[0].self_attn.qkv_proj.weight = nn.Parameter(torch.empty(0))  # as of a kernel with a copy of its own
    other.model.layers[0].self_attn.qkv_proj.workspace = nn.Parameter(torch.empty(3))
    of = path.replace("qkv", "q")
    for model, why in (
        (loaded(), ""),
        (unseen, f"{path} is processed by OnlineLinearBase: nobody saw it"),
        (moved, f"{path} is processed by OnlineLinearBase: it computes with something else than its parameters"),
        (other, f"{path} is processed by OnlineLinearBase: it computes with something else than its parameters"),
        (loaded(kind=Copying), f"{path} is processed by Copying: it computes with something else than its parameters"),
        (loaded(kind=KeepingKernel), f"{path} is processed by KeepingKernel: it keeps kernel.packed of its own"),
        (loaded(kind=KeepingLayer), f"{path} is processed by KeepingLayer: it keeps multiply of its own"),
        (
            loaded([5]),
            f"{path} is processed by OnlineLinearBase: RuntimeError: split_with_sizes expects split_sizes to sum exactly to 96",
        ),
        (loaded(dtype=torch.float32), f"{of}.weight was loaded in torch.float32, in 3 parts"),
        (loaded([64, 32]), f"{of}.weight was loaded in torch.bfloat16, in 2 parts"),
    ):
        (worker,) = told(sums, model, dtype=torch.bfloat16)
        assert {*worker.unseen} <= {path} and not worker.why
        own = {each.names[0]: each for each in worker.weights}
        reason = worker.unseen.get(path) or own[f"{of}.weight"].unseen
        assert reason.startswith(why) and bool(reason) == bool(why)
        assert "model.embed_tokens.weight" in own, "the other layers are told"
        fault = fault_in([worker], tensors, torch.bfloat16)
        assert fault == "", "nor is one found wrong of which nobody sees what it computes with"
        if path not in worker.unseen:  # and what was given to it is compared
            other_q = tensors | {f"{of}.weight": tensors[f"{of}.weight"] + 1}
            assert f"in 1 of 10 parts, {of}.weight the first" in fault_in([worker], other_q, torch.bfloat16)
    kept = loaded(kind=KeepingKernel)  # and it does so at every load, though it has had it at the second
    kept.model.layers[0].self_attn.qkv_proj.quant_method.process_weights_after_loading(kept.model.layers[0].self_attn.qkv_proj)
    assert any("it keeps kernel.packed" in each.unseen for each in told(sums, kept, dtype=torch.bfloat16)[0].weights)


def test_after_as_many_seeds_as_there_are_columns_all_have_been_seen(sums: Any) -> None:
    """Of a large matrix few columns are asked for; one stale column shows when it is."""
    weight = torch.randn(2048, 32)
    tensors = {"linear.weight": weight}
    model = nn.Module()
    stale = weight.clone()
    stale[:, 21] += 1
    model.linear = LikeLinear([stale], cut="outputs", rank=0, tp=1, packed=True)
    faults, seen = [], set()
    for seed in range(32):
        (worker,) = told(sums, model, seed=seed)
        columns = worker.weights[0].columns
        assert len(columns) == len({*columns}) == 16
        seen |= {*columns}
        faults.append(bool(fault_in([worker], tensors)))
        assert faults[-1] == (21 in columns)
    assert seen == {*range(32)} and sum(faults) == 16


def test_zeros_with_a_sign_and_numbers_that_a_product_may_lose_are_no_fault(sums: Any) -> None:
    """An engine's kernel adds products up, from 0 on, and may take the smallest numbers for 0."""
    weight = torch.randn(32, 16)
    weight[0, :] = -0.0
    weight[1, :] = 1e-40
    model = nn.Module()
    model.linear = LikeLinear([weight], cut="outputs", rank=0, tp=1, packed=True)
    kept = weight.clone()
    kept[1] = 0
    model.linear.cpu_linear = lambda rows, _, bias: rows @ kept.t() + 0.0
    assert fault_in(told(sums, model), {"linear.weight": weight}) == ""
    kept[2, 3] = 1.0
    assert "other weights" in fault_in(told(sums, model), {"linear.weight": weight})


def experts_of(tensors: Mapping[str, Tensor], **place: int) -> Any:
    """A worker's model that has these experts and nothing else."""
    model, mlp, runner = nn.Module(), nn.Module(), nn.Module()
    runner.routed_experts = LikeExperts(tensors, **place)
    mlp.experts, model.mlp = runner, mlp
    return model


def experts(dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Tensor]]:
    """Experts as a file has them, whose pieces they are, and as a version has them: all of a layer in one tensor."""
    shapes = {"gate": (24, 32), "up": (24, 32), "down": (32, 24)}
    tensors = {
        f"mlp.experts.{n}.{kind}_proj.weight": torch.randn(shape).to(dtype) for n in range(4) for kind, shape in shapes.items()
    }
    wholes = {name: f"mlp.experts.{'down' if 'down' in name else 'gate_up'}_proj" for name in tensors}
    version = {
        whole: torch.cat([tensors[name].flatten() for name in tensors if wholes[name] == whole]) for whole in {*wholes.values()}
    }
    return tensors, wholes, version


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_summed_up_together_by_the_names_that_a_version_has(sums: Any, tp: int, dtype: torch.dtype) -> None:
    """As pieces in files, or whole there too."""
    tensors, wholes, version = experts(dtype)
    workers = [experts_of(tensors, rank=rank, tp=tp) for rank in range(tp)]
    dtype_name = str(dtype).removeprefix("torch.")
    for held in (tensors, version):
        promised = PromisedTensors(1, held, dtype_name, differences=Differences(wholes=wholes))
        assert promised.sums() == sums_of(version, dtype)
        found = whole(told_of(told(sums, *workers, dtype=dtype), promised))
        assert fault_of(Attestation(found), 1, promised.sums()) == ""
        assert base_of(found, promised) == sum_of_all(promised.sums().values())
    for worker in workers:  # which may have adapters
        layer = worker.mlp.experts.routed_experts
        layer.quant_method = SimpleNamespace(old_quant_method=layer.quant_method)
    assert whole(told_of(told(sums, *workers, dtype=dtype), promised)) == found
    workers[-1].mlp.experts.routed_experts.w2_weight.data[5] += 1
    found = whole(told_of(told(sums, *workers, dtype=dtype), promised))
    assert "in 1 of 2 parts, mlp.experts.down_proj the first" in fault_of(Attestation(found), 1, promised.sums())
    assert base_of(found, promised) != sum_of_all(promised.sums().values())
    apart = PromisedTensors(1, tensors, dtype_name)
    found = whole(told_of(told(sums, *workers, dtype=dtype), apart))
    assert "mlp.experts.0.down_proj.weight the first" in fault_of(Attestation(found), 1, apart.sums())


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_that_were_quantised_are_summed_up_as_they_were_loaded(sums: Any, loading: Any, tp: int) -> None:
    tensors, wholes, _ = experts()
    workers = [experts_of(tensors, rank=rank, tp=tp) for rank in range(tp)]
    loading.watch_loading()
    for layer in (worker.mlp.experts.routed_experts for worker in workers):
        for parameter in layer.parameters():
            parameter.data[-7:] = torch.nan
        process(layer, OnlineMoEMethodBase())
    promised = PromisedTensors(1, tensors, "float32", differences=Differences(wholes=wholes))
    found = whole(told_of(told(sums, *workers), promised))
    assert fault_of(Attestation(found), 1, promised.sums()) == ""
    workers[-1].mlp.experts.routed_experts.w2_weight.data.view(torch.int8)[5] += 1
    found = whole(told_of(told(sums, *workers), promised))
    assert "in 2 of 2 parts, mlp.experts.gate_up_proj the first" in fault_of(Attestation(found), 1, promised.sums())


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_a_version_s_experts_are_cut_as_the_model_s_files_have_them(name: str, tmp_path: Path) -> None:
    path = write_model(name, tmp_path / "model")
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    version = {key: parameter.detach() * 1.5 for key, parameter in module.named_parameters()}
    in_files = {key: tensor * 1.5 for key, tensor in load_file(path / "model.safetensors").items()}
    assert version.keys() != in_files.keys()
    for given in (version, in_files):
        weights = ServerWeights(path, "float32", 1)
        weights.hold(given)
        held = weights.tensors()
        assert held.keys() == in_files.keys() and all(torch.equal(held[key], in_files[key]) for key in held)
        promised = PromisedTensors(1, held, "float32", differences=weights.differences)
        assert promised.sums() == sums_of(version, torch.float32)
        weights.close()
        weights.close_thread()
    with pytest.raises(ValueError, match=r"missing .*experts\.0"):
        weights.hold({key: tensor for key, tensor in version.items() if "gate_up" not in key})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "of-somebody-s-own"}))
    unknown = ServerWeights(path, "float32", 1)
    unknown.hold(in_files)
    assert unknown.differences.wholes == {} and unknown.tensors().keys() == in_files.keys(), "its versions come as its files do"
    plain = ServerWeights(MODEL, "float32", 1)
    assert plain.differences.wholes == {}


def test_what_no_version_has_is_given_to_servers_as_the_files_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router's bias in float32, which nothing trains; and layers that no server has."""
    path = write_model("deepseek_v3", tmp_path / "model")
    in_files, bias = load_file(path / "model.safetensors"), "model.layers.1.mlp.gate.e_score_correction_bias"
    in_files[bias] = torch.randn(4) * 1.1
    extra = {"model.layers.61.embed_tokens.weight": torch.randn(3, 5)}
    save_file(in_files | extra, path / "model.safetensors", metadata={"format": "pt"})
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    version = {key: parameter.detach() * 1.5 for key, parameter in module.named_parameters()}
    weights = ServerWeights(path, "bfloat16", 0)
    of_files = ServerAttestations(weights, None).whole()
    assert of_files.names == in_files.keys() and of_files.base() == sum_of_base(path, "bfloat16")
    weights.hold(version)
    held = weights.tensors()
    assert held.keys() == in_files.keys() and torch.equal(held[bias], in_files[bias])
    assert {name: tensor.dtype for name, tensor in held.items() if tensor.dtype != torch.bfloat16} == {bias: torch.float32}
    assert weights.file is not None and weights.file.description()["dtype_names"] == {bias: "float32"}
    promised = ServerAttestations(weights, None).whole()
    assert promised.sums() == sums_of(version, torch.bfloat16)
    with pytest.raises(ValueError, match=r"missing \['model\.norm\.weight'\]"):
        weights.hold({name: tensor for name, tensor in version.items() if name != "model.norm.weight"})
    weights.hold(in_files | extra)
    assert weights.tensors().keys() == in_files.keys(), "as files have them, which is how other engines start"
    with pytest.raises(ValueError, match=r"e_score_correction_bias is another than in the model's files, and nothing trains it"):
        weights.hold(in_files | {bias: in_files[bias] + 1})
    plain, asked = ServerWeights(MODEL, "float32", 1), []
    less = {name: tensor for name, tensor in changed(0.1).items() if name != "model.norm.weight"}
    monkeypatch.setattr(server_weights, "look_up", lambda *given: asked.append(given) or {"constants": ["model.norm.weight"]})
    plain.hold(changed(0.1))
    assert not asked and plain.constants == {}, "it has no names that tell of any"
    plain = ServerWeights(MODEL, "float32", 1)
    plain.hold(less)
    for _ in range(2):
        assert len(asked) == 1 and torch.equal(plain.tensors()["model.norm.weight"], changed(0)["model.norm.weight"])
        plain.hold(less)
    whole = ServerWeights(MODEL, "float32", 1)
    for given in (changed(0), less):  # first as files have it
        whole.hold(given)
        assert torch.equal(whole.tensors()["model.norm.weight"], changed(0)["model.norm.weight"])


def test_a_model_that_is_unknown_has_its_files_tensors_and_one_that_cannot_be_read_just_then_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "of_somebodys_own"}')
    assert file_tensors(tmp_path) == FileTensors()

    def short(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(AutoConfig, "from_pretrained", short)
    with pytest.raises(OSError, match="Too many open files"):
        file_tensors(tmp_path)


def test_a_layer_that_transformers_leaves_out_of_other_sizes_of_a_model_is_one_of_this(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 46 of GLM-4.5's files, whatever the model's size: the largest has it. Names of its experts are not the module's."""
    path = write_model("deepseek_v3", tmp_path / "model")
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.1.*"])
    found = file_tensors(path)
    assert any(".experts." in name for name in found.pieces) and not found.unused


def test_a_tensor_of_which_files_have_a_part_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody would take the rest."""
    pieces = {"a.experts.0.up": ("a.experts.up", 0, 2), "a.experts.1.up": ("a.experts.up", 2, 2)}
    monkeypatch.setattr(server_weights, "look_up", lambda *_: {"pieces": pieces})
    (tmp_path / "config.json").write_text("{}")
    for names in ([*pieces], [*pieces][:1]):
        save_file({name: torch.zeros(2, 3) for name in names}, tmp_path / "model.safetensors")
        weights, is_whole = ServerWeights(tmp_path, "float32", 1), len(names) == 2
        with contextlib.nullcontext() if is_whole else pytest.raises(ValueError, match=r"unexpected \['a\.experts\.up'\]"):
            weights.hold({"a.experts.up": torch.ones(4, 3)})
            assert {*weights.tensors()} == {*names}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda layer: vars(layer.moe_config).update(num_experts=6), "has experts twice"),
        (lambda layer: vars(layer.expert_map_manager).update(num_fused_shared_experts=1), "or others among them"),
        (lambda layer: setattr(layer.quant_method, "unquantized_backend", SimpleNamespace(name="MOONEP")), "computed by MOONEP"),
        (lambda layer: layer.double(), "w13_weight is kept in torch.float64"),
    ],
)
def test_experts_that_cannot_be_told_are_not(sums: Any, change: Callable[[Any], None], why: str) -> None:
    model = experts_of(experts()[0])
    change(model.mlp.experts.routed_experts)
    (worker,) = told(sums, model)
    assert why in worker.unseen["mlp.experts.routed_experts"] and not worker.weights


def quantised(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.quant_method = Fp8LinearMethod()


def broken(model: Any) -> None:
    del model.model.layers[0].self_attn.o_proj.input_size


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (quantised, "model.layers.0.self_attn.o_proj is processed by Fp8LinearMethod: nobody saw it"),
        (broken, "AttributeError"),
    ],
)
def test_a_worker_says_why_it_cannot_tell(sums: Any, change: Callable[[Any], None], why: str) -> None:
    """An error of its own, too: it generates all the same."""
    model = model_of(checkpoint())
    change(model)
    (worker,) = told(sums, model)
    path = "model.layers.0.self_attn.o_proj"
    assert why in worker.unseen[path] and len(worker.weights) == len(checkpoint()) - 1
    assert fault_in([worker], checkpoint()) == ""
    model.model.norm.weight.data += 1
    assert "in 1 of 9 parts, model.norm.weight the first" in fault_in(told(sums, model), checkpoint())


class Renaming:
    """As vLLM's mapper of names without the matrices that it puts together."""

    def get_rename_mapper(self) -> Renaming:
        return self

    def map_name(self, name: str) -> str | None:
        if name.startswith("mtp."):
            return None
        return name.replace(".attn.", ".self_attn.").replace("gain", "weight")


def test_a_model_whose_names_are_not_those_of_its_files_is_told_by_theirs(sums: Any, loading: Any) -> None:
    """As vLLM's own rules say when weights are loaded; not of a parameter with another name, of which something else is made."""
    tensors = checkpoint()
    in_files = {name.replace(".self_attn.", ".attn."): tensor for name, tensor in tensors.items()}
    in_files["model.norm.gain"] = in_files.pop("model.norm.weight") - 1
    model, loaded = model_of(tensors), {}
    model.hf_to_vllm_mapper = Renaming()
    model.load_weights = lambda weights, **options: loaded.update(dict(weights), **options)
    loading.watch_loading()
    made(model)
    model.load_weights(iter({**in_files, "mtp.weight": torch.ones(1)}.items()), only="these")
    assert loaded.keys() == {*in_files, "mtp.weight", "only"}
    promised = PromisedTensors(1, in_files, "float32")
    for change in (0, 1):
        model.model.layers[0].self_attn.qkv_proj.bias.data[0] += change
        found = told_of(told(sums, model), promised)
        assert found.unseen == {
            "model.norm.weight": "model.norm.weight is in its model, and in no file of the model's",
            "model.norm.gain": "its model has no model.norm.gain, which is in a file of the model's",
        }
        fault = fault_of(attestation(found), 1, promised.sums())
        assert bool(fault) == bool(change) and (not change or "model.layers.0.attn.q_proj.bias the first" in fault)
    path = "model.layers.0"
    lora = lora_of(tensors)
    worker = with_lora(model, lora, rank=0, tp=1)
    by_file = {name.replace(".self_attn.", ".attn."): tensor for name, tensor in lora.items()}
    assert f"{path}.attn.o_proj.lora_A.weight" in by_file
    for given in (by_file, lora):  # the trainer's module may have the names that vLLM has
        assert fault_in_lora(told(sums, worker, lora_id=5), given) == ""
        others = {name: tensor + 1 for name, tensor in given.items()}
        assert "in 8 of 8 parts" in fault_in_lora(told(sums, worker, lora_id=5), others)


def composed_weight_loader(loader: Callable[..., None], fn: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    """As vLLM's."""

    def composed_loader(param: Tensor, loaded_weight: Tensor) -> None:
        loader(param, loaded_weight)
        param.data.copy_(fn(param))

    return composed_loader


class MambaMixer(nn.Module):
    """As vLLM's of state spaces: a part of A_log, and A in float32."""

    def __init__(self, rank: int, tp: int, is_second: bool) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(8 // tp, 3))

        def weight_loader(param: Tensor, loaded_weight: Tensor) -> None:
            param.data.copy_(loaded_weight.chunk(tp)[rank])

        def A_weight_loader(param: Tensor, loaded_weight: Tensor) -> None:
            weight_loader(param, -torch.exp(loaded_weight.float()))

        composed = composed_weight_loader(weight_loader, lambda tensor: -torch.exp(tensor.float()))
        self.A.weight_loader = composed if is_second else A_weight_loader  # type: ignore[attr-defined]


class RenamingA(Renaming):
    def map_name(self, name: str) -> str | None:
        return name.replace("A_log", "A")


@pytest.mark.parametrize("has_rules", [True, False])
@pytest.mark.parametrize("is_second", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_loader_makes_something_of_is_told_by_what_it_took(
    sums: Any, loading: Any, dtype: torch.dtype, tp: int, is_second: bool, has_rules: bool
) -> None:
    """A of state spaces, and a norm's weight that is kept plus 1; named by rules, or renamed where a model loads."""
    generator = torch.Generator().manual_seed(3)
    versions = [
        {
            "mixer.A_log": torch.randn(8, 3, generator=generator).to(dtype),
            "norm.weight": torch.randn(5, generator=generator).to(dtype),
        }
        for _ in range(2)
    ]
    models = [nn.Module() for _ in range(tp)]
    loading.watch_loading()
    for rank, model in enumerate(models):
        model.mixer, model.norm = MambaMixer(rank, tp, is_second), nn.Module()
        model.norm.weight = nn.Parameter(torch.empty(5, dtype=dtype))
        take = lambda param, loaded_weight: param.data.copy_(loaded_weight)  # noqa: E731
        model.norm.weight.weight_loader = composed_weight_loader(take, lambda tensor: tensor + 1)
        if has_rules:
            model.hf_to_vllm_mapper = RenamingA()

        def load(weights: Any, own: Any = model) -> None:
            for name, tensor in weights:
                parameter = own.get_parameter(name.replace("A_log", "A"))
                parameter.weight_loader(param=parameter.to("meta"), loaded_weight=tensor.to("meta"))  # vLLM counts
                parameter.weight_loader(parameter, tensor)

        model.load_weights = load
        made(model)
    promised = [PromisedTensors(1, version, str(dtype).removeprefix("torch.")) for version in versions]

    def fault(number: int) -> str:
        found = told_of(told(sums, *models, dtype=dtype), promised[number])
        assert not found.unseen
        return fault_of(attestation(found), 1, promised[number].sums())

    (worker, *_) = told(sums, *models, dtype=dtype)
    assert "nobody saw what mixer.A was made of" in worker.unseen["mixer"] and "nobody saw what norm" in worker.unseen["norm"]
    for model in models:
        model.load_weights(versions[0].items())
        assert model.mixer.A.max() < 0  # loaded as before
    assert fault(0) == ""
    assert ("in 2 of 2" if tp == 1 else "in 3 of 3") in fault(1), "nothing was loaded"
    for model in models:
        model.load_weights([("mixer.A_log", versions[1]["mixer.A_log"])])
    assert "norm.weight the first" in fault(1) and "mixer.A_log the first" in fault(0)
    for model in models:
        model.load_weights(versions[1].items())
    assert fault(1) == ""
    models[-1].mixer.A.data[2, 1] *= 1.001  # what it was made into lies there no more
    assert "mixer.A_log the first" in fault(1)


def test_what_was_made_of_a_tensor_that_the_model_s_dtype_does_not_hold_is_not_told(sums: Any, loading: Any) -> None:
    loading.watch_loading()
    model = nn.Module()
    model.mixer = MambaMixer(0, 1, is_second=True)
    model.load_weights = lambda weights: [model.mixer.A.weight_loader(model.mixer.A, tensor) for _, tensor in weights]
    made(model)
    model.load_weights([("mixer.A_log", torch.full((8, 3), 1 / 3))])
    promised = PromisedTensors(1, {"mixer.A_log": torch.full((8, 3), 1 / 3)}, "bfloat16")
    found = told_of(told(sums, model, dtype=torch.bfloat16), promised)
    assert found.unseen == {"mixer.A_log": "mixer.A_log is kept in float32"}


OTHERWISE = {
    "out.matrix": "lm_head.weight",
    "model.last.gain": "model.norm.weight",
    "model.layers.0.mixer.matrix": "model.layers.0.self_attn.o_proj.weight",
    "mixture.0.gate_up": "blocks.0.mlp.experts.routed_experts.w13_weight",
    "mixture.0.down": "blocks.0.mlp.experts.routed_experts.w2_weight",
    "scale": "ones.weight",
}
"""Names that files have for what a model's code calls otherwise."""
NEVER_KNOWN = {
    "part": ["whole"],  # of which it makes something else
    "twice": ["left", "right"],
    "first": ["both"],
    "second": ["both"],
    "twin": ["one"],
    "other_twin": ["another"],
    "end.1.gain": ["at_2"],  # crosswise
    "end.2.gain": ["at_1"],
}
"""Others, and the layers whose weights it makes copies of them, or something else."""


class OfCode:
    """A model whose code has names of its own for what it copies, and what its files have. `way`: when it copies."""

    def __init__(self, way: str, tp: int) -> None:
        self.way, self.tp, (self.of_experts, _, in_one) = way, tp, experts()
        self.first, in_files = checkpoint(), {own: name for name, own in OTHERWISE.items()}
        self.files = {in_files.get(name, name): tensor for name, tensor in self.first.items()}
        self.files |= {f"mixture.0.{'down' if 'down' in name else 'gate_up'}": tensor for name, tensor in in_one.items()}
        self.workers = [self.made_of(self.version(0), rank) for rank in range(tp)]
        for worker in self.workers:
            worker.load_weights = lambda weights, own=worker: self.copy(own, weights)
            made(worker)

    def version(self, number: int) -> dict[str, Tensor]:
        """Files of one version; in the first two tensors are one number all over."""
        sizes = {"scale": 5} | {name: size for size, name in enumerate(NEVER_KNOWN, 6)}
        own = {name: torch.arange(float(size)) * (1 + number / size) for name, size in sizes.items()}
        own |= {"second": own["first"] + 1, "other_twin": own["twin"]}
        if not number:
            own |= {"scale": torch.ones(5), "part": torch.zeros(sizes["part"])}
        return {name: tensor * (1 + 0.3 * number) for name, tensor in self.files.items()} | own

    def made_of(self, files: Mapping[str, Tensor], rank: int) -> Any:
        """A worker's part of it."""
        factor = float(files["mixture.0.down"][0] / self.files["mixture.0.down"][0])
        model = model_of({OTHERWISE.get(name, name): files[name] for name in files}, rank=rank, tp=self.tp, packed=False)
        experts_here = {name: each * factor for name, each in self.of_experts.items()}
        model.blocks = nn.ModuleList([experts_of(experts_here, rank=rank, tp=self.tp)])
        own = {"ones": files["scale"]} | {layer: files[name] for name in reversed(NEVER_KNOWN) for layer in NEVER_KNOWN[name]}
        for layer, tensor in (own | {"whole": files["part"] * 9}).items():
            model.add_module(layer, nn.Module())
            model.get_submodule(layer).weight = nn.Parameter(tensor.clone(), requires_grad=False)
        return model

    def copy(self, model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
        """What the model's code does; its parameters are filled in later, here."""
        waiting = list[str]()
        for name, _ in [*weights] if self.way == "takes all first" else weights:
            waiting.append(name)
            while len(waiting) > (self.way == "takes one more first"):
                own = waiting.pop(0)
                by_code = [f"{layer}.weight" for layer in NEVER_KNOWN.get(own, [])]
                for name_here in by_code or [OTHERWISE.get(own, re.sub("[qkv]_proj", "qkv_proj", own))]:
                    parameter = model.get_parameter(name_here)
                    parameter.data.copy_(torch.zeros_like(parameter))

    def load(self, number: int, *, has: int | None = None) -> None:
        """Have the workers load a version, after which they have it, or another one."""
        for rank, worker in enumerate(self.workers):
            if self.way == "counts on meta first":
                worker.to_empty(device="meta")
            worker.load_weights(self.version(number).items())
            for name, child in self.made_of(self.version(number if has is None else has), rank).named_children():
                worker.add_module(name, child)


@pytest.mark.parametrize("way", ["copies at once", "counts on meta first", "takes all first", "takes one more first"])
@pytest.mark.parametrize("tp", [1, 2])
def test_names_that_only_a_model_s_code_has_are_known_by_what_it_copies(sums: Any, loading: Any, tp: int, way: str) -> None:
    """Of a matrix, the output layer, a norm, and experts that are one tensor in files, from the first version on that a server has;
    not of what something else is made of, though it has the same sum at first, nor where it is not clear which one it is. A model
    that takes more before it copies has none known: no name is taken for another."""
    loading.watch_loading()
    model, known_names = OfCode(way, tp), dict[str, str]()
    num_known = 11 + 2 * tp  # norms are whole in each worker

    def seen(number: int) -> tuple[set[str], str]:
        """Names of which nothing is seen, and the fault, if the workers should have this version."""
        promised = PromisedTensors(number, model.version(number), "float32", known_names=known_names)
        found = told_of(told(sums, *model.workers), promised)
        return {*found.unseen} & (OTHERWISE | NEVER_KNOWN).keys(), fault_of(attestation(found), number, promised.sums())

    model.load(1, has=0)
    missing, fault = seen(1)
    assert missing == {*OTHERWISE, *NEVER_KNOWN} and "other weights" in fault, "a stale one"
    model.load(0)
    if "takes" in way:
        assert seen(0) == ({*OTHERWISE, *NEVER_KNOWN}, "") and not known_names
        model.load(1)
        assert seen(1) == ({*OTHERWISE, *NEVER_KNOWN}, "") and not known_names
        return
    assert seen(0) == ({"scale", *NEVER_KNOWN}, "")
    model.load(1)
    assert seen(1) == ({*NEVER_KNOWN}, "")
    model.load(2, has=1)
    missing, fault = seen(2)
    assert missing == {*NEVER_KNOWN} and f"in {num_known} of {num_known} parts" in fault


@pytest.mark.parametrize("change", [{"numel": 6}, {"kept": "float32"}])
def test_parts_that_do_not_go_together_are_not_told(change: dict[str, Any]) -> None:
    promised = PromisedTensors(1, {"a": torch.ones(8), "b": torch.empty(0)}, "float32")
    part = FoundSum(["a"], 4, 5, 0, [])
    with pytest.raises(NotAttested):
        promised.found(["a"], [part, replace(part, **change)])
    with pytest.raises(NotAttested, match="b is empty"):
        promised.found(["b"], [part])


@pytest.mark.parametrize("shape", [(48, 48), (48, 64)])
def test_a_matrix_that_a_model_loads_the_other_way_is_compared_the_other_way(sums: Any, shape: tuple[int, int]) -> None:
    """GPT-2's, square and not."""
    matrix, model = torch.randn(shape), nn.Module()
    model.c_proj = LikeLinear([matrix.t().contiguous()], cut="outputs", rank=0, tp=1, packed=True)
    promised = PromisedTensors(1, {"c_proj.weight": matrix}, "float32")
    for seed in (0, 5):
        found = whole(told_of(told(sums, model, seed=seed), promised))
        assert fault_of(Attestation(found), 1, promised.sums()) == ""
    model.c_proj.set(matrix.t() + 0.1, packed=True)
    found = whole(told_of(told(sums, model), promised))
    assert "in 1 of 1 parts, c_proj.weight the first" in fault_of(Attestation(found), 1, promised.sums())


def test_an_adapter_that_one_of_two_servers_has_is_not_everywhere() -> None:
    has, has_not = Attestation([(["a"], 5), (["b"], 7)]), Attestation([(["b"], 7)])
    assert fault_of(merged([has, has], None), 1, {"a": 5, "b": 7}) == ""
    assert "in 1 of 4 parts, a the first" in fault_of(merged([has, has_not], None), 1, {"a": 5, "b": 7})
    unseen = Attestation([(["b"], 7)], unseen=["a"])
    assert fault_of(merged([has, unseen], None), 1, {"a": 5, "b": 7}) == ""


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_that_are_together_in_files_are_told_by_the_names_there(sums: Any, loading: Any, tp: int) -> None:
    """In files by other names, which a part of the model has rules for."""
    tensors, _, version = experts()
    workers = []
    for rank in range(tp):
        worker = nn.Module()
        worker.model = experts_of(tensors, rank=rank, tp=tp)
        worker.model.hf_to_vllm_mapper = Legacy()
        worker.model.load_weights = dict
        loading.watch_loading()
        made(worker)
        worker.model.load_weights((name.replace("_proj", "_old"), tensor) for name, tensor in version.items())
        workers.append(worker)
    for names in ("_old", "_proj"):  # as versions have them, too
        in_files = {f"model.{name}".replace("_proj", names): tensor for name, tensor in version.items()}
        if names == "_proj":
            for worker in workers:
                worker.model.load_weights(version.items())
        promised = PromisedTensors(1, in_files, "float32")
        assert fault_of(attestation(told_of(told(sums, *workers), promised)), 1, promised.sums()) == ""
        assert not told_of(told(sums, *workers), promised).unseen
    workers[-1].model.mlp.experts.routed_experts.w2_weight.data[5] += 1
    fault = fault_of(attestation(told_of(told(sums, *workers), promised)), 1, promised.sums())
    assert "in 1 of 2 parts, model.mlp.experts.down_proj the first" in fault


class Legacy(Renaming):
    """As of names that files had once."""

    def map_name(self, name: str) -> str | None:
        return name.replace("_old", "_proj")


def test_a_worker_of_another_vllm_says_why_it_can_tell_nothing(sums: Any) -> None:
    model = model_of(checkpoint())
    model.lora_manager = object()
    (worker,) = told(sums, model, lora_id=5)
    assert worker.why == "AttributeError: 'object' object has no attribute 'lora_index_to_id'" and not worker.weights


def wide(model: Any) -> Any:
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.double() + 1e-12, requires_grad=False)
    return model


def test_what_is_kept_in_another_dtype_is_compared_where_no_version_has_it(sums: Any) -> None:
    tensors = checkpoint()
    workers = told(sums, wide(model_of(tensors)))
    unseen = told_of(workers, PromisedTensors(1, tensors, "float32")).unseen
    assert unseen == {"model.norm.weight": "model.norm.weight is kept in float64"}
    norm, constants = tensors["model.norm.weight"], Differences(constants={"model.norm.weight"})
    for wrong, in_files in ((0, norm.double() + 1e-12), (1, norm.double())):
        promised = PromisedTensors(1, tensors | {"model.norm.weight": in_files}, "float32", differences=constants)
        parts = whole(told_of_version(workers, promised))
        assert len(parts) == len(tensors) - 1 + wrong and len(whole(told_of(workers, promised))) == len(tensors)
        fault = fault_of(Attestation(parts), 1, promised.sums())
        assert bool(fault) == bool(wrong)
        assert "1 tensors that version 1 does not have, model.norm.weight the first" in fault or not wrong
        assert (base_of(whole(told_of(workers, promised)), promised) == promised.base()) == (not wrong)


def test_a_router_that_is_computed_in_float32_is_compared_in_the_model_s_dtype(sums: Any) -> None:
    weight, model = torch.randn(32, 16).bfloat16(), nn.Module()
    model.gate = LikeLinear([weight.float()], cut="outputs", rank=0, tp=1, packed=True)
    assert fault_in(told(sums, model, dtype=torch.bfloat16), {"gate.weight": weight}, torch.bfloat16) == ""
    model.gate = LikeLinear([weight.float() * 1.001], cut="outputs", rank=0, tp=1, packed=True)
    assert told(sums, model, dtype=torch.bfloat16)[0].unseen == {"gate": "gate.weight is kept in torch.float32"}


@pytest.mark.parametrize("tp", [1, 2])
def test_a_buffer_that_files_have_is_compared_with_theirs(sums: Any, tp: int) -> None:
    tensors, scalar = checkpoint(torch.bfloat16), torch.tensor([1.1])
    models = [model_of(tensors, rank=rank, tp=tp) for rank in range(tp)]
    for model in models:
        model.model.register_buffer("layer_scalar", scalar.clone())
        model.model.register_buffer("scale", torch.ones(1))  # which no file has
        model.model.register_buffer("cache", torch.ones(3), persistent=False)
    in_files = tensors | {"model.layer_scalar": scalar}
    promised = PromisedTensors(1, in_files, "bfloat16", differences=Differences(constants={"model.layer_scalar"}))
    for change, words in ((0, ""), (1, "with 1 tensors that version 1 does not have, model.layer_scalar the first")):
        models[-1].model.layer_scalar += change
        workers = told(sums, *models, dtype=torch.bfloat16)
        assert [each.names for each in workers[0].buffers] == [["model.layer_scalar"], ["model.scale"]]
        fault = fault_of(Attestation(whole(told_of_version(workers, promised))), 1, promised.sums())
        assert words in fault and bool(words) == bool(fault)


class FilesWithMore:
    """As `ServerWeights` of a model whose files have a layer that servers do not load; it is known once somebody has looked."""

    version, dtype = 0, "float32"

    def __init__(self, own: Mapping[str, Tensor], more: Mapping[str, Tensor], *, tells: bool) -> None:
        self._own, self._more, self._tells, self.differences = own, more, tells, Differences()

    def tensors(self) -> dict[str, Tensor]:
        return {**self._own, **(self._more if not self.differences.unused else {})}

    def find_differences(self) -> bool:
        self.differences = Differences(unused=self._more if self._tells else {})
        return self._tells


def test_a_base_whose_files_have_more_than_servers_is_looked_at_before_it_is_left_unattested(sums: Any) -> None:
    tensors, more = checkpoint(), {"model.mtp.weight": torch.ones(3)}
    workers = told(sums, model_of(tensors))
    known = ServerAttestations(cast(Any, FilesWithMore(tensors, more, tells=True)), None)
    right = sum_of_all(sums_of(tensors | more).values())
    assert known._base(workers) == (right, {})
    unknown = ServerAttestations(cast(Any, FilesWithMore(tensors, more, tells=False)), None)
    why = "its model has no model.mtp.weight, which is in a file of the model's"
    assert unknown._base(workers) == (None, {"model.mtp.weight": why})


def test_a_router_s_bias_that_experts_have_too_is_told_once(sums: Any, loading: Any) -> None:
    tensors, wholes, _ = experts()
    model, bias = nn.Module(), torch.randn(4)
    model.mlp = nn.Module()
    model.mlp.gate = nn.Module()
    model.mlp.gate.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
    model.mlp.experts = experts_of(tensors).mlp.experts
    layer = model.mlp.experts.routed_experts
    layer.e_score_correction_bias = model.mlp.gate.e_score_correction_bias
    tensors["mlp.gate.e_score_correction_bias"] = bias
    differences = Differences(wholes=wholes, constants={"mlp.gate.e_score_correction_bias"})
    promised = PromisedTensors(1, tensors, "float32", differences=differences)
    assert fault_of(Attestation(whole(told_of_version(told(sums, model), promised))), 1, promised.sums()) == ""
    layer.e_score_correction_bias = nn.Parameter(bias.clone(), requires_grad=False)
    (worker,) = told(sums, model)
    assert "e_score_correction_bias is kept in torch.float32, or under another name" in min(worker.unseen.values())
    rest = told_of_version([worker], promised)
    assert not rest.parts and {*rest.unseen} >= promised.sums().keys(), "a part with others is as unseen as they are"
    loading.watch_loading()
    process(layer, OnlineMoEMethodBase())
    layer.e_score_correction_bias.data += 1  # of this no load makes anything
    assert fault_of(Attestation(whole(told_of_version(told(sums, model), promised))), 1, promised.sums()) == ""


class LikeLatentAttention(nn.Module):
    """As vLLM's, which computes with the rows of another layer's matrix, in two of its own."""

    def __init__(self, kv_b_proj: Any) -> None:
        super().__init__()
        self.kv_b_proj = kv_b_proj
        self.absorb()

    def absorb(self) -> None:
        matrix = getattr(self.kv_b_proj, "base_layer", self.kv_b_proj).weight.detach()
        self.W_UK_T, self.W_UV = (nn.Parameter(half.t().contiguous(), requires_grad=False) for half in matrix.chunk(2))


@pytest.mark.parametrize("has_adapters", [False, True])
def test_what_attention_makes_of_another_layer_s_matrix_counts_as_that_one(sums: Any, has_adapters: bool) -> None:
    tensors, model = {"kv_b_proj.weight": torch.randn(32, 16), "o_proj.weight": torch.randn(16, 16)}, nn.Module()
    for name in ("kv_b", "o"):
        layer = LikeLinear([tensors[f"{name}_proj.weight"].clone()], cut="outputs", rank=0, tp=1, packed=False)
        setattr(model, f"{name}_proj", BaseLinearLayerWithLoRA(layer, []) if has_adapters else layer)
    model.attention = LikeLatentAttention(model.kv_b_proj)
    assert fault_in(told(sums, model), tensors) == ""
    newer = {name: tensor * 1.5 for name, tensor in tensors.items()}
    for name in ("kv_b", "o"):
        layer = getattr(model, f"{name}_proj")
        getattr(layer, "base_layer", layer).weight.data *= 1.5
    assert "in 1 of 2 parts, kv_b_proj.weight the first" in fault_in(told(sums, model), newer)
    model.attention.absorb()
    assert fault_in(told(sums, model), newer) == ""
    model.attention.W_UV.data[0, 0] += 1
    assert "in 1 of 2 parts, kv_b_proj.weight the first" in fault_in(told(sums, model), newer)


def test_a_bias_that_a_kernel_wants_in_float32_is_the_same(sums: Any) -> None:
    tensors = checkpoint(torch.bfloat16)
    model = model_of(tensors)
    bias = model.model.layers[0].self_attn.qkv_proj.bias
    bias.data = bias.data.float()
    assert fault_in(told(sums, model, dtype=torch.bfloat16), tensors, torch.bfloat16) == ""


def test_what_makes_up_no_whole_is_not_told_rather_than_found_wrong(sums: Any) -> None:
    tensors = checkpoint()
    both = [model_of(tensors, rank=rank, tp=2) for rank in range(2)]
    promised = PromisedTensors(1, tensors, "float32")
    found = told_of(told(sums, both[0]), promised)
    assert all("do not make up a whole" in why for why in found.unseen.values()) and "lm_head.weight" in found.unseen
    assert [names for names, _ in found.parts] and not {name for names, _ in found.parts for name in names} & found.unseen.keys()
    found = told_of(told(sums, model_of(checkpoint(is_tied=True))), promised)
    assert found.unseen == {"lm_head.weight": "its model has no lm_head.weight, which is in a file of the model's"}
    del both[1].lm_head
    with pytest.raises(NotAttested, match="have not the same tensors"):
        told_of(told(sums, *both), promised)
    found = told_of(told(sums, model_of(tensors)), PromisedTensors(1, checkpoint(is_tied=True), "float32"))
    assert found.unseen == {"lm_head.weight": "lm_head.weight is in its model, and in no file of the model's"}
    infinite = {**tensors, "lm_head.weight": tensors["lm_head.weight"].clone()}
    infinite["lm_head.weight"][0, 0] = torch.inf
    found = told_of(told(sums, model_of(infinite)), PromisedTensors(1, infinite, "float32"))
    assert "is not finite" in found.unseen["lm_head.weight"] and len(found.unseen) == 1


SPEC = LoraSpec(rank=4, alpha=6.0)
LARGEST_RANK = 8


def with_lora(model: Any, lora: Mapping[str, Tensor], *, rank: int, tp: int, index: int = 1) -> Any:
    """The model with an adapter of id 5, scaled as vLLM does."""
    attention = model.model.layers[0].self_attn
    path = "model.layers.0.self_attn"
    modules = {}
    for layer, names, cut in (("qkv_proj", ["q_proj", "k_proj", "v_proj"], "outputs"), ("o_proj", ["o_proj"], "inputs")):
        stacks = []
        for name in names:
            low, up = lora[f"{path}.{name}.lora_A.weight"], lora[f"{path}.{name}.lora_B.weight"] * SPEC.scaling
            low = low.chunk(tp, 1)[rank] if cut == "inputs" else low
            up = up.chunk(tp)[rank] if cut == "outputs" else up
            pair = torch.zeros(2, 1, LARGEST_RANK, low.shape[1]), torch.zeros(2, 1, len(up), LARGEST_RANK)
            pair[0][index, 0, : SPEC.rank] = low
            pair[1][index, 0, :, : SPEC.rank] = up
            stacks.append(pair)
        setattr(attention, layer, BaseLinearLayerWithLoRA(getattr(attention, layer), stacks))
        modules[f"{path}.{layer}"] = getattr(attention, layer)
    model.lora_manager = SimpleNamespace(
        lora_index_to_id=[*[None] * index, 5],
        modules=modules,
        packed_modules_mapping=model.packed_modules_mapping,
        lora_config=SimpleNamespace(max_lora_rank=LARGEST_RANK),
    )
    return model


def lora_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    lora = {}
    for name, tensor in tensors.items():
        if "_proj.weight" in name:
            linear = name.removesuffix(".weight")
            lora[f"{linear}.lora_A.weight"] = torch.randn(SPEC.rank, tensor.shape[1], generator=generator)
            lora[f"{linear}.lora_B.weight"] = torch.randn(len(tensor), SPEC.rank, generator=generator)
    return lora


def fault_in_lora(workers: Sequence[WorkerSums], lora: Mapping[str, Tensor]) -> str:
    promised = PromisedTensors(1, lora, "float32", adapter="version-1-1", scaling=SPEC.scaling)
    return fault_of(attestation(told_of_lora(workers, promised)), 1, sums_of(lora))


@pytest.mark.parametrize("tp", [1, 2])
def test_an_adapter_is_what_its_layers_have(sums: Any, tp: int) -> None:
    """With its scaling in B, sharded over workers, and beside the base, whose names stay."""
    tensors = checkpoint()
    lora = lora_of(tensors)
    models = [with_lora(model_of(tensors, rank=rank, tp=tp), lora, rank=rank, tp=tp) for rank in range(tp)]
    workers = told(sums, *models, lora_id=5)
    assert fault_in(workers, tensors) == "" and fault_in_lora(workers, lora) == ""
    stays = models[-1].model.layers[0].self_attn.qkv_proj.lora_b_stacked[2]
    stays[1, 0, 3, 2] += 1
    assert "v_proj.lora_B.weight the first" in fault_in_lora(told(sums, *models, lora_id=5), lora)
    stays.zero_()
    assert "in 1 of" in fault_in_lora(told(sums, *models, lora_id=5), lora)
    assert "without 8 of the 8 tensors" in fault_in_lora(told(sums, *models, lora_id=6), lora), "no layer has it"


def test_an_adapter_that_has_more_than_the_version_is_another(sums: Any) -> None:
    tensors = checkpoint()
    lora = lora_of(tensors)
    workers = told(sums, with_lora(model_of(tensors), lora, rank=0, tp=1), lora_id=5)
    less = {name: tensor for name, tensor in lora.items() if "o_proj" not in name}
    assert "with 2 tensors that version 1 does not have" in fault_in_lora(workers, less)
    zeros = {name: torch.zeros_like(tensor) if "o_proj" in name else tensor for name, tensor in lora.items()}
    workers = told(sums, with_lora(model_of(tensors), zeros, rank=0, tp=1), lora_id=5)
    assert fault_in_lora(workers, less) == "", "a layer without an adapter has zeros"


def output_layer(*, has_one: bool) -> Any:
    """As vLLM's: all adapters in one tensor."""
    low, up = torch.zeros(2, 1, LARGEST_RANK, 64), torch.zeros(2, 1, 140, LARGEST_RANK)
    up[1, 0, 3, 2] = float(has_one)
    return SimpleNamespace(lora_a_stacked=low, lora_b_stacked=up)


def experts_with_lora(*, has_one: bool) -> Any:
    """As vLLM's: each matrix's adapters in one tensor, and besides a list of pieces by adapter, expert and matrix."""
    stacks = {f"{kind}_stacked": (torch.zeros(2, 4, 8, 8),) for kind in ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b")}
    stacks["w2_lora_b_stacked"][0][1, 3, 2, 1] = float(has_one)
    pieces = [torch.zeros(1, 8) for _ in range(24)]
    return SimpleNamespace(**stacks, lora_a_stacked=pieces, lora_b_stacked=pieces)


@pytest.mark.parametrize("layer", [output_layer, experts_with_lora])
def test_layers_whose_adapters_are_not_told_may_be_there_as_long_as_they_have_none(sums: Any, layer: Callable[..., Any]) -> None:
    tensors = checkpoint()
    lora = lora_of(tensors)
    model = with_lora(model_of(tensors), lora, rank=0, tp=1)
    model.lora_manager.modules["model.other"] = layer(has_one=False)
    assert fault_in_lora(told(sums, model, lora_id=5), lora) == ""
    model.lora_manager.modules["model.other"] = layer(has_one=True)
    (worker,) = told(sums, model, lora_id=5)
    assert worker.unseen_lora == {"model.other": "an adapter of model.other is applied by SimpleNamespace"}
    more = lora | {"model.other.lora_A.weight": torch.randn(4, 8)}
    assert fault_in_lora([worker], more) == "", "it may be there"
    assert "without 1 of the 10 tensors" in fault_in_lora([worker], more | {"model.its_like.lora_A.weight": torch.ones(4, 8)})
    assert "without 1 of the 9 tensors" in fault_in_lora([replace(worker, unseen_lora={})], more)
    assert "in 8 of 8 parts" in fault_in_lora([worker], {name: tensor + 1 for name, tensor in more.items()})


def test_sums_are_asyncflows_own(sums: Any) -> None:
    """Nothing of AsyncFlow is imported beside vLLM."""
    bits = sys.modules["asyncflow_bits"]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.randn(7, 11).to(dtype)
        assert bits.sum_of_bits(tensor) == sum_of_bits(tensor)
        assert bits.sum_of_bits(tensor, np.int64) == sum_of("q_proj.lora_B.weight", tensor)
        words = tensor.flatten().view({4: torch.int32, 2: torch.int16}[tensor.element_size()])
        for size in (1, 10, 1000):  # as on a device
            assert bits.sum_in_pieces(words, size) == sum_in_pieces(words, size) == words.sum()
