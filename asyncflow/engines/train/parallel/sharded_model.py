"""A causal language model that is sharded over the ranks of a layout: what causal_model.py is on one device.

    transformers' model -> this rank's stage (stages.py) -> its part of each matrix (tensor.py) -> of each parameter (fsdp.py)
      (shapes alone, no memory)                                 the model's files (weight_files.py) -> its values --+

A rank reads of the model's files what it keeps, straight to where it keeps it.

A pass computes in `dtype` from parameters that are gathered over data-parallel ranks layer by layer. Every rank of the layout makes
every pass, at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asyncflow.engines.base import TrainEngineOptions
from asyncflow.engines.lora import initial_lora
from asyncflow.engines.train.model.causal_model import compute_buffers, empty_module, frozen_options, recompute_activations
from asyncflow.engines.train.model.log_probs import Head, log_probs_and_entropy
from asyncflow.engines.train.model.lora import LoraSwitch, SharedBase, add_lora, shapes_for
from asyncflow.engines.train.model.packing import Packed
from asyncflow.engines.train.model.products import adopt
from asyncflow.engines.train.model.rank_sums import begin_of
from asyncflow.engines.train.model.weight_files import WeightFiles, part_at
from asyncflow.engines.train.parallel.fsdp import FsdpUnit, local_part, shard_over_data
from asyncflow.engines.train.parallel.ranks import Ranks
from asyncflow.engines.train.parallel.stages import keep_stage
from asyncflow.engines.train.parallel.tensor import head_shard, place, place_lora, shard_model
from asyncflow.types import TensorSpec

# P packed tokens, T response tokens, H hidden elements, V tokens of the vocabulary.


class ShardedModel:
    """Part of a model's weights on this rank, and of the arithmetic that they are used in. Implements `StageModel`."""

    def __init__(
        self, path: Path | str, ranks: Ranks, options: TrainEngineOptions, *, reduce_dtype: torch.dtype | None = None
    ) -> None:
        """Load the model at `path` (Hugging Face format), and keep this rank's part: in float32 what is trained, and in the passes'
        dtype what is not; with `offload` a model that is not trained in host memory.

        `options`: the policy's. `reduce_dtype`: of gradients on their way between ranks; None for a model that is not trained.

        Raises `UserError` if there is no such model, or it cannot be trained here, or not under the layout.
        """
        options = frozen_options(options) if reduce_dtype is None else options
        lora, is_offloaded = options.lora, options.offload and reduce_dtype is None
        self.device, self.dtype = torch.device(options.device), getattr(torch, options.dtype)
        weights_dtype = self.dtype if reduce_dtype is None or lora is not None else torch.float32
        module = empty_module(path, weights_dtype).requires_grad_(reduce_dtype is not None)
        whole = {name: TensorSpec.of(parameter) for name, parameter in module.named_parameters()}
        files = WeightFiles(path)
        sources = _sources(module, files)
        files.check({sources[name]: spec.shape for name, spec in whole.items()})
        shapes = {} if lora is None else shapes_for(module, lora)
        self.specs = {name: TensorSpec(shape, "float32") for name, shape in shapes.items()} or whole
        self._temperature, self._chunk_tokens = options.temperature, options.log_prob_chunk_tokens
        self.hidden_size: int = module.config.hidden_size
        self.stage = keep_stage(module, ranks.pp_rank, ranks.layout.pp)
        if ranks.layout.tp > 1:
            shard_model(module, ranks.mesh["tp"])
        self.lora: LoraSwitch | None = None
        if lora is not None:
            self.lora = add_lora(module, shapes, lora, place_lora if ranks.layout.tp > 1 else None)
            self.stage = replace(self.stage, tied_name=None)  # nothing is to be added up: the matrix is not trained
        adopt(module)
        layers = [layer for layer in module.base_model.layers if next(layer.parameters(), None) is not None]
        if options.activation_checkpointing:
            for layer in layers:
                recompute_activations(layer)
        begins = {name: _begin(parameter, ranks) for name, parameter in module.named_parameters()}
        self.module: Any = module
        """Transformers' model: what this rank has of it."""
        self._root: Any = _PassRoot(module)
        self.units = _units(self._root, layers)
        shard_over_data(
            self._root,
            self.units,
            ranks.mesh["dp"],
            dtype=None if self.dtype == weights_dtype and lora is None else self.dtype,
            reduce_dtype=reduce_dtype or weights_dtype,
            is_offloaded=is_offloaded and self.device.type != "cpu",
        )
        self._make_room("cpu" if is_offloaded else self.device)
        # Each tied weight comes once, under the name that a checkpoint has it by.
        everything: dict[str, nn.Parameter] = dict(module.named_parameters())
        self.parameters = everything if lora is None else {name: p for name, p in everything.items() if name in shapes}
        # The update writes to these, which are FSDP2's own memory: elementwise, and without what a DTensor costs.
        self.parts = {name: nn.Parameter(local_part(p), p.requires_grad) for name, p in self.parameters.items()}
        for name, parameter in everything.items():
            if name not in shapes:
                files.fill(local_part(parameter), sources[name], begins[name])
        if lora is not None:
            first = initial_lora(shapes, lora, options.seed)
            for name, part in self.parts.items():
                local_part(part).copy_(first[name][part_at(begins[name], part.shape)])

    def stage_forward(self, packed: Packed, hidden_PH: Tensor | None) -> Tensor:
        """See `StageModel.stage_forward`."""
        made_PH: Tensor = self._root(packed, hidden_PH)[0]
        return made_PH

    def predicting(self, packed: Packed, hidden_PH: Tensor) -> Tensor:
        """Hidden states [T, H] that predict the response tokens, temperature applied; on the last stage."""
        return packed.predicting(hidden_PH, packed.temperature or self._temperature)

    def head(self) -> Head:
        """Output layer; on the last stage, after its forward."""
        head_VH, shard = head_shard(self.module.get_output_embeddings().weight)
        return Head(head_VH, self._chunk_tokens, shard)

    def log_probs(self, packed: Packed, hidden_PH: Tensor) -> Tensor:
        """Log-probs (float32 [T]) of the response tokens, from the last stage's hidden states; on that stage."""
        if not len(packed.targets_T):
            return hidden_PH.new_empty(0, dtype=torch.float32)
        return log_probs_and_entropy(self.predicting(packed, hidden_PH), self.head(), packed.targets_T, packed.token_counts)[0]

    def nothing(self, hidden_PH: Tensor) -> Tensor:
        """Zero for which every parameter is used; on the last stage."""
        return (hidden_PH.sum() + self.head().weight_VH.sum()) * 0.0

    def let_go(self) -> None:
        """Free what is still gathered after passes without a backward: it will soon be out of date."""
        self._root.reshard()

    @torch.no_grad()
    def move_from(self, policy: ShardedModel) -> None:
        """Take over the policy's weights as they are now."""
        for name, part in self.parts.items():
            part.copy_(policy.parts[name])

    def _make_room(self, device: torch.device | str) -> None:
        """Memory for the parameters' parts, which had none."""
        module = self.module
        heads = [module.get_input_embeddings(), module.get_output_embeddings()]
        is_tied = len({id(getattr(one, "weight", one)) for one in heads}) == 1
        self._root.to_empty(device=device)
        if is_tied:  # each place has been given a parameter of its own
            heads[1].weight = heads[0].weight
        compute_buffers(module, self.device)


class SharedBaseShards(SharedBase):
    """Model that is not trained, over the base of a policy with an adapter: see `SharedBase`. Implements `StageModel`."""

    def __init__(self, policy: ShardedModel, *, has_adapter: bool) -> None:
        assert policy.lora is not None, "the policy has an adapter"
        super().__init__(policy.parts, policy.lora, has_adapter=has_adapter)
        self.dtype, self._policy = policy.dtype, policy

    def stage_forward(self, packed: Packed, hidden_PH: Tensor | None) -> Tensor:
        """See `StageModel.stage_forward`."""
        with self.within():
            return self._policy.stage_forward(packed, hidden_PH)

    def log_probs(self, packed: Packed, hidden_PH: Tensor) -> Tensor:
        """See `ShardedModel.log_probs`. No adapter is on the output layer."""
        return self._policy.log_probs(packed, hidden_PH)

    def let_go(self) -> None:
        """See `ShardedModel.let_go`."""
        self._policy.let_go()

    @contextmanager
    def _with_adapter(self) -> Iterator[None]:
        # FSDP2 gathers from the memory of the policy's own alone. Nobody else reads that: ranks gather a version between passes.
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, own in self.parameters.items():
            part = self._parts[name].detach()
            held = part.clone()
            part.copy_(own)
            own.copy_(held)


class _PassRoot(nn.Module):
    """The root that FSDP2 sees: what is called is not transformers' causal model, but its base model, on packed tokens."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, packed: Packed, hidden_PH: Tensor | None) -> Tensor:
        """Compute the stage's hidden states [1, P, H] from the token ids, or from the hidden states [P, H] of the stage before."""
        inputs = {"input_ids": packed.tokens_P[None]} if hidden_PH is None else {"inputs_embeds": hidden_PH[None]}
        outputs = self.module.base_model(
            **inputs, position_ids=packed.positions_P[None], layout=packed.layout, attention_mask=None, use_cache=False
        )
        made_1PH: Tensor = outputs.last_hidden_state
        return made_1PH.clone() if made_1PH._is_view() else made_1PH  # FSDP2's hooks are on it, and views may lose them


def _sources(module: Any, files: Mapping[str, Tensor]) -> dict[str, str]:
    """Name of each parameter in a model's files, which have a tied one by either of its names."""
    named = list(module.named_parameters(remove_duplicate=False))
    tied = [name for name, parameter in named if parameter is module.get_output_embeddings().weight]
    in_files = next((name for name in tied if name in files), tied[0])
    return {name: name for name, _ in named} | dict.fromkeys(tied, in_files)


def _begin(parameter: Tensor, ranks: Ranks) -> tuple[int, ...]:
    """First index of a rank's part in the whole once it is sharded over data-parallel ranks, too, by dimension."""
    first, *others = place(parameter)
    return first + begin_of(ranks.dp_rank, ranks.layout.dp, len(local_part(parameter))), *others


def _units(root: _PassRoot, layers: list[Any]) -> list[FsdpUnit]:
    """Each layer, and the root with what is left: what is trained of them, named as a checkpoint names it."""
    names = {id(parameter): name for name, parameter in root.module.named_parameters()}
    units = [FsdpUnit(layer, {names[id(p)]: p for p in layer.parameters() if p.requires_grad}) for layer in layers]
    known = {name for unit in units for name in unit.shapes}
    left = {name: p for name, p in root.module.named_parameters() if name not in known and p.requires_grad}
    return [*units, FsdpUnit(root, left)]
