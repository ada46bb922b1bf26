"""What a model's folder in Hugging Face format says, for whoever may not import transformers, or torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncflow.types import UserError


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no file. Raises `UserError` if it is not JSON."""
    if not file.is_file():
        return {}
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from error
    return tree if isinstance(tree, dict) else {}


def end_token_ids(folder: Path) -> list[int]:
    """The ids that end a response, from `generation_config.json`, else `config.json`."""
    for name in ("generation_config.json", "config.json"):
        found = read_json(folder / name).get("eos_token_id")
        if found is not None and found != []:
            return list(found) if isinstance(found, list) else [int(found)]
    return []


def weight_files(folder: Path) -> list[Path]:
    """Where the weights are, as transformers looks for them: in `model.safetensors`, or else in the shards that an index names."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file() or not index.is_file():
        return [whole]
    return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
