"""Kills the process groups of the reward workers when the process that owns them is gone, however it went.

consumes: lines on stdin, `+1234` for a group that lives and `-1234` for one that is gone
waits for: the next line (without end, on purpose: its whole work is to outlive its parent)
is unblocked by: the owner, or the end of stdin, which the kernel brings about when the owner dies

A worker dies with its parent by itself (`worker.die_with_parent`), but processes that a scorer started do not, and a scorer stuck
in C code that holds the interpreter lock cannot look after them. Run by path with `-I -S`: only the standard library.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Read until the owner is gone, then leave nobody of its groups behind."""
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
