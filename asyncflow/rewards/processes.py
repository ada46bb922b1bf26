"""What a reward process may use, and when it has to end. Linux enforces all of it; elsewhere the guard and the deadline remain."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1

_space_at_limit: int | None = None  # bytes of address space that this process had when it was limited


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, also in the middle of C code. Elsewhere the guard does it alone."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(0)


def limit_memory(memory_bytes: int) -> None:
    """Let this process add at most `memory_bytes` of address space to what it has now. Linux only: others do not enforce it."""
    if sys.platform != "linux":
        return
    global _space_at_limit
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _space_at_limit = pages * resource.getpagesize()
    _lower(resource.RLIMIT_AS, _space_at_limit + memory_bytes)


def memory_share() -> float:
    """How much of what `limit_memory` lets this process add it has had at most, 0 to 1; 0 where there is no limit.

    For who calls code that keeps a `MemoryError` to itself. The memory that could not be had is not in it.
    """
    if sys.platform != "linux" or _space_at_limit is None:
        return 0.0
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmPeak:"))
    room = resource.getrlimit(resource.RLIMIT_AS)[0] - _space_at_limit
    return (int(peak.split()[1]) * 1024 - _space_at_limit) / room if room > 0 else 1.0


def limit_output(output_bytes: int) -> None:
    """Let this process write no file larger than that, and leave no core."""
    _lower(resource.RLIMIT_FSIZE, output_bytes)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(what: int, limit: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
