"""Low-rank adapter of one of the decoder's linear layers, which are several of the checkpoint's in one: qkv, gate and up.

    x W^T (whatever computes it)  +  scaling (x A^T) B^T        A [parts * rank, inputs]   B [outputs, parts * rank]

    rows of a pass --> the base's product, of all of them at once ---------------> output
              +--> an adapter's rows, gathered --> its two products --added to--> the same rows of the output

So the rows of one pass may have several adapters, each with its own rank, and some of them none. A row has the same bits, whichever
other rows its adapter has in the pass: linears.py's products do not know the rows beside one, if there are enough of them.

They are applied, not merged into the weights. A merge rounds W + scaling B A to the dtype of W, in which a small change is lost,
where the trainer computes both products; it needs the base's weights a second time, in plain order; and it packs every matrix again
at each install. What applying costs is two small products for each linear layer (docs/lora.md has the figure).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from asyncflow.engines.lora_files import A, B
from asyncflow.types import LoraSpec


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows of a pass that have the adapter of this number; `rows` None: all of them.

    `rows`: int64 [n]. `filled`: the same, with the last one again and again, up to a number that `padded` makes.
    """

    number: int
    rows: Tensor | None = None
    filled: Tensor | None = None


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

    def add_to(self, output: Tensor, x: Tensor, adapted: AdapterRows) -> None:
        """Add the product for the adapter's rows of x [rows, inputs] to those of the layer's output [rows, outputs], in place.
        Rounds where the trainer does."""
        if adapted.filled is not None:
            x = x.index_select(0, adapted.filled)
        made = F.linear(F.linear(x, self.a), self.b).mul_(self.scaling)
        if adapted.rows is None:
            output.add_(made)
        else:
            output.index_add_(0, adapted.rows, made[: len(adapted.rows)])
