"""Which models the engines compute. No torch: a run's inputs are checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from asyncflow.types import UserError

MODEL_TYPES: Final = ("qwen2", "qwen3", "llama")
"""Architectures whose forward is known to hand extra arguments on to every attention call and to do nothing else across rows."""

# These change the rotary frequencies with the longest position in the call: a row's log-probs would depend on its neighbours.
_LENGTH_DEPENDENT_ROPE: Final = ("dynamic", "longrope")


def check_family(fields: Mapping[str, Any]) -> None:
    """Raises `UserError` for a model that packed attention is not known to compute exactly. `fields`: of its `config.json`."""
    kind = fields.get("model_type")
    if kind not in MODEL_TYPES:
        raise UserError(f"The trainer cannot train a model of type {kind!r}: choose one of type {', '.join(MODEL_TYPES)}.")
    if set(fields.get("layer_types") or ["full_attention"]) != {"full_attention"} or fields.get("use_sliding_window"):
        raise UserError(f"The trainer has no sliding-window attention, which this {kind} asks for: choose another.")
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        raise UserError(f"The trainer cannot pack rows under the rope type {rope_type!r} that this model asks for: choose another.")
