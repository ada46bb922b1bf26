"""One process per worker on this machine.

A worker holds the reading end of a control pipe: when the driver closes it, or dies in whatever way, the worker ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from asyncflow.cluster.base import WorkerSpec
from asyncflow.cluster.supervised import SupervisedCluster, WorkerProcess


class LocalCluster(SupervisedCluster):
    """See the module's head."""

    async def _spawn(self, spec: WorkerSpec, log: Path) -> WorkerProcess:
        with log.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "asyncflow.cluster.child",
                spec.entry,
                spec.name,
                str(self._run_dir),
                stdin=asyncio.subprocess.PIPE,  # the control pipe
                stdout=output,
                stderr=output,
                env={**os.environ, **spec.environment},
                start_new_session=True,  # a Ctrl-C in the terminal is the driver's to handle
            )
