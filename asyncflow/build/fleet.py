"""What the processes of a run are started with."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from asyncflow.cluster.base import WorkerSpec
from asyncflow.config import Config
from asyncflow.engines.base import RANKS_STORE

# Micro-batches allocate and free the same megabytes over and over: glibc is to keep them, not to map zeroed pages each time.
_KEEP_FREED_MEMORY: Final = {
    "MALLOC_TRIM_THRESHOLD_": str(10**9),
    "MALLOC_MMAP_THRESHOLD_": str(10**9),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def threads(count: int) -> dict[str, str]:
    """The environment of a worker that computes with so many: numerical libraries read it when they are imported."""
    return {name: str(count) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} | {
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def training(config: Config) -> dict[str, str]:
    """The environment of a worker that computes as the trainer does."""
    return threads(config.train.num_threads) | _KEEP_FREED_MEMORY


def trainers(config: Config, entry: str, folder: Path) -> list[WorkerSpec]:
    """One worker for each rank of the layout. They find each other in `folder`, which is theirs alone."""
    size = config.layout.size
    return [
        WorkerSpec(f"trainer/{rank}", entry, training(config) | _rank(rank, size) | {RANKS_STORE: f"file://{folder}/ranks"})
        for rank in range(size)
    ]


def _rank(rank: int, size: int) -> dict[str, str]:
    """torchrun's names."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {name: str(number) for name, number in numbers.items()}
