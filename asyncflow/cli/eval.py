"""`asyncflow eval`: the accuracy of a model on held-out problems."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from asyncflow.cli.display import Display
from asyncflow.config import Config, parse
from asyncflow.settings import apply_override, read_yaml
from asyncflow.types import UserError


def evaluate(
    model: Annotated[str, typer.Argument(help="A model's folder in Hugging Face format, such as runs/quickstart/model.")],
    data: Annotated[str, typer.Argument(help="A JSONL file, or generated:arithmetic.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value of a run's configuration.")] = None,
    config: Annotated[Path | None, typer.Option(help="Take everything else from this run's YAML file.")] = None,
) -> None:
    """Accuracy on held-out problems, greedy and sampled."""
    with tempfile.TemporaryDirectory(prefix="asyncflow-eval-") as scratch:
        resolved = _config(model, data, overrides or [], config, scratch)
        raise typer.Exit(0 if asyncio.run(_evaluate(resolved)) else 130)


def _config(model: str, data: str, overrides: list[str], config: Path | None, scratch: str) -> Config:
    """A run of no steps: the first evaluation is all of it."""
    tree: dict[str, Any] = read_yaml(config) if config is not None else {}
    tree |= {"model": {**tree.get("model", {}), "path": model}, "data": {**tree.get("data", {}), "path": data}}
    tree["eval"] = {**tree.get("eval", {}), "path": data}
    tree["run"] = {**tree.get("run", {}), "name": "eval", "dir": scratch}
    tree["telemetry"] = {"trackers": []}
    for override in overrides:
        if override.split("=")[0] in ("run.name", "run.dir", "model.path", "data.path", "eval.path"):
            raise UserError(f"{override!r} is given by the command's own arguments")
        apply_override(tree, override)
    return parse(tree)


async def _evaluate(config: Config) -> bool:
    from asyncflow.job import Job, run_with_signals

    with Display("eval", 1) as display:
        job = Job(config, display, evaluate_only=True)
        return await run_with_signals(job, job.run())
