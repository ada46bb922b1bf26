"""What each rank of `test_dataloader_ranks.py` runs: 2 data-parallel groups of 2 ranks, which see their lead's batches.

Writes FOLDER/<rank>.json: what it saw of three streams, and how two that fail have failed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncflow.engines.base import RANKS_STORE
from asyncflow.transfer_queue.loader import dataloader
from asyncflow.transfer_queue.loader.dataloader import StreamDataLoader
from tests.patience import patience

PHASES = ("score", "train", "update")


def digest(batch: dict[str, Any]) -> str:
    """Of all columns: dtypes, shapes and values."""
    found = hashlib.sha256()
    for name, column in batch.items():
        for tensor in [column] if isinstance(column, torch.Tensor) else column:
            found.update(f"{name} {type(column).__name__} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def failure(loader: StreamDataLoader) -> str:
    try:
        next(iter(loader))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main(address: str, folder: Path, timeout: float) -> None:
    """`timeout`: seconds within which the ranks of a group come to a collective."""
    dataloader.WAITING_SECONDS = 0.2  # so that peers are told to wait while this test waits
    # A peer that is not told would give up before the rows come.
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", os.environ[RANKS_STORE], timeout=timedelta(seconds=patience(20)), rank=rank, world_size=size)
    groups = [dist.new_group(each, timeout=timedelta(seconds=timeout)) for each in ([0, 1], [2, 3])]
    group = groups[rank // 2]
    seen: dict[str, Any] = {name: [] for name in PHASES}

    def see(phase: str, batch: dict[str, Any], indices: torch.Tensor) -> None:
        seen[phase].append({"rows": indices.tolist(), "digest": digest(batch)})
        sums = indices.sum()
        dist.all_reduce(sums, group=group)  # a collective of the model's, between the loader's
        assert int(sums) == 2 * int(indices.sum())
        time.sleep(0.01 * (1 + rank // 2))

    with StreamDataLoader(address, "score", batch_size=5, partition=0, group=group, num_workers=rank // 2) as loader:
        for batch, indices in loader:
            see("score", batch, indices)
            response = batch["response"]
            kept = loader.complete(indices, {"score": batch["reward"], "logprobs": [e.float() for e in response.entries()]})
            assert (kept is None) == (rank % 2 == 1)
    lead = dist.get_process_group_ranks(group)[1]
    with StreamDataLoader(address, "train", batch_size=7, partition=0, pad_to_multiple_of=8, group=group, lead=lead) as loader:
        assert loader.is_lead == (rank % 2 == 1)
        for batch, indices in loader:
            assert batch["response"].values.shape[1] in (8, 16)
            see("train", batch, indices)
    with StreamDataLoader(address, "update", groups=2, partition=0, group=group) as loader:
        for batch, indices in loader:
            assert loader.group_of(indices).tolist() == [i // 4 for i in range(len(indices))]
            see("update", batch, indices)
    seen["unknown"] = failure(StreamDataLoader(address, "train", groups=1, columns=["nosuch"], group=group))
    seen["late"] = failure(StreamDataLoader(address, "update", groups=1, partition=1, group=group, timeout_seconds=0.5))
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()
