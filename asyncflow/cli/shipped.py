"""Recipe and model that come with the package."""

from __future__ import annotations

from pathlib import Path

from asyncflow.types import RunError


def shipped_folder() -> Path:
    """Folder of the shipped recipes: `asyncflow/recipes` in an installed wheel, `recipes` in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "recipes", package.parent / "recipes"):
        if (folder / "quickstart.yaml").is_file():
            return folder
    raise RunError(f"there is no recipe in {package / 'recipes'}: install AsyncFlow again")


def shipped_model() -> Path:
    """Folder of the model of 0.44M parameters, in Hugging Face format."""
    return shipped_folder() / "models" / "tiny-arithmetic"
