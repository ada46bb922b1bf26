"""Rows of a run's metrics by step: the newest in memory, all in `metrics.jsonl`, since a run may have any number of steps."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from pathlib import Path
from typing import Any, Final

from asyncflow.run.state.resume import metrics_of

NEWEST: Final = 256
"""Rows in memory."""


class StepRows(Mapping[int, Mapping[str, float]]):
    """Rows of a run whose steps come in order, each after its line has been written to the file. Rows before the newest are read
    from there, all in one reading."""

    def __init__(self, run_dir: Path, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """`rows`: those that the file has already."""
        self._run_dir = run_dir
        self._steps = array("q")
        self._newest: dict[int, Mapping[str, float]] = {}
        for row in rows:
            self[row["step"]] = row

    def __setitem__(self, step: int, row: Mapping[str, float]) -> None:
        if self._steps and step <= self._steps[-1]:
            raise ValueError(f"step {step} has come after step {self._steps[-1]}")
        self._steps.append(step)
        self._newest[step] = row
        if len(self._newest) > NEWEST:
            del self._newest[next(iter(self._newest))]

    def __getitem__(self, step: int) -> Mapping[str, float]:
        if step in self._newest:
            return self._newest[step]
        if step not in self:
            raise KeyError(step)
        return self._all()[step]

    def __contains__(self, step: object) -> bool:
        if not isinstance(step, int):
            return False
        place = bisect_left(self._steps, step)
        return place < len(self._steps) and self._steps[place] == step

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def items(self) -> ItemsView[int, Mapping[str, float]]:
        """Steps with their rows."""
        return self._all().items()

    def values(self) -> ValuesView[Mapping[str, float]]:
        """Rows in the order of their steps."""
        return self._all().values()

    def since(self, first: int) -> dict[int, Mapping[str, float]]:
        """Rows of the steps from this one on."""
        rows = self._newest if first >= next(iter(self._newest), 0) else self._all()
        return {step: row for step, row in rows.items() if step >= first}

    def _all(self) -> dict[int, Mapping[str, float]]:
        if len(self._newest) == len(self._steps):
            return dict(self._newest)
        before = next(iter(self._newest))
        return {row["step"]: row for row in metrics_of(self._run_dir) if row["step"] < before} | self._newest
