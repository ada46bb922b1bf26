"""One process per worker on this machine.

    Linux: a fork of a process that has imported what the worker needs (forking.py)
    elsewhere, for a worker without `imports`, or where a fork would not be safe: an interpreter of its own

A worker holds the reading end of a control pipe: when the driver closes it, or dies in whatever way, the worker ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

from asyncflow.cluster.base import WorkerSpec
from asyncflow.cluster.forking import IS_POSSIBLE, ForkServer, Refusal
from asyncflow.cluster.supervised import SupervisedCluster, WorkerProcess


class LocalCluster(SupervisedCluster):
    """Cluster of one process per worker, on this machine."""

    async def _spawn(self, spec: WorkerSpec, log: Path) -> WorkerProcess:
        with log.open("ab") as output:
            return await spawn(spec, self._run_dir, output.fileno())


async def spawn(spec: WorkerSpec, run_dir: Path, output: int) -> WorkerProcess:
    """Start a worker's process. `output`: file descriptor that it writes to."""
    environment = {**os.environ, **spec.environment}
    if IS_POSSIBLE and spec.imports:
        try:
            return await ForkServer.here(environment).fork(spec, run_dir, environment, output)
        except Refusal as refusal:
            logging.getLogger(__name__).warning("worker %s is not forked, and starts slower: %s", spec.name, refusal)
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "asyncflow.cluster.child",
        spec.entry,
        spec.name,
        str(run_dir),
        stdin=asyncio.subprocess.PIPE,  # the control pipe
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,  # a Ctrl-C in the terminal is the driver's to handle
    )
