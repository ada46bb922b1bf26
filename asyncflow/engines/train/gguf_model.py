"""A GGUF file's model as a folder in Hugging Face format, dequantised: `python -m asyncflow.engines.train.gguf_model FILE FOLDER`.

transformers reads the file (it needs the packages `gguf` and `accelerate`), with every weight in float32, so no value is rounded
again. Only families that it knows from GGUF can be read.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncflow.types import UserError
from asyncflow.user_file import status_of


def convert(file: Path, folder: Path) -> None:
    """Write weights, config, tokenizer and end tokens of `file` to `folder`. Raises `UserError` when it cannot be read."""
    try:  # transformers imports them, and would say so in another way
        importlib.import_module("gguf")
        importlib.import_module("accelerate")
    except ImportError as error:
        raise UserError(f"{file} is a GGUF file, and {error.name} is not installed: pip install 'asyncflow-rl[gguf]'") from error
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except (ValueError, NotImplementedError, OSError, KeyError) as error:
        raise UserError(f"transformers cannot read {file} as a causal language model: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    # A parameter that is tied to another one is written once, under the first name.
    tensors = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    del config.quantization_config  # of the file's blocks, which are gone
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ends = [tokenizer.eos_token_id] if config.eos_token_id is None else config.eos_token_id
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    try:
        convert(arguments.file, arguments.folder)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(status_of(error))
