"""`asyncflow quickstart`: the shipped recipe with the shipped model, in any folder."""

from __future__ import annotations

from typing import Annotated

import typer

from asyncflow.cli.shipped import shipped_folder, shipped_model
from asyncflow.cli.train import train


def quickstart(
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, as many as you like.")] = None,
) -> None:
    """Train the shipped model for 40 steps, in about a minute on two cores. The run in runs/quickstart replaces an earlier one."""
    settings = [f"model.path={shipped_model()}", "run.overwrite=true", *(overrides or [])]
    train(shipped_folder() / "quickstart.yaml", settings)
