"""A model's files beside the module's parameters: `python -m asyncflow.engines.train.file_tensors FOLDER` prints how they differ.

    config.json --> transformers' modules on the meta device --their rows, cut as for files--> FileTensors

A process of its own for rollout workers, which do without transformers. A version of the trainer's has the module's parameters: all
experts of a layer are in one tensor, say, and the files have each expert's matrices. What files have under the module's own names
is left out, and so is what is no range of rows.
"""

from __future__ import annotations

import argparse
import math
import re
import warnings
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from asyncflow.model_folder import FileTensors, RowRange, is_weight, weight_files
from asyncflow.user_file import came_of_shortage


def file_tensors(folder: Path) -> FileTensors:
    """These of a model; none of one that transformers does not have, whose versions come as its files do."""
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            module = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, OSError) as error:
        if came_of_shortage(error):
            raise
        return FileTensors()
    in_files = set[str]()
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            in_files |= {*filter(is_weight, opened.keys())}
    constants = {name for key, buffer in module.named_buffers() for name in revert_weight_conversion(module, {key: buffer})}
    pieces, patterns = _pieces(module), module._keys_to_ignore_on_load_unexpected or []
    left = in_files - constants - pieces.keys() - module.state_dict().keys()
    return FileTensors(
        pieces,
        constants=sorted(in_files & constants),
        unused=sorted(name for name in left if any(re.search(pattern, name) for pattern in patterns)),
    )


def _pieces(module: Any) -> dict[str, RowRange]:
    found: dict[str, RowRange] = {}
    for whole, tensor in module.named_parameters():
        shape = (*tensor.shape[:-1], 1) if tensor.ndim > 1 else tensor.shape
        for name, rows in revert_weight_conversion(module, {whole: torch.arange(math.prod(shape)).view(shape)}).items():
            first = int(rows.flatten()[0])
            if name != whole and rows.shape[-1] == shape[-1] and rows.flatten().equal(torch.arange(first, first + rows.numel())):
                found[name] = whole, first, rows.numel()
    return found


def main() -> None:
    """Run the module as a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(msgspec.json.encode(file_tensors(parser.parse_args().folder)).decode())


if __name__ == "__main__":
    main()
