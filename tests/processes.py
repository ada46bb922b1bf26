"""Processes that a test has seen, and what has become of them."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that run. One may end at any moment, also between two questions about it."""
    return [process for process in processes if _is_alive(process)]


def children_called(words: str) -> list[psutil.Process]:
    """Children of this process that run and have these words in their command line. Others' may be zombies, which have none."""
    return [child for child in psutil.Process().children() if words in " ".join(_command_line(child))]


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # a zombie is one, too
        return []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
