"""Low-rank adapters of the decoder's linear layers, which are several of the checkpoint's in one: qkv, gate and up.

    x W^T (whatever computes it)  +  scaling (x A^T) B^T        A [parts * rank, inputs]   B [outputs, parts * rank]

They are applied, not merged into the weights. A merge rounds W + scaling B A to the dtype of W, in which a small change is lost,
where the trainer computes both products; it needs the base's weights a second time, in plain order; and it packs every matrix again
at each install. What applying costs is two small products for each linear layer (docs/lora.md has the figure).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from asyncflow.bit_sums import sum_of_bits
from asyncflow.engines.lora import check_lora
from asyncflow.engines.lora_files import A, B, is_lora
from asyncflow.types import LoraSpec, UserError


class LowRank:
    """Adapter of one linear layer. The parts' rows of A come one after another, and B is 0 but for each part's own block."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int], inputs: int, spec: LoraSpec, like: Tensor) -> None:
        """`names`, `sizes`: of the parts, the checkpoint's linear layers, and their outputs. `like`: has the dtype and device."""
        targets = [name for name in names if spec.has_target(name)]
        self.a = like.new_zeros(len(targets) * spec.rank, inputs)
        self.b = like.new_zeros(sum(sizes), len(targets) * spec.rank)
        self.scaling = spec.scaling
        self.slices: dict[str, Tensor] = {}  # of the two, by the names of an adapter's tensors
        blocks = dict(zip(names, torch.split(self.b, list(sizes)), strict=True))
        for number, name in enumerate(targets):
            place = slice(number * spec.rank, (number + 1) * spec.rank)
            self.slices |= {name + A: self.a[place], name + B: blocks[name][:, place]}

    def add_to(self, output: Tensor, x: Tensor) -> Tensor:
        """Add the product for x [rows, inputs] to the layer's output [rows, outputs], in place. Rounds where the trainer does."""
        return output.add_(F.linear(F.linear(x, self.a), self.b).mul_(self.scaling))


class HasLora(Protocol):
    """Linear layer that adds its adapter's product, if it has one."""

    lora: LowRank | None


class LoraLayers:
    """All adapters of a decoder: none without a `spec`. Until an install the model is its base."""

    def __init__(self, spec: LoraSpec | None) -> None:
        self._spec = spec
        self._layers: list[tuple[HasLora, LowRank]] = []
        self.slices: dict[str, Tensor] = {}
        """What installs write, by the names of an adapter's tensors."""

    def __bool__(self) -> bool:
        return bool(self._layers)

    def add(self, linear: HasLora, names: Sequence[str], sizes: Sequence[int], inputs: int, like: Tensor) -> None:
        """Give a linear layer an adapter, see `LowRank`, if any of its parts is a target."""
        if self._spec is None or not any(map(self._spec.has_target, names)):
            return
        made = LowRank(names, sizes, inputs, self._spec, like)
        self._layers.append((linear, made))
        self.slices |= made.slices

    def takes(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the tensors are for adapters: some are an adapter's, or there are none."""
        return self._spec is not None and (not tensors or any(map(is_lora, tensors)))

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that an adapter fits, or that there is none. Raises `ValueError`, naming what does not."""
        if not tensors:
            return
        try:
            check_lora(tensors, {name: tuple(piece.shape) for name, piece in self.slices.items()}, "the adapter")
        except UserError as error:
            raise ValueError(str(error)) from error

    def install(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy an adapter's tensors; without any the model is its base. Raises `ValueError`, changing nothing, as `check`."""
        self.check(tensors)
        with torch.inference_mode():
            for name, piece in self.slices.items() if tensors else ():
                piece.copy_(tensors[name])
        self.use(bool(tensors))

    def sums(self) -> list[tuple[tuple[str, ...], int]]:
        """Sums of the bits of the adapters that layers compute with now, each with the names of those in one buffer."""
        sums: list[tuple[tuple[str, ...], int]] = []
        for linear, made in self._layers:
            if linear.lora is made:
                for suffix, buffer in ((A, made.a), (B, made.b)):
                    sums.append((tuple(name for name in made.slices if name.endswith(suffix)), sum_of_bits(buffer)))
        return sums

    def use(self, is_used: bool) -> None:
        """Compute with the adapters, or with the base alone."""
        for linear, made in self._layers:
            linear.lora = made if is_used else None
