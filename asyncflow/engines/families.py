"""Model families that the engines can compute. Without torch, since a run's inputs are checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncflow.types import Layout, UserError


@dataclass(frozen=True, slots=True)
class Family:
    """Family of models: Hugging Face's class name, and what its attention has beyond Llama's (biases, norms)."""

    architecture: str
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    head_dim: int | None = None  # used if the config.json has none; None: hidden size / number of heads


FAMILIES: Final[Mapping[str, Family]] = {
    "qwen2": Family("Qwen2ForCausalLM", has_qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", has_qk_norm=True, head_dim=128),
    "llama": Family("LlamaForCausalLM"),
}
"""Supported families by `model_type`.

Their forward pass is known to hand extra arguments on to every attention call, and to do nothing else across rows.
"""

# These change the rotary frequencies with the longest position in the call: a row's log-probs would depend on its neighbours.
_LENGTH_DEPENDENT_ROPE: Final = ("dynamic", "longrope")


def head_dim(fields: Mapping[str, Any]) -> int:
    """Width of an attention head, in elements. `fields`: a model's `config.json`, of any family."""
    family = FAMILIES.get(fields.get("model_type", ""))
    return fields.get("head_dim") or (family and family.head_dim) or fields["hidden_size"] // fields["num_attention_heads"]


def check_family(fields: Mapping[str, Any]) -> None:
    """Check that packed attention computes a model exactly. `fields`: its `config.json`.

    Raises `UserError` for an unknown family, for sliding-window attention, and for a rope type that depends on the length.
    """
    kind = fields.get("model_type")
    if kind not in FAMILIES:
        raise UserError(f"The trainer cannot train a model of type {kind!r}: choose one of type {', '.join(FAMILIES)}.")
    if set(fields.get("layer_types") or ["full_attention"]) != {"full_attention"} or fields.get("use_sliding_window"):
        raise UserError(f"The trainer has no sliding-window attention, which this {kind} asks for: choose another.")
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        raise UserError(f"The trainer cannot pack rows under the rope type {rope_type!r} that this model asks for: choose another.")


def check_tensor_parallel(fields: Mapping[str, Any], num_ranks: int) -> None:
    """Check that a model's matrices can be sharded over `num_ranks` ranks. `fields`: its `config.json`. Raises `UserError`."""
    num_heads, vocabulary_size = fields["num_attention_heads"], fields["vocab_size"]
    num_kv_heads, width = fields.get("num_key_value_heads") or num_heads, fields["intermediate_size"]
    most = math.gcd(num_heads, num_kv_heads, width)

    def is_possible(parts: int) -> bool:
        # Every rank has a row of the vocabulary.
        return not most % parts and -(-vocabulary_size // parts) * (parts - 1) < vocabulary_size

    if not is_possible(num_ranks):
        possible = [str(parts) for parts in range(1, most + 1) if is_possible(parts)]
        raise UserError(
            f"plan.train.tp is {num_ranks}, but the model's {num_heads} attention heads, {num_kv_heads} key and value heads, "
            f"{width} columns of the MLP and {vocabulary_size} tokens are cut by {', '.join(possible)} alone: set it to that."
        )


def check_pipeline(num_layers: int, num_stages: int) -> None:
    """Check that a pipeline has no more stages than the model has layers. Raises `UserError`."""
    if num_layers < num_stages:
        raise UserError(f"plan.train.pp is {num_stages}, but the model has {num_layers} layers: set it to {num_layers} at most.")


def check_layout(fields: Mapping[str, Any], layout: Layout) -> None:
    """Check that a model can be sharded as the layout asks. `fields`: its `config.json`. Raises `UserError`."""
    check_tensor_parallel(fields, layout.tp)
    check_pipeline(fields["num_hidden_layers"], layout.pp)
