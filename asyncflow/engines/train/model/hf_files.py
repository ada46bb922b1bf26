"""Writing of a model in Hugging Face format, from tensors that come one at a time, without the model's module."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig


def write_model(path: Path, source: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write config, generation config (those of the model at `source`) and weights to the folder `path`.

    `tensors`: (Hugging Face name, tensor on any device), tied ones once, all of one dtype, which is written to the config. All
    tensors are kept in host memory until the last one has come.
    """
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
    config = AutoConfig.from_pretrained(source)
    config.dtype = next((tensor.dtype for tensor in held.values()), torch.float32)
    path.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(path)
    if (source / "generation_config.json").is_file():
        GenerationConfig.from_pretrained(source).save_pretrained(path)
    save_file(held, path / "model.safetensors", metadata={"format": "pt"})
