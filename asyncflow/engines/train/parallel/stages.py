"""Cuts a model into the stages of a pipeline: consecutive layers, the first with the embedding, the last with norm and head.

    stage 0             stage 1             stage 2
    embedding
    layers 0 1 2        layers 3 4 5        layers 6 7
                                            norm, head          (a tied head: its own copy of the embedding's matrix)

A stage is still transformers' model, under the names that a checkpoint has: where a module lies elsewhere, its place is taken by
one that hands its input on. So a stage's forward is the model's own, from token ids or from the hidden states of the stage before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from torch import Tensor, nn

from asyncflow.engines.families import check_pipeline

EMBEDDING_COST: Final = 0.25
"""Cost of the embedding, as a share of what such a matrix costs in a layer or the head: nothing is multiplied, but a gradient of
its size is filled and added up."""


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Stage of a pipeline, one of `num_stages`, and the layers that it has.

    `tied_name`: on the first and last stage of a model whose head is its embedding, the name there of that matrix, else None.
    """

    index: int
    num_stages: int
    layers: range
    tied_name: str | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage, which has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which has the output layer."""
        return self.index == self.num_stages - 1

    @property
    def copy_name(self) -> str | None:
        """The last stage's copy of a matrix that the first one has: not to be exported, saved, or counted in a norm."""
        return None if self.is_first else self.tied_name


class Elsewhere(nn.Module):
    """Module in the place of one that another stage has: hands its input on."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def keep_stage(module: Any, index: int, num_stages: int) -> PipelineStage:
    """Keep stage `index` of `num_stages` of transformers' causal language model: its other layers are removed, in place.

    Which layers those are follows from the shapes alone, so that policy and frozen models of one configuration are sharded alike.

    Raises `UserError` if there are fewer layers than stages.
    """
    base = module.base_model
    embedding_VH, head_VH = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    layer_costs = [sum(parameter.numel() for parameter in layer.parameters()) for layer in base.layers]
    first_cost, last_cost = int(EMBEDDING_COST * embedding_VH.numel()), head_VH.numel()
    layers = share_out(layer_costs, num_stages, first_cost=first_cost, last_cost=last_cost)[index]
    for number in set(range(len(base.layers))) - set(layers):
        base.layers[number] = Elsewhere()
    if index > 0:
        module.set_input_embeddings(Elsewhere())
    if index < num_stages - 1:
        base.norm = Elsewhere()
        module.set_output_embeddings(Elsewhere())
    is_tied = num_stages > 1 and head_VH is embedding_VH
    shared = (name for name, parameter in module.named_parameters() if is_tied and parameter is head_VH)
    return PipelineStage(index, num_stages, layers, next(shared, None))


def share_out(layer_costs: Sequence[int], num_stages: int, *, first_cost: int, last_cost: int) -> list[range]:
    """Consecutive layers for each stage, at least one: the most costly stage as cheap as can be, the others even.

    `first_cost` and `last_cost` are what the first and the last stage have besides. Where cuts are worth the same, the later stages
    have more: the earlier ones keep the activations of more micro-batches.

    Raises `UserError` if there are fewer layers than stages.
    """
    num_layers = len(layer_costs)
    check_pipeline(num_layers, num_stages)

    @cache
    def best(stage: int, begin: int) -> tuple[int, int, tuple[int, ...]]:
        """Highest cost, sum of squares and ends of the stages from `stage` on, which have the layers from `begin` on."""
        besides = first_cost * (stage == 0) + last_cost * (stage == num_stages - 1)
        if stage == num_stages - 1:
            cost = besides + sum(layer_costs[begin:])
            return cost, cost**2, (num_layers,)
        cuts = []
        for end in range(begin + 1, num_layers - (num_stages - stage) + 2):
            cost = besides + sum(layer_costs[begin:end])
            highest, squares, ends = best(stage + 1, end)
            cuts.append((max(cost, highest), squares + cost**2, (end, *ends)))
        return min(cuts)

    ends = best(0, 0)[2]
    return [range(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]
