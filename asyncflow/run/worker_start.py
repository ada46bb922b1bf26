"""Start of a worker's process: its environment, and what it imports.

Nothing heavy is imported here: a run has its workers' imports begin before it looks at anything else.
"""

from __future__ import annotations

import os
from typing import Final

from asyncflow.cluster.forking import IS_POSSIBLE, ForkServer
from asyncflow.config import Config
from asyncflow.devices import CPU, kind_of
from asyncflow.engines.rollout import ROLLOUT_ENGINE_IMPORTS
from asyncflow.engines.train import TRAIN_ENGINE_IMPORTS
from asyncflow.threads import thread_environment

MAINS: Final = "asyncflow.run.workers"
# Micro-batches, sums and decode steps allocate and free the same memory over and over: glibc is to keep it, not to take fresh pages
# each time. Threads share one arena, since one of their own takes no block above 64 MB; -1: nothing is given back.
_KEEP_FREED_MEMORY: Final = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def training(config: Config) -> dict[str, str]:
    """The environment of a worker that computes as the trainer does."""
    return thread_environment(config.train.least_threads) | _KEEP_FREED_MEMORY


def generating(config: Config) -> dict[str, str]:
    """The environment of a worker that generates."""
    return thread_environment(config.rollout.least_threads) | _KEEP_FREED_MEMORY


def imports(*modules: str, device: str = CPU) -> tuple[str, ...]:
    """Modules of a worker that computes on `device`, for a fork server to import. None where a fork might not be safe: an
    accelerator's driver does not outlive one."""
    return (MAINS, *modules) if kind_of(device) == CPU else ()


def rollout_imports(config: Config, device: str) -> tuple[str, ...]:
    """Modules of a worker that generates, likewise."""
    known = ROLLOUT_ENGINE_IMPORTS.get(config.rollout.engine.name)
    return imports(*known, device=device) if known is not None else ()


def train_imports(config: Config, device: str) -> tuple[str, ...]:
    """Modules of a worker that computes as the trainer does, likewise."""
    known = TRAIN_ENGINE_IMPORTS.get(config.train.engine.name)
    return imports(*known, device=device) if known is not None else ()


def import_ahead(config: Config, *, is_training: bool = True) -> None:
    """Have what the workers import imported from now on, beside whatever this process does until they start. A fork server that was
    begun for a run of other threads ends."""
    wanted: list[tuple[int, tuple[str, ...]]] = []
    if config.cluster.name == "local" and IS_POSSIBLE:
        wanted.append((config.rollout.least_threads, rollout_imports(config, config.rollout.device)))
        if is_training:
            wanted.append((config.train.least_threads, train_imports(config, config.train.device)))
    servers = [(ForkServer.here({**os.environ, **thread_environment(count)}), modules) for count, modules in wanted if modules]
    ForkServer.keep([server for server, _ in servers])
    for server, modules in servers:
        server.prepare(modules)
