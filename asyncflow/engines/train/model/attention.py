"""Attention over packed rows: each row attends causally to itself alone, at its own length.

There is no mask of any size: the rows' lengths travel as an extra argument (`row_lengths`) through the model's forward, and each
row is one causal call. Transformers builds no mask for an implementation that it does not know, and would infer packing from
position ids only for its own; so what protects a row from its neighbours is this file, and it refuses to run without lengths.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig

from asyncflow.types import UserError

# P tokens of all rows, H query heads, K key and value heads, D elements per head.

ATTENTION_NAME: Final = "asyncflow_packed"

MODEL_TYPES: Final = ("qwen2", "qwen3", "llama")
"""Architectures whose forward is known to hand extra arguments on to every attention call and to do nothing else across rows."""

# These change the rotary frequencies with the longest position in the call: a row's log-probs would depend on its neighbours.
_LENGTH_DEPENDENT_ROPE: Final = ("dynamic", "longrope")


def check_packable(config: PretrainedConfig) -> None:
    """Raises `UserError` for a model that packed attention is not known to compute exactly."""
    if config.model_type not in MODEL_TYPES:
        raise UserError(
            f"The trainer cannot train a model of type {config.model_type!r}: choose one of type {', '.join(MODEL_TYPES)}."
        )
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        raise UserError(f"The trainer has no sliding-window attention, which this {config.model_type} asks for: choose another.")
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        raise UserError(f"The trainer cannot pack rows under the rope type {rope_type!r} that this model asks for: choose another.")


def packed_attention(
    module: nn.Module,
    query_1HPD: Tensor,
    key_1KPD: Tensor,
    value_1KPD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    row_lengths: tuple[int, ...] | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: the output [1, P, H, D] and no weights.

    Raises:
        ValueError: lengths are missing or do not add up to P, or something is asked for that packed rows do not have.
    """
    if row_lengths is None or sum(row_lengths) != query_1HPD.shape[2] or query_1HPD.shape[0] != 1:
        raise ValueError(f"row_lengths {row_lengths} do not make up the packed tokens {tuple(query_1HPD.shape)}")
    if attention_mask is not None or dropout or sliding_window is not None:
        raise ValueError("packed attention has no mask, no dropout and no sliding window")
    has_shared_heads = query_1HPD.shape[1] != key_1KPD.shape[1]
    parts = zip(*(x.split_with_sizes(row_lengths, dim=2) for x in (query_1HPD, key_1KPD, value_1KPD)), strict=True)
    outputs = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=has_shared_heads).transpose(1, 2)
        for q, k, v in parts
    ]
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(ATTENTION_NAME, packed_attention)
