"""Low-rank adapters (LoRA, arXiv:2106.09685) by name, and in the files of PEFT, which others read and write.

    a linear layer               model.layers.0.self_attn.q_proj
    its adapter, as it travels   model.layers.0.self_attn.q_proj.lora_A.weight [rank, inputs], ....lora_B.weight [outputs, rank]
    in PEFT's files              base_model.model.<the same>, in adapter_model.safetensors beside adapter_config.json

Left out: what makes PEFT compute anything else than y = x W^T + (alpha / r) (x A^T) B^T (DoRA, rank-stabilised scaling, biases,
ranks that differ by layer, layers that are trained whole, bases that are changed as training begins, such as PiSSA's). A file that
asks for it is refused by the name of its field. Without torch, since a run's inputs are checked before anything starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from asyncflow.attestation import ADAPTER_ENDS
from asyncflow.model_folder import read_json, weight_files
from asyncflow.types import Array, LoraSpec, UserError

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
A, B = ADAPTER_ENDS
PREFIX: Final = "base_model.model."
_READ: Final = {"peft_type", "r", "lora_alpha", "target_modules", "base_model_name_or_path", "init_lora_weights"}
# They say where the adapter comes from, or how it was trained, and nothing of what it computes. Those of a way to begin count only
# with that `init_lora_weights`.
_HARMLESS: Final = {
    *("auto_mapping", "inference_mode", "lora_dropout", "peft_version", "revision", "task_type"),
    *("loftq_config", "eva_config", "corda_config", "runtime_config", "lora_ga_config", "megatron_core", "qalora_group_size"),
}  # fmt: skip
_BASE_STAYS: Final = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` with which PEFT leaves the base as it is. With others (pissa, olora, corda, loftq, lora_ga) an
adapter is for a base that was changed as the training began, by PEFT itself or with it."""


def is_lora(name: str) -> bool:
    """Whether a tensor of this name is an adapter's."""
    return name.endswith((A, B))


def linear_of(name: str) -> str:
    """Name of the linear layer that an adapter's tensor belongs to."""
    return name.removesuffix(A).removesuffix(B)


def lora_shapes(linears: Mapping[str, tuple[int, int]], spec: LoraSpec) -> dict[str, tuple[int, int]]:
    """Shapes of an adapter's tensors by name. `linears`: (outputs, inputs) of a model's linear layers by name.

    Raises `UserError` for a target that is no linear layer of the model, and where there is none at all.
    """
    for target in spec.targets:
        if not any(name == target or name.endswith(f".{target}") for name in linears):
            known = sorted({name.rpartition(".")[2] for name in linears})
            raise UserError(f"model.lora.targets: the model has no linear layer {target!r}: its names end in {', '.join(known)}")
    shapes: dict[str, tuple[int, int]] = {}
    for name, (outputs, inputs) in linears.items():
        if spec.has_target(name):
            shapes |= {name + A: (spec.rank, inputs), name + B: (outputs, spec.rank)}
    if not shapes:
        raise UserError("model.lora: the model has no linear layers of the kind that gets an adapter (GPT-2's are another one)")
    return shapes


def check_lora_targets(model: Path, spec: LoraSpec) -> None:
    """Check, by the names of a model's weights, that it has the linear layers that are to get an adapter. Raises `UserError`."""
    linears: dict[str, tuple[int, int]] = {}
    for file in filter(Path.is_file, weight_files(model) if spec.targets else ()):
        with safe_open(file, framework="numpy") as tensors:
            shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        matrices = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) == 2}
        linears |= {name: (shape[0], shape[1]) for name, shape in matrices.items() if "embed" not in name and name != "lm_head"}
    if linears:
        lora_shapes(linears, spec)


def check_lora_files(folder: Path, spec: LoraSpec) -> None:
    """Check that PEFT's files are there, and of an adapter as `spec` has it. Reads no weights. Raises `UserError`."""
    found = spec_in(folder)
    if (found.rank, found.alpha) != (spec.rank, spec.alpha):
        raise UserError(
            f"The adapter at {folder} has rank {found.rank} and alpha {found.alpha:g}: set model.lora.rank={found.rank} "
            f"model.lora.alpha={found.alpha:g}"
        )


def holds_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter in PEFT's format, and not a whole model."""
    return (folder / CONFIG_FILE).is_file()


def spec_in(folder: Path) -> LoraSpec:
    """Rank, alpha and targets in a folder of PEFT's files. Raises `UserError` for what is none, or computes something else."""
    fields = read_json(folder / CONFIG_FILE)
    if not fields or not (folder / WEIGHTS_FILE).is_file():
        raise UserError(f"There is no adapter in PEFT's format at {folder}: it needs {CONFIG_FILE} and {WEIGHTS_FILE}.")
    fields = {"bias": "none", **fields}
    if fields.get("peft_type") != "LORA" or fields.pop("bias") != "none":
        raise UserError(
            f"The adapter at {folder} is no plain LoRA (peft_type LORA, bias none), which is all that is computed here."
        )
    for name, value in fields.items():
        if name not in _READ | _HARMLESS and value not in (None, False, 0, [], {}, ""):
            raise UserError(f"The adapter at {folder} asks for {name} = {value!r}, which is not computed here.")
    if (init := fields.get("init_lora_weights")) not in _BASE_STAYS:
        raise UserError(
            f"The adapter at {folder} has init_lora_weights = {init!r}, with which PEFT changes the base's own weights: it does "
            f"not fit the base as it is. Save it anew by PEFT's save_pretrained with path_initial_model_for_weight_conversion: it "
            f"makes a plain adapter of it where it can (pissa, olora, corda, lora_ga)."
        )
    targets = fields["target_modules"]
    names = tuple(sorted(targets)) if isinstance(targets, list) else ()
    return LoraSpec(int(fields["r"]), float(fields["lora_alpha"]), names)


def write_lora(folder: Path, spec: LoraSpec, base: Path, arrays: Mapping[str, Array]) -> None:
    """Write an adapter's tensors (float32) as PEFT's files. `base`: folder of the model that it is for."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({PREFIX + name: array for name, array in arrays.items()}, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "target_modules": sorted({linear_of(name).rpartition(".")[2] for name in arrays}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n")


def write_published_lora(folder: Path, spec: LoraSpec, base: Path, published: Path) -> None:
    """Write PEFT's files from a safetensors file of an adapter as it travels."""
    write_lora(folder, spec, base, load_file(published))
