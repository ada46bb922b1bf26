"""The language model within a model of several modalities: `python -m asyncflow.engines.train.text_model FROM TO`.

    FROM: Gemma3ForConditionalGeneration, Qwen3_5ForConditionalGeneration, ... --> TO: Gemma3ForCausalLM, Qwen3_5ForCausalLM, ...

Its `text_config` becomes the config, its weights keep their values and dtype, and the tokenizer's files are copied. So it is a
causal language model as any other, for all that reads it. Parts for images and sounds stay where they are.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from asyncflow.model_folder import read_json
from asyncflow.types import UserError
from asyncflow.user_file import status_of

_TAKEN: Final = ("*.json", "*.jinja", "*.txt", "*.model")
_NOT_TAKEN: Final = ("config.json", "*.index.json", "*processor*")
_GENERATION: Final = "generation_config.json"


def extract(source: Path, folder: Path, *, has_weights: bool = True) -> None:
    """Write the language model of `source` to `folder`; without `has_weights` only its config and tokenizer. Raises `UserError`
    where there is none that transformers knows by itself."""
    try:
        config = AutoConfig.from_pretrained(source)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config.get_text_config())
        if has_weights:
            model = _with_weights(model, source)
    except (ValueError, KeyError, AttributeError, OSError, ImportError) as error:
        raise UserError(f"transformers has no causal language model for {source}: {_first_line(error)}") from error
    folder.mkdir(parents=True, exist_ok=True)
    if has_weights:
        model.save_pretrained(folder)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    (folder / _GENERATION).unlink(missing_ok=True)  # made of the config's defaults
    for file in sorted(found for pattern in _TAKEN for found in source.glob(pattern)):
        if not any(file.match(pattern) for pattern in _NOT_TAKEN):
            shutil.copyfile(file, folder / file.name)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _with_weights(model: Any, source: Path) -> Any:
    """The language model, which is given without memory, with the weights of the whole one."""
    name = str((read_json(source / "config.json").get("architectures") or [""])[0])
    whole = getattr(transformers, name).from_pretrained(source, dtype="auto")
    if (inner := next((module for module in whole.modules() if type(module) is type(model)), None)) is not None:
        return inner
    decoder, head = whole.get_decoder(), whole.get_output_embeddings()
    place = next((place for place, child in model.named_children() if type(child) is type(decoder)), None)
    if place is None or head is None:
        raise ValueError(f"what generates in a {name} is no {type(model).__name__}")
    setattr(model, place, decoder)
    model.set_output_embeddings(head)
    model.config.tie_word_embeddings = head.weight is decoder.get_input_embeddings().weight  # it may stand beside text_config
    model.config.dtype = head.weight.dtype
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--facts", action="store_true", help="no weights")
    arguments = parser.parse_args()
    try:
        extract(arguments.source, arguments.folder, has_weights=not arguments.facts)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(status_of(error))
