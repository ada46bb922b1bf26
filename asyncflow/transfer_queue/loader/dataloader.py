"""The torch face of the transfer queue: what a task reads, as a stream of batches of tensors.

    StreamDataLoader --- prefetch.py: a thread that leases and fetches ahead, reader processes if wanted ---> controllers, units
         |         `---- broadcast.py: one rank of a group reads, its peers get the same
         `-------------- writeback.py: the rows that it holds, and what is said of them; tensors.py: columns as tensors

consumes: `next`; what the loop over it writes back
waits for: rows that are ready for the task, at most `timeout_seconds`; the units' answers to what is written
is unblocked by: the queue, in the thread that fetches; the lead's broadcast, on its peers

Left out: data-parallel ranks that agree among themselves (each group's lead asks the queue on its own; the sampler `token_balanced`
serves all of them together), write-back by others than the lead, pinned memory.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncflow.transfer_queue.leases import Want
from asyncflow.transfer_queue.loader.broadcast import WAITING_SECONDS, GroupBroadcast, Message
from asyncflow.transfer_queue.loader.prefetch import Fetched, StreamFeed, StreamSource
from asyncflow.transfer_queue.loader.tensors import Jagged, Padded, Padding, TensorColumn, WritableColumn, to_device
from asyncflow.transfer_queue.loader.writeback import HeldRows, Rows

__all__ = ["Jagged", "Padded", "StreamBatch", "StreamDataLoader"]


class StreamBatch(NamedTuple):
    """`columns`: by name, a tensor [n, ...] for a dense column, `Jagged` or `Padded` for a ragged one. `indices` int64 [n], in host
    memory: the rows.

    n entries where a column is stored per row; where it is stored per group, one for every group of the rows, in the order of first
    appearance (see `StreamDataLoader.group_of`).
    """

    columns: dict[str, TensorColumn]
    indices: Tensor


class StreamDataLoader:
    """Iterates over batches of a task's rows as they become ready, until the partition or the task ends, and takes results back.

        with StreamDataLoader(address, "score", batch_size=8, num_workers=0) as loader:
            for batch, indices in loader:
                logprobs = [torch.zeros(len(response)) for response in batch["response"].entries()]
                loader.complete(indices, {"score": batch["response"].lengths.float(), "logprobs": logprobs})

    A batch is held, and kept from others, until its rows are completed (a task with outputs), done (one without), or failed.
    Leaving the loop by `break` or an exception gives back whatever is still held; after the regular end it stays held until
    `close`, so that a whole partition may be acknowledged at once. A row is delivered once, and again only if it was given back, or
    failed, or if the process that held it died.

    Of a DataLoader it has iteration, `batch_size`, `num_workers`, `drop_last` and `dataset`; it has no length. A loader may be
    iterated again (set `partition` before, if need be), not twice at the same time. It is used from one thread.
    """

    drop_last = False

    def __init__(
        self,
        address: str,
        task: str,
        *,
        columns: Sequence[str] | None = None,
        batch_size: int | None = None,
        groups: int | None = None,
        tokens: int | None = None,
        at_least: int = 1,
        partition: int | None = None,
        installed: int | None = None,
        rank: int = 0,
        num_workers: int = 0,
        prefetch: int = 2,
        pad_to_multiple_of: int | None = None,
        pad_values: Mapping[str, float] | None = None,
        acknowledge: Literal["on_next", "manual"] = "on_next",
        group: dist.ProcessGroup | None = None,
        lead: int | None = None,
        device: str | torch.device = "cpu",
        name: str = "loader",
        credentials: str | Path | None = None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        """Make a loader; nothing is connected before the first batch is asked for.

        Args:
            address: the queue's, `unix:PATH` or `tls:HOST:PORT`; the latter needs `credentials`, the path of the run's key.
            columns: what to read, if not all that the task reads.
            batch_size: at most so many rows in a batch. One of `batch_size`, `groups` and `tokens` is needed. A task that takes
                whole groups gets one group even if that alone is more.
            groups: at most so many groups in a batch.
            tokens: at most so many tokens in a batch.
            at_least: wait for so many rows. A batch is smaller than `batch_size` where fewer are ready than that, and at the end.
            partition: only groups of this partition: of this training step, in a run.
            installed: only groups that this policy version may generate.
            rank: this data-parallel group's number, for samplers that serve all of them together.
            num_workers: processes that fetch and pad (spawned, so the program's main module has to be importable); with 0 the
                loader's thread does.
            prefetch: how many batches are leased ahead of the one that is worked on; with 0 they are leased when asked for. What
                one consumer holds no other can have.
            pad_to_multiple_of: deliver ragged columns `Padded` to the batch's greatest length, rounded up to a multiple of this,
                with `pad_values[column]` or 0; without, `Jagged`.
            acknowledge: for a task without outputs. `on_next`: a batch's rows are done when the next one is asked for; `manual`:
                when `done` is called. Rows of a batch in the middle of which the loop is left are not done.
            group: of tensor- or pipeline-parallel ranks that are to see the same batches. Only `lead` (a global rank, by default
                the group's first) reads; all have to iterate in step, and to leave the loop together. On the others `complete`,
                `done` and `fail` do nothing: the lead writes for all.
            device: where the columns go to.
            name: what the queue's status calls this loader.
            timeout_seconds: for the next batch, and for each request to the queue.

        Raises:
            ValueError: arguments that contradict each other.
        """
        _check_least(0, num_workers=num_workers, prefetch=prefetch)
        if acknowledge not in ("on_next", "manual"):
            raise ValueError(f"acknowledge is 'on_next' or 'manual', not {acknowledge!r}")
        self.task, self.partition = task, partition
        self.batch_size, self.num_workers, self.prefetch = batch_size, num_workers, prefetch
        self._want = _want(batch_size, groups, tokens, at_least, installed, rank)
        self._padding = _padding(pad_to_multiple_of, pad_values)
        self._device = torch.device(device)
        self._broadcast: GroupBroadcast | None = None
        if group is not None and dist.get_world_size(group) > 1:
            self._broadcast = GroupBroadcast(group, lead, self._device)
        self._source = StreamSource(
            address=address,
            name=name,
            task=task,
            columns=None if columns is None else tuple(columns),
            credentials=None if credentials is None else Path(credentials),
            timeout_seconds=timeout_seconds,
            padding=None if self._broadcast else self._padding,
        )
        self._acknowledges = acknowledge == "on_next"
        self._hang_up: Callable[[], object] = lambda: None
        self._held = HeldRows(task)
        self._group_bits = 0
        self._is_iterating = False

    # -- iteration ----------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Generator[StreamBatch, None, None]:
        """Raises what connecting, leasing and fetching raise; `TimeoutError` when no batch came in time; on peers the lead's error.

        A second iteration beside the first is a `RuntimeError`.
        """
        if self._is_iterating:
            raise RuntimeError("this loader is being iterated already")
        self._is_iterating, is_over = True, False
        try:
            with contextlib.closing(self._messages()) as messages:
                for message in messages:
                    self._group_bits = message.group_bits
                    columns = {name: to_device(column, self._device) for name, column in message.columns.items()}
                    if self._broadcast is not None and self._padding is not None:
                        columns = self._padding.apply(columns)
                    yield StreamBatch(columns, message.indices)
            is_over = True
        finally:
            self._is_iterating = False
            if not is_over:
                self.close()

    @property
    def dataset(self) -> StreamDataLoader:
        """Itself: a stream has nothing to index."""
        return self

    @property
    def is_lead(self) -> bool:
        """Whether this process is the one that talks to the queue."""
        return self._broadcast is None or self._broadcast.is_lead

    def group_of(self, indices: Tensor) -> Tensor:
        """int64 [n]: where the group of each of a batch's rows is in the columns that are stored per group."""
        _, first, inverse = np.unique(indices.numpy() >> self._group_bits, return_index=True, return_inverse=True)
        return torch.from_numpy(np.argsort(np.argsort(first))[inverse])

    # -- results ------------------------------------------------------------------------------------------------------------

    def complete(self, indices: Rows, outputs: Mapping[str, WritableColumn]) -> Tensor | None:
        """Write the task's outputs for rows of batches that this loader has delivered, and so acknowledge them.

        `outputs`: by column, what `WritableColumn` says, with an entry for each of `indices` (or for each of their groups, in the
        order of first appearance). Returns bool [n]: False for a row whose outputs are not kept, because its lease was over or it
        was dropped. None on a peer, where it does nothing.

        Raises:
            ValueError: what is written does not fit its column (names row and column), or a row is not held.
        """
        if not self.is_lead:
            return None
        return self._held.complete(indices, outputs)

    def done(self, indices: Rows) -> Tensor | None:
        """Mark rows of a task without outputs as done. Returns what `complete` returns.

        Raises `ValueError` where the task has outputs, or a row is not held.
        """
        if not self.is_lead:
            return None
        return self._held.done(indices)

    def fail(self, indices: Rows, error: str) -> None:
        """Give rows back after a failure: they are delivered again, or fail for good with this error after `max_failures` of them.

        Raises `ValueError` where a row is not held.
        """
        if self.is_lead:
            self._held.fail(indices, error)

    # -- ends ---------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Hang up and give back what is held. Also ends a loop that is under way. The loader may be iterated anew."""
        self._held.clear()
        self._hang_up()

    def __enter__(self) -> StreamDataLoader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------------------------------------------

    def _messages(self) -> Generator[Message, None, None]:
        """Batches that this rank delivers; not padded where they are broadcast."""
        broadcast = self._broadcast
        if broadcast is None:
            yield from self._from_queue()
        elif broadcast.is_lead:
            yield from self._announced(broadcast)
        else:
            while (message := broadcast.receive()) is not None:
                yield message

    def _announced(self, broadcast: GroupBroadcast) -> Generator[Message, None, None]:
        with contextlib.closing(self._from_queue()) as messages:
            while True:
                try:
                    message = next(messages, None)
                except Exception as error:
                    broadcast.send_error(error)
                    raise
                broadcast.send(message)
                if message is None:
                    return
                yield message

    def _from_queue(self) -> Generator[Message, None, None]:
        feed = self._opened()
        feed.wait(feed.submit(feed.begin(msgspec.structs.replace(self._want, partition=self.partition))), "starting to lease")
        delivered = np.empty(0, np.int64)
        acknowledges = self._acknowledges and not feed.schema.task(self.task).writes
        while feed is self._held.feed:
            if acknowledges:
                self._held.acknowledge(delivered)
            fetched = self._next(feed)
            if fetched is None:
                return
            delivered = fetched.indices.numpy()
            self._held.add(delivered, fetched.lease)
            yield Message(fetched.indices, fetched.columns, feed.schema.group_bits)

    def _next(self, feed: StreamFeed) -> Fetched | None:
        """The peers, which wait for the lead's next broadcast, are told when it takes long."""
        future, deadline = feed.take(), time.monotonic() + self._source.timeout_seconds
        while not future.done() and (left := deadline - time.monotonic()) > 0:
            concurrent.futures.wait([future], min(left, WAITING_SECONDS))
            if self._broadcast is not None and not future.done():
                self._broadcast.send_waiting()
        return feed.wait(future, f"waiting for rows that are ready for task {self.task!r}", 0.0)

    def _opened(self) -> StreamFeed:
        feed = self._held.feed
        if feed is None:
            feed = self._held.feed = StreamFeed(self._source, prefetch=self.prefetch, num_workers=self.num_workers)
            self._hang_up = weakref.finalize(self, feed.close)  # calls it once, at the latest when the loader goes
            self._check(feed)
        return feed

    def _check(self, feed: StreamFeed) -> None:
        task = feed.schema.task(self.task)
        columns = {name: feed.schema.column(name) for name in self._source.columns or task.reads}
        for name in self._padding.values if self._padding else ():
            if name not in columns or not columns[name].ragged:
                raise ValueError(f"pad_values names {name!r}, which is no ragged column of {', '.join(columns)}")


def _want(batch_size: int | None, groups: int | None, tokens: int | None, at_least: int, installed: int | None, rank: int) -> Want:
    """Request for one batch. Raises `ValueError` for limits that no batch could have."""
    if batch_size is None and groups is None and tokens is None:
        raise ValueError("a batch needs a limit: batch_size (rows), groups or tokens")
    _check_least(1, batch_size=batch_size, groups=groups, tokens=tokens, at_least=at_least)
    if batch_size is not None and at_least > batch_size:
        raise ValueError(f"at_least {at_least} rows never fit into a batch_size of {batch_size}")
    return Want(groups or 0, batch_size or 0, tokens or 0, at_least, installed, rank=rank)


def _padding(multiple: int | None, values: Mapping[str, float] | None) -> Padding | None:
    """Padding of ragged columns; None: none. Raises `ValueError`."""
    _check_least(1, pad_to_multiple_of=multiple)
    if values and multiple is None:
        raise ValueError("pad_values without pad_to_multiple_of: nothing is padded")
    return None if multiple is None else Padding(multiple, dict(values or {}))


def _check_least(least: int, **numbers: int | None) -> None:
    for what, value in numbers.items():
        if value is not None and value < least:
            raise ValueError(f"{what} is {value}: it has to be {least} or more")
