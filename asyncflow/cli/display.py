"""Display of a run in the terminal: a progress bar with the figures of the last step, or one line a step where there is none; and
the sentence that a user reads about an error."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from asyncflow.loops.evaluation import EvaluationRow
from asyncflow.run.job import Listener
from asyncflow.types import first_error


class Display(Listener):
    """Draws a run on standard output; used as a context manager."""

    def __init__(self, name: str, steps: int, *, is_training: bool = True) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._steps, self._is_training, self._has_explained = steps, is_training, False
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(name, total=steps, figures="starting")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def log(self, text: str) -> None:
        self._console.print(text, markup=False)

    def step(self, step: int, row: Mapping[str, float]) -> None:
        figures = (
            f"reward {row.get('reward/mean', float('nan')):.3f}  TPSPD {row.get('perf/tpspd', 0.0):,.0f}  "
            f"staleness {row.get('staleness/max', 0)}"
        )
        self._progress.update(self._task, completed=step + 1, figures=figures)
        if not self._has_explained:
            self._has_explained = True
            self.log(
                "TPSPD: tokens trained per second per device; staleness: by how many versions a response is older than its step"
            )
        if not self._console.is_terminal:
            self.log(f"step {step + 1}/{self._steps}  {figures}  {row.get('perf/step_seconds', 0.0):.2f} s")

    def evaluation(self, row: EvaluationRow) -> None:
        names = [name for name in row if name.startswith("accuracy/")]
        figures = ", ".join(f"{name.removeprefix('accuracy/')} {row[name]:.3f}" for name in names) or "none"
        unscored = sum(value for name, value in row.items() if name.startswith("unscored/"))
        lost = f", {unscored} responses could not be scored" if unscored else ""
        when = f" after {row['step']} steps" if row["step"] else " before the first step" if self._is_training else ""
        self.log(f"held-out accuracy{when}: {figures} ({row['num_prompts']} prompts{lost})")


def sentence(group: BaseExceptionGroup) -> str:
    """Sentence that tells a user of the first error of a group."""
    error = first_error(group)
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename2 or error.filename or 'a file'}: {error.strerror}"  # of a copy: where it was to go
