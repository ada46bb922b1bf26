"""Shapes of an adapter's tensors: `python -m asyncflow.engines.train.adapter_shapes FOLDER RANK [TARGET...]` prints them as JSON.

    config.json --> transformers' modules on the meta device --> {name: shape}

A process of its own for rollout workers, which do without transformers, and have to know what a trainer will send. Names of weights
in the files do not tell: experts may be apart there and one tensor in the module, and other matrices are no linear layers.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncflow.engines.train.model.lora import shapes_for
from asyncflow.types import LoraSpec, UserError
from asyncflow.user_file import status_of


def adapter_shapes(folder: Path, spec: LoraSpec) -> dict[str, tuple[int, int]]:
    """Shapes by name. Raises `UserError` if transformers has no causal language model there, or that gets no such adapter."""
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            module = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"transformers has no causal language model for {folder}: {str(error).splitlines()[0]}") from error
    return shapes_for(module, spec)


def main() -> int:
    """Run the module as a program. Returns the exit code: 0, or 2 where there are no such shapes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("rank", type=int)
    parser.add_argument("targets", nargs="*")
    given = parser.parse_args()
    try:
        print(json.dumps(adapter_shapes(given.folder, LoraSpec(given.rank, 1.0, tuple(given.targets)))))
    except UserError as error:
        print(error, file=sys.stderr)
        return status_of(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
