"""The periodic schedule in one half of a run's steps, the synchronous one in the other half, in turn.

Neither lets anything of two steps overlap, so a step is as it would be in a run of its own schedule, and what is compared happened
within seconds: a machine's speed may change by a third within minutes.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncflow.workflows.schedule import Progress
from asyncflow.workflows.synchronous import Synchronous

MODES = ("synchronous", "periodic")


class EveryOther(Synchronous):
    """`first` is the mode of step 0."""

    def __init__(self, *, first: str) -> None:
        self._first = first

    def may_start(self, task: str, step: int, progress: Progress) -> bool:
        is_periodic = step in steps_of("periodic", self._first, [step])
        return is_periodic or super().may_start(task, step, progress)


def steps_of(mode: str, first: str, steps: Iterable[int]) -> list[int]:
    """Those of the steps that are in this mode, where step 0 is in the `first`."""
    return [step for step in steps if (step % 2 == 0) == (mode == first)]
