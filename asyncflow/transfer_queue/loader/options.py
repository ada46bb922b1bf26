"""Options of a stream of batches (dataloader.py), and what follows from them: the request for a batch, and its padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from asyncflow.transfer_queue.leases import Want
from asyncflow.transfer_queue.loader.prefetch import StreamSource
from asyncflow.transfer_queue.loader.tensors import Padding


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """Options of a `StreamDataLoader`.

    Args:
        address: the queue's, `unix:PATH` or `tls:HOST:PORT`; the latter needs `credentials`, the path of the run's key.
        columns: what to read, if not all that the task reads.
        batch_size: at most so many rows in a batch. One of `batch_size`, `groups` and `tokens` is needed. A task that takes whole
            groups gets one group even if that alone is more.
        groups: at most so many groups in a batch.
        tokens: at most so many tokens in a batch.
        at_least: wait for so many rows. A batch is smaller than `batch_size` where fewer are ready than that, and at the end.
        partition: only groups of this partition: of this training step, in a run.
        installed: only groups that this policy version may generate.
        rank: this data-parallel group's number, for samplers that serve all of them together.
        num_workers: processes that fetch and pad (spawned, so the program's main module has to be importable); with 0 the loader's
            thread does.
        prefetch: how many batches are leased ahead of the one that is worked on; with 0 they are leased when asked for. What one
            consumer holds no other can have.
        pad_to_multiple_of: deliver ragged columns `Padded` to the batch's greatest length, rounded up to a multiple of this, with
            `pad_values[column]` or 0; without, `Jagged`.
        acknowledge: for a task without outputs. `on_next`: a batch's rows are done when the next one is asked for; `manual`: when
            `done` is called. Rows of a batch in the middle of which the loop is left are not done.
        group: of tensor- or pipeline-parallel ranks that are to see the same batches. Only `lead` (a global rank, by default the
            group's first) reads; all have to iterate in step, and to leave the loop together. On the others `complete`, `done` and
            `fail` do nothing: the lead writes for all.
        device: where the columns go to.
        name: what the queue's status calls this loader.
        timeout_seconds: for the next batch, and for each request to the queue.

    Raises:
        ValueError: arguments that contradict each other.
    """

    address: str
    task: str
    _: KW_ONLY
    columns: Sequence[str] | None = None
    batch_size: int | None = None
    groups: int | None = None
    tokens: int | None = None
    at_least: int = 1
    partition: int | None = None
    installed: int | None = None
    rank: int = 0
    num_workers: int = 0
    prefetch: int = 2
    pad_to_multiple_of: int | None = None
    pad_values: Mapping[str, float] | None = None
    acknowledge: Literal["on_next", "manual"] = "on_next"
    group: dist.ProcessGroup | None = None
    lead: int | None = None
    device: str | torch.device = "cpu"
    name: str = "loader"
    credentials: str | Path | None = None
    timeout_seconds: float = 1800.0

    def __post_init__(self) -> None:
        _check_least(0, num_workers=self.num_workers, prefetch=self.prefetch)
        if self.acknowledge not in ("on_next", "manual"):
            raise ValueError(f"acknowledge is 'on_next' or 'manual', not {self.acknowledge!r}")
        if self.batch_size is None and self.groups is None and self.tokens is None:
            raise ValueError("a batch needs a limit: batch_size (rows), groups or tokens")
        _check_least(1, batch_size=self.batch_size, groups=self.groups, tokens=self.tokens, at_least=self.at_least)
        if self.batch_size is not None and self.at_least > self.batch_size:
            raise ValueError(f"at_least {self.at_least} rows never fit into a batch_size of {self.batch_size}")
        _check_least(1, pad_to_multiple_of=self.pad_to_multiple_of)
        if self.pad_values and self.pad_to_multiple_of is None:
            raise ValueError("pad_values without pad_to_multiple_of: nothing is padded")

    def want(self) -> Want:
        """Request for one batch."""
        return Want(self.groups or 0, self.batch_size or 0, self.tokens or 0, self.at_least, self.installed, rank=self.rank)

    def padding(self) -> Padding | None:
        """Padding of ragged columns; None: none."""
        return None if self.pad_to_multiple_of is None else Padding(self.pad_to_multiple_of, dict(self.pad_values or {}))

    def source(self, padding: Padding | None) -> StreamSource:
        """Source that batches are read from. `padding`: of what is read there."""
        return StreamSource(
            address=self.address,
            name=self.name,
            task=self.task,
            columns=None if self.columns is None else tuple(self.columns),
            credentials=None if self.credentials is None else Path(self.credentials),
            timeout_seconds=self.timeout_seconds,
            padding=padding,
        )


def _check_least(least: int, **numbers: int | None) -> None:
    for what, value in numbers.items():
        if value is not None and value < least:
            raise ValueError(f"{what} is {value}: it has to be {least} or more")
