"""Small models with random weights, for tests and measurements: `python -m asyncflow.engines.train.random_model --help`.

    python -m asyncflow.engines.train.random_model random:qwen2-tiny out/ --texts questions.txt

Writes a folder in Hugging Face format: config.json, generation_config.json, model.safetensors, tokenizer.json and
tokenizer_config.json. Imports neither torch nor transformers, since that would take longer than all the rest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from asyncflow.engines.families import FAMILIES
from asyncflow.types import Array, UserError
from asyncflow.user_file import status_of

END_TOKEN: Final = "<|endoftext|>"
VOCABULARY_SIZE: Final = 2000
_CONTEXT_TOKENS: Final = 4096
_INITIAL_STD: Final = 0.02

# Qwen2's own split: a digit always stands alone, so that 12 is "1", "2" in every context.
_PRE_TOKENS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _RandomModelShape:
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int


SPECS: Final = {
    "random:qwen2-tiny": _RandomModelShape("qwen2", 128, 384, 2, 4, 2),
    "random:qwen2-small": _RandomModelShape("qwen2", 256, 768, 5, 8, 2),
    "random:qwen3-tiny": _RandomModelShape("qwen3", 128, 384, 2, 4, 2),
    "random:llama-tiny": _RandomModelShape("llama", 128, 384, 2, 4, 2),
}
"""Models that can be made. With a full vocabulary they have 0.6 million parameters, and `qwen2-small` 4.3 million."""


def make_random_model(spec: str, out: Path, texts: Iterable[str], seed: int) -> None:
    """Write a model with random weights to the folder `out`; the same arguments give the same bytes.

    The vocabulary, a byte-level BPE of at most 2,000 entries with `<|endoftext|>`, is trained on `texts`.

    Raises `UserError` if `spec` is not one of `SPECS`.
    """
    if spec not in SPECS:
        raise UserError(f"There is no model {spec!r} to make: choose one of {', '.join(SPECS)}.")
    shape = SPECS[spec]
    tokenizer = _train_tokenizer(texts)
    vocabulary_size = tokenizer.get_vocab_size()
    end_id = tokenizer.token_to_id(END_TOKEN)
    out.mkdir(parents=True, exist_ok=True)
    save_file(_random_tensors(shape, vocabulary_size, seed), out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    ending = {"eos_token_id": end_id, "pad_token_id": end_id, "bos_token_id": None}
    files = {
        "config.json": {**_config(shape, vocabulary_size), **ending},
        # Sampling as reinforcement learning does it: from the whole distribution.
        "generation_config.json": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, **ending},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_TOKEN,
            "pad_token": END_TOKEN,
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
            "model_max_length": _CONTEXT_TOKENS,
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # Transformers uses this normalizer for every Qwen2 model, whatever the file contains. So the file contains it, too.
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRE_TOKENS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _config(shape: _RandomModelShape, vocabulary_size: int) -> dict[str, Any]:
    return {
        "architectures": [FAMILIES[shape.model_type].architecture],
        "model_type": shape.model_type,
        "vocab_size": vocabulary_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.hidden_size // shape.num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": _CONTEXT_TOKENS,
        "initializer_range": _INITIAL_STD,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def _random_tensors(shape: _RandomModelShape, vocabulary_size: int, seed: int) -> dict[str, Array]:
    """Weights, float32, by Hugging Face name: matrices normal with `initializer_range`, norms 1, biases 0, as in transformers."""
    rng = np.random.default_rng(seed)
    family, hidden, wide = FAMILIES[shape.model_type], shape.hidden_size, shape.intermediate_size
    head_dim = hidden // shape.num_heads
    heads = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}

    def matrix(num_rows: int, num_columns: int) -> Array:
        return rng.standard_normal((num_rows, num_columns), np.float32) * np.float32(_INITIAL_STD)

    tensors = {"model.embed_tokens.weight": matrix(vocabulary_size, hidden), "model.norm.weight": np.ones(hidden, np.float32)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        for name, num_heads in heads.items():
            size = num_heads * head_dim
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = matrix(size, hidden)
            if family.has_qkv_bias:
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = np.zeros(size, np.float32)
            if family.has_qk_norm and name != "v":
                tensors[f"{prefix}self_attn.{name}_norm.weight"] = np.ones(head_dim, np.float32)
        tensors[f"{prefix}self_attn.o_proj.weight"] = matrix(hidden, hidden)
        tensors[f"{prefix}mlp.gate_proj.weight"] = matrix(wide, hidden)
        tensors[f"{prefix}mlp.up_proj.weight"] = matrix(wide, hidden)
        tensors[f"{prefix}mlp.down_proj.weight"] = matrix(hidden, wide)
        tensors[f"{prefix}input_layernorm.weight"] = np.ones(hidden, np.float32)
        tensors[f"{prefix}post_attention_layernorm.weight"] = np.ones(hidden, np.float32)
    return tensors


def main() -> int:
    """Run the module as a program. Returns the exit code: 0, or 2 after a wrong argument or a file error."""
    parser = argparse.ArgumentParser(prog="python -m asyncflow.engines.train.random_model", description="Make a random model.")
    parser.add_argument("spec", help=", ".join(SPECS))
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--texts", type=Path, required=True, help="UTF-8 file to train the vocabulary on, a text a line")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        with args.texts.open(encoding="utf-8") as lines:
            make_random_model(args.spec, args.out, lines, args.seed)
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return status_of(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
