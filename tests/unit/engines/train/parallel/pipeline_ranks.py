"""What test_pipeline.py has its processes do. Each compares its own stage with the whole model, computed by itself."""

from __future__ import annotations

import copy
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from asyncflow.engines.base import RANKS_STORE, MicroBatchResult
from asyncflow.engines.train.model.attention import ATTENTION_NAME
from asyncflow.engines.train.model.log_probs import Head, log_probs_and_entropy
from asyncflow.engines.train.model.packing import Packed, pack, pack_inert
from asyncflow.engines.train.parallel.pipeline import Pipeline
from asyncflow.engines.train.parallel.stages import PipelineStage, keep_stage
from asyncflow.types import Ragged
from tests.unit.engines.train.parallel.processes import end_itself

# P packed tokens, T response tokens, H hidden elements, V tokens of the vocabulary.

HIDDEN_SIZE = 32
NUM_LAYERS = 5


@dataclass
class StageOf:
    """Implements `StageModel` over transformers' model, whole or cut."""

    module: Any

    @property
    def dtype(self) -> torch.dtype:
        """See `StageModel.dtype`."""
        return self.module.dtype

    def stage_forward(self, packed: Packed, hidden_PH: Tensor | None) -> Tensor:
        """See `StageModel.stage_forward`."""
        inputs = {"input_ids": packed.tokens_P[None]} if hidden_PH is None else {"inputs_embeds": hidden_PH[None]}
        outputs = self.module.base_model(
            **inputs, position_ids=packed.positions_P[None], layout=packed.layout, attention_mask=None, use_cache=False
        )
        return outputs.last_hidden_state[0]


def make_model(family: str, is_tied: bool, dtype: torch.dtype = torch.float32) -> Any:
    """The same random weights in every process; biases and norms are not what they begin as."""
    sizes = {"hidden_size": HIDDEN_SIZE, "intermediate_size": 48, "num_hidden_layers": NUM_LAYERS, "vocab_size": 101, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": is_tied}
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **sizes, **heads), attn_implementation=ATTENTION_NAME, dtype=torch.float32
    ).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.1)
    return model.to(dtype)


def make_packed(num_micro_batches: int, *, is_shared: bool, seed: int = 0, inert: tuple[int, ...] = ()) -> list[Packed]:
    """Ragged lengths; those whose numbers are in `inert` are empty."""
    rng = np.random.default_rng(seed)
    packed = []
    for i in range(num_micro_batches):
        prompt_ids = rng.integers(0, 101, rng.integers(1, 20))
        responses = [rng.integers(0, 101, n) for n in rng.integers(1, 30, rng.integers(1, 5))]
        full = pack(prompt_ids, Ragged.from_arrays(responses, "int64"), is_shared=is_shared)
        packed.append(pack_inert(1 + i) if i in inert else full)
    return packed


def loss_of(packed: Packed, hidden_PH: Tensor, head_VH: Tensor) -> Tensor:
    """A weighted sum of log-probs; of an empty micro-batch, times 0."""
    if not packed.response_lengths:
        return (hidden_PH.sum() + head_VH.sum()) * 0.0
    log_probs_T, _ = log_probs_and_entropy(packed.predicting(hidden_PH), Head(head_VH, 16), packed.targets_T)
    return (log_probs_T * torch.linspace(-1.0, 1.5, len(log_probs_T))).sum()


@contextmanager
def world() -> Iterator[dist.ProcessGroup]:
    """The group of all ranks."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ[RANKS_STORE], rank=rank, world_size=size)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


def whole_turn(whole: Any, packed: Sequence[Packed]) -> list[float]:
    """The losses of the model in one piece, whose gradients are added to `p.grad`."""
    losses = []
    for one in packed:
        loss = loss_of(one, StageOf(whole).stage_forward(one, None), whole.lm_head.weight)
        loss.backward()
        losses.append(loss.item())
    return losses


def staged_turn(pipeline: Pipeline, part: Any, packed: Sequence[Packed]) -> list[float]:
    """The same of a stage's part; the losses are there on every stage."""
    results: list[MicroBatchResult] = []
    passes: list[int] = []

    def loss(i: int, hidden_PH: Tensor) -> Tensor:
        assert pipeline.stage.is_last
        loss = loss_of(packed[i], hidden_PH, part.lm_head.weight)
        results.append(MicroBatchResult(loss.item(), 1, 2, {"a/max": float("nan")}))
        return loss

    pipeline.forward_backward(StageOf(part), packed, loss, before_backward=passes.append, after_backward=passes.append)
    assert passes == [i for i in range(len(packed)) for _ in range(2)]
    return [result.loss_sum for result in pipeline.results_from_last(results)]


def largest_error(stage: PipelineStage, gradients: dict[str, Tensor | None], whole: Any) -> float:
    """Relative, each parameter on its own: a norm's gradient would be lost beside an embedding's."""
    expected = dict(whole.named_parameters())
    errors = [0.0]
    for name, gradient in gradients.items():
        other = expected["model.embed_tokens.weight" if name == stage.copy_name else name].grad
        assert (gradient is None) == (other is None), name
        if gradient is not None and other is not None:
            size, distance = torch.linalg.vector_norm(other).item(), torch.linalg.vector_norm(gradient - other).item()
            errors.append(distance / size if distance else 0.0)
    return max(errors)


@dataclass
class Both:
    """A model in one piece, and this process's stage of it."""

    whole: Any
    part: Any
    pipeline: Pipeline

    def errors(self, packed: Sequence[Packed]) -> tuple[float, float]:
        """Relative: of a round's losses, and of the stage's gradients."""
        stage, parameters = self.pipeline.stage, dict(self.part.named_parameters())
        for module in (self.whole, self.part):
            module.zero_grad()
        expected, losses = whole_turn(self.whole, packed), staged_turn(self.pipeline, self.part, packed)
        if stage.tied_name is not None and (gradient := parameters[stage.tied_name].grad) is not None:
            self.pipeline.add_tied_(gradient)

        # The same passes without gradient, and the way back of what the last stage has.
        def outcome(i: int, hidden_PH: Tensor) -> Tensor:
            assert not hidden_PH.requires_grad
            return loss_of(packed[i], hidden_PH, self.part.lm_head.weight)

        again = self.pipeline.forward(StageOf(self.part), packed, outcome)
        assert len(again) == (len(packed) if stage.is_last else 0)
        assert self.pipeline.log_probs_from_last(torch.stack(again) if again else None, len(packed)).tolist() == losses
        scale = max(map(abs, expected), default=0.0) or 1.0
        loss_error = max((abs(a - b) / scale for a, b in zip(losses, expected, strict=True)), default=0.0)
        return loss_error, largest_error(stage, {name: parameter.grad for name, parameter in parameters.items()}, self.whole)


def both_of(group: dist.ProcessGroup, family: str, is_tied: bool, dtype: torch.dtype = torch.float32) -> Both:
    whole = make_model(family, is_tied, dtype)
    part = copy.deepcopy(whole)
    stage = keep_stage(part, dist.get_rank(group), dist.get_world_size(group))
    return Both(whole, part, Pipeline(group, stage, hidden_size=HIDDEN_SIZE, device="cpu", timeout_seconds=60))


def compare(families: tuple[str, ...], numbers: tuple[int, ...]) -> dict[str, tuple[float, float]]:
    """Errors of this stage by case, one stage on each rank; `numbers` of micro-batches."""
    found = {}
    with world() as group:
        for family, is_tied in itertools.product(families, (True, False)):
            both = both_of(group, family, is_tied)
            for is_shared, number in itertools.product((True, False), numbers):
                case = f"{family} {is_tied=} {is_shared=} {number=}"
                found[case] = both.errors(make_packed(number, is_shared=is_shared))
            for inert in ((0,), (1, 2), (0, 1, 2)) if is_tied else ():
                found[f"{family} {inert=}"] = both.errors(make_packed(3, is_shared=True, inert=inert))
        # The order of addition is that of one process, and so are the bits, but for a tied matrix.
        narrow = both_of(group, families[0], False, torch.bfloat16)
        found["bfloat16"] = narrow.errors(make_packed(3, is_shared=True))
    return found


def compare_sharded() -> list[float]:
    """Two stages, each sharded over two ranks by FSDP2; rank = dp_rank * 2 + pp_rank. The second group has a micro-batch less."""
    with world():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        whole = make_model("qwen3", is_tied=False)
        part = copy.deepcopy(whole)
        stage = keep_stage(part, mesh.get_local_rank("pp"), 2)
        for module in [*(part.model.layers[i] for i in stage.layers), part.model]:
            sharded = fully_shard(module, mesh=mesh["dp"])
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        pipeline = Pipeline(mesh.get_group("pp"), stage, hidden_size=HIDDEN_SIZE, device="cpu", timeout_seconds=60)
        groups = [make_packed(4, is_shared=True, seed=1), make_packed(4, is_shared=True, seed=2, inert=(3,))]
        expected = [whole_turn(whole, packed) for packed in groups]
        losses = staged_turn(pipeline, part, groups[mesh.get_local_rank("dp")])
        gradients = {}
        for name, parameter in part.named_parameters():
            if name == "lm_head.weight":  # not sharded here
                dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
            gradients[name] = parameter.grad if name == "lm_head.weight" else parameter.grad.full_tensor()
        error = largest_error(stage, gradients, whole)
        own = expected[mesh.get_local_rank("dp")]
        return [error, *(abs(a - b) / max(map(abs, own)) for a, b in zip(losses, own, strict=True))]


def tied_updates() -> list[list[int]]:
    """Three updates of a tied model's two copies; the bits of this stage's."""
    with world() as group:
        part = make_model("qwen2", is_tied=True)
        stage = keep_stage(part, dist.get_rank(group), dist.get_world_size(group))
        pipeline = Pipeline(group, stage, hidden_size=HIDDEN_SIZE, device="cpu", timeout_seconds=60)
        optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
        bits = []
        for step in range(3):
            staged_turn(pipeline, part, make_packed(3, is_shared=True, seed=step))
            if stage.tied_name is not None:
                tied = part.get_parameter(stage.tied_name)
                assert tied.grad is not None
                pipeline.add_tied_(tied.grad)
            optimizer.step()
            optimizer.zero_grad()
            if stage.tied_name is not None:
                bits = part.get_parameter(stage.tied_name).detach().view(torch.int32).tolist()
        return bits


@dataclass
class OneLayer:
    """Implements `StageModel` by a matrix; what it does for micro-batch 2 is `fault`."""

    weight: Tensor
    fault: Callable[[Tensor], Tensor]
    dtype: torch.dtype = torch.float32

    def stage_forward(self, packed: Packed, hidden_PH: Tensor | None) -> Tensor:
        """See `StageModel.stage_forward`."""
        made_PH = (torch.ones(packed.num_tokens, len(self.weight)) if hidden_PH is None else hidden_PH) @ self.weight
        return self.fault(made_PH) if packed.num_tokens == FAULTY_TOKENS else made_PH


FAULTY_TOKENS = 7


def faulty(fault: str, faulty_stage: int) -> float:
    """A round in which a stage has a fault at its third micro-batch; the seconds that it took."""
    faults: dict[str, Callable[[Tensor], Tensor]] = {"error": fail, "death": die, "silence": sleep, "shape": lambda t: t[1:]}
    begun = time.monotonic()
    with world() as group:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        pipeline = Pipeline(group, PipelineStage(rank, size, range(rank, rank + 1)), hidden_size=4, device="cpu", timeout_seconds=2)
        model = OneLayer(torch.eye(4, requires_grad=True), faults.get(fault, torch.clone) if rank == faulty_stage else torch.clone)
        packed = [pack_inert(n) for n in (3, 1, FAULTY_TOKENS, 2)]
        loss_factor = float("nan") if fault == "nan" and rank == faulty_stage else 1.0
        pipeline.forward_backward(model, packed, lambda i, hidden_PH: hidden_PH.sum() * (loss_factor if i == 2 else 1.0))
        if fault == "nan":
            assert model.weight.grad is not None and model.weight.grad.isnan().all()
    return time.monotonic() - begun


def fail(made_PH: Tensor) -> Tensor:
    """An error of the model's."""
    raise ValueError("planted")


def die(made_PH: Tensor) -> Tensor:
    """Without a word."""
    end_itself()
    return made_PH


def sleep(made_PH: Tensor) -> Tensor:
    """For longer than others wait: the meaning is a time, twice theirs."""
    time.sleep(4)
    return made_PH
