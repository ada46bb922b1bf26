"""A low-rank adapter merged into its base, as a model's folder in Hugging Face format: a program of its own, and what a verb calls.

python -m asyncflow.run.models.merged_model BASE ADAPTER FOLDER --> FOLDER: config, weights, tokenizer
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from asyncflow.run.models.model_files import copy_tokenizer
from asyncflow.types import UserError
from asyncflow.user_file import status_of


def write_merged(base: Path, adapter: Path, folder: Path) -> None:
    """Write W + (alpha / rank) B A in the place of each target's weight W: a whole model, which needs no adapter any more. Raises
    `UserError`."""
    from asyncflow.engines.lora import merge_lora

    merge_lora(base, adapter, folder)
    shutil.copyfile(base / "config.json", folder / "config.json")
    copy_tokenizer(base, folder)


def main() -> int:
    """Run the module as a program."""
    parser = argparse.ArgumentParser(
        prog="python -m asyncflow.run.models.merged_model", description="Merge a low-rank adapter into its base."
    )
    for name in ("base", "adapter", "folder"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    try:
        write_merged(arguments.base, arguments.adapter, arguments.folder)
    except UserError as error:
        print(error, file=sys.stderr)
        return status_of(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
