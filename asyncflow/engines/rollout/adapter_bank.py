"""Low-rank adapters of a decoder: the one that installs write, and those that were loaded beside it, over one base.

    number 0        what `Decoder.install` brings, with versions that are adapters; the base alone without one
    numbers 1 ..    adapters that were loaded (loaded_adapters.py gives them names), of any rank up to a bound

Each adapter has buffers of its own, of its own rank: a sum over more columns than its rank, even zeros, might be cut into other
blocks, and so have other bits. Which adapter a slot generates with is known to the decoder (`Decoder.adapters`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from asyncflow.attestation import ADAPTER_MODULUS
from asyncflow.bit_sums import sum_of_bits
from asyncflow.engines.lora import check_lora
from asyncflow.engines.lora_files import A, B, is_lora
from asyncflow.engines.rollout.linears import padded
from asyncflow.engines.rollout.low_rank import AdapterRows, LowRank
from asyncflow.types import Array, LoraSpec, UserError

INSTALLED: Final = 0
"""Number of the adapter that installs write."""


class HasLora(Protocol):
    """Linear layer that adds the products of adapters, by their numbers."""

    lora: dict[int, LowRank]


@dataclass(frozen=True, slots=True)
class AdaptableLayer:
    """Linear layer that may have adapters: the names of its parts, their outputs, and its inputs. `like`: has dtype and device."""

    linear: HasLora
    names: Sequence[str]
    sizes: Sequence[int]
    inputs: int
    like: Tensor


class Adapter:
    """Adapter of a whole model: of those of its linear layers that are targets. All zeros until tensors are copied."""

    def __init__(self, spec: LoraSpec) -> None:
        self._spec = spec
        self._layers: list[tuple[HasLora, LowRank]] = []
        self.slices: dict[str, Tensor] = {}
        """Tensors that are computed with, by the names of an adapter's tensors."""

    def add(self, layer: AdaptableLayer) -> None:
        """Have an adapter for this layer, if any of its parts is a target."""
        if any(map(self._spec.has_target, layer.names)):
            made = LowRank(layer.names, layer.sizes, layer.inputs, self._spec, layer.like)
            self._layers.append((layer.linear, made))
            self.slices |= made.slices

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that tensors fit. Raises `ValueError`, naming what does not."""
        try:
            check_lora(tensors, {name: tuple(piece.shape) for name, piece in self.slices.items()}, "the adapter")
        except UserError as error:
            raise ValueError(str(error)) from error

    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors, converting their dtype. Raises `ValueError`, changing nothing, as `check`."""
        self.check(tensors)
        with torch.inference_mode():
            for name, piece in self.slices.items():
                piece.copy_(tensors[name])

    def bind(self, number: int) -> None:
        """Let the layers compute with the adapter for rows that have this number."""
        for linear, made in self._layers:
            linear.lora[number] = made

    def unbind(self, number: int) -> None:
        """Let the layers compute without the adapter of this number."""
        for linear, _ in self._layers:
            linear.lora.pop(number, None)

    def sums(self, number: int) -> list[tuple[tuple[str, ...], int]]:
        """Sums of the bits of what layers compute with for this number, each with the names of the tensors in one buffer."""
        sums: list[tuple[tuple[str, ...], int]] = []
        for linear, made in self._layers:
            if linear.lora.get(number) is made:
                for suffix, buffer in ((A, made.a), (B, made.b)):
                    names = tuple(name for name in made.slices if name.endswith(suffix))
                    sums.append((names, sum_of_bits(buffer, ADAPTER_MODULUS)))
        return sums


class AdapterBank:
    """Adapters of a decoder. `spec`: of those that installs bring; None: installs bring none."""

    def __init__(self, spec: LoraSpec | None) -> None:
        self._layers: list[AdaptableLayer] = []
        self._installed = None if spec is None else Adapter(spec)
        self._bound: dict[int, Adapter] = {}  # that rows may have

    def add(self, layer: AdaptableLayer) -> None:
        """Let a layer have adapters."""
        self._layers.append(layer)
        if self._installed is not None:
            self._installed.add(layer)

    @property
    def slices(self) -> Mapping[str, Tensor]:
        """Buffers that installs of an adapter write, by the names of its tensors."""
        return {} if self._installed is None else self._installed.slices

    def takes(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the tensors of an install are an adapter's: some are, or there are none."""
        return self._installed is not None and (not tensors or any(map(is_lora, tensors)))

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that an adapter may be installed, or that there is none. Raises `ValueError`, naming what does not fit."""
        assert self._installed is not None, "this decoder's installs bring no adapter"
        if tensors:
            self._installed.check(tensors)

    def install(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy an adapter's tensors; without any the model is its base. Raises `ValueError`, changing nothing, as `check`."""
        assert self._installed is not None, "this decoder's installs bring no adapter"
        if tensors:
            self._installed.copy(tensors)
        self.use(bool(tensors))

    def use(self, is_used: bool) -> None:
        """Compute with the adapter that was installed, or with the base alone."""
        if is_used and self._installed is not None:
            self.put(INSTALLED, self._installed)
        else:
            self.remove(INSTALLED)

    def new(self, spec: LoraSpec) -> Adapter:
        """Adapter for this model, in buffers of its own, which no row has. May be called from any thread."""
        adapter = Adapter(spec)
        for layer in self._layers:
            adapter.add(layer)
        return adapter

    def put(self, number: int, adapter: Adapter) -> None:
        """Compute with an adapter from now on, where rows have this number."""
        self._bound[number] = adapter
        adapter.bind(number)

    def remove(self, number: int) -> None:
        """Forget an adapter: rows of this number are the base's."""
        if (adapter := self._bound.pop(number, None)) is not None:
            adapter.unbind(number)

    def rows_of(self, numbers: Array) -> tuple[AdapterRows, ...]:
        """Rows of each adapter in a pass, whose rows have these numbers (int64 [T])."""
        if not self._bound or not len(numbers):
            return ()
        first = int(numbers[0])
        if (numbers == first).all():
            return (AdapterRows(first),) if first in self._bound else ()
        found = []
        for number in np.unique(numbers).tolist():
            if number in self._bound:
                rows = np.flatnonzero(numbers == number)
                filled = np.append(rows, np.full(padded(len(rows)) - len(rows), rows[-1]))
                device = self._layers[0].like.device
                found.append(AdapterRows(number, *(torch.from_numpy(each).to(device) for each in (rows, filled))))
        return tuple(found)

    def sums(self, number: int = INSTALLED) -> list[tuple[tuple[str, ...], int]]:
        """Sums of the bits of an adapter that layers compute with now, see `Adapter.sums`."""
        adapter = self._bound.get(number)
        return [] if adapter is None else adapter.sums(number)
