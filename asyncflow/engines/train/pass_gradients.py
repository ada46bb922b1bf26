"""Gradients of weights within one pass, straight to the sums (accumulate.py), as pieces that others may compute (pieces.py).

    pass of micro-batches a, b, c      rows of x and dy:  a a a b b c c c c
      layer y = x W^T                    dW_a = dy_a^T x_a --round--> sums;  dW_b ...;  dW_c ...       no gradient of W itself

With exact sums a gradient is taken micro-batch by micro-batch. Rows of a pass do not depend on one another: attention keeps
micro-batches apart, all else is row by row, and rows of a matrix product have the same bits whatever rows are beside them. Only the
gradient of a weight mixes rows. So it is taken from each micro-batch's rows by itself, and is to the bit what the micro-batch gives
alone: the sums do not know which micro-batches were in a pass together.

With plain sums (on a CPU) it is one product over all rows.

Nothing in a pass waits for the gradient of a matrix: it is a third of a pass's work, and that of the head comes before the backward
pass. So a thread that has no pass takes it meanwhile. Each is the same product wherever it is computed, and goes to the sums of its
pass. In the forward pass, where there are no such pieces yet, it takes some of the rows of each product: the bits of a row are the
same.

That products keep rows apart is a matter of the machine's library, which is tried at the start (pass_probe.py).

Under tensor parallelism a module computes with its rank's part of a weight (parallel/tensor.py), and so does this. Where all ranks
have a weight, each micro-batch's gradient is summed over them before it is rounded: by `over_ranks` of the module.

Left out: modules with weights that are none of linear layer, embedding and RMS norm.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from asyncflow.engines.train.accumulate import ExactAccumulator, PlainAccumulator
from asyncflow.engines.train.model.causal_model import CausalModel
from asyncflow.engines.train.model.packing import Packed
from asyncflow.engines.train.model.products import rows_by, rows_by_transposed, write_rows_by_transposed
from asyncflow.engines.train.pieces import AT_ONCE, Pieces

if TYPE_CHECKING:
    from asyncflow.engines.train.parallel.sharded_model import ShardedModel

GradientSums = ExactAccumulator | PlainAccumulator

# P packed tokens, O outputs, I inputs, H hidden elements, V tokens of the vocabulary, U of them, C rows of logits.


@dataclass(slots=True, eq=False)
class PassState:
    """State of one pass. `places`: of its micro-batches. `rows_U`: of each, the rows of the embedding that it uses, ascending, and
    `held_UH`, by micro-batch, rows of the head's gradient that the embedding's are added to: where these two are one matrix."""

    places: Sequence[slice]
    muted: set[int] = field(default_factory=set)
    rows_U: list[Tensor] = field(default_factory=list)
    held_UH: dict[int, Tensor] = field(default_factory=dict)


class PassGradients:
    """Gradients of a model's weights in passes of several micro-batches, on their way to its sums."""

    pieces: Pieces = AT_ONCE
    """Pieces by which the gradients of matrices are computed: nothing in a pass waits for them."""

    def __init__(
        self, model: CausalModel | ShardedModel, sums: GradientSums, *, gives_zeros: bool = False, has_head: bool = True
    ) -> None:
        """Change the model's modules so that they compute as before, except in a pass (`within`). See `why_not` first.

        `gives_zeros`: autograd gets zeros for a gradient of each weight, since each of them is waited for. `has_head`: passes use
        the output layer.
        """
        self._sums = sums
        self._state: PassState | None = None  # of the pass that is under way
        self._gives_zeros = gives_zeros
        # What depends on it has a gradient, though no weight has.
        self._anchor = torch.zeros((), device=model.device, requires_grad=True)
        names = {id(parameter): name for name, parameter in model.parameters.items()}
        self._locks = {name: threading.Lock() for name in model.parameters}
        self._over_ranks: dict[str, Callable[[Tensor], Tensor]] = {}  # sums over tensor-parallel ranks, by weight
        head = getattr(model.module.get_output_embeddings(), "weight", None)  # a stage of a pipeline may have none
        self._head_name = names.get(id(head)) if has_head else None
        self._holds = (
            isinstance(sums, ExactAccumulator)
            and self._head_name is not None
            and getattr(model.module.get_input_embeddings(), "weight", None) is head
        )
        for module in model.module.modules():
            own = {key: names.get(id(parameter)) for key, parameter in module.named_parameters(recurse=False)}
            if any(own.values()):
                if (over_ranks := getattr(module, "over_ranks", None)) is not None:
                    self._over_ranks |= {name: over_ranks for name in own.values() if name is not None}
                module.forward = partial(_form_of(module), self, module, own, module.forward)

    @staticmethod
    def why_not(model: CausalModel | ShardedModel, *, has_head: bool = True) -> str:
        """Reason why a model's gradients cannot be taken so; "" if they can. `has_head`: passes use the output layer."""
        if has_head and getattr(model.module.get_output_embeddings(), "bias", None) is not None:
            return "its output layer has a bias"
        trained = {id(parameter) for parameter in model.parameters.values()}
        for name, module in model.module.named_modules():
            if any(id(each) in trained for each in module.parameters(recurse=False)) and _form_of(module) is None:
                return f"it has weights in {name}, a {type(module).__name__}"
        return ""

    def begin(self, packed: Packed) -> PassState:
        """State of a pass that begins."""
        return PassState(packed.places)

    @contextmanager
    def within(self, state: PassState) -> Iterator[None]:
        """Context of a pass, or of a part of one: gradients of weights go to the sums, and are there at its end."""
        self._state = state
        try:
            try:
                yield
            finally:
                self.pieces.end()
        finally:
            self._state = None

    @contextmanager
    def of(self, packed: Packed) -> Iterator[None]:
        """Context of a whole pass, forward and backward. Raises `RangeError` at its end."""
        with self.within(self.begin(packed)):
            yield
        self._sums.end_pass()

    def loss_with(self, total: Tensor, head_VH: Tensor) -> Tensor:
        """Same loss, for whose sake autograd gets zeros for the output layer, too, if it gets any."""
        apply: Any = _Used.apply
        made: Tensor = apply(total, head_VH) if self._gives_zeros else total
        return made

    def _in_graph(self, weight: Tensor) -> Tensor:
        return weight if self._gives_zeros else weight.detach()

    def mute(self, number: int) -> None:
        """Add nothing of a micro-batch, in any layer: its loss is not finite."""
        self._now.muted.add(number)

    def is_muted(self, number: int) -> bool:
        """Whether a micro-batch was muted."""
        return number in self._now.muted

    @property
    def _now(self) -> PassState:
        assert self._state is not None, "a pass is under way"
        return self._state

    def add_head(self, grad_CV: Tensor, hidden_CH: Tensor, parts: Sequence[tuple[int, slice]]) -> None:
        """Add the head's gradient, the product grad^T hidden, over the rows of each of the `parts`: a micro-batch's number, and its
        rows, which are all that it has. Where the embedding is the same matrix, rows that it has a gradient for are held back until
        that is there: the sum of both is rounded, as it is of a micro-batch alone."""
        if self._head_name is None:
            return
        change = None
        if self._holds:
            change = partial(self._hold, [number for number, _ in parts])
            for number, _ in parts:
                self._now.held_UH[number] = hidden_CH.new_empty(len(self._now.rows_U[number]), hidden_CH.shape[1])
        self._add_products(self._head_name, grad_CV, hidden_CH, [rows for _, rows in parts], change)

    def add_head_whole(self, number: int, gradient_VH: Tensor) -> None:
        """Add the head's gradient of a micro-batch."""
        if self._head_name is None:
            return
        if self._holds:
            self._now.held_UH[number] = gradient_VH.new_empty(len(self._now.rows_U[number]), gradient_VH.shape[1])
            self._hold([number], 0, 0, gradient_VH)
        with self._locks[self._head_name]:  # somebody else may be adding a piece of it
            self._sums.add_whole(self._head_name, gradient_VH)

    def _hold(self, numbers: Sequence[int], part: int, begin: int, block_BH: Tensor) -> None:
        """Hold back the rows of the micro-batch's own tokens: move them out of a block of the head's gradient."""
        number = numbers[part]
        rows_U = self._now.rows_U[number]
        edges = torch.tensor([begin, begin + len(block_BH)], device=rows_U.device)
        first, end = torch.searchsorted(rows_U, edges).tolist()
        if first < end:
            rows = rows_U[first:end] - begin
            self._now.held_UH[number][first:end] = block_BH[rows]
            block_BH[rows] = 0.0

    def product(self, rows_PI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Rows times W^T, plus the bias: [P, O]. Some of the rows are computed by threads with nothing else to do. A row's
        bits do not depend on the others if there are `LEAST_ROWS`."""
        parts = self.pieces.parts(len(rows_PI), rows_PI.numel() * len(weight_OI))
        if len(parts) == 1:
            return rows_by_transposed(rows_PI, weight_OI, bias_O)
        made_PO = rows_PI.new_empty(len(rows_PI), len(weight_OI))

        def compute(part: slice) -> None:
            write_rows_by_transposed(made_PO[part], rows_PI[part], weight_OI, bias_O)

        others = [self.pieces.share(partial(rows_by_transposed, rows_PI[part], weight_OI, bias_O)) for part in parts[1:]]
        began = time.monotonic()
        compute(parts[0])
        half_as_long = (time.monotonic() - began) / 2
        for part, other in zip(parts[1:], others, strict=True):
            if (rows := other.take(half_as_long)) is None:
                compute(part)
            else:
                made_PO[part] = rows
        return made_PO

    def weighted(self, name: str, rows_TH: Tensor, weight_1H: Tensor, counts: Sequence[int]) -> Tensor:
        """Sums [T] of each row's elements times the weights of the parameter `name`. `counts`: rows of each micro-batch."""
        apply: Any = _Weighted.apply
        made: Tensor = apply(rows_TH, weight_1H, self, name, counts)
        return made

    # -- modules ------------------------------------------------------------------------------------------------------------

    def linear(self, module: Any, names: dict[str, str | None], plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Forward of a linear layer."""
        if self._state is None:
            return plain(x)
        bias = None if module.bias is None else self._in_graph(module.bias)
        apply: Any = _PassLinear.apply  # torch has no types for it
        made: Tensor = apply(x, self._in_graph(module.weight), bias, self._anchor, self, names)
        return made

    def embedding(self, module: Any, names: dict[str, str | None], plain: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
        """Forward of an embedding."""
        if self._state is None:
            return plain(tokens)
        if self._holds:
            self._now.rows_U = [torch.unique(tokens.flatten()[place]) for place in self._now.places]
        apply: Any = _Embedding.apply
        made: Tensor = apply(tokens, self._in_graph(module.weight), self._anchor, self, names["weight"], module.padding_idx)
        return made

    def norm(self, module: Any, names: dict[str, str | None], plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Forward of an RMS norm: the module's own, with a weight for each row, whose gradient is not summed over rows yet."""
        if self._state is None:
            return plain(x)
        weight = module._parameters["weight"]
        apply: Any = _Repeated.apply
        module._parameters["weight"] = apply(self._in_graph(weight), self._anchor, x.shape, self, names["weight"])
        try:
            return plain(x)
        finally:
            module._parameters["weight"] = weight

    def add_linear(self, names: dict[str, str | None], grad_PO: Tensor, x_PI: Tensor) -> None:
        """Add the gradients of a linear layer."""
        if (name := names["weight"]) is not None:
            self._add_products(name, grad_PO, x_PI, [place for _, place in self._added()], self._changed_by(name))
        if (bias := names.get("bias")) is not None:
            self._add_sums(bias, grad_PO)

    def add_norm(self, name: str, grad_1PX: Tensor) -> None:
        """Add the gradient of a norm's weight, from that of the weight of each row, maybe of each of its heads."""
        self._add_sums(name, grad_1PX[0])

    def add_weighted(self, name: str, grad_TH: Tensor, counts: Sequence[int]) -> None:
        """Add the gradient of the weights of `weighted`, from that of each row's."""
        ends = [0, *accumulate(counts)]
        parts = [slice(*each) for number, each in enumerate(pairwise(ends)) if not self.is_muted(number)]
        self._sums.add_sums(name, grad_TH, parts)

    def add_embedding(self, name: str, tokens_P: Tensor, grad_PH: Tensor, padding: int | None) -> None:
        """Add the gradient of the embedding, and what of the head's was held back for it."""
        self.pieces.end()  # of the head, which may be the same matrix
        for number, place in self._added():
            tokens_U, inverse = torch.unique(tokens_P[place], return_inverse=True)
            skipped = -1 if padding is None else int(torch.searchsorted(tokens_U, padding))
            if padding is not None and not (skipped < len(tokens_U) and int(tokens_U[skipped]) == padding):
                skipped = -1
            rows_UH = torch.ops.aten.embedding_dense_backward(grad_PH[place], inverse, len(tokens_U), skipped, False)
            if self._holds:
                rows_UH = rows_UH + self._now.held_UH.pop(number)
            self._sums.add_rows(name, tokens_U, rows_UH)

    def _add_sums(self, name: str, rows_PX: Tensor) -> None:
        self._sums.add_sums(name, rows_PX, [place for _, place in self._added()], self._over_ranks.get(name))

    def _changed_by(self, name: str) -> Callable[[int, int, Tensor], None] | None:
        """Sum over ranks of a block of a micro-batch's gradient, in place; None where the other ranks have no addends."""
        if (over_ranks := self._over_ranks.get(name)) is None:
            return None

        def change(_number: int, _begin: int, block_BI: Tensor) -> None:
            block_BI.copy_(over_ranks(block_BI))

        return change

    def _add_products(self, name: str, *arguments: Any) -> None:
        def add() -> None:
            with self._locks[name]:  # layers may have a matrix in common
                self._sums.add_products(name, *arguments)

        if name in self._over_ranks:
            add()  # all ranks make their exchanges in one order
        else:
            self.pieces.add(add)

    def _added(self) -> list[tuple[int, slice]]:
        """Micro-batches that are not muted: number, and place in the pass."""
        return [(number, place) for number, place in enumerate(self._now.places) if number not in self._now.muted]


def _form_of(module: nn.Module) -> Any:
    """Method of `PassGradients` that is a module's forward; None if there is none."""
    own = {key: parameter.ndim for key, parameter in module.named_parameters(recurse=False)}
    if type(module) is nn.Linear:
        return PassGradients.linear
    if type(module) is nn.Embedding and module.max_norm is None and not module.scale_grad_by_freq:
        return PassGradients.embedding
    return PassGradients.norm if type(module).__name__.endswith("RMSNorm") and own == {"weight": 1} else None


def _zeros(weight: Tensor | None, is_wanted: bool) -> Tensor | None:
    """Zeros of a weight's shape, which take no memory before autograd keeps them; None if they are not wanted."""
    return weight.new_zeros(()).expand_as(weight) if is_wanted and weight is not None else None


class _PassLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        anchor: Tensor,
        to: PassGradients,
        names: dict[str, str | None],
    ) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.to, ctx.names = to, names
        ctx.zeros = _zeros(weight_OI, ctx.needs_input_grad[1]), _zeros(bias_O, ctx.needs_input_grad[2])
        return to.product(x.reshape(-1, x.shape[-1]), weight_OI, bias_O).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, weight_OI = ctx.saved_tensors
        grad_PO = grad.reshape(-1, grad.shape[-1])
        ctx.to.add_linear(ctx.names, grad_PO, x.reshape(-1, x.shape[-1]))
        of_x = rows_by(grad_PO, weight_OI).view(x.shape) if ctx.needs_input_grad[0] else None
        return of_x, *ctx.zeros, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight_VH: Tensor, anchor: Tensor, to: PassGradients, name: str, padding: int | None
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.to, ctx.name, ctx.padding = to, name, padding
        ctx.zeros = _zeros(weight_VH, ctx.needs_input_grad[1])
        return nn.functional.embedding(tokens, weight_VH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_1PH: Tensor) -> tuple[None, Tensor | None, None, None, None, None]:
        (tokens,) = ctx.saved_tensors
        ctx.to.add_embedding(ctx.name, tokens.flatten(), grad_1PH.reshape(-1, grad_1PH.shape[-1]), ctx.padding)
        return None, ctx.zeros, None, None, None, None


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, anchor: Tensor, shape: torch.Size, to: PassGradients, name: str) -> Tensor:
        ctx.to, ctx.name, ctx.zeros = to, name, _zeros(weight, ctx.needs_input_grad[0])
        return weight.expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        ctx.to.add_norm(ctx.name, grad)
        return ctx.zeros, None, None, None, None


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_TH: Tensor, weight_1H: Tensor, to: PassGradients, name: str, counts: Sequence[int]) -> Tensor:
        ctx.save_for_backward(rows_TH, weight_1H)
        ctx.to, ctx.name, ctx.counts = to, name, counts
        return (rows_TH * weight_1H).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows_TH, weight_1H = ctx.saved_tensors
        ctx.to.add_weighted(ctx.name, grad_T[:, None] * rows_TH, ctx.counts)
        return grad_T[:, None] * weight_1H, None, None, None, None


class _Used(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, weight: Tensor) -> Tensor:
        ctx.zeros = _zeros(weight, True)
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, ctx.zeros
