"""What a worker of vLLM's notes while a model is loaded, for the sums of it (asyncflow_sums.py).

    a layer's method makes something of all that was loaded --> sums of what it was given, and of what it made
    a parameter's loader makes something of what it takes   --> likewise
    a model calls tensors otherwise than its files          --> the names that it was given
    a model's code copies tensors to parameters             --> which one was copied where

So what was loaded can be told, and whether what was made of it lies there still; not that the right thing was made of it.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from asyncflow_bits import is_exact, sum_of_bits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import utils as loading
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
"""Methods of layers whose weights lie there as they were loaded, or can be asked for."""
ONLINE = (OnlineLinearBase, OnlineMoEMethodBase)
"""Methods that quantise what is loaded, of which vLLM's source says that they compute with a layer's parameters."""
NUMBERS_AND_WORDS = (bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum, type(None))
DEEPEST = 4
"""Levels of objects in objects that are looked into for what a layer keeps."""


class CannotTell(Exception):
    """Error for weights that the model computes with and that cannot be told. The text says of which part."""


@dataclass(frozen=True, slots=True)
class Processed:
    """Sums of a layer whose method has made something of its weights. `loaded`: of each parameter before that, its dtype, and the
    number of elements and the sum of each tensor in it. `made`: of each tensor after that, shape, dtype and sum. `hidden`: why
    kernels may read something else than these; "" if there is no reason."""

    loaded: dict[str, tuple[torch.dtype, list[tuple[int, int]]]]
    made: dict[str, tuple[torch.Size, torch.dtype, int]]
    hidden: str


@dataclass(slots=True)
class Composed:
    """A parameter of which its loader makes something, such as A of a state space, -exp(A_log). `given`: sums of what it was made
    of, this worker's part, by dtypes that hold this, its own the first; none if nothing was loaded. `made`: the sum of it, after
    that."""

    given: dict[torch.dtype, int] = field(default_factory=dict)
    made: int = 0


processed_of: WeakKeyDictionary[nn.Module, Processed | str] = WeakKeyDictionary()
"""Of each layer, or why nothing is known."""
composed_of: WeakKeyDictionary[nn.Module, dict[str, Composed]] = WeakKeyDictionary()
"""Of each layer, by its parameters' own names."""
_held_at_first: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary()
"""Of each layer, what there was before anything was loaded (`_held`)."""
_names_given: WeakKeyDictionary[nn.Module, list[dict[str, str]]] = WeakKeyDictionary()
"""Of each model, and then of its parts, the names of what it was given, by those that it has for them."""
_sources: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()
"""Of each model, by its parameters' names, the one tensor that was copied there, and nowhere else, the last time; "": several."""


def watch_loading() -> None:
    """Have sums taken of what layers' methods are given whenever layers are loaded, and of what they make of it, and names noted
    that models have for what they are given; in models that are made from here on."""
    record = loading.record_metadata_for_reloading

    def recorded(model: nn.Module) -> None:
        for layer in model.modules():
            for name, parameter in layer._parameters.items():
                with contextlib.suppress(Exception):  # another vLLM's: it loads all the same
                    _watch_loader(layer, name, parameter)
        record(model)
        with contextlib.suppress(Exception):
            _watch_copies(model)
        for path, part in model.named_modules():
            with contextlib.suppress(Exception):  # another vLLM's: what it calls otherwise is not told
                mapper = getattr(part, "hf_to_vllm_mapper", None)
                if mapper is not None and callable(getattr(part, "load_weights", None)):
                    noted = _note_names(f"{path}.".lstrip("."), part, mapper.get_rename_mapper())
                    _names_given.setdefault(model, []).append(noted)
        for layer in model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if isinstance(method, QuantizeMethodBase) and type(method) not in PLAIN:
                with contextlib.suppress(Exception):  # one that takes no attributes, say: nobody sees what it does
                    _watch(method)
                    _held_at_first[layer] = _held(layer, method)

    loading.record_metadata_for_reloading = recorded


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies to a model's parameters, each from one of the tensors that it takes one after another.

    Parameters are known by their storages, which those on `meta` have, too: vLLM counts there what is loaded, at once, and
    copies later.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[str, set[str]] = {}
        """Of each tensor that was taken, the parameters that it was copied to."""
        self._taken, self._parameters = "", dict[int, str]()
        self._storages = []  # as long as there are these, no other has the place of one
        for name, parameter in model.named_parameters():
            with contextlib.suppress(Exception):  # it has none
                self._storages.append(parameter.untyped_storage())
                self._parameters[self._storages[-1]._cdata] = name

    def taken(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights; each is the one that is copied until the next is taken."""
        for self._taken, tensor in weights:
            self.seen.setdefault(self._taken, set())
            yield self._taken, tensor
        self._taken = ""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have torch compile what is called meanwhile: else it never would again."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self._taken:
            with contextlib.suppress(Exception):
                self.seen[self._taken].add(self._parameters[args[0].untyped_storage()._cdata])
        return func(*args, **(kwargs or {}))

    def sources(self) -> dict[str, str]:
        """The one tensor that was copied to each parameter, if that was copied nowhere else; else ""."""
        given = defaultdict[str, list[str]](list)
        for name, parameters in self.seen.items():
            for parameter in parameters:
                given[parameter].append(name if len(parameters) == 1 else "")
        return {parameter: names[0] if len(names) == 1 else "" for parameter, names in given.items()}


def _watch_copies(model: Any) -> None:
    """Have `_sources` known of each load of a model."""
    load = model.load_weights

    def watched(weights: Iterable[tuple[str, Tensor]], *given: Any, **more: Any) -> Any:
        with _Copies(model) as copies:
            loaded = load(copies.taken(weights), *given, **more)
        _sources.setdefault(model, {}).update(copies.sources())
        return loaded

    model.load_weights = watched


def source_of(model: nn.Module, name: str) -> str:
    """Name of the tensor that a parameter is a copy of, or was made of, and no other is; "" if there is none such."""
    return _sources.get(model, {}).get(name, "")


def _watch_loader(layer: nn.Module, name: str, parameter: Any) -> None:
    """Have a loader that makes something of what it takes note both, each time that it loads. Its arguments keep their names, by
    which vLLM counts what is loaded."""
    if (two := _take_and_make(getattr(parameter, "weight_loader", None))) is None:
        return
    (take, make), composed = two, Composed()
    composed_of.setdefault(layer, {})[name] = composed

    def load(param: Any, loaded_weight: Tensor) -> None:
        take(param, loaded_weight)
        given = {} if param.is_meta else _in_dtypes(param.data)  # vLLM only counts there
        param.data.copy_(make(param))
        if given:
            composed.given, composed.made = given, sum_of_bits(param.data)

    parameter.weight_loader = load


def _in_dtypes(tensor: Tensor) -> dict[torch.dtype, int]:
    """Sums of a tensor in its own dtype, and in smaller ones that hold it: a model's tensors may be kept in float32."""
    smaller = (torch.bfloat16, torch.float16) if tensor.dtype == torch.float32 else ()
    return {dtype: sum_of_bits(tensor.to(dtype)) for dtype in (tensor.dtype, *smaller) if is_exact(tensor, dtype)}


def _take_and_make(loader: Any) -> tuple[Callable[..., Any], Callable[[Tensor], Tensor]] | None:
    """Functions of a loader: it takes its part of a tensor with one, and makes something of that with the other. None if it makes
    nothing."""
    name = getattr(loader, "__qualname__", "")
    if name == "composed_weight_loader.<locals>.composed_loader":
        own = inspect.getclosurevars(loader).nonlocals
        return own["loader"], own["fn"]
    if name == "MambaMixer.__init__.<locals>.A_weight_loader":  # which makes A of the whole, and then takes its part
        return inspect.getclosurevars(loader).nonlocals["weight_loader"], lambda tensor: -torch.exp(tensor.float())
    return None


def _note_names(prefix: str, part: Any, rename: Any) -> dict[str, str]:
    """The names, whenever it is loaded, of what a part of a model is given: by those that it has for them, with this prefix."""
    load, names = part.load_weights, dict[str, str]()

    def noted(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if (own := rename.map_name(name)) is not None:
                names[prefix + own] = prefix + name
            yield name, tensor

    part.load_weights = lambda weights, *given, **more: load(noted(weights), *given, **more)
    return names


def _watch(method: Any) -> None:
    if "process_weights_after_loading" in vars(method):  # of several layers
        return
    process = method.process_weights_after_loading

    def watched(layer: nn.Module) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            process(layer)  # which returns at once
            return
        loaded = _unless_broken(lambda: _loaded(layer, method))
        process(layer)
        made = _unless_broken(lambda: sums_of_tensors(layer))
        broken = [each for each in (loaded, made) if isinstance(each, str)]
        processed_of[layer] = broken[0] if broken else Processed(loaded, made, _unless_broken(lambda: _hidden(layer, method)))

    method.process_weights_after_loading = watched


def _unless_broken(take: Callable[[], Any]) -> Any:
    """Result of the call, or its error in words: of another vLLM than this was written against, maybe, which loads all the same."""
    try:
        return take()
    except Exception as error:
        return words_of(error)


def words_of(error: Exception) -> str:
    """The reason that an error gives."""
    return str(error) if isinstance(error, CannotTell) else f"{type(error).__name__}: {error}"


def _loaded(layer: Any, method: Any) -> dict[str, tuple[torch.dtype, list[tuple[int, int]]]]:
    is_of_experts = hasattr(layer, "get_expert_mapping")
    if is_of_experts:
        method._zero_padding(layer)  # else it is whatever was in memory; methods that quantise it do the same
    found = {}
    for name, parameter in layer._parameters.items():
        if parameter is not None and name not in SKIP_LOAD_TENSORS:
            parts = [parameter.data] if is_of_experts else _partitions(layer, parameter)
            found[name] = parameter.dtype, [(part.numel(), sum_of_bits(part)) for part in parts]
    return found


def _partitions(layer: Any, parameter: Any) -> Sequence[Tensor]:
    """The tensors that lie in a parameter one after another."""
    tensor, dimension = parameter.data, getattr(parameter, "output_dim", None) or 0
    if (num_tokens := getattr(layer, "num_org_embeddings_per_partition", None)) is not None:
        return [tensor.narrow(dimension, 0, num_tokens)]
    sizes = getattr(layer, "output_partition_sizes", None) or [tensor.shape[dimension]]
    return torch.split(tensor, [*sizes], dimension)


def _hidden(layer: nn.Module, method: Any) -> str:
    """Why a layer may compute with something else than its parameters and buffers; "" if there is no reason."""
    if isinstance(method, ONLINE):
        return ""
    held = _held(layer, method)
    own = {name for name, is_tensor in held.items() if is_tensor} | (held.keys() - _held_at_first[layer].keys())
    return f"it keeps {min(own)} of its own" if own else ""


def _held(layer: nn.Module, method: Any) -> dict[str, bool]:
    """Names of what a layer, its method, and what these have, hold besides numbers, words, and the layer's parameters and buffers;
    and whether it is a tensor. Of modules that are no part of the layer nothing more is looked for."""
    found, seen = dict[str, bool](), {id(layer._parameters), id(layer._buffers)}
    seen |= {id(tensor) for tensor in [*layer._parameters.values(), *layer._buffers.values()] if tensor is not None}
    owners: list[tuple[str, Any, int]] = [("", layer, 0), ("", method, 0)]
    while owners:
        path, owner, depth = owners.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        if isinstance(owner, (list, tuple)):
            own = dict(enumerate(owner))
        else:
            own = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
        for name, value in own.items():
            if isinstance(value, NUMBERS_AND_WORDS) or id(value) in seen:
                continue
            is_tensor = isinstance(value, Tensor)
            found[f"{path}{name}"] = is_tensor
            is_part = not isinstance(value, nn.Module) or owner is layer._modules
            if depth < DEEPEST and is_part and not is_tensor and not isinstance(value, (type, types.ModuleType)):
                owners.append((f"{path}{name}.", value, depth + 1))
    return found


def sums_of_tensors(layer: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype, int]]:
    """Shape, dtype and sum of all tensors that a layer has, and that these are made of, but for those that no load changes."""
    own = [*layer._parameters.items(), *layer._buffers.items()]
    tensors = [(name, tensor) for name, tensor in own if tensor is not None and name not in SKIP_LOAD_TENSORS]
    found = {}
    while tensors:
        name, tensor = tensors.pop()
        if is_traceable_wrapper_subclass(tensor.data):
            inner = [(f"{name}.{own}", getattr(tensor.data, own)) for own in tensor.data.__tensor_flatten__()[0]]
            tensors += [(path, each) for path, each in inner if each is not None]
        else:
            found[name] = tensor.shape, tensor.dtype, sum_of_bits(tensor.data)
    return found


def name_in_files(model: nn.Module, name: str) -> str | None:
    """Name that files have for what the model calls so; None if it was given nothing that it calls so."""
    is_given = False
    for given in reversed(_names_given.get(model, [])):
        is_given |= name in given
        name = given.get(name, name)
    return name if is_given else None
