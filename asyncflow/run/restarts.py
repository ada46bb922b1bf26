"""Restarts of a run from its newest checkpoint, after deaths of workers that are not started again by themselves."""

from __future__ import annotations

from asyncflow.cluster.base import restart_pause


class Restarts:
    """Number of a run's restarts, and how many more may follow.

    Restarts in vain are those in a row between which no step was committed that never was before: `most` of these may be, and each
    has a longer pause before it.
    """

    def __init__(self, most: int) -> None:
        self.num = 0
        self._most, self._num_in_vain, self._furthest = most, 0, 0

    def reached(self, first: int, committed: int) -> None:
        """Take note that an attempt from step `first` on has committed the steps before `committed`."""
        if committed > max(self._furthest, first):
            self._num_in_vain, self._furthest = 0, committed

    @property
    def are_left(self) -> bool:
        """Whether another one may follow."""
        return self._num_in_vain < self._most

    @property
    def pause(self) -> float:
        """Seconds before the next one."""
        return restart_pause(self._num_in_vain)

    def begin(self) -> None:
        """Take note of one more."""
        self.num += 1
        self._num_in_vain += 1
