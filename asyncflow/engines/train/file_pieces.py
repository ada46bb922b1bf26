"""Pieces that a model's files have of the module's tensors: `python -m asyncflow.engines.train.file_pieces FOLDER` prints them.

    config.json --> transformers' modules on the meta device --their rows, cut as for files--> {name in files: [tensor, row, rows]}

A process of its own for rollout workers, which do without transformers. The module has all experts of a layer in one tensor, say,
and the files have each expert's matrices. What files have under the module's own names is left out, and so is what is no range of
rows.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

RowRange = tuple[str, int, int]
"""Name of the module's tensor, its first row that belongs to the piece, and how many do. Rows are along the last dimension; those
of a vector are its elements."""


def file_pieces(folder: Path) -> dict[str, RowRange]:
    """Pieces by their names in files; none of a model that transformers does not have, whose versions come as its files do."""
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            module = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, OSError):
        return {}
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
    print(json.dumps(file_pieces(parser.parse_args().folder)))


if __name__ == "__main__":
    main()
