"""The synchronous schedule in one half of a run's steps, the periodic one in the other half, in turn.

A machine may be a third slower than it was a minute ago: here, what is compared happened within seconds. Under neither schedule is
one step generated or trained beside another, and what follows a commit is the same in both, so a step is as it would be in a run of
its own schedule.
"""

from __future__ import annotations

from typing import Literal

from asyncflow.control.modes import Synchronous
from asyncflow.control.schedule import Progress

Mode = Literal["synchronous", "periodic"]


class EveryOther(Synchronous):
    """Steps are synchronous and periodic in turn."""

    def __init__(self, *, first: Mode) -> None:
        """`first`: the mode of step 0."""
        self._first = first

    def may_start(self, task: str, step: int, progress: Progress) -> bool:
        return mode_of(step, self._first) == "periodic" or super().may_start(task, step, progress)


def mode_of(step: int, first: Mode) -> Mode:
    """Of a step, where step 0 is in the `first` mode."""
    return first if step % 2 == 0 else other(first)


def other(mode: Mode) -> Mode:
    return "periodic" if mode == "synchronous" else "synchronous"
