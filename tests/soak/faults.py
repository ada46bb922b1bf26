"""Faults that a process of a run suffers from outside: it is killed, stopped, slowed, starved, or its connections are cut.

A fault returns what it did; `Impossible` says that this machine does not let it be done.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import psutil

_PIDFD_GETFD: Final = 438  # of Linux, on every architecture
FILL_PIECE: Final = 1 << 20


class Impossible(Exception):
    """The machine, or the moment, does not let the fault happen."""


def kill(process: psutil.Process, rng: random.Random) -> float:
    """SIGKILL. Returns 0.0: it lasts no time."""
    process.kill()
    return 0.0


def stop(process: psutil.Process, rng: random.Random) -> float:
    """SIGSTOP for a while: some seconds, one time in twelve half a minute to two minutes. Returns the seconds."""
    seconds = rng.uniform(30.0, 120.0) if rng.random() < 1 / 12 else min(30.0, rng.expovariate(1 / 2.0))
    try:
        process.suspend()
        time.sleep(seconds)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    return seconds


def slow(process: psutil.Process, rng: random.Random) -> float:
    """A tenth of its speed for some seconds. Returns the seconds."""
    seconds = rng.uniform(1.0, 4.0)
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            process.suspend()
            time.sleep(0.09)
            process.resume()
            time.sleep(0.01)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    return seconds


def starve_handles(process: psutil.Process, rng: random.Random) -> float:
    """No more file handles than it has, for a while. Returns the seconds."""
    return _limited(process, resource.RLIMIT_NOFILE, process.num_fds(), rng.uniform(0.2, 2.0))


def starve_memory(process: psutil.Process, rng: random.Random) -> float:
    """No more address space than it has, but for a megabyte, for a while. Returns the seconds."""
    return _limited(process, resource.RLIMIT_AS, process.memory_info().vms + (1 << 20), rng.uniform(0.2, 2.0))


def _limited(process: psutil.Process, what: int, limit: int, seconds: float) -> float:
    before = resource.prlimit(process.pid, what)
    try:
        resource.prlimit(process.pid, what, (limit, before[1]))
        time.sleep(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, what, before)
    return seconds


def cut(process: psutil.Process, rng: random.Random) -> float:
    """Shut one of its connections down, in both directions, for both ends. Returns 0.0."""
    found = [number for number, link in _links(process.pid) if link.startswith("socket:")]
    rng.shuffle(found)
    for number in found:
        with _taken(process.pid, number) as taken:
            try:
                taken.getpeername()
            except OSError:  # it listens, or is one of a pair
                continue
            with contextlib.suppress(OSError):
                taken.shutdown(socket.SHUT_RDWR)
                return 0.0
    raise Impossible("it has no connection")


def _links(pid: int) -> Iterator[tuple[int, str]]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield int(entry.name), os.readlink(entry)


@contextlib.contextmanager
def _taken(pid: int, number: int) -> Iterator[socket.socket]:
    """A socket of another process, here as well."""
    by_process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if (own := libc.syscall(_PIDFD_GETFD, by_process, number, 0)) < 0:
            raise Impossible(f"pidfd_getfd: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(by_process)
    with socket.socket(fileno=own) as taken:
        yield taken


def fill(folder: Path, rng: random.Random) -> float:
    """Leave no room in the file system of `folder`, which is the run's own, for a while. Returns the seconds."""
    seconds, filler = rng.uniform(0.2, 2.0), folder / "filler"
    try:
        with filler.open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(FILL_PIECE))
                file.flush()
        time.sleep(seconds)
    finally:
        filler.unlink()
    return seconds


FAULTS: Final[dict[str, Callable[[psutil.Process, random.Random], float]]] = {
    "kill": kill,
    "stop": stop,
    "slow": slow,
    "handles": starve_handles,
    "memory": starve_memory,
    "cut": cut,
}
"""Faults of one process, by name. `fill` is of a file system."""
