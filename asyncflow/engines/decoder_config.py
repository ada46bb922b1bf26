"""Fields of a Hugging Face `config.json` that determine the computation, for the families that engines compute by themselves.

Two engines do so: the embedded decoder (families.py: `DECODED`) and Megatron's (`FAMILIES`). If a field could change the
computation in a way that they do not implement, the config is refused, and the error names the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncflow.engines.families import DECODED, Family, head_dim

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
READ = {
    *SIZES,
    *("model_type", "architectures", "layer_types", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias"),
    *("tie_word_embeddings", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
}
# Fields that transformers gives every config, whatever the family. With these values they ask for nothing special.
DEFAULTS: dict[str, Any] = {
    "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
}
# Those that it gave them before version 5, of kinds of models that these are not.
EARLIER_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("torchscript", "use_bfloat16", "tf_legacy_loss", "is_decoder"), False),
    **{"add_cross_attention": False, "tie_encoder_decoder": False, "pruned_heads": {}},
}
# Only these values are implemented. `sliding_window` and `max_window_layers` have no effect while `use_sliding_window` is false.
FIXED = {"use_sliding_window": False, "use_mrope": False, "use_bidirectional_attention": False, **EARLIER_DEFAULTS, **DEFAULTS}
HARMLESS = {
    *("_name_or_path", "_model_name_or_path", "transformers_version", "dtype", "torch_dtype", "initializer_range", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sliding_window", "max_window_layers", "pretraining_tp"),
    *("output_attentions", "output_hidden_states", "return_dict", "_attn_implementation_autoset"),
    *("tokenizer_class", "sep_token_id", "problem_type"),
    # Of generation, which is the run's own; the library wrote them before version 5.
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "num_return_sequences"),
    *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "diversity_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "output_scores", "return_dict_in_generate"),
    *("remove_invalid_values",),
    *(
        "attention_dropout",
        "embd_pdrop",
        "resid_pdrop",
        "original_max_position_embeddings",
    ),  # the last one counts under rope types that are refused
}
LOCAL_LAYERS = {"gemma2": 2, "gemma3_text": 6}
"""Families with windows in some layers: of so many, all but the last, where the config does not name the layers."""
ROPE_SCALING = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes, constants and switches of one decoder, as read from a Hugging Face `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    family: Family
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    rope: Mapping[str, Any]
    rotary_dim: int  # elements of a head that are rotated, the first ones
    rotates: tuple[bool, ...]  # by layer: whether positions count in it
    local_rope: Mapping[str, Any]  # `rope` of the layers whose windows are limited
    is_local: tuple[bool, ...]  # by layer
    max_window: int | None = None  # tokens up to which the model's windows are no limit
    has_late_rounding: bool = False  # norms multiply by their weights in float32
    rotates_in_float32: bool = False  # and rounds after that
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None  # None: 1 / sqrt(head_dim)
    attention_softcap: float | None = None
    logits_scaling: float = 1.0  # logits are divided by it
    logits_softcap: float | None = None

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> DecoderConfig:
        """Make the config from the fields of a `config.json`.

        Raises `ValueError`, which names the first field that is not implemented.
        """
        kind: Any = fields.get("model_type")
        if kind not in DECODED:
            raise ValueError(f"model_type {kind!r} is not one of {', '.join(DECODED)}")
        family = DECODED[kind]
        for name, value in fields.items():
            if name in FIXED and value not in (None, FIXED[name]):
                raise ValueError(f"config field {name} = {value!r} is not implemented (only {FIXED[name]!r})")
            # None is how a config says that a feature is absent.
            if name not in READ | FIXED.keys() | HARMLESS | {*family.fields} and value is not None:
                raise ValueError(f"unknown config field {name} = {value!r}: it could change the computation")
        if fields.get("architectures") not in (None, [family.architecture]):
            raise ValueError(f"config field architectures = {fields['architectures']!r} is not [{family.architecture!r}]")
        sizes: dict[str, Any] = {name: fields.get(name) for name in SIZES}
        if not family.needs_kv_heads or "num_key_value_heads" in fields:
            sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or sizes["num_attention_heads"]
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"config field {name} = {value!r} is not a positive integer")
        is_gemma, activation = kind in LOCAL_LAYERS, "gelu_pytorch_tanh" if family.has_gelu else "silu"
        for name in ("hidden_activation",) if fields.get("hidden_activation") else ("hidden_act",):  # the first one counts
            if fields.get(name) not in (None, activation):
                raise ValueError(f"config field {name} = {fields[name]!r} is not implemented (only {activation!r})")
        is_local = _local_layers(fields)
        has_windows = kind in ("mistral", "phi3") or any(is_local)
        if not (has_windows or is_gemma or kind.startswith("qwen")) and fields.get("sliding_window") is not None:
            raise ValueError(f"config field sliding_window is not implemented for {kind}")
        attention_bias = bool(fields.get("attention_bias"))
        if (attention_bias and not family.has_attention_bias) or (fields.get("mlp_bias") and not family.has_mlp_bias):
            raise ValueError(f"config fields attention_bias and mlp_bias are not those of {kind}")
        global_fields, local_fields = _rope_by_layers(fields) if kind == "gemma3_text" else (fields, fields)
        rope, partial = _rope_fields(global_fields, family.rope_theta)
        if partial != 1.0 and kind != "phi3":
            raise ValueError(f"rope parameter partial_rotary_factor = {partial} is not implemented for {kind}")
        of_family = [name for name in family.fields if name.endswith(("multiplier", "scaling"))]
        multipliers: dict[str, Any] = {name: float(fields.get(name, 1.0)) for name in of_family}
        if family.scales_embedding:
            multipliers["embedding_multiplier"] = sizes["hidden_size"] ** 0.5
        if is_gemma:
            multipliers["attention_multiplier"] = fields.get("query_pre_attn_scalar", 256) ** -0.5
            caps = (50.0, 30.0) if kind == "gemma2" else (None, None)
            multipliers["attention_softcap"] = fields.get("attn_logit_softcapping", caps[0])
            multipliers["logits_softcap"] = fields.get("final_logit_softcapping", caps[1])
        return cls(
            **sizes,
            **multipliers,
            head_dim=head_dim(fields),
            rms_norm_eps=fields.get("rms_norm_eps", family.rms_norm_eps),
            max_position_embeddings=fields.get("max_position_embeddings", 2048),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", family.is_tied)),
            family=family,
            qkv_bias=attention_bias or family.has_qkv_bias,
            output_bias=attention_bias,
            mlp_bias=bool(fields.get("mlp_bias")),
            rope=rope,
            rotary_dim=int(head_dim(fields) * partial),
            rotates=_rotating_layers(fields, sizes["num_hidden_layers"]),
            local_rope=_rope_fields(local_fields, family.rope_theta)[0],
            is_local=is_local,
            max_window=fields.get("sliding_window", None if kind == "phi3" else 4096) if has_windows else None,
            has_late_rounding=kind == "olmo2" or is_gemma,
            rotates_in_float32=kind == "olmo2",
        )


def _local_layers(fields: Mapping[str, Any]) -> tuple[bool, ...]:
    """Whether each layer's window is limited, which of the families here only Gemma's say by layer. Raises `ValueError`."""
    count, every = fields["num_hidden_layers"], LOCAL_LAYERS.get(fields["model_type"])
    given = fields.get("layer_types")
    if every is None or given:
        types = given or ["full_attention"] * count
        if strangers := set(types) - ({"full_attention"} if every is None else {"full_attention", "sliding_attention"}):
            raise ValueError(f"config field layer_types has {', '.join(sorted(strangers))}, which is not implemented here")
        return tuple(each == "sliding_attention" for each in types)
    every = fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern") or every
    return tuple(bool((layer + 1) % every) for layer in range(count))


def _rope_by_layers(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of the rotation in Gemma 3's layers with all of the context, and in those with windows, from either spelling."""
    given, rest = fields.get("rope_parameters") or {}, {name: v for name, v in fields.items() if not name.startswith("rope_")}
    if "full_attention" in given:
        return {**rest, "rope_parameters": given["full_attention"]}, {**rest, "rope_parameters": given["sliding_attention"]}
    local = {**rest, "rope_theta": fields.get("rope_local_base_freq") or 10000.0}
    return {name: value for name, value in fields.items() if name != "rope_local_base_freq"}, local


def _rotating_layers(fields: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Whether each layer rotates queries and keys; some of SmolLM3's do not (`no_rope_layers` has a 1 for those that do)."""
    if fields["model_type"] != "smollm3":
        return (True,) * num_layers
    interval = fields.get("no_rope_layer_interval", 4)
    given = fields.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(given) != num_layers:
        raise ValueError(f"config field no_rope_layers has {len(given)} entries, and the model {num_layers} layers")
    return tuple(map(bool, given))


def _rope_fields(fields: Mapping[str, Any], theta: float) -> tuple[Mapping[str, Any], float]:
    """`rope_theta`, `rope_type` and the scaling's own numbers, from either spelling (`rope_parameters` since transformers 5), and
    the part of a head that is rotated."""
    rope = {"rope_theta": fields.get("rope_theta") or theta, **(fields.get("rope_scaling") or {})}
    rope |= fields.get("rope_parameters") or {}
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if kind not in ROPE_SCALING:
        raise ValueError(f"rope scaling {kind!r} is not one of {', '.join(ROPE_SCALING)}")
    partial = float(rope.pop("partial_rotary_factor", None) or fields.get("partial_rotary_factor") or 1.0)
    expected = {"rope_theta", "rope_type"} | ROPE_SCALING[kind]
    if rope.keys() != expected:
        raise ValueError(f"rope parameters {sorted(rope)} are not {sorted(expected)}, those of {kind!r}")
    return rope, partial


def rope_frequencies(head_dim: int, rope: Mapping[str, Any]) -> Tensor:
    """Rotary frequencies of a head of D = `head_dim` elements, in radians per position: float32 [D / 2].

    `rope`: as in `DecoderConfig`. The type `llama3` is computed as in Llama 3.1's reference code.
    """
    frequency = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope["rope_type"] == "default":
        return frequency
    scaled = frequency / rope["factor"]
    if rope["rope_type"] == "linear":
        return scaled
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * scaled + smooth * frequency
