"""Start of a worker's process: its environment, and what it imports.

Nothing heavy is imported here: a run has its workers' imports begin before it looks at anything else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
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
    return _engine_imports(config.rollout.engine.name, ROLLOUT_ENGINE_IMPORTS, device)


def train_imports(config: Config, device: str) -> tuple[str, ...]:
    """Modules of a worker that computes as the trainer does, likewise."""
    return _engine_imports(config.train.engine.name, TRAIN_ENGINE_IMPORTS, device)


def _engine_imports(name: str, known: Mapping[str, tuple[str, ...]], device: str) -> tuple[str, ...]:
    """An engine of the user's own, `file.py:Name`, is imported in the fork, beside what ours need: it is made of these, as a rule,
    and of torch."""
    modules = sum(known.values(), ()) if ":" in name else known.get(name)
    return imports(*modules, device=device) if modules is not None else ()


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
