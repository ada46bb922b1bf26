"""The main of a worker process: `python -m asyncflow.cluster.child ENTRY NAME RUN_DIR`, its control pipe as standard input."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import traceback
from pathlib import Path

from asyncflow.registry import load
from asyncflow.types import RunError, UserError, first_error
from asyncflow.user_file import is_of_user, status_of, traces_of, words_of


def _end_with_the_driver() -> None:
    """Blocks until the control pipe closes, then ends the process at once, whatever its other threads compute."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def main(entry: str, name: str, run_dir: Path) -> int:
    """Run the worker to its end. Returns the exit status: 0 well, 1 failed, 2 a mistake that the user can mend."""
    threading.Thread(target=_end_with_the_driver, name="control pipe", daemon=True).start()
    try:
        asyncio.run(load("worker", entry)(name, run_dir))
    except Exception as failure:  # every one ends the process: the last line it prints is what the driver shows
        error = first_error(failure)
        with contextlib.suppress(Exception):  # closed, or on a full disk
            sys.stdout.flush()  # of the user's code
        if isinstance(error, UserError | RunError):
            print(error, file=sys.stderr)
            return status_of(error)
        traceback.print_exception(error)
        if any(is_of_user(trace) for trace in traces_of(error)):
            print(words_of(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    sys.stdout.flush()
    os._exit(status)  # a daemon thread that computes is not waited for
