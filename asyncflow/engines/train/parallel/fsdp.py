"""Data parallelism: parameters, gradients and optimiser state sharded over ranks (FSDP2), and a step's gradients summed over them.

    forward, backward   a layer's parameters are gathered, used and let go
    backward            a layer's gradients --(muted: 0) --(exact: to the grid, float64)--> sum over ranks, cut --> this rank's sums
    update              this rank's part of every parameter, from this rank's part of the sums

Everything is elementwise but the sums over ranks, and those are exact with `train.accumulate: exact`: then the weights are to the
bit what one process computes, however groups are shared out (accumulate.py says why). FSDP2 by itself would cast what it has
reduced back to float32, micro-batch by micro-batch; so the exact sums are taken where it calls for a reduce-scatter, which is its
own extension point (`set_custom_reduce_scatter`).

With passes of several micro-batches each one's gradient is rounded by itself (pass_gradients.py): FSDP2 gathers and reduces once a
pass, and what goes to the exact sums are the pass's own (`PassSums`).

A micro-batch is *muted* where a rank has none while others do, or its loss is not finite: it goes through every module like the
others, so that nobody waits, and counts as zeros.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from asyncflow.engines.train.accumulate import (
    CHUNK_ELEMENTS,
    GRADIENT_GRID,
    LARGEST_CHUNK,
    Accumulator,
    ExactAccumulator,
    check_range,
    divided,
    make_accumulator,
)
from asyncflow.engines.train.parallel.ranks import Ranks
from asyncflow.engines.train.pieces import AT_ONCE, Pieces
from asyncflow.types import UserError

if TYPE_CHECKING:
    from asyncflow.engines.train.parallel.sharded_model import ShardedModel

# R ranks of the group, E elements that each of them keeps of a unit's parameters.


class FsdpUnit:
    """A module whose parameters are gathered together, and the order in which FSDP2 lays them out."""

    def __init__(self, module: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        """`parameters`: the module's by name, not yet sharded over data-parallel ranks, those of units within it left out."""
        self.module = module
        own = {name: local_part(parameter) for name, parameter in parameters.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}

    def parts(self, num_ranks: int) -> dict[str, slice]:
        """Place of each parameter in the part of the unit that a rank keeps: rows are shared out evenly, the last ranks' filled
        up."""
        places, begin = {}, 0
        for name, (rows, *others) in self.shapes.items():
            end = begin + -(-rows // num_ranks) * math.prod(others)
            places[name] = slice(begin, end)
            begin = end
        return places


def shard_over_data(
    root: nn.Module,
    units: Sequence[FsdpUnit],
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype | None,
    reduce_dtype: torch.dtype,
    is_offloaded: bool = False,
) -> None:
    """Shard the parameters of the units, the last of which is the root's own, over a mesh of one axis, in place.

    `dtype`: what they are gathered and computed in, None for their own. `reduce_dtype`: of gradients on their way. `is_offloaded`:
    they are kept in host memory. The root's own stay gathered from its forward to the end of its backward, or until `reshard`.
    Raises `UserError` where PyTorch is too old.
    """
    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise UserError("plan.train takes several ranks, for which PyTorch's FSDP2 is too old here: install torch 2.9 or newer.")
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    offload: OffloadPolicy = CPUOffloadPolicy() if is_offloaded else OffloadPolicy()
    for unit in units:
        fully_shard(
            unit.module, mesh=mesh, reshard_after_forward=unit.module is not root, mp_policy=precision, offload_policy=offload
        )
        sharded: Any = unit.module
        assert isinstance(sharded, FSDPModule)
        sharded.set_gradient_divide_factor(1.0)  # sums, not means
        sharded.set_force_sum_reduction_for_comms(True)


def local_part(parameter: Tensor) -> Tensor:
    """Part of a parameter on this rank, detached: a plain tensor that shares its memory."""
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Sums(ABC):
    """Gradient sums of a step: this rank's part. An exception leaves them unusable until `clear`."""

    def __init__(self, policy: ShardedModel) -> None:
        # As FSDP2 has them, and this rank's own parts, in the same memory, named alike.
        self._parameters, self._parts = policy.parameters, policy.parts
        self._trained = [unit for unit in policy.units if unit.shapes]  # a stage in the middle has nothing of its own but layers

    @abstractmethod
    def of_passes(self) -> ExactAccumulator:
        """Sums that gradients of passes of several micro-batches go to."""

    @abstractmethod
    def share(self, pieces: Pieces) -> None:
        """Add up and divide by these pieces, which those of passes are among (pass_gradients.py)."""

    @abstractmethod
    def is_zero(self) -> bool:
        """Whether this rank's part of every sum is 0. For exact sums."""

    @abstractmethod
    def before_backward(self, *, is_muted: bool, is_aside: bool = False, is_split: bool = False) -> None:
        """Begin the backward pass of a micro-batch, on all ranks. `is_aside`: not for the sums, `take` follows and not `add`.
        `is_split`: its gradients go to `of_passes`, and FSDP2 has zeros."""

    @abstractmethod
    def add(self) -> None:
        """End the backward pass, and add its gradients to the sums."""

    def take(self) -> dict[str, Tensor]:
        """End the backward pass. Returns its gradients, this rank's parts, summed over data-parallel ranks, by name."""
        gradients = {name: local_part(p.grad) for name, p in self._parameters.items() if p.grad is not None}
        for parameter in self._parameters.values():
            parameter.grad = None
        return gradients

    @abstractmethod
    def gradients(self, normaliser: int) -> list[Tensor]:
        """Parts of the sums on this rank, divided by `normaliser`, float32, which are what the `.grad` of its parts of the
        parameters holds from now on. All ranks alike. Raises `RangeError` where the sums are not exact."""

    @abstractmethod
    def clear(self) -> None:
        """Forget the step."""


def make_sums(kind: Literal["exact", "fp32"], policy: ShardedModel, ranks: Ranks) -> Sums:
    """Sums of a policy's gradients, `kind` as in accumulate.py."""
    if kind == "exact" and ranks.layout.dp > 1:
        return ExactSums(policy, ranks)
    return HandedSums(policy, make_accumulator(kind, policy.parts), ranks)


class HandedSums(Sums):
    """Sums by the accumulator of one process, over what FSDP2 has reduced."""

    def __init__(self, policy: ShardedModel, accumulator: Accumulator, ranks: Ranks) -> None:
        super().__init__(policy)
        self._accumulator, self._is_alone = accumulator, ranks.layout.dp == 1
        self._is_muted = False
        for unit in self._trained:
            _reduce_by(unit, _Reduction(self._mute))

    def of_passes(self) -> ExactAccumulator:
        assert isinstance(self._accumulator, ExactAccumulator), "the others take passes as they are"
        return self._accumulator

    def share(self, pieces: Pieces) -> None:
        self._accumulator.pieces = pieces

    def is_zero(self) -> bool:
        return self.of_passes().is_zero()

    def before_backward(self, *, is_muted: bool, is_aside: bool = False, is_split: bool = False) -> None:
        self._is_muted = is_muted

    def add(self) -> None:
        made = self.take()
        if not (self._is_muted and self._is_alone):  # alone, nothing is reduced, so nothing was muted
            for name, part in self._parts.items():
                if (of_part := made.pop(name, None)) is not None:
                    # An exact accumulator has taken what was there; the sums of a plain one are there.
                    part.grad = of_part if part.grad is None else part.grad.add_(of_part)
        self._accumulator.add()

    def gradients(self, normaliser: int) -> list[Tensor]:
        return self._accumulator.gradients(normaliser)

    def clear(self) -> None:
        self._accumulator.clear()

    def _mute(self, addend_RE: Tensor) -> None:
        if self._is_muted:
            addend_RE.zero_()


class ExactSums(Sums):
    """Sums over ranks and micro-batches of what `GRADIENT_GRID` keeps of each gradient, float64."""

    def __init__(self, policy: ShardedModel, ranks: Ranks) -> None:
        super().__init__(policy)
        self._ranks, self._pieces = ranks, AT_ONCE
        self._units = [_ExactUnit(unit, ranks.layout.dp) for unit in self._trained]
        self._of_pass = PassSums({name: shape for unit in self._trained for name, shape in unit.shapes.items()}, ranks.device)

    def of_passes(self) -> ExactAccumulator:
        return self._of_pass

    def share(self, pieces: Pieces) -> None:
        self._pieces = self._of_pass.pieces = pieces

    def is_zero(self) -> bool:
        return not any(unit.sums_E is not None and bool(unit.sums_E.any()) for unit in self._units)

    def before_backward(self, *, is_muted: bool, is_aside: bool = False, is_split: bool = False) -> None:
        for unit in self._units:
            unit.is_muted, unit.is_aside, unit.of_pass = is_muted, is_aside, self._of_pass if is_split else None

    def add(self) -> None:
        """See `Sums.add`: they were added where they were reduced. What FSDP2 has made of them is let go."""
        self.take()
        peaks: dict[str, list[float]] = {}
        for name, peak in self._of_pass.peaks():
            peaks.setdefault(name, []).append(peak)
        if peaks:  # else FSDP2 had the gradients, and they were counted where they were rounded
            for unit in self._units:
                unit.count(peaks)

    def gradients(self, normaliser: int) -> list[Tensor]:
        self._check_range()
        parts: list[Tensor] = []

        def divide(part: Tensor, sums_X: Tensor) -> None:
            part.grad = divided(sums_X[: part.numel()].view(part.shape), normaliser)

        for unit in self._units:
            if unit.sums_E is None:
                continue
            for name, place in unit.places.items():
                parts.append(self._parts[name])
                self._pieces.add(partial(divide, parts[-1], unit.sums_E[place]))
            unit.sums_E = None
        self._pieces.end()
        return [part.grad for part in parts if part.grad is not None]

    def clear(self) -> None:
        for unit in self._units:
            unit.clear()
        self._of_pass.clear()
        for part in self._parts.values():
            part.grad = None
        self.take()

    def _check_range(self) -> None:
        """Over all micro-batches of the step and all ranks' gradients, so that they all come to the same."""
        peaks = torch.cat([unit.peaks for unit in self._units]).tolist()
        steps = torch.cat([unit.steps for unit in self._units]).tolist()
        # Below 2**63: what is larger is refused either way.
        bounds = self._ranks.total([int(min(number, 2.0**62)) for number in steps], of="dp")
        largest = self._ranks.largest(peaks, of="dp")
        names = [name for unit in self._units for name in unit.places]
        for name, bound, peak in zip(names, bounds, largest, strict=True):
            check_range(name, peak, bound)


class PassSums(ExactAccumulator):
    """Exact sums of one pass's micro-batches on this rank, of whole parameters. They are taken unit by unit, as soon as they are
    complete, and added up over ranks; whether they are within the range is seen there."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], device: torch.device) -> None:
        super().__init__({})
        self._shapes, self._device = shapes, device

    def take(self, name: str) -> Tensor | None:
        """A parameter's sum, float64, which is let go; None if nothing was added to it."""
        self.pieces.end()  # somebody may still be adding to it
        return self._sums.pop(name, None)

    def end_pass(self) -> None:
        """Do nothing: see `peaks`."""

    def _sum(self, name: str) -> Tensor:
        if name not in self._sums:
            self._sums[name] = torch.zeros(*self._shapes[name], dtype=torch.float64, device=self._device)
        return self._sums[name]


class _ExactUnit:
    """A unit's sums. `peaks` and `steps`, by parameter, float64: the largest finite magnitude that this rank had in a micro-batch,
    and the sum over micro-batches of the largest in each, in steps of the grid.
    `is_muted`, `is_aside`: see `Sums.before_backward`. `of_pass`: sums that are added, in place of what FSDP2 has."""

    of_pass: PassSums | None = None

    def __init__(self, unit: FsdpUnit, num_ranks: int) -> None:
        self.places = unit.parts(num_ranks)
        self._num_ranks = num_ranks
        self.is_muted = self.is_aside = False
        self._device = next(unit.module.parameters()).device
        self.clear()
        _reduce_by(unit, _Reduction(self._round, self._add))

    def clear(self) -> None:
        self.sums_E: Tensor | None = None
        self.peaks, self.steps = (torch.zeros(len(self.places), dtype=torch.float64, device=self._device) for _ in range(2))

    def _round(self, addend: Tensor) -> None:
        """A rank's own gradient, float64 [R * E], to the grid, in place."""
        if self.is_muted:
            addend.zero_()
        if self.is_muted or self.is_aside:
            return
        addend_RE = addend.view(self._num_ranks, -1)
        if self.of_pass is not None:
            self._fill(addend_RE, self.of_pass)
            return
        extremes = [torch.stack(torch.aminmax(addend_RE[:, place])).abs().max() for place in self.places.values()]
        peaks = torch.stack(extremes)
        # What is not finite makes a sum that is not, which skips the step.
        peaks = peaks.where(peaks.isfinite(), 0.0)
        self.peaks = torch.maximum(self.peaks, peaks)
        self.steps += (peaks / GRADIENT_GRID.spacing).ceil_()
        for addend_C in torch.split(addend, CHUNK_ELEMENTS if addend.is_cpu else LARGEST_CHUNK):
            GRADIENT_GRID.round_(addend_C)

    def _fill(self, addend_RE: Tensor, sums: PassSums) -> None:
        addend_RE.zero_()
        for name, place in self.places.items():
            if (whole := sums.take(name)) is not None:
                if not whole.is_cpu:  # it was made on another stream than this one, and its memory is not to be used again yet
                    whole.record_stream(torch.get_device_module(whole.device.type).current_stream(whole.device))
                part_RX, flat = addend_RE[:, place], whole.flatten()
                num_full, num_left = divmod(len(flat), part_RX.shape[1])
                part_RX[:num_full] = flat[: len(flat) - num_left].view(num_full, -1)
                if num_left:  # what fills up the last ranks' parts stays 0
                    part_RX[num_full, :num_left] = flat[-num_left:]

    def count(self, peaks: Mapping[str, Sequence[float]]) -> None:
        """Count the largest magnitudes of micro-batches' gradients, by parameter, that `of_pass` has added up."""
        of_each = [peaks.get(name, ()) for name in self.places]
        largest = [max(own, default=0.0) for own in of_each]
        steps = [float(sum(math.ceil(peak / GRADIENT_GRID.spacing) for peak in own)) for own in of_each]
        two = torch.tensor([largest, steps], dtype=torch.float64, device=self._device)
        self.peaks, self.steps = torch.maximum(self.peaks, two[0]), self.steps + two[1]

    def _add(self, sum_E: Tensor) -> None:
        if self.is_aside:
            return
        if self.sums_E is None:
            self.sums_E = sum_E.clone()
        else:
            self.sums_E += sum_E


# Its name up to torch 2.12.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Reduction:
    """FSDP2's reduce-scatter, with something done to what goes in and to what comes out."""

    def __init__(self, before: Callable[[Tensor], None], after: Callable[[Tensor], None] = lambda sums_E: None) -> None:
        self._before, self._after = before, after

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for a tensor that goes in or comes out."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._before(input_tensor)
        _reduce_scatter(output_tensor, input_tensor, op=op, group=group)
        self._after(output_tensor)


def _reduce_by(unit: FsdpUnit, reduction: _Reduction) -> None:
    module: Any = unit.module
    module.set_custom_reduce_scatter(reduction)
