"""Tensor parallelism: a model's matrices sharded over the ranks of a mesh, as transformers' own plan for the model says.

    token ids -> embedding (rows of the vocabulary) -> residual stream -> final norm -> hidden states, the same on all ranks
                                                        |          ^
                     norm -> q, k, v (heads) -> attention -> o     |
                     norm -> gate, up (columns) --------> down ----+ a sum over ranks

Between a matrix that is sharded by its outputs and the next, which is sharded by its inputs, everything is a plain tensor of this
rank's heads or columns: attention knows nothing of it. The residual stream is a DTensor, sharded over tokens (sequence
parallelism), in pieces of any size, so that norms and residuals are computed and kept once. What enters a pair of matrices is
gathered then, and its gradient is summed once.

Parameters are DTensors afterwards, those too that are not sharded. Each one's gradient has the parameter's own placement: nothing
is left to be summed over the mesh. The output layer is sharded over the vocabulary: `head_shard` is what log_probs.py asks for.

Left out: key and value heads that several ranks share, and `module(...)` itself, as its output layer is never called.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from asyncflow.engines.families import check_tensor_parallel
from asyncflow.engines.train.model.log_probs import VocabularyShard
from asyncflow.engines.train.model.lora import Combine
from asyncflow.types import UserError

# P packed tokens, H hidden elements, V tokens of the vocabulary.

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


def place_lora(linear: Any) -> Combine:
    """Shard the low-rank adapter of a linear layer that `shard_model` has sharded, and say how its product is computed.

    A layer that is sharded by its outputs has all of A on each rank, and its own rows of B; one that is sharded by its inputs has
    its own columns of A, and all of B, and its product is a part of the sum that the layer's own is. Nothing more is exchanged in a
    forward pass; the gradient of the matrix that all ranks have is a sum over them.
    """
    (placement,), mesh = linear.weight.placements, linear.weight.device_mesh
    is_by_outputs = placement == Shard(0)
    _distribute(linear.lora_A, mesh, Replicate() if is_by_outputs else Shard(1))
    _distribute(linear.lora_B, mesh, Shard(0) if is_by_outputs else Replicate())
    return _lora_by_outputs if is_by_outputs else _lora_by_inputs


def _lora_by_outputs(linear: Any, x: Any, output: Any, scaling: float) -> Any:
    low = F.linear(x.to_local(grad_placements=[Partial()]), linear.lora_A.weight.to_local(grad_placements=[Partial()]))
    added = F.linear(low, linear.lora_B.weight.to_local()) * scaling
    return output + DTensor.from_local(added, output.device_mesh, [Shard(added.ndim - 1)], run_check=False)


def _lora_by_inputs(linear: Any, x: Any, output: Any, scaling: float) -> Any:
    low = F.linear(x.to_local(), linear.lora_A.weight.to_local())
    added = F.linear(low, linear.lora_B.weight.to_local(grad_placements=[Partial()])) * scaling
    return output + DTensor.from_local(added, output.device_mesh, [Partial()], run_check=False)


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
    # Residual stream in, residual stream out: `use_local_output` would lose how many tokens there are.
    styles: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "rowwise": lambda: RowwiseParallel(output_layouts=RESIDUAL, use_local_output=False),
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
            plan[name] = ResidualNorm()
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


class VocabularyEmbedding(ParallelStyle):
    """Rows of the vocabulary on each rank; a token's row comes from the one that has it. Token ids in, residual stream out.

    PyTorch's own style for it (`RowwiseParallel`) takes the padding token, whose row gets no gradient, for a row of each shard, and
    makes the gradient of the whole matrix on each rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        embedding: Any = module
        _distribute(embedding, device_mesh, Shard(0))

        def forward(tokens: Tensor) -> Tensor:
            local_VH = embedding.weight.to_local()
            shard = VocabularyShard(device_mesh.get_group(), place(embedding.weight)[0])
            rows, is_here = shard.find(tokens, len(local_VH))
            # A row from 0 up is a token of this shard; -1 would be its last one.
            padding = -1 if embedding.padding_idx is None else embedding.padding_idx - shard.offset
            embedded = F.embedding(rows, local_VH, padding if 0 <= padding < len(local_VH) else None)
            embedded = embedded.where(is_here[..., None], 0.0)
            summed = DTensor.from_local(embedded, device_mesh, [Partial()], run_check=False)
            return summed.redistribute(placements=[RESIDUAL])

        embedding.forward = forward
        return module


class ResidualNorm(ParallelStyle):
    """A norm on the residual stream: what this rank has of it in, all tokens out. On plain tensors, which is ten times as fast."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        plain_forward = _forward_of_norm(module, device_mesh)

        def forward(stream: DTensor) -> DTensor:
            local = plain_forward(stream.to_local())
            out = DTensor.from_local(local, device_mesh, [RESIDUAL], run_check=False, shape=stream.shape, stride=stream.stride())
            # The gradient that comes back is a sum over ranks, and is made whole, or its part of the tokens, here.
            return out.redistribute(placements=[Replicate()])

        module.forward = forward
        return module


class HeadNorm(ParallelStyle):
    """A norm on each of this rank's heads: the weight is one for all heads, so its gradient is a sum over ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.forward = _forward_of_norm(module, device_mesh)
        return module


def _forward_of_norm(norm: nn.Module, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """Give all ranks a norm's parameters. Returns its forward on plain tensors: of this rank's tokens or heads, so that the
    parameters' gradients come back as parts of a sum over ranks."""
    _distribute(norm, mesh, Replicate())
    plain_forward = norm.forward

    def forward(x: Tensor) -> Tensor:
        own: dict[str, Any] = dict(norm._parameters)
        for name, parameter in own.items():
            norm._parameters[name] = parameter.to_local(grad_placements=[Partial()])
        try:
            out: Tensor = plain_forward(x)
            return out
        finally:
            norm._parameters.update(own)

    return forward


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Shard or copy a module's own parameters. A copied one's gradient is summed over the ranks as soon as it is there."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        sharded = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        shared: Any = nn.Parameter(sharded, parameter.requires_grad)
        if placement.is_replicate() and parameter.requires_grad:
            shared.register_hook(_summed)  # FSDP2, whose parameters are others, does the same
        module.register_parameter(name, shared)


def _summed(gradient: Tensor) -> Tensor:
    return gradient.redistribute(placements=[Replicate()]) if isinstance(gradient, DTensor) else gradient


def _leave_whole(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
    """The last hidden states as a plain tensor, the same on all ranks; so is the gradient that comes for them."""
    hidden = outputs.last_hidden_state
    if isinstance(hidden, DTensor):
        outputs.last_hidden_state = hidden.redistribute(placements=[Replicate()]).to_local()
    return outputs


def begin_of(index: int, num_parts: int, size: int) -> int:
    """First index of part `index` of so many elements or rows: DTensor shards into parts of equal sizes, but for the last ones."""
    return min(-(-size // num_parts) * index, size)
