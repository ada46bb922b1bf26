"""`asyncflow init`: a new project with a recipe, a reward, data and a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Final

import typer

from asyncflow.cli.quickstart import shipped_model
from asyncflow.types import UserError

TEMPLATES: Final = Path(__file__).with_name("project")
"""The project's files; `.txt` is left out of a name, which keeps these ones from being modules of the package."""
NUM_EXAMPLES: Final = 2000
NUM_HELD_OUT: Final = 200


def init(folder: Annotated[Path, typer.Argument(help="The project's folder, which is made.")]) -> None:
    """Make a project: a recipe, a reward and its test, data, and a small model, all of which run as they are."""
    from asyncflow.data.arithmetic import as_examples

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already: give the project a folder that is not, or an empty one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder {folder} cannot be made: {error.strerror}; name another one") from error
    for template in TEMPLATES.iterdir():
        shutil.copyfile(template, folder / template.name.removesuffix(".txt"))
    shutil.copytree(shipped_model(), folder / "model")
    for name, rows in {
        "train.jsonl": as_examples(0, "train", NUM_EXAMPLES),
        "heldout.jsonl": as_examples(0, "heldout", NUM_HELD_OUT),
    }.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{folder} has a recipe, a reward and its test, data and a model. Next:")
    print(f"  cd {folder}")
    print("  asyncflow train recipe.yaml        # then change recipe.yaml, reward.py, train.jsonl, model/ to yours")
    print("  python -m pytest test_reward.py    # needs pytest")
