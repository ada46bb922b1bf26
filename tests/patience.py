"""How long a test waits before it gives up: a multiple of what a measured step takes on this machine, now.

    await asyncio.wait_for(answer, patience(20))
    while not is_there():
        assert time.monotonic() < deadline          # deadline = time.monotonic() + patience(60)
    await until(is_there)                           # the same in an event loop

A machine that is half as fast, or busy with something else, is given twice the time, and `MOST` times at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

STEP = 100_000
STEP_SECONDS = 0.005
"""What a step of so many additions takes on a quiet machine of 2026."""
MOST = 8.0


def patience(seconds: float) -> float:
    """Seconds of this machine for so many of a quiet one; never fewer."""
    began = time.perf_counter()
    total = 0
    for number in range(STEP):
        total += number
    return seconds * min(MOST, max(1.0, (time.perf_counter() - began) / STEP_SECONDS))


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until it holds, while the event loop goes on; `seconds` as of `patience`."""
    deadline = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.005)
