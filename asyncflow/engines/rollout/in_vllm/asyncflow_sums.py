"""Sums of what a worker of vLLM's computes with, for AsyncFlow's attested weights (`asyncflow/attestation.py`).

    a buffer that kernels read as it lies           --> the sum of its bits
    a packed copy, which its kernel alone reads     --> columns of the matrix: what the kernel gives for rows with a single 1, which
                                                        is exact to the bit; the sum of theirs
    what a layer's method makes of loaded weights   --> the sum over what was loaded, taken there, with the difference of the bits
    (it quantises them, packs them, turns them)         that lie there now from those that it made
    what a parameter's loader makes of what it takes -> likewise
    what attention makes of another layer's matrix  --> that one's sum, with the difference of its bits from those made of it

A fused matrix is taken apart into the checkpoint's own tensors, by the model's `packed_modules_mapping`; the experts of a layer
are summed up together, since kernels order and fill up their matrices as they like. What the sums should be is known to the
sender alone. A layer that cannot be told is named, with the reason; where one keeps what was made of its weights anywhere else than
in parameters and buffers, the sum is over what it was given. Nothing can be told of what was quantised before it was saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from asyncflow_bits import is_exact, normal, sum_of_bits
from asyncflow_loading import (
    PLAIN,
    CannotTell,
    Composed,
    composed_of,
    name_in_files,
    processed_of,
    source_of,
    sums_of_tensors,
    words_of,
)
from torch import Tensor, nn
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

LEAST_COLUMNS = 16
LEAST_ELEMENTS = 1 << 15  # of each tensor, in these columns: enough if one in a thousand has changed, as in a step in bfloat16
ABSORBED = ("W_UV", "W_UK_T")
"""Parameters of latent attention (MLA) that are made of the rows of `kv_b_proj`, each in one of them."""
WRAPPED = ".base_layer"  # what vLLM calls a layer inside of the one that adds adapters to it

SumEntry = list[Any]
"""[names of the checkpoint's, number of its elements that this worker has, sum, inputs that it has, columns that the sum is over,
whether it may be quantised, dtype that it is kept in, why nobody sees that kernels read this, name of the one tensor of the
checkpoint's that was copied there]. The last ones are left out where it is not, is kept in the model's, they do, or there is none.

Columns are counted over all workers, and there are none where the sum is over all that this one has. Of several tensors together
no elements are counted. An adapter's tensor has the names that it may have."""


@torch.inference_mode()
def attested(model: nn.Module, dtype: torch.dtype, seed: int, lora_id: int | None, has_weights: bool) -> dict[str, Any]:
    """Sums of the model's own weights, with `has_weights`, and of the adapter `lora_id`, if there is one; or `why` there are none.

    `seed` chooses columns: after as many seeds as a matrix has columns, all have been seen. `unseen` and `unseen_lora` are the
    layers that cannot be told, and why.
    """
    unseen, unseen_lora = dict[str, str](), dict[str, str]()
    try:
        weights, buffers = ([*_weights(model, dtype, seed, unseen)], [*_buffers(model, dtype)]) if has_weights else ([], [])
        lora, rank = ([], 0) if lora_id is None else _lora(model, lora_id, unseen_lora)
    except Exception as error:  # of another vLLM than this was written against, maybe: it generates all the same
        return {"why": words_of(error)}
    for entry in [*weights, *buffers]:
        entry[0] = [_as_in_files(model, name) for name in entry[0]]
    told = {"weights": weights, "buffers": buffers, "lora": lora, "lora_rank": rank}
    return told | {"unseen": unseen, "unseen_lora": unseen_lora}


def _as_in_files(model: nn.Module, name: str) -> str:
    """Name that files have for a tensor, if they have one for the same."""
    of_file = name_in_files(model, name)
    # Where a parameter itself is called otherwise, it is something else, it seems.
    return of_file if of_file is not None and of_file.rpartition(".")[2] == name.rpartition(".")[2] else name


def _paths(model: nn.Module, path: str) -> list[str]:
    """Names of a layer, in files and in the model: an adapter has one of these."""
    return [*dict.fromkeys([_as_in_files(model, f"{path}.weight").removesuffix(".weight"), path])]


def _weights(model: nn.Module, dtype: torch.dtype, seed: int, unseen: dict[str, str]) -> Iterator[SumEntry]:
    aliases: dict[nn.Module, list[str]] = {}
    for alias, module in model.named_modules(remove_duplicate=False):
        aliases.setdefault(module, []).append(alias.replace(WRAPPED, ""))
    absorbed = {module: _change_of_absorbed(module) for module in aliases if all(hasattr(module, name) for name in ABSORBED)}
    changes = {_without_adapters(module.kv_b_proj): change for module, change in absorbed.items()}
    first_names: dict[int, str] = {}
    for module, paths in aliases.items():
        if module in absorbed and module._parameters.keys() <= {*ABSORBED}:
            continue
        try:
            entries = [*_of_layer(model, module, paths, first_names, dtype, seed)]
        except Exception as error:
            unseen[paths[0]] = words_of(error)
            continue
        for name, entry in entries:
            entry[2] = (entry[2] + changes.get(module, 0)) % (1 << 32)
            if source := source_of(model, name):
                entry += [*(False, "", "")[len(entry) - 5 :], source]
            yield entry


def _change_of_absorbed(attention: Any) -> int:
    """Sum over what latent attention computes with, less that over what it was made of."""
    made = [getattr(attention, name) for name in ABSORBED]
    return sum(map(sum_of_bits, made)) - sum_of_bits(get_and_maybe_dequant_weights(attention.kv_b_proj, out_dtype=made[0].dtype))


def _without_adapters(layer: Any) -> nn.Module:
    return getattr(layer, "base_layer", layer)


def _of_layer(
    model: nn.Module, module: Any, paths: Sequence[str], first_names: dict[int, str], dtype: torch.dtype, seed: int
) -> Iterator[tuple[str, SumEntry]]:
    """Sums over a layer's own weights, each with the parameter's name. `paths`: the layer's. `first_names`: of the parameters that
    were met so far, by id."""
    method: Any = getattr(module, "quant_method", None)
    method = getattr(method, "old_quant_method", method)  # of experts that may have adapters
    if isinstance(method, QuantizeMethodBase) and type(method) not in PLAIN and module._parameters:
        yield from _of_processed(model, module, method, paths[0], dtype)
        return
    is_head = isinstance(module, ParallelLMHead) or any(path.rpartition(".")[2] == "lm_head" for path in paths)
    for own_name, parameter in module._parameters.items():
        if parameter is None:
            continue
        is_shared = id(parameter) in first_names
        name = first_names.setdefault(id(parameter), f"{paths[0]}.{own_name}".lstrip("."))
        names = _names(model, name)
        if (composed := composed_of.get(module, {}).get(own_name)) is not None:
            yield name, _of_composed(composed, model, name, parameter, dtype)
            continue
        if type(method) is UnquantizedFusedMoEMethod:
            if method.unquantized_backend.name == "MOONEP":  # which keeps a part of them elsewhere
                raise CannotTell(f"{paths[0]} is computed by MOONEP")
            if not (is_shared and own_name in SKIP_LOAD_TENSORS):  # the router's
                names = _names_of_experts(model, module, paths[0], own_name, parameter.dtype, dtype)
                yield name, [names, 0, sum_of_bits(parameter.data), 0, []]
            continue
        if method is not None and type(method) not in PLAIN:
            raise CannotTell(f"{name} is applied by {type(method).__name__}")
        is_embedding = type(method) is UnquantizedEmbeddingMethod
        is_packed = own_name == "weight" and method is not None and "cpu_linear" in module.__dict__
        if is_packed and (is_head or not is_embedding):
            yield from ((name, each) for each in _of_columns(module, names, dtype, seed))
        is_read = not is_packed or (is_embedding and not isinstance(module, ParallelLMHead))  # by lookups
        if is_read and not is_shared:
            yield from ((name, each) for each in _of_buffer(module, names, parameter.data, dtype))


def _names(model: nn.Module, name: str) -> list[str]:
    """The checkpoint's names for what the model calls so."""
    path, _, own_name = name.rpartition(".")
    parent, _, last = path.rpartition(".")
    mapping = getattr(model, "packed_modules_mapping", {})
    return [f"{parent}.{each}.{own_name}".lstrip(".") for each in mapping.get(last, [last])]


def _names_of_experts(model: nn.Module, module: Any, path: str, own_name: str, kept: torch.dtype, dtype: torch.dtype) -> list[str]:
    """The checkpoint's names for a parameter of experts. A worker has some of them, or its part of each: between them the workers
    have each of them once."""
    config, manager = module.moe_config, module.expert_map_manager
    if config.num_experts != config.num_logical_experts or manager.num_fused_shared_experts:
        raise CannotTell(f"{path} has experts twice, or others among them")
    parent = path.removesuffix(".routed_experts").removesuffix("experts")
    kind, _, end = own_name.partition("_")  # w13_weight, w2_bias
    together = [
        name
        for parameter, of_experts, *_ in module.get_expert_mapping(include_fused=True)
        if parameter == f"experts.{own_name}" and (name := name_in_files(model, f"{parent}{of_experts}")) is not None
    ]
    names = together or [
        f"{parent}{of_expert.replace('base_layer.', '')}{end}"
        for parameter, of_expert, *_ in module.get_expert_mapping()
        if parameter == f"experts.{kind}_"
    ]
    if kept != dtype or not names or not parent.endswith("."):
        raise CannotTell(f"{path}.{own_name} is kept in {kept}, or under another name")
    return names


def _of_processed(model: nn.Module, module: Any, method: Any, path: str, dtype: torch.dtype) -> Iterator[tuple[str, SumEntry]]:
    """Sums over what was loaded, likewise; where other bits lie there than were made of it, all are others."""
    processed = processed_of.get(module, "nobody saw it")
    if isinstance(processed, str):
        raise CannotTell(f"{path} is processed by {type(method).__name__}: {processed}")
    now = sums_of_tensors(module)
    forms, forms_then = ({name: each[:2] for name, each in one.items()} for one in (now, processed.made))
    hidden = processed.hidden
    if forms != forms_then or not all(shape.numel() for shape, _ in forms.values()):
        hidden = "it computes with something else than its parameters"
    why = f"{path} is processed by {type(method).__name__}: {hidden}" if hidden else ""
    change = sum(now[name][2] - processed.made[name][2] for name in now if forms_then.get(name) == forms[name])
    for own_name, (kept, parts) in processed.loaded.items():
        of_model = f"{path}.{own_name}".lstrip(".")
        if hasattr(module, "get_expert_mapping"):
            names = _names_of_experts(model, module, path, own_name, kept, dtype)
            yield of_model, [names, 0, (parts[0][1] + change) % (1 << 32), 0, [], True, "", why]
            continue
        names = _names(model, of_model)
        if len(names) == 1:
            parts = [(sum(numel for numel, _ in parts), sum(found for _, found in parts))]
        if kept != dtype or len(parts) != len(names):
            raise CannotTell(f"{names[0]} was loaded in {kept}, in {len(parts)} parts")
        for name, (numel, found) in zip(names, parts, strict=True):
            yield of_model, [[name], numel, (found + change) % (1 << 32), 0, [], True, "", why]


def _of_composed(composed: Composed, model: nn.Module, name: str, parameter: Tensor, dtype: torch.dtype) -> SumEntry:
    """Sum over what the parameter's loader made it of; where other bits lie there than it made, another one."""
    if not composed.given:
        raise CannotTell(f"nobody saw what {name} was made of")
    own = next(iter(composed.given))
    kept = [] if dtype in composed.given else [False, _name_of(own)]
    in_files = name_in_files(model, name) or (f"{name}_log" if name.endswith(".A") else name)
    change = sum_of_bits(parameter.data) - composed.made
    return [[in_files], parameter.numel(), (composed.given.get(dtype, composed.given[own]) + change) % (1 << 32), 0, [], *kept]


def _of_buffer(module: nn.Module, names: Sequence[str], buffer: Tensor, dtype: torch.dtype) -> Iterator[SumEntry]:
    if not buffer.numel() or not buffer.is_floating_point():
        raise CannotTell(f"{names[0]} is in no buffer of its own")
    if is_exact(buffer, dtype):  # such as a bias that a kernel wants in float32
        buffer = buffer.to(dtype)
    for name, piece in _pieces(module, names, buffer):
        yield _as_kept(name, piece, dtype)


def _as_kept(name: str, tensor: Tensor, dtype: torch.dtype) -> SumEntry:
    """Sum over all of a tensor, in the dtype that it has here."""
    kept = [] if tensor.dtype == dtype else [False, _name_of(tensor.dtype)]
    return [[name], tensor.numel(), sum_of_bits(tensor), 0, [], *kept]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _buffers(model: nn.Module, dtype: torch.dtype) -> Iterator[SumEntry]:
    """Sums over buffers that files may have, by the names that they have here."""
    for path, module in model.named_modules():
        for own_name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and own_name not in module._non_persistent_buffers_set:
                yield _as_kept(f"{path.replace(WRAPPED, '')}.{own_name}".lstrip("."), buffer, dtype)


def _of_columns(module: Any, names: Sequence[str], dtype: torch.dtype, seed: int) -> Iterator[SumEntry]:
    inputs = getattr(module, "input_size_per_partition", module.input_size)
    # The same number on each worker: those that fill up a vocabulary are counted.
    count = min(inputs, max(LEAST_COLUMNS, -(-LEAST_ELEMENTS // min(module.output_partition_sizes))))
    columns = torch.tensor([(seed + number * inputs // count) % inputs for number in range(count)])
    rows = torch.zeros(count, inputs, dtype=module.params_dtype)
    rows[torch.arange(count), columns] = 1
    answers = module.quant_method.apply(module, rows.to(module.weight.device), None)
    if not is_exact(answers, dtype):
        raise CannotTell(f"{names[0]} is kept in {answers.dtype}")
    answers = answers.to(dtype)  # of a router, say, that is computed in float32
    begin = inputs * module.tp_rank if inputs != module.input_size else 0
    for name, piece in _pieces(module, names, answers.t()):
        yield [[name], piece.shape[0] * inputs, sum_of_bits(normal(piece)), inputs, (columns + begin).tolist()]


def _outputs(module: Any, names: Sequence[str]) -> list[int]:
    """Numbers of rows of the tensors that lie in a layer's matrix one after another; without those that fill up a vocabulary."""
    if (num_tokens := getattr(module, "num_org_embeddings_per_partition", None)) is not None:
        return [num_tokens]
    sizes = list(module.output_partition_sizes)
    if len(names) == 1:
        return [sum(sizes)]
    if len(sizes) != len(names):
        raise CannotTell(f"{names[0]} lies in a matrix of {len(sizes)} parts, and {len(names)} names")
    return sizes


def _pieces(module: nn.Module, names: Sequence[str], matrix: Tensor) -> Iterator[tuple[str, Tensor]]:
    is_plain = len(names) == 1 and not hasattr(module, "num_org_embeddings_per_partition")
    outputs = [len(matrix)] if is_plain else _outputs(module, names)
    for name, end, size in zip(names, np.cumsum(outputs).tolist(), outputs, strict=True):
        yield name, matrix[end - size : end]


def _lora(model: nn.Module, lora_id: int, unseen: dict[str, str]) -> tuple[list[SumEntry], int]:
    """Sums of an adapter's matrices, as layers have them, and the rank up to which these are filled with zeros."""
    manager: Any = getattr(model, "lora_manager", None)
    if manager is None or lora_id not in manager.lora_index_to_id:
        return [], 0
    index = manager.lora_index_to_id.index(lora_id)
    found: list[SumEntry] = []
    for path, layer in manager.modules.items():
        parent, _, last = path.rpartition(".")
        own_names = manager.packed_modules_mapping.get(last, [last])
        names = [_paths(model, f"{parent}.{name}".lstrip(".")) for name in own_names]
        stacks = {"lora_A": layer.lora_a_stacked, "lora_B": layer.lora_b_stacked}
        if not isinstance(layer, BaseLinearLayerWithLoRA) or len(stacks["lora_A"]) != len(names):
            if any(bool(stack[index].any()) for stack in _stacks(layer)):
                why = f"an adapter of {path} is applied by {type(layer).__name__}"
                unseen.update(dict.fromkeys([path, *(each for paths in names for each in paths)], why))
            continue
        for matrix, stack in stacks.items():
            for paths, buffer in zip(names, stack, strict=True):
                piece = buffer[index]
                found.append([[f"{each}.{matrix}.weight" for each in paths], piece.numel(), sum_of_bits(piece, np.int64), 0, []])
    return found, manager.lora_config.max_lora_rank


def _stacks(layer: Any) -> Iterator[Tensor]:
    """A layer's matrices of all adapters, whose number is the first dimension of each."""
    kinds = ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b") if hasattr(layer, "w13_lora_a_stacked") else ("lora_a", "lora_b")
    for kind in kinds:
        stacked = getattr(layer, f"{kind}_stacked")
        yield from [stacked] if isinstance(stacked, Tensor) else stacked  # the output layer has one
