"""Tensors of low-rank adapters: their first values, those in PEFT's files, and a model that one is merged into."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncflow.attestation import MODULUS
from asyncflow.bit_sums import sum_over
from asyncflow.engines.lora_files import PREFIX, WEIGHTS_FILE, A, B, check_lora_files, linear_of, spec_in
from asyncflow.model_folder import is_weight, read_json, weight_files
from asyncflow.types import LoraSpec, UserError


def initial_lora(shapes: Mapping[str, tuple[int, ...]], spec: LoraSpec, seed: int) -> dict[str, Tensor]:
    """First tensors of an adapter, float32, by name: those in `spec.path`, or else A as PEFT draws it, from `seed`, and B 0.

    `shapes`: from `lora_shapes`. Every process that calls it has the same. Raises `UserError` where the files do not fit.
    """
    if spec.path is not None:
        tensors = read_lora(Path(spec.path), spec)
        check_lora(tensors, shapes, f"The adapter at {spec.path}")
        return tensors
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        tensors[name] = torch.zeros(shape)
        if name.endswith(A):
            torch.nn.init.kaiming_uniform_(tensors[name], a=math.sqrt(5), generator=generator)
    return tensors


def check_lora(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], what: str) -> None:
    """Check that an adapter is one for the model. `shapes`: of all of its tensors. Raises `UserError`, naming what does not fit."""
    if lacking := sorted(shapes.keys() - tensors.keys()):
        raise UserError(f"{what} lacks {len(lacking)} of {len(shapes)} tensors, {lacking[0]} the first: it is for other targets")
    if unknown := sorted(tensors.keys() - shapes.keys()):
        raise UserError(
            f"{what} has {len(unknown)} tensors that bind to nothing here, {unknown[0]} the first: it is for other targets"
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != tuple(shape):
            raise UserError(f"{what} has {name} of shape {tuple(tensors[name].shape)}, and the model takes {tuple(shape)}")


def read_lora(folder: Path, spec: LoraSpec) -> dict[str, Tensor]:
    """Tensors of an adapter in PEFT's files, float32, by the names that travel. Raises `UserError` if it is not as `spec`."""
    check_lora_files(folder, spec)
    return {name.removeprefix(PREFIX): tensor.float() for name, tensor in load_file(folder / WEIGHTS_FILE).items()}


def merged_lora(base: Path, adapter: Path) -> dict[str, Tensor]:
    """Weights of `base` with the adapter merged into them, W + (alpha / rank) B A, in their dtype.

    Raises `UserError` where one is not there, or the adapter is for another model.
    """
    spec = spec_in(adapter)
    lora = read_lora(adapter, spec)
    tensors = {name: tensor for file in weight_files(base) for name, tensor in load_file(file).items()}
    linears = {linear_of(name) for name in lora}
    if lacking := sorted(name for name in linears if f"{name}.weight" not in tensors):
        raise UserError(f"The adapter at {adapter} is for another model than {base}, which has no {lacking[0]}.")
    for name in sorted(linears):
        weight, low, up = tensors[f"{name}.weight"], lora[name + A], lora[name + B]
        if (up.shape[0], low.shape[1]) != tuple(weight.shape):
            raise UserError(f"The adapter at {adapter} is for another model than {base}, whose {name} is {tuple(weight.shape)}.")
        tensors[f"{name}.weight"] = (weight.float() + (up @ low) * spec.scaling).to(weight.dtype)
    return tensors


def merge_lora(base: Path, adapter: Path, out: Path) -> None:
    """Write what `merged_lora` makes to the folder `out`. Raises `UserError`."""
    tensors = merged_lora(base, adapter)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def sum_of_base(base: Path, dtype: str) -> int:
    """Sum of the bits (asyncflow/attestation.py) of a model's weights, as an engine of this dtype has them."""
    is_tied = bool(read_json(base / "config.json").get("tie_word_embeddings"))
    total = 0
    for file in weight_files(base):
        with safe_open(file, framework="pt") as opened:
            names = filter(is_weight, opened.keys())
            kept = [name for name in names if not (is_tied and name == "lm_head.weight")]
            total += sum_over((opened.get_tensor(name) for name in kept), getattr(torch, dtype))
    return total % MODULUS
