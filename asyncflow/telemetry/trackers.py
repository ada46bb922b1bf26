"""Trackers of the steps' metrics: a JSON Lines file, TensorBoard, Weights & Biases.

jsonl        <run>/metrics.jsonl   exactly one line per step, the file that the report reads
tensorboard  <run>/tensorboard/    event files
wandb        <run>/wandb/          and its server, unless WANDB_MODE says offline or disabled
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from asyncflow.run_dir import METRICS_FILE
from asyncflow.telemetry.tensorboard import TensorBoardTracker
from asyncflow.types import UserError

OWN_TRACKER: Final = "jsonl"
"""The tracker that every run has: its report and `--resume` read the file."""
TENSORBOARD_FOLDER: Final = "tensorboard"
WANDB_PROJECT: Final = "asyncflow"


class Tracker(Protocol):
    """Receives the row of every step. Steps ascend, but for a resumed run, which starts again at its checkpoint."""

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Record the row of one step. The files hold it when this returns, whatever happens to this process next."""

    def close(self) -> None:
        """Finish. Nothing may be logged after it."""


class JsonlTracker:
    """Tracker that writes a line `{"step": ..., <name>: <number>, ...}` per step; a number that is not finite becomes null.

    A resumed run goes on in the file, which has been cut back to the steps before its checkpoint (`run/state/resume.py`).
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._file.write(msgspec.json.encode({"step": step, **row}) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """See `Tracker.close`."""
        self._file.close()


class WandbTracker:
    """A Weights & Biases run. Its own environment variables (WANDB_MODE, WANDB_PROJECT, WANDB_API_KEY) hold."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], run_name: str) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise UserError("The tracker 'wandb' needs the wandb package: pip install asyncflow-rl[wandb].") from error
        project = os.environ.get("WANDB_PROJECT", WANDB_PROJECT)
        self._run = wandb.init(project=project, name=run_name, dir=str(run_dir), config=dict(config))

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        """See `Tracker.close`."""
        self._run.finish()


def make_trackers(names: Sequence[str], run_dir: Path, config: Mapping[str, Any], run_name: str) -> dict[str, Tracker]:
    """The trackers named (`jsonl`, `tensorboard`, `wandb`), by name, in that order; a name given twice counts once.

    `config` is the resolved configuration, for W&B's page. A `UserError` for an unknown name or a missing package.
    """
    makers: dict[str, Callable[[], Tracker]] = {
        OWN_TRACKER: lambda: JsonlTracker(run_dir / METRICS_FILE),
        "tensorboard": lambda: TensorBoardTracker(run_dir / TENSORBOARD_FOLDER),
        "wandb": lambda: WandbTracker(run_dir, config, run_name),
    }
    for name in names:
        if name not in makers:
            raise UserError(f"There is no tracker {name!r}; choose from {', '.join(makers)}.")
    run_dir.mkdir(parents=True, exist_ok=True)
    return {name: makers[name]() for name in dict.fromkeys(names)}
