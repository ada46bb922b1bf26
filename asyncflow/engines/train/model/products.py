"""Products of matrices in linear layers. Those of float32 are oneDNN's on processors with AVX-512 that are not Intel's: there MKL,
which torch takes, uses half of the vector units.

    rows x W^T      [P, I], [O, I] -> [P, O]      forward
    rows x W        [P, O], [O, I] -> [P, I]      gradient of the inputs
    dy^T x          [P, O], [P, I] -> [O, I]      gradient of the weight

oneDNN keeps 0.7 MB of code for each product and number of rows that it has seen, and takes a millisecond to make it. So rows are
filled up with zeros to one of few numbers (`filled`), which add nothing to a sum over rows. A row's bits do not depend on the
others, if there are two, nor those of a sum on where its rows are: no bit depends on what else is in a pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from asyncflow.mkl import is_intels

# P rows, I inputs, O outputs.


_SMALL: Final = 2**14
"""Elements of a sum over rows up to which filling these up costs more than oneDNN saves."""


def rows_by_transposed(rows_PI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Rows W^T, plus the bias: [P, O]."""
    if not _is_onednns(rows_PI, weight_OI):
        return nn.functional.linear(rows_PI, weight_OI, bias_O)
    return _product(rows_PI, weight_OI, bias_O)


def write_rows_by_transposed(out_PO: Tensor, rows_PI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> None:
    """Write `rows_by_transposed` into a tensor."""
    if _is_onednns(rows_PI, weight_OI):
        out_PO.copy_(_product(rows_PI, weight_OI, bias_O))
    elif bias_O is None:
        torch.mm(rows_PI, weight_OI.t(), out=out_PO)
    else:
        torch.addmm(bias_O, rows_PI, weight_OI.t(), out=out_PO)


def rows_by(rows_PO: Tensor, weight_OI: Tensor) -> Tensor:
    """Rows W: [P, I]."""
    if not _is_onednns(rows_PO, weight_OI):
        return rows_PO @ weight_OI
    return _product(rows_PO, weight_OI.t(), None)


def over_rows(left_PO: Tensor, right_PI: Tensor) -> Tensor:
    """Sum over rows left^T right: [O, I]."""
    if not _is_onednns(left_PO, right_PI) or left_PO.shape[1] * right_PI.shape[1] <= _SMALL:
        return left_PO.t() @ right_PI
    num_rows = filled(len(left_PO))
    made: Tensor = torch.ops.mkldnn._linear_pointwise(
        _with_rows(left_PO, num_rows).t(), _with_rows(right_PI, num_rows).t(), None, "none", [], ""
    )
    return made


def add_over_rows(sums_OI: Tensor, left_PO: Tensor, right_PI: Tensor) -> None:
    """Add `over_rows` to sums of the same dtype."""
    if _is_onednns(left_PO, right_PI):
        sums_OI.add_(over_rows(left_PO, right_PI))
    else:
        sums_OI.addmm_(left_PO.t(), right_PI)


def for_sums(rows_PI: Tensor) -> Tensor:
    """Rows that `over_rows` takes several times, in a form in which it need not fill them up each time."""
    return _with_rows(rows_PI, filled(len(rows_PI))) if _is_onednns(rows_PI, rows_PI) else rows_PI


def filled(num_rows: int) -> int:
    """Number of rows that so many are filled up to: a multiple of a sixteenth of the next power of two, and of 16."""
    step = max(16, 1 << max(0, (num_rows - 1).bit_length() - 4))
    return max(step, num_rows + -num_rows % step)


def adopt(module: nn.Module) -> None:
    """Have a model's linear layers compute by these products, forward and backward."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            changed: Any = layer
            changed.forward = partial(_forward, layer)


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    if type(x) is not Tensor or not _is_onednns(x, layer.weight):
        return nn.functional.linear(x, layer.weight, layer.bias)
    apply: Any = _AdoptedLinear.apply  # torch has no types for it
    made: Tensor = apply(x, layer.weight, layer.bias)
    return made


class _AdoptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return rows_by_transposed(x.reshape(-1, x.shape[-1]), weight_OI, bias_O).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_OI = ctx.saved_tensors
        grad_PO = grad.reshape(-1, grad.shape[-1])
        of_x = rows_by(grad_PO, weight_OI).view(x.shape) if ctx.needs_input_grad[0] else None
        of_weight = over_rows(grad_PO, x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, grad_PO.sum(0) if ctx.needs_input_grad[2] else None


def _is_faster_here() -> bool:
    """Whether oneDNN is to be taken: a matter of the machine, not of a measurement, so that all processes do the same."""
    return torch._C._has_mkldnn and torch.backends.cpu.get_cpu_capability() == "AVX512" and not is_intels()


_TAKES_ONEDNN = _is_faster_here()


def _is_onednns(left: Tensor, right: Tensor) -> bool:
    return (
        _TAKES_ONEDNN
        and left.dtype == right.dtype == torch.float32
        and left.is_cpu
        and right.is_cpu
        and type(right) in (Tensor, nn.Parameter)  # none that is sharded over ranks
        and left.numel() > 0
        and right.numel() > 0
    )


def _product(rows_PX: Tensor, matrix_YX: Tensor, bias_Y: Tensor | None) -> Tensor:
    num_rows = len(rows_PX)
    whole_PX = _with_rows(rows_PX, filled(num_rows))
    made_PY: Tensor = torch.ops.mkldnn._linear_pointwise(whole_PX, matrix_YX, bias_Y, "none", [], "")
    return made_PY[:num_rows]


def _with_rows(rows_PX: Tensor, num_rows: int) -> Tensor:
    """Rows, and zeros behind them."""
    if len(rows_PX) == num_rows:
        return rows_PX
    whole = rows_PX.new_empty(num_rows, rows_PX.shape[1])
    whole[: len(rows_PX)] = rows_PX
    whole[len(rows_PX) :].zero_()
    return whole
