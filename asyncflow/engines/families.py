"""Model families that the engines can compute. Without torch, since a run's inputs are checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncflow.types import Layout, UserError


@dataclass(frozen=True, slots=True)
class Family:
    """Family of models: Hugging Face's class name, what it has beyond Llama, and what its config.json may leave out."""

    architecture: str
    has_qkv_bias: bool = False
    has_qk_norm: bool = False  # of each head
    head_dim: int | None = None  # used if the config.json has none; None: hidden size / number of heads
    has_whole_qk_norm: bool = False  # of all query heads together, and of all key heads
    norms: str = "before"  # where attention and MLP are normed: `before`, `behind` or `both`
    norm_offset: float = 0.0  # which norms add to their weights
    has_gelu: bool = False  # in the MLP, by the tanh; else SiLU
    scales_embedding: bool = False  # by the square root of the hidden size, rounded to the weights' dtype
    is_fused: bool = False  # q, k and v are one matrix, gate and up another
    has_attention_bias: bool = True  # if its config.json says so
    has_mlp_bias: bool = False  # likewise
    needs_kv_heads: bool = False  # its config.json must name their number
    fields: tuple[str, ...] = ()  # of its config.json, which those of others do not have
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    is_tied: bool = False


FAMILIES: Final[Mapping[str, Family]] = {
    "qwen2": Family("Qwen2ForCausalLM", has_qkv_bias=True, has_attention_bias=False, needs_kv_heads=True),
    "qwen3": Family("Qwen3ForCausalLM", has_qk_norm=True, head_dim=128, needs_kv_heads=True),
    "llama": Family("LlamaForCausalLM", has_mlp_bias=True),
}
"""Families by `model_type` that train on several devices, whichever train engine shards them."""

_GEMMA: Final[Mapping[str, Any]] = {
    "norms": "both", "norm_offset": 1.0, "has_gelu": True, "scales_embedding": True, "needs_kv_heads": True, "is_tied": True
}  # fmt: skip
_GEMMA_FIELDS: Final = (
    *("hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "cache_implementation"),
    *("sliding_window_pattern", "_sliding_window_pattern", "use_bidirectional_attention"),
)

DECODED: Final[Mapping[str, Family]] = {
    **FAMILIES,
    "gemma2": Family("Gemma2ForCausalLM", head_dim=256, fields=_GEMMA_FIELDS, **_GEMMA),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        has_qk_norm=True,
        head_dim=256,
        fields=(*_GEMMA_FIELDS, "rope_local_base_freq"),
        rope_theta=1e6,
        **_GEMMA,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        has_mlp_bias=True,
        fields=("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    ),
    "mistral": Family("MistralForCausalLM", has_attention_bias=False, needs_kv_heads=True),
    "olmo2": Family("Olmo2ForCausalLM", has_whole_qk_norm=True, norms="behind", rms_norm_eps=1e-5),
    "phi3": Family("Phi3ForCausalLM", has_attention_bias=False, is_fused=True, rms_norm_eps=1e-5),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        has_mlp_bias=True,
        needs_kv_heads=True,
        fields=("no_rope_layers", "no_rope_layer_interval"),
        rope_theta=2000000.0,
        is_tied=True,
    ),
}
"""Families by `model_type` that the embedded decoder generates with."""

PACKED: Final = (
    *FAMILIES,
    *("cohere", "ernie4_5", "gemma", "glm", "granite", "helium", "mistral", "olmo2", "phi3", "seed_oss", "smollm3", "starcoder2"),
)
"""Types of models whose forward pass is known, and tested, to hand extra arguments on to every attention call, and to do nothing
else across tokens."""

# Their windows are on where `sliding_window` is a number, or missing; those of others where `use_sliding_window` says so.
_WINDOW_UNLESS_NONE: Final = ("mistral", "phi3", "starcoder2")

# These change the rotary frequencies with the longest position in the call: a row's log-probs would depend on its neighbours.
_LENGTH_DEPENDENT_ROPES: Final = ("dynamic", "longrope")


_OTHER_NAMES: Final = {
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
}


def with_usual_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A model's `config.json`, with the sizes under the usual names too that GPT-2, Bloom and their like call otherwise."""
    named = {name: fields[own] for name, others in _OTHER_NAMES.items() for own in others if own in fields}
    return named | {name: value for name, value in fields.items() if value is not None or name not in named}


def head_dim(fields: Mapping[str, Any]) -> int:
    """Width of an attention head, in elements. `fields`: a model's `config.json`, of any family."""
    family = DECODED.get(fields.get("model_type", ""))
    return fields.get("head_dim") or (family and family.head_dim) or fields["hidden_size"] // fields["num_attention_heads"]


def why_not_packed(fields: Mapping[str, Any]) -> str:
    """Reason why packed attention does not compute a model exactly, or "" if it does. `fields`: its `config.json`."""
    kind = fields.get("model_type")
    if kind not in PACKED:
        return f"models of type {kind!r} are not known to hand the packed layout through"
    has_windows = fields.get("sliding_window", 0) is not None if kind in _WINDOW_UNLESS_NONE else fields.get("use_sliding_window")
    if set(fields.get("layer_types") or ["full_attention"]) != {"full_attention"} or has_windows:
        return "packed attention has no sliding windows"
    return why_alone(fields)


def why_quantised(fields: Mapping[str, Any]) -> str:
    """Reason why a model's weights are none that can be trained, or replaced by a trainer's, or "". `fields`: its `config.json`."""
    settings = fields.get("quantization_config")
    if not settings:
        return ""
    method = settings.get("quant_method", "by a method without a name")
    return f"its weights are quantised ({method}): take the ones that they were made of, in bfloat16 or float32"


def why_alone(fields: Mapping[str, Any]) -> str:
    """Reason why no two rows of a model may be in one pass, or "" if they may. `fields`: its `config.json`."""
    kind = next(iter(_turning_points(fields)), "")
    return f"under the rope type {kind!r} a row depends on the longest one" if kind else ""


def why_not_generated(fields: Mapping[str, Any], context: int) -> str:
    """Reason why transformers' `generate` gives other log-probs than the trainer, or is given no weights of its, or "". `fields`: a
    model's `config.json`. `context`: tokens of the longest prompt with its response."""
    if why := why_quantised(fields):
        return why
    for kind, positions in _turning_points(fields).items():
        if context > positions:
            return (
                f"under the rope type {kind!r} a row that exceeds {positions} positions has other frequencies from its first token "
                f"on, and what was generated before had not; a context has {context} tokens: set "
                f"model.max_context_tokens={positions}, or fewer"
            )
    return ""


def _turning_points(fields: Mapping[str, Any]) -> dict[str, int]:
    """Positions beyond which all of a row has other rotary frequencies, by the rope type that does so."""
    given, most = fields.get("rope_parameters") or fields.get("rope_scaling") or {}, fields.get("max_position_embeddings") or 0
    found: dict[str, int] = {}
    for rope in [each for each in given.values() if isinstance(each, Mapping)] or [given]:  # by type of layer, or of all layers
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind in _LENGTH_DEPENDENT_ROPES:
            own = fields.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or most
            positions = own if kind == "longrope" else most
            found[kind] = min(positions, found.get(kind, positions))
    return found


def check_weights_kind(fields: Mapping[str, Any]) -> None:
    """Check that a model's weights can be trained at all. `fields`: its `config.json`. Raises `UserError`."""
    if why := why_quantised(fields):
        raise UserError(f"model.path cannot be trained: {why}.")


def check_family(fields: Mapping[str, Any]) -> None:
    """Check that a model can be sharded, by any train engine. `fields`: its `config.json`. Raises `UserError`."""
    check_weights_kind(fields)
    kind = fields.get("model_type")
    why = why_not_packed(fields) if kind in FAMILIES else f"models of type {', '.join(FAMILIES)} alone are sharded"
    if why:
        raise UserError(
            f"The trainer cannot train a model of type {kind!r} so: {why}. Take train.engine=torch on one device (plan.train.dp, "
            f"tp and pp 1), or another model."
        )


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
            f"{width} columns of the MLP and {vocabulary_size} tokens are sharded by {', '.join(possible)} alone: set it to that."
        )


def check_pipeline(num_layers: int, num_stages: int) -> None:
    """Check that a pipeline has no more stages than the model has layers. Raises `UserError`."""
    if num_layers < num_stages:
        raise UserError(f"plan.train.pp is {num_stages}, but the model has {num_layers} layers: set it to {num_layers} at most.")


def check_layout(fields: Mapping[str, Any], layout: Layout) -> None:
    """Check that a model can be sharded as the layout asks. `fields`: its `config.json`. Raises `UserError`."""
    check_tensor_parallel(fields, layout.tp)
    check_pipeline(fields["num_hidden_layers"], layout.pp)
