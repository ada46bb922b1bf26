"""Origin of each of Megatron's weights in a Hugging Face checkpoint, and how tensor parallelism shards it.

Megatron                         Hugging Face                sharded over tensor-parallel ranks
embedding.word_embeddings        model.embed_tokens          rows, of a vocabulary filled up to equal shards
output_layer                     lm_head, or the embedding   the same
...linear_qkv                    q_proj, k_proj, v_proj      key heads, each with its queries: [q q k v] [q q k v] ...
...linear_proj, mlp.linear_fc2   o_proj, down_proj           columns
mlp.linear_fc1                   gate_proj, up_proj          rows of each, the rank's gate above its up
norms                            norms                       not at all
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncflow.engines.decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of one of Megatron's weights: the Hugging Face names of its tensors, and the way it is sharded."""

    names: tuple[str, ...]
    cut: Literal["whole", "rows", "columns", "vocabulary", "heads"]
    num_key_heads: int = 1  # of the whole model
    head_dim: int = 1
    vocab_size: int = 1

    def shard(self, tensors: Sequence[Tensor], rank: int, num_ranks: int) -> Tensor:
        """Part of the whole `tensors` (in the order of `names`) that tensor-parallel rank `rank` of `num_ranks` holds."""
        if self.cut == "whole":
            return tensors[0]
        if self.cut == "columns":
            return tensors[0].chunk(num_ranks, dim=1)[rank]
        if self.cut == "vocabulary":
            rows = padded_vocabulary(self.vocab_size, num_ranks) // num_ranks
            own = tensors[0][rank * rows : (rank + 1) * rows]
            return torch.cat([own, own.new_zeros(rows - len(own), *own.shape[1:])])
        if self.cut == "rows":
            return torch.cat([tensor.chunk(num_ranks)[rank] for tensor in tensors])
        heads = [tensor.reshape(self.num_key_heads, -1, *tensor.shape[1:]) for tensor in tensors]
        return torch.cat(heads, dim=1).chunk(num_ranks)[rank].flatten(0, 1)

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Whole tensors, in the order of `names`, from the shards of all ranks. The inverse of `shard`."""
        if self.cut == "whole":
            return [shards[0]]
        if self.cut == "columns":
            return [torch.cat(list(shards), dim=1)]
        if self.cut == "vocabulary":
            return [torch.cat(list(shards))[: self.vocab_size]]
        if self.cut == "rows":
            parts = [shard.chunk(len(self.names)) for shard in shards]
            return [torch.cat([part[i] for part in parts]) for i in range(len(self.names))]
        heads = torch.cat([shard.reshape(self.num_key_heads // len(shards), -1, *shard.shape[1:]) for shard in shards])
        sizes = [heads.shape[1] - 2 * self.head_dim, self.head_dim, self.head_dim]
        return [part.flatten(0, 1) for part in torch.split(heads, sizes, dim=1)]


def padded_vocabulary(vocab_size: int, num_ranks: int) -> int:
    """Number of rows of the embedding after it is filled up to equal shards for `num_ranks` ranks."""
    return -(-vocab_size // num_ranks) * num_ranks


def embedding(config: DecoderConfig) -> Origin:
    """Origin of the embedding; also that of the output layer, if the two are tied."""
    return Origin(("model.embed_tokens.weight",), "vocabulary", vocab_size=config.vocab_size)


def origins(config: DecoderConfig, layers: range, *, is_first: bool, is_last: bool) -> dict[str, Origin]:
    """Origins of the weights of a pipeline stage with these `layers` of the model, by Megatron's names.

    The first stage has the embedding, the last one the output layer. A last stage that is not the first has a separate output
    layer, even if it is tied to the embedding.
    """
    weights: dict[str, Origin] = {}
    if is_first:
        weights["embedding.word_embeddings.weight"] = embedding(config)
    for own, layer in enumerate(layers):
        weights |= {f"decoder.layers.{own}.{name}": origin for name, origin in _layer(config, f"model.layers.{layer}.").items()}
    if is_last:
        weights["decoder.final_layernorm.weight"] = Origin(("model.norm.weight",), "whole")
        if not config.tie_word_embeddings:
            weights["output_layer.weight"] = Origin(("lm_head.weight",), "vocabulary", vocab_size=config.vocab_size)
        elif not is_first:
            weights["output_layer.weight"] = embedding(config)
    return weights


def _layer(config: DecoderConfig, prefix: str) -> dict[str, Origin]:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."

    def heads(kind: str) -> Origin:
        names = tuple(f"{attention}{matrix}_proj.{kind}" for matrix in "qkv")
        return Origin(names, "heads", num_key_heads=config.num_key_value_heads, head_dim=config.head_dim)

    weights = {
        "input_layernorm.weight": Origin((f"{prefix}input_layernorm.weight",), "whole"),
        "self_attention.linear_qkv.weight": heads("weight"),
        "self_attention.linear_proj.weight": Origin((f"{attention}o_proj.weight",), "columns"),
        "pre_mlp_layernorm.weight": Origin((f"{prefix}post_attention_layernorm.weight",), "whole"),
        "mlp.linear_fc1.weight": Origin((f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"), "rows"),
        "mlp.linear_fc2.weight": Origin((f"{mlp}down_proj.weight",), "columns"),
    }
    if config.qkv_bias:
        weights["self_attention.linear_qkv.bias"] = heads("bias")
    if config.family.has_qk_norm:
        for kind in "qk":
            weights[f"self_attention.{kind}_layernorm.weight"] = Origin((f"{attention}{kind}_norm.weight",), "whole")
    return weights


def stage_origins(config: DecoderConfig, num_stages: int) -> list[dict[str, Origin]]:
    """Origins of each stage's weights, by Megatron's names: one mapping for each stage."""
    each = config.num_hidden_layers // num_stages
    stages = range(num_stages)
    return [origins(config, range(i * each, (i + 1) * each), is_first=i == 0, is_last=i == num_stages - 1) for i in stages]
