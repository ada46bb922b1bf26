"""`asyncflow merge`: a low-rank adapter merged into its base, as a model's folder in Hugging Face format."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from asyncflow.engines.lora_files import CONFIG_FILE
from asyncflow.model_folder import read_json
from asyncflow.run_dir import RunDir
from asyncflow.types import UserError


def merge(
    adapter: Annotated[Path, typer.Argument(help="A run's folder, or one of PEFT's files, such as runs/lora/model.")],
    out: Annotated[Path, typer.Argument(help="The folder that the merged model is written to; it must not be there yet.")],
    base: Annotated[
        str | None,
        typer.Option(help="The model that the adapter is for, a folder or a name on the Hub. None: what its configuration names."),
    ] = None,
) -> None:
    """Write W + (alpha / rank) B A in the place of each target's weight W: a whole model, which needs no adapter any more."""
    folder = RunDir(adapter).model if RunDir(adapter).is_run() else adapter
    fields = read_json(folder / CONFIG_FILE)
    if not fields:
        raise UserError(f"{folder} holds no low-rank adapter: it has no {CONFIG_FILE}")
    if out.exists():
        raise UserError(f"{out} is there already: give another folder")

    from asyncflow.run.models.merged_model import write_merged
    from asyncflow.run.models.model_source import folder_of

    name, revision = str(fields.get("base_model_name_or_path")), fields.get("revision")
    named = f"{name}@{revision}" if revision and not Path(name).exists() else name
    with TemporaryDirectory(prefix="asyncflow-model-") as scratch:
        model = asyncio.run(folder_of(base or named, Path(scratch), print))
        if not (model / "config.json").is_file():
            raise UserError(f"The adapter's base {base or named} is no model's folder here: give it by --base.")
        write_merged(model, folder, out)
    print(out)
