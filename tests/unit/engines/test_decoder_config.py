"""What is read of a config.json, and the fields that are refused."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from asyncflow.engines.decoder_config import DEFAULTS, EARLIER_DEFAULTS, FIXED, HARMLESS, READ, DecoderConfig, rope_frequencies
from asyncflow.engines.families import DECODED

SIZES = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "max_position_embeddings": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def written_whole(kind: str, **fields: Any) -> dict[str, Any]:
    """The config.json of a model of this family with all fields in it, those that have the library's default too."""
    return json.loads(json.dumps(AutoConfig.for_model(kind, **fields).to_dict()))


@pytest.mark.parametrize("kind", DECODED)
def test_what_the_library_takes_for_granted_is_what_is_listed(kind: str) -> None:
    whole = written_whole(kind)
    ours = READ | HARMLESS | (FIXED.keys() - DEFAULTS.keys()) | {*DECODED[kind].fields}
    assert {name: value for name, value in whole.items() if name not in ours and value is not None} == DEFAULTS


@pytest.mark.parametrize("kind", DECODED)
def test_a_config_that_is_written_whole_is_what_it_is_in_short(kind: str) -> None:
    whole = written_whole(kind, **SIZES, **HEADS)
    assert whole["architectures"] is None and whole["chunk_size_feed_forward"] == 0
    short = DecoderConfig.from_fields({"model_type": kind, **SIZES, **HEADS})
    assert DecoderConfig.from_fields(whole) == short
    del whole["architectures"]
    assert DecoderConfig.from_fields(whole) == short
    others = {"max_length": 4096, "temperature": 0.7, "tokenizer_class": "LlamaTokenizer"}
    assert DecoderConfig.from_fields({**whole, **EARLIER_DEFAULTS, **others}) == short
    for name in (*DEFAULTS, *EARLIER_DEFAULTS):
        with pytest.raises(ValueError, match=f"{name} = 3 is not implemented"):
            DecoderConfig.from_fields({**whole, name: 3})


def test_both_spellings_of_rope_and_dtype() -> None:
    new = {"model_type": "llama", **SIZES, **HEADS, "dtype": "float32"}
    old = {"model_type": "llama", **SIZES, **HEADS, "torch_dtype": "float32", "rope_theta": 5e5}
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"} | {"original_max_position_embeddings": 64}
    spelled_new = DecoderConfig.from_fields({**new, "rope_parameters": {**scaling, "rope_theta": 5e5}})
    assert DecoderConfig.from_fields({**old, "rope_scaling": scaling}) == spelled_new
    linear = DecoderConfig.from_fields({**old, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert torch.equal(rope_frequencies(12, linear.rope) * 2, rope_frequencies(12, {"rope_theta": 5e5, "rope_type": "default"}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "gemma"),
        ("attn_logit_softcapping", 30.0),
        ("quantization_config", {"bits": 4}),
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("architectures", ["Qwen3ForSequenceClassification"]),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "attention_factor": 2.0}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("embedding_multiplier", 12.0),
        ("mlp_bias", True),
        ("num_key_value_heads", None),
        ("vocab_size", "many"),
    ],
)
def test_what_could_change_the_computation_is_refused_by_name(field: str, value: object) -> None:
    fields = {"model_type": "qwen3", **SIZES, **HEADS, "sliding_window": 4096, "max_window_layers": 28, "quantization_config": None}
    DecoderConfig.from_fields(fields)
    if field == "num_key_value_heads":
        del fields[field]
    else:
        fields[field] = value
    with pytest.raises(ValueError, match=f"{field}|{'rope'}" if "rope" in field else field):
        DecoderConfig.from_fields(fields)
