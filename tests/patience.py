"""How long a test waits before it gives up: a multiple of what a measured step takes on this machine, now.

    await asyncio.wait_for(answer, patience(20))
    while not is_there():
        assert time.monotonic() < deadline          # deadline = time.monotonic() + patience(60)

A machine that is half as fast, or busy with something else, is given twice the time.
"""

from __future__ import annotations

import time

STEP = 100_000
STEP_SECONDS = 0.005
"""What a step of so many additions takes on a quiet machine of 2026."""


def patience(seconds: float) -> float:
    """Seconds of this machine for so many of a quiet one; never fewer."""
    began = time.perf_counter()
    total = 0
    for number in range(STEP):
        total += number
    return seconds * max(1.0, (time.perf_counter() - began) / STEP_SECONDS)
