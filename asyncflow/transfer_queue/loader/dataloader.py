"""Data loader over the transfer queue, for other people's trainers: what a task reads, as a stream of batches of tensors.

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
from collections.abc import Callable, Generator, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncflow.registry import by_name
from asyncflow.transfer_queue.loader.broadcast import WAITING_SECONDS, BroadcastBatch, GroupBroadcast
from asyncflow.transfer_queue.loader.options import LoaderOptions
from asyncflow.transfer_queue.loader.prefetch import Fetched, StreamFeed
from asyncflow.transfer_queue.loader.tensors import Jagged, Padded, TensorColumn, WritableColumn, to_device
from asyncflow.transfer_queue.loader.writeback import HeldRows, RowIndices

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

    @by_name(LoaderOptions)
    def __init__(self, options: LoaderOptions) -> None:
        """Make a loader; nothing is connected before the first batch is asked for. Raises `ValueError` as `LoaderOptions`."""
        self.task, self.partition = options.task, options.partition
        self.batch_size, self.num_workers, self.prefetch = options.batch_size, options.num_workers, options.prefetch
        self._want, self._padding = options.want(), options.padding()
        self._device = torch.device(options.device)
        self._broadcast: GroupBroadcast | None = None
        if options.group is not None and dist.get_world_size(options.group) > 1:
            self._broadcast = GroupBroadcast(options.group, options.lead, self._device)
        self._source = options.source(None if self._broadcast else self._padding)
        self._acknowledges = options.acknowledge == "on_next"
        self._hang_up: Callable[[], object] = lambda: None
        self._held = HeldRows(options.task)
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

    def complete(self, indices: RowIndices, outputs: Mapping[str, WritableColumn]) -> Tensor | None:
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

    def done(self, indices: RowIndices) -> Tensor | None:
        """Mark rows of a task without outputs as done. Returns what `complete` returns.

        Raises `ValueError` where the task has outputs, or a row is not held.
        """
        if not self.is_lead:
            return None
        return self._held.done(indices)

    def fail(self, indices: RowIndices, error: str) -> None:
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

    def _messages(self) -> Generator[BroadcastBatch, None, None]:
        """Batches that this rank delivers; not padded where they are broadcast."""
        broadcast = self._broadcast
        if broadcast is None:
            yield from self._from_queue()
        elif broadcast.is_lead:
            yield from self._announced(broadcast)
        else:
            while (message := broadcast.receive()) is not None:
                yield message

    def _announced(self, broadcast: GroupBroadcast) -> Generator[BroadcastBatch, None, None]:
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

    def _from_queue(self) -> Generator[BroadcastBatch, None, None]:
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
            yield BroadcastBatch(fetched.indices, fetched.columns, feed.schema.group_bits)

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
