"""Standard output and error of a command that goes on when nobody reads them.

A closed pipe (`asyncflow train ... | head`), a pager that stands still, a full disk: what cannot be written is left out, and the
command goes on. Files of a run hold everything that it prints.
"""

from __future__ import annotations

import io
import os
import select
import stat
import sys
from typing import Final, TextIO

PATIENCE_SECONDS: Final = 0.5
"""Seconds that a write waits for a reader that stands still. After that nothing waits until it reads again."""


class OptionalReader(io.FileIO):
    """File that takes every write, and leaves out what its reader does not take."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._may_block = not stat.S_ISREG(os.fstat(number).st_mode)
        self._patience = PATIENCE_SECONDS

    def write(self, data: object) -> int:
        """Write what the reader takes of the bytes. Returns the number of all of them."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        start = 0
        while start < len(view):
            part = view[start : start + select.PIPE_BUF]  # a pipe that is ready takes so many at once
            try:
                if self._may_block and not select.select([], [self], [], self._patience)[1]:
                    self._patience = 0.0
                    break
                start += super().write(part) or 0
                self._patience = PATIENCE_SECONDS
            except (OSError, ValueError):
                break
        return len(view)


def keep_going() -> None:
    """Let this process's standard output and error be such files, where they are files."""
    sys.stdout, sys.stderr = _optional(sys.stdout), _optional(sys.stderr)


def _optional(stream: TextIO) -> TextIO:
    try:
        file = OptionalReader(stream.fileno())
    except (OSError, ValueError, AttributeError):  # none at all, or a test's
        return stream
    buffered = io.BufferedWriter(file)
    return io.TextIOWrapper(buffered, stream.encoding, "backslashreplace", line_buffering=True)
