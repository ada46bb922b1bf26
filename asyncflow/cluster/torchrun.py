"""Trainers that torchrun has started: each process becomes a rank of a run whose driver the first of them starts.

    torchrun --nproc-per-node 4 -m asyncflow train CONFIG plan.train.dp=4

consumes: torchrun's environment variables, and its store, in which the first rank says what this launch is called
waits for: that name; the driver, until it has claimed the run's folder; then for the end of the run
is unblocked by: the driver's job file, which names this launch; the end of the first rank's process, which stays as long as it

The first rank's process starts the driver, which starts everything but trainers, and hands on its exit status. All ranks are on one
machine, whichever of several torchruns has started them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil

from asyncflow.registry import load
from asyncflow.run_dir import control_socket
from asyncflow.transport import ConnectionLost
from asyncflow.types import Layout, UserError, first_error

LAUNCH = "ASYNCFLOW_LAUNCH"
"""The environment variable by which a driver knows, and tells, which launch of torchrun its trainers come from; and the key in
torchrun's store."""

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")


DRIVER_ENDS_SECONDS = 20.0
"""Seconds that a driver has to notice that its trainers have gone, and to end when it is told to."""


def is_rank() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and LAUNCH not in os.environ


def run_rank(
    driver_arguments: Sequence[str], layout: Layout, job_file: Path, read_launch: Callable[[Path], str], *, patience_seconds: float
) -> int:
    """Be one rank of the run, and the first one its driver's parent, too. Returns the exit status.

    `driver_arguments` are those of `asyncflow`; `read_launch` finds in the job file the launch that it is of.

    Raises:
        UserError: torchrun has not started as many processes as the layout has ranks, or they are on several machines.
        RunError: the first rank was not there in time.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size != layout.size:
        raise UserError(
            f"torchrun has started {size} processes, and plan.train asks for dp {layout.dp} x tp {layout.tp} x pp {layout.pp} = "
            f"{layout.size}: start it with --nproc-per-node {layout.size}"
        )
    # By its name, as the worker below: a driver, which has this module too, imports no torch.
    word_of_first = load("store", "asyncflow.transport.torch_store:word_of_first")
    own = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex}"
    launch, _kept_open = word_of_first(LAUNCH, own if rank == 0 else None, patience_seconds)
    host, process_id, _ = launch.split("/")
    if host != socket.gethostname():
        raise UserError(
            f"torchrun has started ranks on {host} and on {socket.gethostname()}: for several machines set cluster: ray"
        )
    # Of this machine, also where several torchruns have started them.
    os.environ.update({"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)})
    driver, first = None, None
    if rank == 0:
        driver = _start_driver(driver_arguments, launch)
    else:
        first = _process(int(process_id))
        # torchrun hands its signals to all: it is the driver that ends them, when the last checkpoint is written.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    try:
        has_ended = (lambda: driver.poll() is not None) if driver is not None else partial(_has_ended, first)
        if not _wait_for_driver(has_ended, job_file, read_launch, launch, patience_seconds):
            return driver.returncode if driver is not None else 0  # it has said why
        try:
            asyncio.run(load("worker", "asyncflow.run.workers:train_worker")(f"trainer/{rank}", job_file.parent))
        except* ConnectionLost:
            print("the driver has gone", file=sys.stderr)  # why, it has said itself
        except* Exception as failure:
            print(f"trainer/{rank}: {first_error(failure)}", file=sys.stderr, flush=True)  # before the driver is waited for
            raise
        return driver.wait() if driver is not None else 0
    finally:
        if driver is not None:
            _end(driver)


def _end(driver: subprocess.Popen[bytes]) -> None:
    """End the driver. It notices by itself that its trainers have gone, logs it and ends; if it does not, it is killed."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            driver.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait(DRIVER_ENDS_SECONDS)
            return


def _start_driver(arguments: Sequence[str], launch: str) -> subprocess.Popen[bytes]:
    """Start the driver as the user would, but for the variable that names the launch of the trainers. Signals to torchrun are
    passed on to it."""
    kept = {
        name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES and not name.startswith("TORCHELASTIC")
    }
    driver = subprocess.Popen([sys.executable, "-m", "asyncflow", *arguments], env=kept | {LAUNCH: launch}, start_new_session=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: driver.send_signal(number))
    return driver


def _wait_for_driver(
    has_ended: Callable[[], bool], job_file: Path, read_launch: Callable[[Path], str], launch: str, patience_seconds: float
) -> bool:
    """Wait until the driver has begun the run, as long as it lives; say so after some time. False: it has ended without."""
    is_late = time.monotonic() + patience_seconds

    def has_begun() -> bool:
        with contextlib.suppress(FileNotFoundError):  # an earlier run's is removed
            return read_launch(job_file) == launch and control_socket(job_file.parent).exists()
        return False

    while not has_begun():
        if has_ended():
            return False
        if time.monotonic() > is_late:
            print(f"the driver has not begun the run in {job_file.parent} after {patience_seconds:g} s: its output says why")
            is_late = math.inf
        time.sleep(0.05)
    return True


def _process(number: int) -> psutil.Process | None:
    """The process of this number. None: it has gone."""
    return psutil.Process(number) if psutil.pid_exists(number) else None


def _has_ended(process: psutil.Process | None) -> bool:
    try:
        return process is None or not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def launch_of(environment: Mapping[str, str]) -> str:
    """The launch of torchrun that a driver belongs to; "" if it starts its trainers itself."""
    return environment.get(LAUNCH, "")
