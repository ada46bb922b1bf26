"""Prefetching of a loader: an event loop in a thread of its own, with the connection to the queue.

    consumer's thread                      this thread                                          reader processes, if any
      take -------------------> a permit   lease (rows alone) --> lease --> ...
                                             |---------> fetch, in order <--------------------> fetch
      <--- the next fetched batch -----------|

consumes: permits, one for every batch that the consumer has asked for and `prefetch` more
waits for: a permit; the controller, until there are rows; the units
is unblocked by: `take`; rows that become ready; the end of the partition or the task; `close`

A request for rows does not wait until the rows before have been transferred. All leases are held, and kept alive, by this one
connection, whichever process fetches: reader processes can come and go without a row changing hands.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import os
import secrets
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.multiprocessing  # tensors between processes: in shared memory
from torch import Tensor

from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.leases import Lease, Want
from asyncflow.transfer_queue.loader.tensors import Padding, TensorColumn, to_tensors
from asyncflow.transfer_queue.schema import Schema
from asyncflow.transport import Credentials
from asyncflow.types import RunError

T = TypeVar("T")

CONNECT_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSource:
    """Source of a stream: the queue, the task, the columns, and their padding. Pickled for the reader processes."""

    address: str
    name: str
    task: str
    columns: tuple[str, ...] | None
    credentials: Path | None
    timeout_seconds: float
    padding: Padding | None

    async def connect(self, role: str) -> TransferQueueClient:
        """Under a name of its own: what a client that goes has held is given back by its name."""
        credentials = None if self.credentials is None else Credentials.load(self.credentials)
        name = f"{self.name}/{role}-{os.getpid()}-{secrets.token_hex(3)}"
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await TransferQueueClient.connect(self.address, name, credentials=credentials)
        except TimeoutError as error:
            raise TimeoutError(f"{self.address} has not said within {CONNECT_SECONDS:g} s what queue it is") from error

    async def fetch(self, client: TransferQueueClient, lease: Lease) -> Fetched | None:
        """Data of a lease; None when all of its rows have been dropped."""
        columns = client.schema.task(lease.token.task).reads if self.columns is None else self.columns
        leased = await client.fetch(lease, columns)
        if leased is None:
            return None
        tensors = to_tensors(leased.batch)
        return Fetched(
            leased.lease, torch.from_numpy(leased.batch.indices), self.padding.apply(tensors) if self.padding else tensors
        )


class Fetched(NamedTuple):
    """A batch and the lease under which it is held. `indices` int64 [n]."""

    lease: Lease
    indices: Tensor
    columns: dict[str, TensorColumn]


class Ahead:
    """Batches ahead of the one that is worked on, in one pass over the stream: at most `prefetch` are leased that have not been
    asked for yet. Lives in the event loop."""

    def __init__(
        self, client: TransferQueueClient, fetch: Callable[[Lease], Coroutine[Any, Any, Fetched | None]], prefetch: int
    ) -> None:
        self._client, self._fetch = client, fetch
        self._permits = asyncio.Semaphore(prefetch)
        self._under_way: asyncio.Queue[asyncio.Future[Fetched | None] | None] = asyncio.Queue()

    async def run(self, task: str, want: Want) -> None:
        """Lease batches until the partition or the task ends. A failure is raised by `take`."""
        try:
            while True:
                await self._permits.acquire()
                leased = await self._client.lease(task, want, columns=())
                if leased is None:
                    self._under_way.put_nowait(None)
                    return
                fetching = asyncio.create_task(self._fetch(leased.lease))
                fetching.add_done_callback(_see)
                self._under_way.put_nowait(fetching)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Let `take` raise an error."""
        failed: asyncio.Future[Fetched | None] = asyncio.get_running_loop().create_future()
        failed.set_exception(error)
        _see(failed)
        self._under_way.put_nowait(failed)

    async def take(self) -> Fetched | None:
        """The next batch; None at the end. To be awaited once at a time, and no more after None or an error."""
        while True:
            self._permits.release()
            under_way = await self._under_way.get()
            if under_way is None:
                return None
            if (fetched := await under_way) is not None:
                return fetched  # else all of it had been dropped


def _see(future: asyncio.Future[Any]) -> None:
    """An exception that nobody comes to ask for (the one before it ended the loop) is not to be logged as one that was lost."""
    if not future.cancelled():
        future.exception()


class StreamFeed:
    """The thread. Calls are from the consumer's thread. `schema`: the queue's."""

    def __init__(self, source: StreamSource, *, prefetch: int, num_workers: int) -> None:
        """Raises what connecting raises: `ConnectionLost`, `UserError`."""
        self._source, self._prefetch = source, prefetch
        self._ahead: Ahead | None = None
        self._failure: Exception | None = None
        self._running: asyncio.Task[None] | None = None
        self._readers: ProcessPoolExecutor | None = None
        if num_workers:
            context = multiprocessing.get_context("spawn")
            self._readers = ProcessPoolExecutor(num_workers, context, _become_reader, (source,))
        opened: Future[Schema] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(opened)), name=f"{source.name} feed", daemon=True)
        self._thread.start()
        self.schema = opened.result()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine over there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, future: Future[T], what: str, seconds: float | None = None) -> T:
        """Result of a future, for which it blocks, for `seconds` at most; None: `source.timeout_seconds`. Raises `TimeoutError`
        that says what took more than `source.timeout_seconds`."""
        concurrent.futures.wait([future], self._source.timeout_seconds if seconds is None else seconds)
        if not future.done():
            future.cancel()
            raise TimeoutError(f"{what} took more than {self._source.timeout_seconds:g} s (loader {self._source.name!r})")
        return future.result()

    def call(self, call: Callable[[TransferQueueClient], Coroutine[Any, Any, T]], what: str) -> T:
        """Run a coroutine over there. Raises what `wait` does."""
        return self.wait(self.submit(call(self._client)), what)

    async def begin(self, want: Want) -> None:
        """Start a pass, when the one before is over. To be submitted."""
        self._ahead = Ahead(self._client, self._fetch, self._prefetch)
        if self._failure is not None:
            self._ahead.fail(self._failure)
        self._running = asyncio.create_task(self._ahead.run(self._source.task, want))

    def take(self) -> Future[Fetched | None]:
        """The next batch of the pass; None at its end."""
        assert self._ahead is not None, "`begin` first"
        return self.submit(self._ahead.take())

    def close(self) -> None:
        """Hang up: what is leased is given back. May be called from any thread, and again."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread:  # where the garbage collector may call it
            self._thread.join()

    async def _main(self, opened: Future[Schema]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            self._client = client = await self._source.connect("loader")
        except Exception as error:
            opened.set_exception(error)
            return
        opened.set_result(client.schema)
        renewing = asyncio.create_task(client.renew_held())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait([renewing, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():  # leases that cannot be renewed are as good as lost
            why = renewing.exception()
            self._failure = why if isinstance(why, Exception) else RunError("the loader's leases are not renewed any more")
            if self._ahead is not None:
                self._ahead.fail(self._failure)
        await stopping
        mine = asyncio.all_tasks() - {asyncio.current_task()}
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)
        await client.disconnect()
        if self._readers is not None:
            for reader in list((self._readers._processes or {}).values()):  # public from Python 3.14 on: terminate_workers
                reader.terminate()  # it holds nothing, and what it waits for may never come
            self._readers.shutdown(cancel_futures=True)

    async def _fetch(self, lease: Lease) -> Fetched | None:
        if self._readers is None:
            return await self._source.fetch(self._client, lease)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._readers, _read, lease)
        except concurrent.futures.BrokenExecutor as error:
            raise RunError(f"a reader process of loader {self._source.name!r} has died: {error}") from error


class _Reader:
    """Reader process: fetches the batches that it is asked for, on a connection of its own that holds no lease."""

    def __init__(self, source: StreamSource) -> None:
        self._source = source
        self._loop = asyncio.new_event_loop()
        self._client: TransferQueueClient | None = None

    def read(self, lease: Lease) -> Fetched | None:
        return self._loop.run_until_complete(self._read(lease))

    async def _read(self, lease: Lease) -> Fetched | None:
        if self._client is None:
            self._client = await self._source.connect("reader")
        return await self._source.fetch(self._client, lease)


_reader: _Reader | None = None


def _become_reader(source: StreamSource) -> None:
    global _reader
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the consumer decides
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    _reader = _Reader(source)


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _read(lease: Lease) -> Fetched | None:
    assert _reader is not None
    return _reader.read(lease)
