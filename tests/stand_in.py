"""A device that is not the CPU, without one: PyTorch's private backend under the name `npu`, which computes on the CPU.

    install()   before anything else makes a tensor; a process that has done so has an accelerator until it ends
    TRAFFIC     what crossed between host and device since `TRAFFIC.clear()`

A tensor of it holds one of the CPU, so numbers are real, and results can be compared to the bit with a run on the CPU. What an
accelerator refuses is refused here: an operation on tensors of both sides (but for numbers on the host, which PyTorch passes on), a
tensor that is read by numpy. Counted are reads (the host waits for the device and takes something from it: `.cpu()`, `.item()`, and
operations whose shape depends on numbers on the device), and uploads. What is read too early is wrong, or refused: streams, events,
pinned memory and copies that nobody has waited for are in tests/stand_in_streams.py. The classes of `torch_npu` that are asked for
are stand-ins, too.
"""

from __future__ import annotations

import importlib.machinery
import math
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyDeviceGuard,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

from tests import stand_in_streams
from tests.stand_in_streams import WORK, Stream, current_stream

KIND: Final = "npu"
aten = torch.ops.aten
_READS: Final = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.masked_select.default,
    aten.unique_dim.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
}
"""Operations for whose result the host waits."""
_COPIES: Final = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default}


class Traffic:
    """Transfers since they were cleared, by operation. Threads count together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reads: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()

    def clear(self) -> None:
        """Begin to count anew."""
        with self._lock:
            self.reads, self.uploads = Counter(), Counter()

    def read(self, operation: Any) -> None:
        """The host has waited for something on the device."""
        with self._lock:
            self.reads[str(operation)] += 1

    def upload(self, operation: Any) -> None:
        """Something has gone to the device."""
        with self._lock:
            self.uploads[str(operation)] += 1


TRAFFIC: Final = Traffic()


class OnDevice(Tensor):
    """Tensor of the stand-in: `numbers` has them, on the CPU."""

    numbers: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        with torch.inference_mode(False):  # a view of a tensor from outside of it is none of it, and others may be none, too
            made: OnDevice = Tensor._make_wrapper_subclass(
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                layout=inner.layout,
                device=torch.device(KIND, 0),
                requires_grad=False,
            )
        made.numbers = inner
        return made

    def tolist(self) -> Any:
        """Numbers on the host, which PyTorch does not give of a subclass by itself."""
        TRAFFIC.read("tolist")
        WORK.access("tolist", [self.numbers], [])
        WORK.finish(current_stream().clock)
        return self.numbers.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Memory of the numbers: by its address files tell what is stored twice."""
        return self.numbers.untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"on_device({self.numbers!r})"

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(operation, args, kwargs or {})


def _compute(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation on tensors of the device, or between it and the host."""
    tensors: list[Tensor] = []
    tree_map(lambda each: tensors.append(each) if isinstance(each, Tensor) else None, (args, kwargs))
    if operation in _COPIES:
        return _copy(operation, args, kwargs)
    made = operation.decompose(*args, **kwargs)  # in inference mode an operation that is made of others comes as it is
    if made is not NotImplemented:
        return made
    if strangers := [each for each in tensors if not isinstance(each, OnDevice) and each.dim()]:
        raise RuntimeError(f"{operation} has tensors of both sides: one of shape {tuple(strangers[0].shape)} is on the host")
    waits = operation in _READS or (operation in (aten.index.Tensor, aten.index_put_.default) and _has_mask(args[1]))
    if waits:
        TRAFFIC.read(operation)
    to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    found = operation(*_inner(args), **_inner(_on_cpu(kwargs)))
    if to_host:
        return WORK.pin(found) if kwargs.get("pin_memory") else found
    _note(operation, args, kwargs, tensors, found)
    if waits:
        WORK.finish(current_stream().clock)
    return _same(operation, args, kwargs, _outer(found))


def _note(operation: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], found: Any) -> None:
    """Tell of the memory that an operation has touched."""
    if any(kind.alias_info is not None and not kind.alias_info.is_write for kind in operation._schema.returns):
        return  # a view
    given = [each.numbers for each in tensors if isinstance(each, OnDevice)]
    written: list[Tensor] = []
    for tensor in _written(operation, args, kwargs).values():
        tree_map(lambda each: written.append(each.numbers) if isinstance(each, OnDevice) else None, tensor)
    places, new = {each.untyped_storage().data_ptr() for each in given}, list[Tensor]()
    tree_map(
        lambda each: new.append(each) if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in places else None,
        found,
    )
    WORK.access(operation, given, written, new)


def _written(operation: Any, args: Any, kwargs: dict[str, Any]) -> dict[frozenset[str], Any]:
    """Arguments that an operation writes to, by the names that its schema has for their memory."""
    return {
        frozenset(argument.alias_info.before_set): kwargs.get(argument.name) if argument.name in kwargs else args[number]
        for number, argument in enumerate(operation._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and (argument.name in kwargs or number < len(args))
    }


def _same(operation: Any, args: Any, kwargs: dict[str, Any], found: Any) -> Any:
    """What an operation returns: of what it has written to, the very tensors that it was given."""
    schema, written = operation._schema, _written(operation, args, kwargs)
    for tensor in written.values():
        for each in tensor if isinstance(tensor, (list, tuple)) else [tensor]:
            if isinstance(each, OnDevice) and (each.shape, each.stride()) != (each.numbers.shape, each.numbers.stride()):
                raise NotImplementedError(f"{operation} has changed the shape of a tensor, and the stand-in cannot")
    if not written or not schema.returns:
        return found
    several = found if isinstance(found, (list, tuple)) and len(schema.returns) > 1 else [found]
    given = [
        written.get(frozenset(kind.alias_info.before_set), made) if kind.alias_info is not None else made
        for kind, made in zip(schema.returns, several, strict=True)
    ]
    return tuple(given) if len(schema.returns) > 1 else given[0]


def _copy(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if operation is aten._to_copy.default:
        (source,) = args
        asked = kwargs.get("device")
        is_to_device = isinstance(source, OnDevice) if asked is None else torch.device(asked).type == KIND
        found = operation(*_inner(args), **_on_cpu(kwargs))
        _count(operation, found if not is_to_device else OnDevice(found), source, is_late=kwargs.get("non_blocking", False))
        return OnDevice(found) if is_to_device else found
    targets, sources = (each if isinstance(each, (list, tuple)) else [each] for each in args[:2])
    is_late = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    for target, source in zip(targets, sources, strict=True):
        _count(operation, target, source, is_late=is_late)
    if not is_late or isinstance(targets[0], OnDevice):
        operation(*_inner(args), **kwargs)
    return args[0] if operation is aten.copy_.default else None


def _count(operation: Any, target: Tensor, source: Tensor, *, is_late: bool) -> None:
    """Count a copy, and have it be late if nobody waits for it. A late one to the host is made by whoever waits for it."""
    if isinstance(source, OnDevice) and isinstance(target, OnDevice):
        WORK.access(operation, [source.numbers], [target.numbers])
    elif isinstance(source, OnDevice) and is_late:
        stand_in_streams.copy_to_host(operation, target, source.numbers)
    elif isinstance(source, OnDevice):
        TRAFFIC.read(operation)
        WORK.access(operation, [source.numbers], [])
        WORK.finish(current_stream().clock)
    elif isinstance(target, OnDevice):
        TRAFFIC.upload(operation)
        WORK.access(operation, [], [target.numbers])
        if is_late:
            stand_in_streams.copy_from_host(source, operation)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """What `torch.tensor(..., device=...)` calls, below any subclass."""
    return _copy(aten.copy_.default, (target, source), {})


def _inner(values: Any) -> Any:
    return tree_map(lambda each: each.numbers if isinstance(each, OnDevice) else each, values)


def _outer(values: Any) -> Any:
    return tree_map(lambda each: OnDevice(each) if isinstance(each, Tensor) else each, values)


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    changed = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    return {**changed, "device": torch.device("cpu")} if kwargs.get("device") is not None else changed


def _has_mask(indices: Any) -> bool:
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


class _Module(_DummyBackendModule):
    """What PyTorch asks of `torch.npu`."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass

    def set_device(self, device: Any) -> None:
        pass

    def device(self, device: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self, device: Any = None) -> None:
        stand_in_streams.synchronize()

    def current_stream(self, device: Any = None) -> Stream:
        return current_stream()

    def stream(self, stream: Stream) -> AbstractContextManager[Stream]:
        return stream

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _attention(query: Tensor, key: Tensor, value: Tensor, heads: int, layout: str, **options: Any) -> tuple[Tensor, ...]:
    """`torch_npu.npu_fusion_attention` for its layout TND, by a softmax over all scores of a segment."""
    inputs = [x.float() for x in (query, key, value)]
    parts = [_segment(*each, options["scale"], "atten_mask" in options) for each in _segments(*inputs, layout, options)]
    out, maxima, sums = (torch.cat([part[i] for part in parts]) for i in range(3))
    empty, out = query.new_empty(0), out.to(query.dtype)
    return out, maxima[..., None].expand(-1, -1, 8).contiguous(), sums[..., None].expand(-1, -1, 8).contiguous(), empty, 0, 0, 0


def _attention_grad(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, heads: int, layout: str, **options: Any
) -> tuple[Any, ...]:
    """`torch_npu.npu_fusion_attention_grad`: p = exp(score - max) / sum, from the maxima, sums and output that it is given."""
    scale, is_causal = options["scale_value"], "atten_mask" in options
    maxima, sums = options["softmax_max"][..., 0], options["softmax_sum"][..., 0]
    dtype, (query, key, value, grad, out) = query.dtype, (x.float() for x in (query, key, value, grad, options["attention_in"]))
    grads = [torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)]
    groups = query.shape[1] // key.shape[1]
    for queries, keys in _slices(options):
        k, v = (x[keys].repeat_interleave(groups, 1) for x in (key, value))
        scores = _scores(query[queries], k, scale, is_causal)
        p = (scores - maxima[queries].t()[..., None]).exp() / sums[queries].t()[..., None]
        dp = torch.einsum("qhd,khd->hqk", grad[queries], v)
        delta = (grad[queries] * out[queries]).sum(-1).t()[..., None]
        ds = p * (dp - delta) * scale
        grads[0][queries] = torch.einsum("hqk,khd->qhd", ds, k)
        for i, found in (
            (1, torch.einsum("hqk,qhd->khd", ds, query[queries])),
            (2, torch.einsum("hqk,qhd->khd", p, grad[queries])),
        ):
            grads[i][keys] += found.unflatten(1, (key.shape[1], groups)).sum(2)
    return (*(each.to(dtype) for each in grads), None)


def _slices(options: dict[str, Any]) -> list[tuple[slice, slice]]:
    ends = [[0, *options[name]] for name in ("actual_seq_qlen", "actual_seq_kvlen")]
    return [(slice(a, b), slice(c, d)) for (a, b), (c, d) in zip(*map(pairwise, ends), strict=True)]


def _segments(query: Tensor, key: Tensor, value: Tensor, layout: str, options: dict[str, Any]) -> list[tuple[Tensor, ...]]:
    assert layout == "TND" and ("atten_mask" in options) == ("sparse_mode" in options) and options.get("sparse_mode", 3) == 3
    groups = query.shape[1] // key.shape[1]
    return [(query[queries], *(x[keys].repeat_interleave(groups, 1) for x in (key, value))) for queries, keys in _slices(options)]


def _scores(query: Tensor, key: Tensor, scale: float, is_causal: bool) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if is_causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1 + len(key) - len(query))
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _segment(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(query, key, scale, is_causal)
    maxima = scores.amax(-1)
    p = (scores - maxima[..., None]).exp()
    sums = p.sum(-1)
    out = torch.einsum("hqk,khd->qhd", p / sums[..., None], value)
    return out, maxima.t(), sums.t()


def install() -> None:
    """Make the stand-in this process's accelerator."""
    stand_in_streams.install()
    hook, guard = _DummyPrivateUse1Hook(), _DummyDeviceGuard()
    _setup_privateuseone_for_python_backend(KIND, _Module(), hook, guard)
    library = torch.library.Library("aten", "IMPL")

    def made(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: OnDevice(operation(*args, **_on_cpu(kwargs)))

    for name in ("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step"):
        kind, _, overload = name.partition(".")
        library.impl(name, made(getattr(getattr(aten, kind), overload or "default")), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    driver = types.ModuleType("torch_npu")
    driver.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    driver.npu_fusion_attention, driver.npu_fusion_attention_grad = _attention, _attention_grad  # type: ignore[attr-defined]
    sys.modules["torch_npu"] = driver
    _KEPT.append(library)


_KEPT: Final[list[Any]] = []


def pytest_configure() -> None:
    """`python -m pytest -p tests.stand_in`: the tests of devices that are there take it for an NPU."""
    install()
