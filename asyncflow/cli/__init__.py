"""The command line: one file per verb, listed in verbs.py."""

from __future__ import annotations

import os
import sys

LOOKS_ONLY = {"--dry-run", "--print-config", "--help"}


def main() -> None:
    """The entry point of `asyncflow`. What a training run's workers import takes longest, so it begins before anything else."""
    if sys.argv[1:2] in (["train"], ["quickstart"]) and not LOOKS_ONLY & set(sys.argv):
        from asyncflow.cluster.forking import IS_POSSIBLE, ForkServer
        from asyncflow.cluster.torchrun import is_rank
        from asyncflow.threads import thread_environment

        if IS_POSSIBLE and not is_rank():
            ForkServer.here({**os.environ, **thread_environment(1)}).prepare(["torch"])
    from asyncflow.cli.verbs import run

    run()
