"""Tensor parallelism: a model's matrices sharded over the ranks of a mesh, as transformers' own plan for the model says.

    token ids -> embedding (rows of the vocabulary) -> residual stream -> final norm -> hidden states, the same on all ranks
                                                        |          ^
                     norm -> q, k, v (heads) -> attention -> o     |
                     norm -> gate, up (columns) --------> down ----+ a sum over ranks

Between a matrix that is sharded by its outputs and the next, which is sharded by its inputs, everything is a plain tensor of this
rank's heads or columns: attention knows nothing of it. The residual stream is a DTensor, sharded over tokens (sequence
parallelism), in pieces of any size, so that norms and residuals are computed once. What enters a pair of matrices is
gathered then, and its gradient is summed once.

Sums over ranks are in the order of these (rank_sums.py), and a weight's gradient is a sum over tokens that are all on one rank: so
no bit of a micro-batch depends on its place in a pass.

Parameters are DTensors afterwards, those too that are not sharded; a module computes with plain tensors, its rank's parts. Each
parameter's gradient has its own placement: nothing is left to be summed over the mesh. The output layer is sharded over the
vocabulary: `head_shard` is what log_probs.py asks for.

Left out: key and value heads that several ranks share, and `module(...)` itself, as its output layer is never called.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from asyncflow.engines.families import check_tensor_parallel
from asyncflow.engines.train.model.log_probs import VocabularyShard
from asyncflow.engines.train.model.rank_sums import begin_of, gathered_rows, summed, summed_rows
from asyncflow.types import UserError

# P packed tokens, Q of them on this rank, H hidden elements, V tokens of the vocabulary.

RESIDUAL: Final = Shard(1)
"""Placement of the residual stream [1, P, H]: sharded over tokens."""


def shard_model(module: Any, mesh: DeviceMesh) -> None:
    """Shard the parameters of transformers' causal language model, or of a stage of it, over a mesh of one axis, in place.

    Each rank has the whole parameters before, the same ones or none yet (on the meta device), and nothing is sent.
    `module.base_model(...)` is called as it was, by all ranks alike, with the same packed tokens; its hidden states are plain
    tensors, the same on all ranks, also those that a stage begins with or ends with. FSDP2 and whatever else keeps parameters come
    after it; a copy of the module does not work, so another model is loaded and sharded for itself.

    Raises `UserError` if transformers has no plan for the model, or it cannot be sharded into so many parts.
    """
    check_tensor_parallel(module.config.to_dict(), mesh.size())
    base, head = module.base_model, module.get_output_embeddings()
    embedding_VH = getattr(module.get_input_embeddings(), "weight", None)
    is_tied = embedding_VH is not None and getattr(head, "weight", None) is embedding_VH
    parallelize_module(base, mesh, _plan(base), src_data_rank=None)
    if is_tied:
        head.weight = module.get_input_embeddings().weight
    elif isinstance(head, nn.Linear):
        _distribute(head, mesh, Shard(0))
    base.register_forward_hook(_leave_whole)


def place_lora(linear: Any) -> None:
    """Shard the low-rank adapter of a linear layer that `shard_model` has sharded.

    A layer that is sharded by its outputs has all of A on each rank, and its own rows of B; one that is sharded by its inputs has
    its own columns of A, and all of B, and its product is a part of the sum that the layer's own is. Nothing more is exchanged in a
    forward pass; the gradient of the matrix that all ranks have is a sum over them.
    """
    (placement,), mesh = linear.weight.placements, linear.weight.device_mesh
    is_by_outputs = placement == Shard(0)
    _on_parts(linear.lora_A, mesh, Replicate() if is_by_outputs else Shard(1), are_summed=is_by_outputs)
    _on_parts(linear.lora_B, mesh, Shard(0) if is_by_outputs else Replicate(), are_summed=not is_by_outputs)


def head_shard(head_VH: Tensor) -> tuple[Tensor, VocabularyShard | None]:
    """The rows of the output layer's weight that this rank has, and where they are; all rows and None if it is not sharded.

    The weight is that of a module that `shard_model` has sharded; under FSDP2, as a forward has it, gathered over data-parallel
    ranks.
    """
    if not isinstance(head_VH, DTensor):
        return head_VH, None
    mesh = head_VH.device_mesh
    return head_VH.to_local(), VocabularyShard(mesh.get_group(), place(head_VH)[0])


def place(parameter: Tensor) -> tuple[int, ...]:
    """First index of this rank's part in the whole of a parameter, by dimension; `shard_model` may have sharded it, or not."""
    begins = [0] * parameter.ndim
    if isinstance(parameter, DTensor):
        (placement,), mesh = parameter.placements, parameter.device_mesh
        if isinstance(placement, Shard):
            begins[placement.dim] = begin_of(mesh.get_local_rank(), mesh.size(), parameter.shape[placement.dim])
    return tuple(begins)


def is_counted(parameter: Tensor) -> bool:
    """Whether this rank's part of a parameter, or of its gradient, is one to count in a sum over all ranks of its mesh.

    Parts that ranks have the same count once, at the first of them: a norm over the gradients is the root of the sum of their
    squares where this is true. Where it is, no two ranks have the same element.
    """
    if not isinstance(parameter, DTensor):
        return True
    coordinate = parameter.device_mesh.get_coordinate() or ()
    return not any(at for at, placement in zip(coordinate, parameter.placements, strict=True) if placement.is_replicate())


def whole(parameter: Tensor) -> Tensor | None:
    """The whole of one parameter on the first rank of its mesh, detached, on its device; None on the others.

    All ranks of the mesh call it, for the same parameters in the same order. No rank keeps more than it had.
    """
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    whole: Any = parameter.detach()
    placements = list(parameter.placements)
    # One axis after the other, in the order in which FSDP2 gathers: rows that both axes shard lie in an order of their own.
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        whole = whole.redistribute(placements=placements)
    return None if any(parameter.device_mesh.get_coordinate() or ()) else whole.to_local()


def _plan(base: Any) -> dict[str, ParallelStyle]:
    """A style for every module of the base model that has parameters of its own, and for every layer."""
    wanted: dict[str, str] = base.config.base_model_tp_plan or {}
    if not wanted:
        kind = base.config.model_type
        raise UserError(f"Transformers has no tensor-parallel plan for a model of type {kind!r}: set plan.train.tp to 1.")
    styles: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": LinearByOutputs,
        "rowwise": LinearByInputs,
        "replicated_with_grad_allreduce": HeadNorm,
    }
    plan: dict[str, ParallelStyle] = {}
    for name, module in base.named_modules():
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        has_own = next(module.parameters(recurse=False), None) is not None
        if pattern in wanted or isinstance(module, nn.Linear):
            style = wanted.get(pattern, "none")
            if style not in styles:
                raise UserError(
                    f"Transformers' plan for {name} is {style}, which the trainer does not take: set plan.train.tp to 1."
                )
            plan[name] = styles[style]()
        elif pattern == "layers.*" and next(module.parameters(), None) is not None:
            plan[name] = ReplicatedInput()
        elif isinstance(module, nn.Embedding):
            plan[name] = VocabularyEmbedding()
        elif has_own and pattern.startswith("layers.*.self_attn."):
            plan[name] = HeadNorm()
        elif has_own:
            plan[name] = ResidualNorm(is_last=not pattern.startswith("layers.*."))
    return plan


class ReplicatedInput(ParallelStyle):
    """Makes a plain tensor that a layer is given, whole and the same on all ranks, the residual stream: a stage's first one is."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden, *others = inputs
            if not isinstance(hidden, DTensor):
                hidden = DTensor.from_local(hidden, device_mesh, [Replicate()], run_check=False)
                hidden = hidden.redistribute(placements=[RESIDUAL])
            return hidden, *others

        module.register_forward_pre_hook(enter)
        return module


class LinearByOutputs(ParallelStyle):
    """A linear layer that makes this rank's outputs of whole inputs, whose gradient is then this rank's addend of a sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _on_parts(module, device_mesh, Shard(0))
        return module


class LinearByInputs(ParallelStyle):
    """A linear layer on this rank's inputs: its product is an addend of a sum over ranks, which is the residual stream."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _on_parts(module, device_mesh, Shard(1))
        module.register_forward_hook(lambda _module, _inputs, addend_1PH: _to_stream(addend_1PH, device_mesh))
        return module


class VocabularyEmbedding(ParallelStyle):
    """Rows of the vocabulary on each rank; a token's row comes from the one that has it. Token ids in, residual stream out.

    PyTorch's own style for it (`RowwiseParallel`) takes the padding token, whose row gets no gradient, for a row of each shard, and
    makes the gradient of the whole matrix on each rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        embedding: Any = module
        here: list[Tensor] = []  # of the pass that is under way: whether a token is of this shard

        def enter(_module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
            rows, is_here = shard.find(inputs[0], num_rows)
            here.append(is_here)
            return rows

        def leave(_module: nn.Module, _inputs: Any, embedded_1PH: Tensor) -> DTensor:
            return _to_stream(embedded_1PH.where(here.pop()[..., None], 0.0), device_mesh)

        _on_parts(embedding, device_mesh, Shard(0))
        shard, num_rows = VocabularyShard(device_mesh.get_group(), place(embedding.weight)[0]), len(embedding.weight.to_local())
        if embedding.padding_idx is not None:
            padding = embedding.padding_idx - shard.offset
            embedding.padding_idx = padding if 0 <= padding < num_rows else None
        embedding.register_forward_pre_hook(enter)
        embedding.register_forward_hook(leave)
        return module


class ResidualNorm(ParallelStyle):
    """A norm on the residual stream: what this rank has of it in, all tokens out, a plain tensor.

    Tokens are gathered before they are multiplied by the weight. So its gradient is a sum over tokens that knows nothing of which
    rank has which, in a norm within a layer an addend of the sum over ranks, as the gradient of the outputs is. Behind the last
    norm (`is_last`) all ranks have the same gradient.
    """

    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        self._is_last = is_last

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        norm: Any = module
        plain_forward: Callable[[Tensor], Tensor] = norm.forward
        gathered: Any = _Gathered.apply  # torch has no types for it
        _on_parts(norm, device_mesh, Replicate(), are_summed=not self._is_last)

        def forward(stream: DTensor) -> Tensor:
            weight = norm._parameters["weight"]
            norm._parameters["weight"] = weight.new_ones(weight.shape[-1])
            try:
                own_1QH = plain_forward(stream.to_local())
            finally:
                norm._parameters["weight"] = weight
            made: Tensor = weight * gathered(own_1QH, stream.shape[1], device_mesh.get_group(), self._is_last)
            return made

        norm.forward = forward
        return module


class HeadNorm(ParallelStyle):
    """A norm on each of this rank's heads: the weight is one for all heads, so its gradient is a sum over ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _on_parts(module, device_mesh, Replicate(), are_summed=True)
        return module


def _on_parts(module: Any, mesh: DeviceMesh, placement: Placement, *, are_summed: bool = False) -> None:
    """Shard or copy a module's own parameters, and have it compute with plain tensors: this rank's parts. A bias of all outputs is
    copied, and added on the first rank alone.

    `are_summed`: the gradients of copied parameters are sums over ranks. `over_ranks`, by which pass_gradients.py sums such, is
    None elsewhere.
    """
    _distribute(module, mesh, placement)
    group, held = mesh.get_group(), list[dict[str, Any]]()
    copied: Any = _Copied.apply
    at_first: Any = _AtFirst.apply
    module.over_ranks = partial(summed, group=group) if are_summed else None

    def enter(_module: nn.Module, _inputs: Any) -> None:
        held.append(dict(module._parameters))
        for name, parameter in held[-1].items():
            if parameter is None:
                continue
            part = parameter.to_local()
            if are_summed and part.requires_grad:
                part = copied(part, module.over_ranks)
            if name == "bias" and placement == Shard(1):
                part = at_first(part, group.rank() == 0)
            module._parameters[name] = part

    def leave(_module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        module._parameters.update(held.pop())

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Shard or copy a module's own parameters; a vector that has no such dimension is copied."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        own = Replicate() if isinstance(placement, Shard) and placement.dim >= parameter.ndim else placement
        sharded = distribute_tensor(parameter, mesh, [own], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(sharded, parameter.requires_grad))


def _to_stream(addend_1PH: Tensor, mesh: DeviceMesh) -> DTensor:
    """The residual stream that is the sum of the ranks' addends."""
    apply: Any = _Added.apply  # torch has no types for it
    own_1QH = apply(addend_1PH, mesh.get_group())
    shape, stride = addend_1PH.shape, addend_1PH.stride()
    return DTensor.from_local(own_1QH, mesh, [RESIDUAL], run_check=False, shape=shape, stride=stride)


class _Added(torch.autograd.Function):
    """This rank's tokens of a sum over ranks, from an addend of all tokens."""

    @staticmethod
    def forward(ctx: Any, addend_1PH: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.num_tokens, ctx.group = addend_1PH.shape[1], group
        return summed_rows(addend_1PH[0], group)[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_1QH: Tensor) -> tuple[Tensor, None]:
        return gathered_rows(grad_1QH[0], ctx.num_tokens, ctx.group)[None], None


class _Gathered(torch.autograd.Function):
    """All ranks' tokens, from this rank's. Their gradient is an addend of a sum over ranks, or, if it `is_whole`, the sum."""

    @staticmethod
    def forward(ctx: Any, own_1QH: Tensor, num_tokens: int, group: dist.ProcessGroup, is_whole: bool) -> Tensor:
        ctx.group, ctx.is_whole = group, is_whole
        return gathered_rows(own_1QH[0], num_tokens, group)[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_1PH: Tensor) -> tuple[Tensor, None, None, None]:
        grad_PH, rank, num_ranks = grad_1PH[0], ctx.group.rank(), ctx.group.size()
        if ctx.is_whole:
            own = slice(*(begin_of(index, num_ranks, len(grad_PH)) for index in (rank, rank + 1)))
            return grad_PH[None, own], None, None, None
        return summed_rows(grad_PH, ctx.group)[None], None, None, None


class _Copied(torch.autograd.Function):
    """A parameter that all ranks have, whose gradient is a sum over them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.over_ranks = over_ranks
        return part.view_as(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.over_ranks(grad), None


class _AtFirst(torch.autograd.Function):
    """A bias on the first rank, and zeros elsewhere, with the gradient that each rank has: all have the same."""

    @staticmethod
    def forward(ctx: Any, bias_H: Tensor, is_first: bool) -> Tensor:
        return bias_H.view_as(bias_H) if is_first else torch.zeros_like(bias_H)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_H: Tensor) -> tuple[Tensor, None]:
        return grad_H, None


def _leave_whole(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
    """The last hidden states as a plain tensor, the same on all ranks; so is the gradient that comes for them."""
    hidden = outputs.last_hidden_state
    if isinstance(hidden, DTensor):
        outputs.last_hidden_state = hidden.redistribute(placements=[Replicate()]).to_local()
    return outputs
