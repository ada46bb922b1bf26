"""Facts of a model's folder in Hugging Face format, for processes that must not import transformers or torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from xxhash import xxh3_128

from asyncflow.types import UserError

_CAUSAL: Final = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of classes that transformers makes for a causal language model."""
_SAMPLE_BYTES: Final = 64 << 10
_COMPUTED: Final = tuple(f"rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached"))


RowRange = tuple[str, int, int]
"""Name of a tensor, its first row that belongs to a piece of it, and how many do. Rows are along the last dimension; those of a
vector are its elements."""


class FileTensors(msgspec.Struct, frozen=True):
    """Tensors in a model's files that no version of the trainer's has by these names. `pieces` of a version's tensors. `constants`:
    the module's buffers, which nothing trains. `unused`: the module has none of them, nor has a server: layers for other ways to
    generate."""

    pieces: dict[str, RowRange] = {}
    constants: list[str] = []
    unused: list[str] = []


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one where there is no file. Raises `UserError` if the file is not JSON."""
    if not file.is_file():
        return {}
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from error
    return tree if isinstance(tree, dict) else {}


def why_not_causal(fields: Mapping[str, Any]) -> str:
    """Class of the model whose `config.json` has these fields, if that is none of a causal language model; empty if it is one."""
    architectures = fields.get("architectures") or []  # none: the architecture follows from model_type
    return "" if not architectures or any(str(name).endswith(_CAUSAL) for name in architectures) else str(architectures[0])


def holds_language_model(fields: Mapping[str, Any]) -> bool:
    """Whether the model whose `config.json` has these fields is none, but has one as a part, and takes images or sounds, too."""
    return bool(why_not_causal(fields)) and isinstance(fields.get("text_config"), dict)


def end_token_ids(folder: Path) -> list[int]:
    """Ids of the tokens that end a response, from `generation_config.json`, else from `config.json`."""
    for name in ("generation_config.json", "config.json"):
        found = read_json(folder / name).get("eos_token_id")
        if found is not None and found != []:
            return list(found) if isinstance(found, list) else [int(found)]
    return []


def weight_files(folder: Path) -> list[Path]:
    """Files of the weights, looked for as transformers does: `model.safetensors`, or else the shards that an index names."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file() or not index.is_file():
        return [whole]
    return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def is_weight(name: str) -> bool:
    """Whether a tensor of a model's files is one of its weights. Older files of Llama's kind also hold rotary frequencies, which
    follow from `config.json`; transformers leaves them out, too."""
    return not name.endswith(_COMPUTED)


def sample_hash(folder: Path) -> str:
    """Hash of names, sizes, beginnings and ends of a model's files (xxh3_128, hex): another one for another model, in the time that
    it takes to open them."""
    digest = xxh3_128()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read())
    return digest.hexdigest()
