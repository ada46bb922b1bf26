"""Pace of a run's checkpoints in shared memory: with every step, for a hundredth of the trainer's time, while there is room.

consumes: what each of them costs; the clock, and the room that the machine has
waits for: nothing
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

MAX_SHARE: Final = 0.01
"""Share of the trainer's time that checkpoints in shared memory may take, and share of a run's time that may pass while checkpoints
are written to the disk that are due by the clock."""


class MemoryPace:
    """Pace of the checkpoints in `folder`."""

    def __init__(
        self,
        folder: Path,
        num_bytes: int,
        clock: Callable[[], float],
        log: Callable[[str], None],
        *,
        is_unbounded: bool = False,
    ) -> None:
        """`num_bytes`: of one checkpoint, at most. `is_unbounded`: one is due with every step, however long the trainer waits."""
        self.folder = folder
        self._num_bytes, self._clock, self._log, self._is_unbounded = num_bytes, clock, log, is_unbounded
        self._begun_at = self._next_at = clock()
        self._is_over = False

    def is_due(self) -> bool:
        """Whether a checkpoint in memory is due. None is due any more once there was no room for it beside the one before."""
        if self._is_over or (self._clock() < self._next_at and not self._is_unbounded):
            return False
        # Storing into a page for which there is no memory ends the process, and other files of the run lie in shared memory.
        free = min(shutil.disk_usage(self.folder).free, psutil.virtual_memory().available // 2)
        if free < 2 * self._num_bytes:
            self.end(f"one takes up to {self._num_bytes:,} bytes, two lie there at times, and {free:,} are free")
        return not self._is_over

    def begun(self) -> None:
        """Note that a checkpoint is begun."""
        self._begun_at = self._clock()

    def written(self, held_seconds: float) -> None:
        """Note that the checkpoint is written, for which the trainer has waited so long."""
        self._next_at = self._begun_at + held_seconds / MAX_SHARE

    def end(self, why: str) -> None:
        """End the checkpoints in memory: no more are due, in this attempt."""
        self._is_over = True
        self._log(f"no more checkpoints in shared memory, so a trainer that dies costs the steps since one on the disk: {why}")
