"""Processes that a test has seen. One may end at any moment, also between two questions about it: here no answer is an error."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

from tests.patience import patience


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that run: one that only waits for its parent to ask does not."""
    return [process for process in processes if is_alive(process)]


def is_alive(process: psutil.Process | int) -> bool:
    """Whether this process, or the one of this number, runs."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(process: psutil.Process) -> None:
    """Kill it, and wait until it is dead: while no core is free it may go on for a moment, and do what the test wants undone."""
    process.kill()
    deadline = time.monotonic() + patience(10)
    while is_alive(process):
        assert time.monotonic() < deadline, f"{process} does not end"
        time.sleep(0.001)


def name_of(process: psutil.Process) -> str:
    """Its name; nothing, of one that has ended."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def words_of(process: psutil.Process) -> list[str]:
    """Its command line, word by word, also where the process has set it in one piece; nothing, of one that has ended.

    The last words of a worker are its name and its run's folder.
    """
    try:
        return " ".join(process.cmdline()).split()
    except psutil.Error:  # a zombie has none, and another user's is not for us
        return []


def below(process: psutil.Process | int) -> list[psutil.Process]:
    """All processes that it has started, and those that they have."""
    try:
        return (psutil.Process(process) if isinstance(process, int) else process).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def children_called(words: str) -> list[psutil.Process]:
    """Children of this process that run and have these words in their command line."""
    return [child for child in psutil.Process().children() if words in " ".join(words_of(child))]
