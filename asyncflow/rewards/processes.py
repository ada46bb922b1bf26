"""What a reward process may use, and when it has to end. Linux enforces all of it; elsewhere the guard and the deadline remain."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


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
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + memory_bytes)


def limit_output(output_bytes: int) -> None:
    """Let this process write no file larger than that, and leave no core."""
    _lower(resource.RLIMIT_FSIZE, output_bytes)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(what: int, limit: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
