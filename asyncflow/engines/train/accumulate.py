"""Sums of a step's gradients over its micro-batches, and their norm; of exact sums neither depends on the order of addition.

    p.grad --round to the grid--> float64 sums --/ normaliser, once--> p.grad, float32 --> order_free_norm --> clip, optimiser

Floating-point addition is not associative, so the order in which micro-batches arrive shows in the last bits of a plain sum. On a
grid, the multiples of one power of two, every sum that stays within 2**53 of its steps is exact in float64. Exact sums depend
neither on the order of the micro-batches, nor on how these are distributed over processes. Gradients of several micro-batches of a
pass are added one by one, that of a matrix straight from its two factors (pass_gradients.py).

Left out: parameters that are not float32, and sparse gradients.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from asyncflow.engines.train.model.products import add_over_rows, for_sums, over_rows
from asyncflow.engines.train.pieces import AT_ONCE, Pieces
from asyncflow.types import RunError

# C elements of a chunk; P packed tokens; a matrix has O rows of I elements; U of its rows; G micro-batches.

CHUNK_ELEMENTS = 2**17
"""Elements of a chunk on a CPU: 1 MiB in float64, which stays in the cache between two operations. No bits depend on it."""
LARGEST_CHUNK = 2**20
"""Elements of a chunk on other devices, where each launch costs time. The largest of all chunks: `_square_grids` relies on it."""


class RangeError(RunError):
    """Error for a finite gradient, or a sum of gradients, that the grid cannot hold exactly."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Grid of the multiples of `spacing`, a power of two, as float64."""

    spacing: float

    @property
    def largest_addend(self) -> float:
        """Largest magnitude that `round_` takes."""
        return 2.0**51 * self.spacing

    @property
    def largest_sum(self) -> float:
        """Largest sum of magnitudes up to which sums of multiples are exact."""
        return 2.0**53 * self.spacing

    @property
    def shift(self) -> float:
        """Number whose addition rounds: from 2**52 to 2**53 steps, float64 holds the grid and nothing between."""
        return 1.5 * 2.0**52 * self.spacing

    def add_steps(self, sums: Tensor, steps: Tensor) -> None:
        """Add numbers of steps, which are rounded in place to whole ones, to `sums` (float64). In float32 they are, too: from 2**23
        on it holds nothing between two whole numbers."""
        sums.add_(steps.round_(), alpha=self.spacing)

    def round_(self, values: Tensor) -> Tensor:
        """Round float64 `values` to the nearest multiples, in place. NaN and infinities become NaN."""
        return values.add_(self.shift).sub_(self.shift)


GRADIENT_GRID = Grid(2.0**-36)
"""The grid of gradient sums, one for all runs. Addends up to 2**15 = 32,768, sums up to 2**17 = 131,072, in any parameter.

A float32 of at least 2**-13 = 1.2e-4 is on it already, by its last bit. A smaller addend is off by 2**-37 at most. A micro-batch
counts at least 1 in the normaliser, so the divided sum is off by 2**-37 = 7.3e-12 at most, where Adam adds 1e-8 to the root of the
second moment: an update is off by less than a thousandth of the learning rate, and by that much only where the gradient vanishes.
"""


class Accumulator(ABC):
    """Gradient sums of one step. An exception leaves them unusable until `clear`."""

    pieces: Pieces = AT_ONCE
    """Pieces by which `join` and `gradients` add up and divide. What is added from outside may be some of them, too."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """`parameters`: by name, float32, all on one device, tied ones once."""
        self._parameters = parameters

    @abstractmethod
    def add(self) -> None:
        """Add the gradients of one micro-batch, which `p.grad` holds, to the sums.

        A gradient that is not finite makes its sum not finite. Raises `RangeError` if a finite one cannot be added exactly.
        """

    @abstractmethod
    def gradients(self, normaliser: int) -> list[Tensor]:
        """Sums divided by `normaliser`, float32, in the order of the parameters; `p.grad` holds the same tensors from now on.

        Parameters that got no gradient are left out. The call uses up the sums; `clear` ends the step.
        """

    @abstractmethod
    def norm(self, gradients: Sequence[Tensor]) -> float:
        """2-norm over all elements of what `gradients` has returned. NaN or infinite if an element is."""

    @abstractmethod
    def join(self, other: Any) -> None:
        """Take over the sums of another accumulator of this kind, of the same step and the same parameters, from whatever device.
        Raises `RangeError`."""

    def clear(self) -> None:
        """Drop the sums, and what `p.grad` holds."""
        for parameter in self._parameters.values():
            parameter.grad = None


def make_accumulator(kind: Literal["exact", "fp32"], parameters: Mapping[str, Tensor]) -> ExactAccumulator | PlainAccumulator:
    """Make an accumulator for `parameters`.

    `exact`: the bits of the sums do not depend on the order of micro-batches; 8 bytes a parameter. `fp32`: plain sums; 4 bytes a
    parameter.
    """
    return ExactAccumulator(parameters) if kind == "exact" else PlainAccumulator(parameters)


class PlainAccumulator(Accumulator):
    """Plain sums: autograd itself adds up in `p.grad`, float32, in the order of arrival."""

    def add(self) -> None:
        """Do nothing: the backward pass has added already."""

    def join(self, other: PlainAccumulator) -> None:
        """See `Accumulator.join`."""
        for name, theirs in other._parameters.items():
            if theirs.grad is not None:
                self.pieces.add(partial(self.add_whole, name, theirs.grad.to(self._parameters[name].device)))
        self.pieces.end()
        other.clear()

    def add_products(
        self,
        name: str,
        left_PO: Tensor,
        right_PI: Tensor,
        parts: Sequence[slice],
        change: Callable[[int, int, Tensor], None] | None = None,
    ) -> None:
        """Add the products left^T right [O, I] over the rows of each part."""
        assert change is None, "nothing is rounded"
        for rows in _neighbours(parts):
            own, left_QO, right_QI = self._parameters[name], left_PO[rows], right_PI[rows]
            if own.grad is not None and own.grad.dtype == left_QO.dtype:
                add_over_rows(own.grad, left_QO, right_QI)
            else:
                self.add_whole(name, over_rows(left_QO, right_QI))

    def add_sums(
        self, name: str, rows_PdX: Tensor, parts: Sequence[slice], change: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Add the sums [X] over the rows of each part, and over what is between P and X."""
        assert change is None, "nothing is rounded"
        for rows in _neighbours(parts):
            own_PdX = rows_PdX[rows]
            self.add_whole(name, own_PdX.sum(tuple(range(own_PdX.ndim - 1))).view_as(self._parameters[name]))

    def add_whole(self, name: str, gradient: Tensor) -> None:
        """Add a gradient of a parameter, which may become the sum itself."""
        own = self._parameters[name]
        own.grad = gradient.to(own.dtype) if own.grad is None else own.grad.add_(gradient)

    def add_rows(self, name: str, rows_U: Tensor, gradient_UI: Tensor) -> None:
        """Add a gradient of a matrix that is zero but for these rows, each of which is there once."""
        own = self._parameters[name]
        own.grad = torch.zeros_like(own) if own.grad is None else own.grad
        own.grad.index_add_(0, rows_U, gradient_UI.to(own.dtype))

    def end_pass(self) -> None:
        """Do nothing: no sum is out of range."""

    def gradients(self, normaliser: int) -> list[Tensor]:
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        self.pieces.over(lambda some: torch._foreach_div_(some, float(normaliser)), gradients)
        return gradients

    def norm(self, gradients: Sequence[Tensor]) -> float:
        """See `Accumulator.norm`: of chunks in float32, which are short enough for it, and of these by an exact sum."""

        def squares(some: Sequence[Tensor]) -> list[float]:
            chunks = [chunk for gradient in some for chunk in _chunks(gradient)]
            norms: list[float] = torch.stack(torch._foreach_norm(chunks)).tolist() if chunks else []
            for number, norm in enumerate(norms):
                if not math.isfinite(norm):  # beyond float32's squares, if no element is infinite itself
                    norms[number] = chunks[number].double().norm().item()
            return [norm * norm for norm in norms]

        return math.sqrt(math.fsum(chain(*self.pieces.over(squares, gradients))))


class ExactAccumulator(Accumulator):
    """Exact sums, float64, of the gradients rounded to `GRADIENT_GRID`."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self._sums: dict[str, Tensor] = {}
        self._bounds: dict[str, int] = {}  # no partial sum, in any order, has more steps of the grid in an element
        self._extremes: list[tuple[str, list[Tensor], float]] = []  # of each addend since the last check, and their unit

    def add(self) -> None:
        """See `Accumulator.add`. Each gradient is freed as soon as it is added."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self.add_whole(name, parameter.grad)
                parameter.grad = None
        self.end_pass()

    def add_products(
        self,
        name: str,
        left_PO: Tensor,
        right_PI: Tensor,
        parts: Sequence[slice],
        change: Callable[[int, int, Tensor], None] | None = None,
    ) -> None:
        """Add the products left^T right [O, I] over the rows of each part, which are one micro-batch's gradient each.

        They are made and added in blocks of rows that stay in the cache. `change` may alter a block before it is added: it gets
        the part's number, the block's first row, and the block.
        """
        num_rows, num_columns = left_PO.shape[1], right_PI.shape[1]
        num_blocks = max(1, -(-num_rows * num_columns // _chunk_elements(left_PO)))
        ends = [num_rows * i // num_blocks for i in range(num_blocks + 1)]
        extremes: list[list[Tensor]] = [[] for _ in parts]
        rights = [right_PI[part] if num_blocks == 1 else for_sums(right_PI[part]) for part in parts]
        for begin, end in pairwise(ends) if parts else ():
            sums_BI = self._sum(name)[begin:end]
            for number, part in enumerate(parts):
                block_BI = over_rows(left_PO[part, begin:end], rights[number])
                if change is not None:
                    change(number, begin, block_BI)
                steps_BI = block_BI.to(torch.float32).mul_(1 / GRADIENT_GRID.spacing)
                extremes[number] += steps_BI.amin(), steps_BI.amax()
                GRADIENT_GRID.add_steps(sums_BI, steps_BI)
        self._extremes.extend((name, of_part, GRADIENT_GRID.spacing) for of_part in extremes)

    def add_sums(
        self, name: str, rows_PdX: Tensor, parts: Sequence[slice], change: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Add the sums [X] over the rows of each part, and over what is between P and X: one micro-batch's gradient each. `change`
        makes of these [parts, X] what is added."""
        if parts:
            dims = tuple(range(rows_PdX.ndim - 1))
            # Of a copy, in memory as it would be alone: a sum's order of addition goes by the strides.
            addends_GX = torch.stack([rows_PdX[part].clone().sum(dims) for part in parts])
            if change is not None:
                addends_GX = change(addends_GX)
            self._extremes.extend((name, [peak], 1.0) for peak in addends_GX.abs().amax(1))
            self._sum(name).add_(GRADIENT_GRID.round_(addends_GX.double()).sum(0))

    def add_whole(self, name: str, gradient: Tensor) -> None:
        """Add a micro-batch's gradient of a parameter."""
        self._extremes.append((name, add_rounded(self._sum(name), gradient, GRADIENT_GRID), 1.0))

    def add_rows(self, name: str, rows_U: Tensor, gradient_UI: Tensor) -> None:
        """Add a micro-batch's gradient of a matrix that is zero but for these rows, each of which is there once."""
        self._extremes.append((name, list(torch.aminmax(gradient_UI)), 1.0))
        self._sum(name).index_add_(0, rows_U, GRADIENT_GRID.round_(gradient_UI.double()))

    def end_pass(self) -> None:
        """Check that what was added since the last call is within the range. Raises `RangeError`."""
        for name, peak in self.peaks():
            # In whole steps of the grid, so that the bound too is exact: whether a step is refused does not depend on the order.
            self._bounds[name] = self._bounds.get(name, 0) + math.ceil(peak / GRADIENT_GRID.spacing)
            check_range(name, peak, self._bounds[name])

    def peaks(self) -> list[tuple[str, float]]:
        """Largest magnitude of each addend since the last call, with the parameter's name. One that is not finite is left out: its
        sum is not either, so the step will be skipped."""
        extremes, self._extremes = self._extremes, []
        scalars = list(chain.from_iterable(of_addend for _, of_addend, _ in extremes))
        # One transfer for all: each .item() on its own would wait for the device.
        magnitudes = iter(torch.stack(scalars).abs().tolist() if scalars else [])
        peaks = [(name, [unit * each for each in islice(magnitudes, len(found))]) for name, found, unit in extremes]
        return [(name, max(values, default=0.0)) for name, values in peaks if all(map(math.isfinite, values))]

    def join(self, other: ExactAccumulator) -> None:
        """See `Accumulator.join`. The sums, and whether they are refused, are as if all had been added here."""
        for name, bound in other._bounds.items():
            self._bounds[name] = self._bounds.get(name, 0) + bound
            check_bound(name, self._bounds[name])
        for name, theirs in other._sums.items():
            sums = theirs.to(self._parameters[name].device)
            if name in self._sums:
                self.pieces.add(partial(self._sums[name].add_, sums))
            else:
                self._sums[name] = sums
        self.pieces.end()
        other.clear()

    def is_zero(self) -> bool:
        """Whether every sum is 0."""
        return not any(bool(sums.any()) for sums in self._sums.values())

    def _sum(self, name: str) -> Tensor:
        if name not in self._sums:
            parameter = self._parameters[name]
            self._sums[name] = torch.zeros(parameter.shape, dtype=torch.float64, device=parameter.device)
        return self._sums[name]

    def gradients(self, normaliser: int) -> list[Tensor]:
        """See `Accumulator.gradients`. Divides in float64, and frees each sum as soon as it is divided."""
        names = [name for name in self._parameters if name in self._sums]

        def divide(name: str) -> None:
            self._parameters[name].grad = divided(self._sums.pop(name), normaliser)

        for name in names:
            self.pieces.add(partial(divide, name))
        self.pieces.end()
        return [gradient for name in names if (gradient := self._parameters[name].grad) is not None]

    def norm(self, gradients: Sequence[Tensor]) -> float:
        """See `Accumulator.norm` and `order_free_norm`."""
        return order_free_norm(gradients, self.pieces)

    def clear(self) -> None:
        self._sums.clear()
        self._bounds.clear()
        self._extremes.clear()
        super().clear()


def check_range(name: str, peak: float, bound: int) -> None:
    """Check that the gradients of the parameter `name` are summed exactly. Raises `RangeError` if they may not be.

    `peak`: the largest magnitude in the newest gradient. `bound`: the sum of all such peaks of the step, in steps of the grid.
    """
    grid = GRADIENT_GRID
    if peak > grid.largest_addend:
        raise RangeError(
            f"The gradient of {name} has an entry of magnitude {peak:.3g}, but exact sums take none above "
            f"{grid.largest_addend:.3g}: set train.accumulate to fp32, or train.responses_per_micro_batch lower."
        )
    check_bound(name, bound)


def check_bound(name: str, bound: int) -> None:
    """Check the second half of `check_range`. Raises `RangeError`."""
    grid = GRADIENT_GRID
    if (most := bound * grid.spacing) > grid.largest_sum:
        raise RangeError(
            f"The gradients of {name} could add up to {most:.3g}, but exact sums go up to {grid.largest_sum:.3g}: "
            f"set train.accumulate to fp32, or train.prompts_per_step lower."
        )


def add_rounded(sums: Tensor, addend: Tensor, grid: Grid) -> list[Tensor]:
    """Round `addend` (any floating dtype and layout) to `grid` and add it to `sums` (float64, contiguous, as many elements).

    Returns the minima and maxima of the addend's chunks, as scalars, which are NaN or infinite where an element is. The sum is
    exact, and its bits do not depend on the order of calls, under two conditions: no extreme is above `grid.largest_addend` in
    magnitude, and the largest magnitudes of all calls add up to at most `grid.largest_sum`. The caller checks both, at a time when
    it can wait for the device.
    """
    extremes: list[Tensor] = []
    for sums_C, addend_C in zip(_chunks(sums), _chunks(addend), strict=True):
        extremes += torch.aminmax(addend_C)
        grid.add_steps(sums_C, addend_C.to(torch.promote_types(addend_C.dtype, torch.float32)).mul(1 / grid.spacing))
    return extremes


def order_free_norm(gradients: Sequence[Tensor], pieces: Pieces = AT_ONCE) -> float:
    """2-norm over all elements of float32 `gradients`; its bits do not depend on their order. `pieces`: what computes its parts.

    If the gradients are sharded over processes, each process calls the three parts itself: `norm_of` takes the maximum of all
    `largest_magnitude` and the sum of all `sum_of_squares`. These are the same, to the bit, however the elements are sharded.
    """
    largest = largest_magnitude(gradients, pieces)
    return norm_of(sum_of_squares(gradients, largest, pieces), largest)


def largest_magnitude(gradients: Sequence[Tensor], pieces: Pieces = AT_ONCE) -> float:
    """Largest |g| over all elements; 0 if there are none, NaN or infinite if an element is."""

    def largest(some: Sequence[Tensor]) -> float:
        peaks = [torch.stack(torch.aminmax(gradient)).abs().max() for gradient in some if gradient.numel()]
        return torch.stack(peaks).max().item() if peaks else 0.0

    of_parts = pieces.over(largest, gradients)
    return math.nan if any(map(math.isnan, of_parts)) else max(of_parts, default=0.0)


def sum_of_squares(gradients: Sequence[Tensor], largest: float, pieces: Pieces = AT_ONCE) -> int:
    """Sum of the rounded g**2 in steps of the grid `_square_grids(largest)[1]`; an exact Python integer, below 2**66 per element.

    `largest`: at least the largest magnitude of these gradients. The sum is 0 if it is not finite.

    One grid would lose many small squares beside a single large one. So a second grid takes what the first one rounds away. An
    element is off by 2**-65 of the largest square at most: 10**10 elements by 3e-10 of the whole, and the norm by half of that.
    """
    return sum(pieces.over(partial(_squares, largest=largest), gradients)) if math.isfinite(largest) else 0


def _squares(gradients: Sequence[Tensor], largest: float) -> int:
    """`sum_of_squares` of some of them. `largest` is finite."""
    coarse, fine = _square_grids(largest)
    sums = []
    for gradient in gradients:
        chunks = _chunks(gradient)
        shift_C = torch.full_like(chunks[0], coarse.shift, dtype=torch.float64) if chunks else gradient
        for gradient_C in chunks:
            values_C = gradient_C.double()  # whose squares are exact, 48 bits, as a part of an operation, too
            rounded_C = torch.addcmul(shift_C[: len(values_C)], values_C, values_C).sub_(coarse.shift)
            sums.append(rounded_C.sum())
            sums.append(fine.round_(rounded_C.addcmul_(values_C, values_C, value=-1)).sum().neg_())
    return sum(int(total / fine.spacing) for total in torch.stack(sums).tolist()) if sums else 0


def norm_of(squares: int, largest: float) -> float:
    """Norm from the whole sum of squares (`sum_of_squares`) and the largest magnitude.

    If the largest magnitude is not finite, it is the norm itself.
    """
    return math.sqrt(squares) * math.sqrt(_square_grids(largest)[1].spacing) if math.isfinite(largest) else largest


def _square_grids(largest: float) -> tuple[Grid, Grid]:
    """Grid for squares up to `largest`**2, and a grid for what the first rounds away; exact for sums of `LARGEST_CHUNK` addends."""
    exponent = 2 * math.frexp(largest)[1]  # largest**2 < 2**exponent
    # 2**20 squares are at most 2**(exponent + 20) = 2**53 steps of the first. 2**20 rests of at most half such a step are at most
    # 2**(exponent - 14) = 2**52 steps of the second.
    return Grid(math.ldexp(1.0, exponent - 33)), Grid(math.ldexp(1.0, exponent - 66))


def divided(sums: Tensor, normaliser: int) -> Tensor:
    """Float64 `sums` divided by `normaliser` in float64, as a new float32 tensor."""
    gradient = torch.empty(sums.shape, dtype=torch.float32, device=sums.device)
    for gradient_C, sums_C in zip(_chunks(gradient), _chunks(sums), strict=True):
        gradient_C.copy_(sums_C / normaliser)
    return gradient


def _neighbours(parts: Sequence[slice]) -> list[slice]:
    """Rows of the parts, those of neighbours as one."""
    joined: list[slice] = []
    for part in parts:
        if joined and joined[-1].stop == part.start:
            joined[-1] = slice(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Elements of a tensor in order, in chunks: views, if `tensor` is contiguous. An empty tensor has no chunk."""
    if not tensor.numel():
        return ()
    return torch.split(tensor.detach().reshape(-1), _chunk_elements(tensor))


def _chunk_elements(tensor: Tensor) -> int:
    return CHUNK_ELEMENTS if tensor.device.type == "cpu" else LARGEST_CHUNK
