"""Limits of processes that run code of the user's: what they may use, and when they end. Linux enforces all of it; elsewhere the
guard and the deadline remain."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Set
from pathlib import Path

import msgspec

END_SECONDS = 2.0  # SIGKILL to the end of all that a piece of work has left
LOOK_AGAIN_SECONDS = 0.001

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_space_at_limit: int | None = None  # bytes of address space that this process had when it was limited


class ProcessLimits(msgspec.Struct, frozen=True):
    """Limits of a process that runs code of the user's."""

    deadline_seconds: float
    """Seconds for one answer, from the moment the question is taken up."""
    memory_bytes: int
    """Address space that answering may add to what the process has when all is built."""
    output_bytes: int = 1 << 20
    """Bytes that answering may print, and write to a file."""
    start_seconds: float = 60.0
    """Seconds for importing and building."""


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, also in the middle of C code. Elsewhere the guard does it alone.

    `parent`: its process id; 0: that of whatever has started this process, where nobody on this machine knows it.
    """
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:  # it died before the call
        os._exit(0)


def adopt_orphans() -> None:
    """Let this process become the parent of what its descendants leave behind, in whatever session that is. Linux only."""
    if sys.platform != "linux" or not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> frozenset[int]:
    """The processes that this one is the parent of, ended ones that nobody has waited for among them. Empty where
    /proc does not list them."""
    found: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{thread}/children") as file:
                found += file.read().split()
    return frozenset(map(int, found))


def end_children(spared: Set[int]) -> None:
    """Kill the children of this process, but for some, and theirs as they become its own, and wait for the end of all. Raises
    `TimeoutError` if that takes longer than `END_SECONDS`."""
    deadline = time.monotonic() + END_SECONDS
    while left := children() - spared:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{len(left)} processes that were started there are still there {END_SECONDS:g} s after SIGKILL")
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_AGAIN_SECONDS)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def limit_memory(memory_bytes: int) -> None:
    """Let this process add at most `memory_bytes` of address space to what it has now. Linux only: others do not enforce it."""
    if sys.platform != "linux":
        return
    global _space_at_limit
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _space_at_limit = pages * resource.getpagesize()
    _lower(resource.RLIMIT_AS, _space_at_limit + memory_bytes)


def memory_share() -> float:
    """Largest share that this process has had so far of the memory that `limit_memory` lets it add, 0 to 1; 0 where there is no
    limit.

    For a caller of code that hides a `MemoryError`. Memory that could not be had is not in it.
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
