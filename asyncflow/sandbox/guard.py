"""Kills the sessions of sandboxed processes when the process that owns them is gone, however it went.

consumes: lines on stdin, `+1234` for a session that lives and `-1234` for one that is gone
waits for: the next line (without end, on purpose: its whole work is to outlive its parent)
is unblocked by: the owner, or the end of stdin, which the kernel brings about when the owner dies

A process dies with its parent by itself (`limits.die_with_parent`), but processes that it started do not, and code stuck
in C code that holds the interpreter lock cannot look after them. Run by path with `-I -S`: only the standard library.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

ROUNDS = 3  # a process may fork while it is looked for


def main() -> None:
    """Read until the owner is gone, then leave nobody of its sessions behind."""
    sessions: set[int] = set()
    for line in sys.stdin.buffer:
        (sessions.add if line[:1] == b"+" else sessions.discard)(int(line[1:]))
    kill_sessions(sessions)


def kill_sessions(sessions: set[int]) -> None:
    """SIGKILL to all processes of sessions, each named by its leader, which need not live any more.

    Every piece of work has a process group of its own in its process's session. Where /proc does not tell
    them, only the leader's is ended.
    """
    for session in sessions:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session, signal.SIGKILL)
    for _ in range(ROUNDS):
        found = [pid for pid, session in _living() if session in sessions]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _living() -> Iterator[tuple[int, int]]:
    """The processes that run, and the session of each."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    with open(f"/proc/{name}/stat", "rb") as file:
                        state, _, _, session = file.read().rpartition(b")")[2].split()[:4]
                    if state != b"Z":
                        yield int(name), int(session)


if __name__ == "__main__":
    main()
