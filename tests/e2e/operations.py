"""Operations on a run's folder, as Python's audit hooks tell of them, and a process that is killed before one of them."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

OF_PATHS = ("os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def watch(folder: Path, told: str, kill_before: str) -> None:
    """Write a line into the file `told` for every operation that changes something below `folder`, its kind: the audit event and
    the path, numbers as n. Kill this process right before the first operation of the kind `kill_before`."""
    lines, prefix, tree = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), str(folder.absolute()), [""]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        path = changed(event, arguments)
        if path is None:
            return
        if event == "os.remove" and not path.startswith("/"):  # within the tree that is being removed, by names alone
            path = f"{tree[0]}/..."
        if event == "shutil.rmtree":
            tree[0] = path
        if not path.startswith(prefix):
            return
        kind = f"{event} {re.sub('[0-9]+', 'n', path.removeprefix(prefix)) or '/'}"
        os.write(lines, f"{kind}\n".encode())
        if kind == kill_before:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def changed(event: str, arguments: tuple[Any, ...]) -> str | None:
    """Path that the operation changes; None for an event that changes nothing."""
    if event == "open":
        path, _, flags = arguments
        return os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) and flags & WRITES else None
    if event == "os.rename":
        return os.fsdecode(arguments[1])
    return os.fsdecode(arguments[0]) if event in OF_PATHS and not isinstance(arguments[0], int) else None
