"""Starts a vLLM server, and ends it with all that it has started when its owner is gone, however it went.

    guard.py FOLDER COMMAND...      stdin: the owner's control pipe; the server's socket lies in FOLDER

consumes: nothing on stdin but its end
waits for: that end, and the server's own (without end, on purpose: its whole work is to outlive both)
is unblocked by: the kernel, which closes the pipe when the owner dies, or tells of the server's end

A server is several processes. They stay in the guard's process group, which is killed as a whole: an engine whose front end has
died would keep its GPU for ever. Run by path with `-I -S`: only the standard library.
"""

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1


def main(folder: str, command: list[str]) -> None:
    """Never returns: the guard ends with its group."""
    libc = ctypes.CDLL(None)
    guard = os.getpid()

    def die_with_the_guard() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it went before the call
            os._exit(1)

    allow_all_handles()
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_the_guard)
    threading.Thread(target=_end_with_the_owner, args=(folder,), daemon=True).start()
    status = server.wait()
    print(f"the vLLM server (process {server.pid}) {ending(status)}", flush=True)
    _end(folder)


def allow_all_handles() -> None:
    """Let this process and its own have as many file handles as it may: its owner may have been short of them when it started this
    one, and a server has many."""
    with contextlib.suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def ending(status: int) -> str:
    """End of a process, in words."""
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _end_with_the_owner(folder: str) -> None:
    while os.read(0, 4096):
        pass
    _end(folder)


def _end(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
