"""Timings of the embedded engine's passes, until they are taken: all prefills, and decode steps, some of them together."""

from __future__ import annotations

from collections import deque
from typing import Final

from asyncflow.engines.base import Timing

TIMED_TOGETHER: Final = 8
"""Decode steps: they are short and many. A number, since those of a time would be few where they are slow."""
MAX_TIMINGS: Final = 10_000
"""Timings that are kept, the newest ones."""


class PassTimings:
    """Timings in the order of time."""

    def __init__(self) -> None:
        self._ended: deque[Timing] = deque(maxlen=MAX_TIMINGS)
        self._steps: Timing | None = None  # decode steps that are timed together, so far

    def add(self, timing: Timing) -> None:
        """Add a pass. A decode step joins those before it."""
        if timing.task != "decode_step":
            self.end()
            self._ended.append(timing)
            return
        if self._steps is not None:
            sums = (former + now for former, now in zip(self._steps[3:], timing[3:], strict=True))
            timing = Timing(timing.task, self._steps.start, timing.end, *sums)
        self._steps = timing
        if timing.calls == TIMED_TOGETHER:
            self.end()

    def end(self) -> None:
        """End the decode steps that are timed together: something else comes before the next one."""
        if self._steps is not None:
            self._ended.append(self._steps)
            self._steps = None

    def take(self) -> list[Timing]:
        """Timings since the last call, in the order of time. May be called from any thread."""
        return [self._ended.popleft() for _ in range(len(self._ended))]
