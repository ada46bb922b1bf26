"""AsyncFlow's modules for vLLM's processes, which do wrong what the file that `ASYNCFLOW_TEST_FAULT` names has in it:

    nothing      an update loads nothing
    stale        an update loads the tensors of the one before
    half         an update loads every second tensor
    tied head    the output layer that is the embedding keeps its packed copy, as vLLM 0.32.0 leaves it on a CPU
    uncopied     an update loads and quantises, and what kernels read stays as it was
    unabsorbed   latent attention (MLA) computes with others than the rows of the matrix that it is given
    unbound      an adapter is loaded, and no layer has it

An operator that vLLM's build for CPUs lacks, which quantises to fp8, is made up for: by it more of its methods can be run.
This folder lies before AsyncFlow's own on the servers' PYTHONPATH.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vllm import _custom_ops
from vllm.lora.model_manager import LoRAModelManager
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, layerwise

found = [Path(folder) / "asyncflow_vllm.py" for folder in os.environ["PYTHONPATH"].split(os.pathsep)]
OWN = next(path for path in found if path.exists() and path != Path(__file__))
spec = importlib.util.spec_from_file_location("asyncflow_vllm_as_it_is", OWN)
assert spec is not None and spec.loader is not None
own = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = own
spec.loader.exec_module(own)
Extension, RequireKey, FileWeights = own.Extension, own.RequireKey, own.FileWeights
tensors_of, finish, activate = own._tensors, FileWeights.finish_weight_update, LoRAModelManager.activate_adapter
copy = layerwise._copy_and_restore_kernel_tensors
absorb = MLAAttention.process_weights_after_loading
before: list[Any] = []


def fault() -> str:
    return Path(os.environ["ASYNCFLOW_TEST_FAULT"]).read_text()


def tensors(buffer: Any, update: Any) -> Iterator[Any]:
    given = [(name, tensor.clone()) for name, tensor in tensors_of(buffer, update)]
    chosen = {"nothing": [], "stale": [*before], "half": given[::2]}.get(fault(), given)
    before[:] = given
    yield from chosen


def finish_weight_update(self: Any) -> None:
    if fault() == "tied head":
        finalize_layerwise_reload(self.model, self.model_config)
    else:
        finish(self)


def copy_and_restore(layer: Any, info: Any) -> None:
    (layerwise._place_kernel_tensors if fault() == "uncopied" else copy)(layer, info)


def process_weights_after_loading(self: Any, act_dtype: torch.dtype) -> None:
    if fault() == "unabsorbed":
        self.W_UV = torch.nn.Parameter(self.W_UV * 1.01, requires_grad=False)  # no view of the matrix any more
    else:
        absorb(self, act_dtype)


def activate_adapter(self: Any, lora_id: int) -> bool:
    done = activate(self, lora_id)
    if done and fault() == "unbound":
        for layer in self.modules.values():
            layer.reset_lora(self.lora_index_to_id.index(lora_id))
    return bool(done)


def scaled_fp8_quant(
    matrix: torch.Tensor, scale: torch.Tensor | None = None, *, use_per_token_if_dynamic: bool = False, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix in fp8, and the scale, or that of each row."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    if scale is None:
        scale = (
            matrix.abs().amax(-1, keepdim=True) if use_per_token_if_dynamic else matrix.abs().amax().reshape(1)
        ).float() / largest
    return (matrix.float() / scale).clamp(-largest, largest).to(torch.float8_e4m3fn), scale


_custom_ops.scaled_fp8_quant = scaled_fp8_quant
layerwise._copy_and_restore_kernel_tensors = copy_and_restore
own._tensors = tensors
FileWeights.finish_weight_update = finish_weight_update
MLAAttention.process_weights_after_loading = process_weights_after_loading
LoRAModelManager.activate_adapter = activate_adapter
