"""`asyncflow report`: make a run's report and trace again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncflow.run_dir import CONFIG_FILE
from asyncflow.types import UserError


def report(run: Annotated[Path, typer.Argument(help="A run's folder, such as runs/quickstart.")]) -> None:
    """Write report.html and trace.json of a run anew."""
    from asyncflow.telemetry.report import write_report
    from asyncflow.telemetry.trace import write_trace

    if not (run / CONFIG_FILE).is_file():
        raise UserError(f"{run} is no run's folder: it has no {CONFIG_FILE}")
    print(write_trace(run))
    print(write_report(run))
