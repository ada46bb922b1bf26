"""What test_tensor.py has its processes do. Each compares its part of a model, or of a head, with the whole, computed by itself."""

from __future__ import annotations

import copy
import hashlib
import itertools
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from asyncflow.engines.train.model.attention import ATTENTION_NAME
from asyncflow.engines.train.model.log_probs import Head, VocabularyShard, log_probs_and_entropy
from asyncflow.engines.train.model.packing import Packed, pack
from asyncflow.engines.train.model.products import _is_onednns as is_onednns
from asyncflow.engines.train.model.products import filled
from asyncflow.engines.train.model.rank_sums import begin_of, gathered_rows, summed, summed_rows
from asyncflow.engines.train.parallel.stages import keep_stage
from asyncflow.engines.train.parallel.tensor import head_shard, is_counted, shard_model, whole
from asyncflow.types import LossSums, Ragged, UserError
from tests.unit.engines.train.parallel.pipeline_ranks import StageOf, make_packed, world
from tests.unit.engines.train.training import token_local_loss

# P packed tokens, T response tokens, C tokens of a chunk, H hidden elements, V tokens of the vocabulary.

PADDING_ID = 3
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 101, "head_dim": 8}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "pad_token_id": PADDING_ID}


def make_model(family: str, *, is_tied: bool) -> Any:
    """The same random weights in every process. An untied one has a bias wherever its family may have one."""
    biases = {} if is_tied or family == "qwen2" else {"attention_bias": True, "mlp_bias": True}
    config = AutoConfig.for_model(family, **SIZES, **HEADS, **biases, tie_word_embeddings=is_tied)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.float32).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.1)
    return model


def packed_cases() -> list[Packed]:
    """Ragged lengths, shared and in rows; one with every token of the vocabulary, each with a gradient of its own; two tokens."""
    every = Ragged.from_arrays([range(100, -1, -1), range(20)], "int64")
    few = Ragged.from_arrays([[5]], "int64")
    return [
        *make_packed(1, is_shared=True),
        *make_packed(1, is_shared=False, seed=1),
        pack(np.arange(7), every, is_shared=True),
        pack(np.array([90]), few, is_shared=True),
    ]


def sums_of(part: slice, log_probs_C: Tensor, entropy_C: Tensor) -> LossSums:
    """Positive and not linear, so that nothing cancels out; the entropies have a gradient as well."""
    loss = (log_probs_C * log_probs_C.detach().cos().add(1.5)).sum().neg() + 0.3 * (entropy_C * entropy_C.detach().cos()).sum()
    return LossSums(loss, {"entropy": entropy_C.sum()})


def loss_of(hidden_PH: Tensor, head_VH: Tensor, packed: Packed, chunk_tokens: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, log-probs and summed entropy; token-local in chunks, or over all tokens at once (None)."""
    hidden_TH = packed.predicting(hidden_PH)
    local_VH, shard = head_shard(head_VH)
    if chunk_tokens is not None:
        loss, metrics, log_probs_T = token_local_loss(
            hidden_TH, local_VH, packed.targets_T, sums_of, chunk_tokens=chunk_tokens, shard=shard
        )
        return loss, log_probs_T, metrics["entropy"]
    log_probs_T, entropy_T = log_probs_and_entropy(hidden_TH, Head(local_VH, 9, shard), packed.targets_T)
    return sums_of(slice(None), log_probs_T, entropy_T).loss, log_probs_T.detach(), entropy_T.sum()


def relative(ours: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.vector_norm(ours.detach() - expected.detach()) / torch.linalg.vector_norm(expected.detach()))


def gradient_errors(ours: nn.Module, expected: nn.Module, prefix: str = "") -> dict[str, float]:
    """Relative errors of the gradient and of its norm; of a parameter's own, a tenth, as some are small sums of large numbers."""
    reference = {name: parameter.grad for name, parameter in expected.named_parameters()}
    squares, distance, errors = torch.zeros((), dtype=torch.float64), 0.0, {}
    for name, parameter in ours.named_parameters():
        gradient, other = parameter.grad, reference.pop(name.removeprefix(prefix))
        assert isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and isinstance(other, Tensor)
        assert gradient.placements == parameter.placements and gradient.dtype == parameter.dtype == torch.float32, name
        if is_counted(parameter):
            squares += gradient.to_local().double().square().sum()
        errors[name] = 0.1 * relative(gradient.full_tensor(), other)
        distance += (10 * errors[name] * other.norm().item()) ** 2
    assert not reference
    dist.all_reduce(squares)
    size = torch.stack([p.grad.norm() for p in expected.parameters() if p.grad is not None]).norm().item()
    return {**errors, "gradient": distance**0.5 / size, "norm": abs(squares.sqrt().item() / size - 1)}


def compare_model(mesh: DeviceMesh, family: str, *, is_tied: bool) -> dict[str, float]:
    """Errors of losses, log-probs, entropies and summed gradients of a model over all ranks. Nothing differs between ranks."""
    expected_model = make_model(family, is_tied=is_tied)
    model = copy.deepcopy(expected_model)
    shard_model(model, mesh)
    errors, bits = {}, hashlib.sha256()
    for i, packed in enumerate(packed_cases()):
        chunk_tokens = 7 if i % 2 else None
        expected = loss_of(StageOf(expected_model).stage_forward(packed, None), expected_model.lm_head.weight, packed, chunk_tokens)
        ours = loss_of(StageOf(model).stage_forward(packed, None), model.lm_head.weight, packed, chunk_tokens)
        names = ("loss", "log-probs", "entropy")
        errors |= {f"{name} {i}": relative(a, b) for name, a, b in zip(names, ours, expected, strict=True)}
        for tensor in ours:
            bits.update(tensor.detach().numpy().tobytes())
        for loss in (expected[0], ours[0]):
            loss.backward()
    errors |= gradient_errors(model, expected_model)
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, bits.hexdigest())
    return {**errors, "ranks differ": float(len(set(digests)) - 1)}


def compare_models(families: tuple[str, ...], tied: tuple[bool, ...]) -> dict[str, float]:
    """The largest error of each case, and where it is."""
    found = {}
    with world():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        for family, is_tied in itertools.product(families, tied):
            errors = compare_model(mesh, family, is_tied=is_tied)
            worst = max(errors, key=lambda name: errors[name])
            found[f"{family} {is_tied=}: {worst}"] = errors[worst]
    return found


class Root(nn.Module):
    """All that uses parameters, in one module: FSDP2 gathers those that are in no layer for its forward, and keeps them."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, packed: Packed) -> tuple[Tensor, Tensor]:
        return StageOf(self.module).stage_forward(packed, None), self.module.lm_head.weight


def compare_sharded(family: str, is_tied: bool, is_checkpointed: bool) -> dict[str, float]:
    """Errors of FSDP2 over two ranks, tensor parallelism over two; rank = dp_rank * 2 + tp_rank. Each pair has its own tokens."""
    with world():
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "pp", "tp"))
        expected_model = make_model(family, is_tied=is_tied)
        root = _fully_sharded(expected_model, mesh, is_checkpointed=is_checkpointed)
        errors = {}
        for i, packed in enumerate(packed_cases()):
            hidden_PH = StageOf(expected_model).stage_forward(packed, None)
            loss, expected_T, _ = loss_of(hidden_PH, expected_model.lm_head.weight, packed, 7)
            loss.backward()
            if i % 2 == mesh.get_local_rank("dp"):
                ours, log_probs_T, _ = loss_of(*root(packed), packed, 7)
                ours.backward()
                errors[f"log-probs {i}"] = relative(log_probs_T, expected_T)
        errors |= gradient_errors(root, expected_model, "module.")
        for (name, parameter), (_, expected) in zip(root.named_parameters(), expected_model.named_parameters(), strict=True):
            gathered = whole(parameter)
            is_right = dist.get_rank() > 0 if gathered is None else dist.get_rank() == 0 and gathered.equal(expected)
            errors[f"whole {name}"] = 0.0 if is_right else 1.0
        return errors


def compare_bfloat16() -> tuple[float, float]:
    """Of passes in bfloat16 from float32 weights, sharded and in one process: gradients' distance from those in float32."""
    with world():
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "pp", "tp"))
        exact = make_model("qwen3", is_tied=True)
        rounded = copy.deepcopy(exact).bfloat16()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        root = _fully_sharded(exact, mesh, mp_policy=policy)
        for i, packed in enumerate(packed_cases()[:2]):
            for model in (exact, rounded):
                loss_of(StageOf(model).stage_forward(packed, None), model.lm_head.weight, packed, 7)[0].backward()
            if i == mesh.get_local_rank("dp"):
                hidden_PH, head_VH = root(packed)
                assert hidden_PH.dtype == head_VH.dtype == torch.bfloat16
                loss_of(hidden_PH, head_VH, packed, 7)[0].backward()
        gradients = [torch.cat([_full(p.grad).flatten() for p in model.parameters()]) for model in (root, rounded, exact)]
        return relative(gradients[0], gradients[2]), relative(gradients[1].float(), gradients[2])


def _full(gradient: Any) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _fully_sharded(model: Any, mesh: DeviceMesh, *, is_checkpointed: bool = False, **options: Any) -> nn.Module:
    model = copy.deepcopy(model)
    shard_model(model, mesh["tp"])
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    root = Root(model)
    for module in (*model.model.layers, root):
        sharded = fully_shard(module, mesh=mesh["dp"], **options)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    return root


def compare_stages() -> dict[str, float]:
    """Errors of a model in two stages, each over all ranks. What crosses from one to the other is as it is without them."""
    with world():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        expected_model = make_model("qwen3", is_tied=False)
        stages = [copy.deepcopy(expected_model) for _ in range(2)]
        for index, model in enumerate(stages):
            keep_stage(model, index, 2)
            shard_model(model, mesh)
        packed = packed_cases()[0]
        expected_PH = StageOf(expected_model).stage_forward(packed, None)
        crossing_PH = StageOf(stages[0]).stage_forward(packed, None)
        assert type(crossing_PH) is Tensor
        arrived_PH = crossing_PH.detach().requires_grad_()
        hidden_PH = StageOf(stages[1]).stage_forward(packed, arrived_PH)
        assert type(hidden_PH) is Tensor and hidden_PH.shape == expected_PH.shape
        loss_of(expected_PH, expected_model.lm_head.weight, packed, 7)[0].backward()
        loss_of(hidden_PH, stages[1].lm_head.weight, packed, 7)[0].backward()
        crossing_PH.backward(arrived_PH.grad)
        expected = dict(expected_model.named_parameters())
        parts = [(name, p.grad) for model in stages for name, p in model.named_parameters()]
        assert sorted(name for name, _ in parts) == sorted(expected)
        return {name: relative(gradient.full_tensor(), expected[name].grad) for name, gradient in parts}


def sums_over_ranks() -> list[tuple[Any, ...]]:
    """Shapes and dtypes of tensors whose sum, or this rank's rows of it, is not that of the ranks' addends one after the other."""
    wrong: list[tuple[Any, ...]] = []
    with world() as group:
        rank, num_ranks = group.rank(), group.size()
        for shape, dtype in itertools.product(
            [(0, 4), (1,), (2,), (3, 5), (7,), (64, 9), (4099,)], (torch.float32, torch.bfloat16)
        ):
            generator = torch.Generator().manual_seed(0)
            addends = [torch.randn(shape, generator=generator).mul_(10.0**i).to(dtype) for i in range(num_ranks)]
            expected = sum(addends[1:], addends[0])
            own = summed_rows(addends[rank], group)
            all_rows, whole_sum = gathered_rows(own, shape[0], group), summed(addends[rank], group)
            piece = slice(*(begin_of(index, num_ranks, shape[0]) for index in (rank, rank + 1)))
            if not (own.equal(expected[piece]) and all_rows.equal(expected) and whole_sum.equal(expected)):
                wrong.append((shape, dtype))
    return wrong


def bytes_kept(family: str) -> dict[str, float]:
    """What a rank keeps of each parameter, the memory behind it included, over the parameter's size."""
    with world():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        model = make_model(family, is_tied=True)
        shard_model(model, mesh)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        kept = {name: p.to_local().untyped_storage().nbytes() / (4 * p.numel()) for name, p in model.named_parameters()}
        model.requires_grad_(False)
        return kept


def refused_plans() -> list[str]:
    """What is said of a model without a plan, of a matrix without one, and of one in a style that is not known."""
    said = []
    with world():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        model = make_model("qwen3", is_tied=True)
        plan = model.config.base_model_tp_plan
        without = {name: style for name, style in plan.items() if not name.endswith("q_proj")}
        for changed in (None, without, {**plan, "layers.*.mlp.up_proj": "packed_colwise"}):
            model.config.base_model_tp_plan = changed
            try:
                shard_model(model, mesh)
            except UserError as error:
                said.append(str(error))
    return said


class Largest(TorchDispatchMode):
    """The most elements that a tensor made within it has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max(
            [self.elements, *(x.numel() for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, Tensor))]
        )
        return out


def compare_heads(sizes: list[int], dtype: str) -> dict[str, float]:
    """Errors of losses over a head in shards of these sizes. No tensor is larger than it has to be."""
    num_tokens, width, num_rows = 23, 8, sum(sizes)
    generator = torch.Generator().manual_seed(0)
    hidden_TH, head_VH = (torch.randn(n, width, generator=generator).to(getattr(torch, dtype)) for n in (num_tokens, num_rows))
    targets_T = torch.arange(num_tokens) * num_rows // num_tokens
    hidden_TH[3] *= 40  # a softmax of one token: other shards have nothing of it
    errors = {}
    with world() as group:
        rank = dist.get_rank()
        offset = sum(sizes[:rank])
        rows = slice(offset, offset + sizes[rank])
        shard = VocabularyShard(group, offset)
        for chunk_tokens, is_local in itertools.product((1, 7, 100), (True, False)):
            results = []
            for head, where in ((head_VH, None), (head_VH[rows].clone(), shard)):
                leaves = [hidden_TH.clone().requires_grad_(), head.requires_grad_()]
                run = partial(_head_loss, is_local, targets_T, chunk_tokens, where)
                with Largest() as largest:
                    loss, log_probs_T, entropy = run(*leaves)
                    grads = torch.autograd.grad(3 * loss, leaves)
                with torch.no_grad():
                    assert run(*leaves)[1].equal(log_probs_T)
                results.append((loss, log_probs_T, entropy, *grads))
                most = largest.elements
                head.requires_grad_(False)
            (*expected, head_grad), (*ours, own_grad) = results
            case = f"{chunk_tokens} {is_local}"
            names = ("loss", "log-probs", "entropy", "hidden states")
            errors |= {f"{name} {case}": relative(a, b) for name, a, b in zip(names, ours, expected, strict=True)}
            errors[f"head {case}"] = relative(own_grad, head_grad[rows])
            chunk = min(chunk_tokens, num_tokens)
            # oneDNN, where it is taken, multiplies rows that are filled up: of hidden states, and of the gradient of the logits.
            made = filled(chunk) if is_onednns(*leaves) else chunk
            limit = max(made * sizes[rank], sizes[rank] * width, max(num_tokens, made) * width, chunk * 3 * len(sizes))
            assert most <= limit, f"{most} elements were made at once, where {limit} are needed"
    return errors


def _head_loss(
    is_local: bool, targets_T: Tensor, chunk_tokens: int, shard: VocabularyShard | None, hidden_TH: Tensor, head_VH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if is_local:
        loss, metrics, log_probs_T = token_local_loss(
            hidden_TH, head_VH, targets_T, sums_of, chunk_tokens=chunk_tokens, shard=shard
        )
        return loss, log_probs_T, metrics["entropy"]
    log_probs_T, entropy_T = log_probs_and_entropy(hidden_TH, Head(head_VH, chunk_tokens, shard), targets_T)
    return sums_of(slice(None), log_probs_T, entropy_T).loss, log_probs_T.detach(), entropy_T.sum()
