"""The owner of a Ray cluster that is started for one run: `python -m asyncflow.cluster.ray.guard FOLDER`.

    driver ==standard input== guard -- spawns --> connection.start -- Ray --> GCS, raylet, agents, hosts, workers

consumes: the end of its standard input
waits for: it; meanwhile it looks whether Ray's main processes live
is unblocked by: the run's end, or the driver's, however it comes about

Ray's own processes look after each other within a minute or two, and not all of them. Here they have an owner that is told at once,
that inherits (as their subreaper) those whose parents have gone, and that has nothing of Ray's in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import psutil

PATIENCE: Final = {"RAY_gcs_rpc_server_reconnect_timeout_s": "1000000"}
"""For the run's driver. Without it Ray ends any process at once when it has not found the head for a minute; with it the run ends
in order, when its workers' hosts are gone. Ray's own processes are to end."""
LOOK_SECONDS: Final = 1.0
_PR_SET_CHILD_SUBREAPER: Final = 36  # of Linux


def guard(folder: Path) -> None:
    """Own the cluster whose files are in `folder` until standard input ends, or one of Ray's main processes. Prints its address."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    command = [sys.executable, "-m", "asyncflow.cluster.ray.connection", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name not in PATIENCE}
    starter = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment)
    try:
        assert starter.stdout is not None
        door = starter.stdout.fileno()
        if address := starter.stdout.readline() if door in select.select([0, door], [], [])[0] else b"":
            own = psutil.Process(starter.pid)
            watched = {process.name(): process for process in own.children() if process.name() in ("gcs_server", "raylet")}
            watched["the process that started them"] = own
            os.write(1, address)
            while not (gone := [name for name, process in watched.items() if not _is_alive(process)]):
                if select.select([0], [], [], LOOK_SECONDS)[0] and not os.read(0, 4096):
                    break
            if gone:
                print(f"{', '.join(gone)} has ended, and all of Ray is ended with it", file=sys.stderr, flush=True)
    finally:
        while left := psutil.Process().children(recursive=True):
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1.0)
        shutil.rmtree(folder, ignore_errors=True)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # ended between the two questions
        return False


if __name__ == "__main__":
    guard(Path(sys.argv[1]))
