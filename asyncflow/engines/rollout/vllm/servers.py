"""The vLLM servers of one engine: what each is asked, what it holds, and how it comes back when it is lost.

    generate ----> the server with the fewest outstanding tokens --> a free slot of it
    install -----> pause, start / update / finish, resume        one lock: between start and finish nobody resumes
    lost --------> ended, started again, given the current weights, and used again

consumes: samples, versions
waits for: a server that is up; a free slot; the gate, which is closed while the server's state is changed; the server
is unblocked by: one that has come back, and the loss of the last one; another sample's end; that change's end; the server's answer;
its loss, which is looked for every `WATCH_SECONDS`
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial

from asyncflow.engines.rollout.vllm.client import RequestRefused, ServerLost, VllmClient
from asyncflow.engines.rollout.vllm.hosts import ServerHost
from asyncflow.types import RunError, UserError
from asyncflow.waits import SERVER, SERVER_START, waiting

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
WATCH_SECONDS = 2.0
RESTART_PAUSES_SECONDS = (0.5, 30.0)  # at first, and at most: it doubles

ServerCall = Callable[[VllmClient], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of one server: how many samples it has at a time, how often it is started again, how long it may take to come, and how
    long for a response."""

    num_slots: int
    max_restarts: int
    start_seconds: float
    generation_seconds: float


class ServerHandle:
    """State of one server."""

    def __init__(
        self,
        host: ServerHost,
        connect: Callable[[str, str], VllmClient],
        bring_up: ServerCall,
        limits: ServerLimits,
        changed: Callable[[], None],
    ) -> None:
        """`connect(address, key)`. `bring_up(client)` brings a server that has just come to the current version. `changed` is told
        when the server is to be had again, or is lost for good."""
        self.host = host
        self.is_up = False
        self.why_down = f"{host.name} has not come yet"  # as long as it is not up
        self.error: RunError | None = None  # lost for good
        self.outstanding_tokens = 0
        self.num_outstanding = 0
        self.num_served = 0
        self.num_restarts = 0
        self.gate = asyncio.Event()  # open: samples may begin
        self.gate.set()
        self._connect, self._bring_up, self._changed = connect, bring_up, changed
        self._limits, self._slots = limits, asyncio.Semaphore(limits.num_slots)
        self._lock = asyncio.Lock()
        self._asked: set[asyncio.Timeout] = set()  # of the calls under way
        self.num_starts = 0  # number of starts of the server: a loss that was seen in an earlier one is no news
        self._client: VllmClient | None = None
        self._coming_back: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def client(self) -> VllmClient:
        """Client of the server, since its last start."""
        assert self._client is not None, "`come_up` first"
        return self._client

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """A place on the server for one sample."""
        async with self._slots:
            self.num_outstanding += 1
            try:
                yield
            finally:
                self.num_outstanding -= 1

    @contextlib.asynccontextmanager
    async def until_lost(self, *, generates: bool = False) -> AsyncIterator[VllmClient]:
        """The server's client, for a call that is cut off when the server is lost: one that hangs would not end it. `generates`:
        the call is for a response.

        Raises `ServerLost` then.
        """
        limit, seconds = asyncio.timeout(None), self._limits.generation_seconds if generates else None
        try:
            with waiting(SERVER, seconds=seconds, server=self.host.name):
                async with limit:
                    self._asked.add(limit)
                    yield self.client
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ServerLost(f"{self.host.name} was lost meanwhile") from error
        finally:
            self._asked.discard(limit)

    async def come_up(self) -> None:
        """Once the host has the server: connect, bring it to the current weights, and use it.

        Raises `RunError` if it does not come, `UserError` if it does not take its key, and what `bring_up` raises.
        """
        address, key = await asyncio.to_thread(self.host.wait_until_ready)
        client = self._connect(address, key)
        unused: VllmClient | None = client
        try:
            await self._until_it_answers(client)  # without the lock: an install on the other instances does not wait for this one
            async with self._lock:
                await self._bring_up(client)
                self._check_open()
                if self._watching is not None:
                    self._watching.cancel()
                unused, self._client = self._client, client
                self.num_starts += 1
                self.is_up = True
                self._watching = asyncio.create_task(self._watch(client, self.num_starts), name=f"watching {self.host.name}")
        finally:  # of the start before, or of one that failed
            if unused is not None:
                await unused.close()

    async def _watch(self, client: VllmClient, start: int) -> None:
        """A front end whose engine has died answers some requests with an error, and others not at all; one that hangs, none."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if not self.is_up or start != self.num_starts:  # the client may be closed by now
                return
            why: Exception = ServerLost("it does not answer, or its engine has died")
            try:
                if await self._is_ready(client):
                    continue
            except UserError as error:  # its owner has started it again, with another key
                why = error
            self.lost(start, why)

    async def _until_it_answers(self, client: VllmClient) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.start_seconds
        while not await self._is_ready(client):
            self._check_open()
            if loop.time() > deadline:
                raise RunError(f"{self.host.name} did not answer within {self._limits.start_seconds:g} s: start it again")
            await asyncio.sleep(POLL_SECONDS)

    async def _is_ready(self, client: VllmClient) -> bool:
        try:
            return await client.is_ready()
        except RequestRefused as error:
            raise UserError(
                f"{self.host.name} does not take the key {self.host.key_from}: give the one that it was started with (docs/vllm.md)"
            ) from error

    def _check_open(self) -> None:
        if self._is_closed:
            raise RunError(f"{self.host.name} is not wanted any more")

    def lost(self, start: int, why: Exception) -> None:
        """Take note that the server is of no use, as was seen after its start number `start`, and bring it back in the
        background."""
        if not self.is_up or start != self.num_starts or self._is_closed:
            return
        self.is_up, self.why_down = False, f"{self.host.name} was lost ({why})"
        asked, self._asked = self._asked, set()
        for limit in asked:
            limit.reschedule(asyncio.get_running_loop().time())
        self._coming_back = asyncio.create_task(self._come_back(why), name=f"bringing back {self.host.name}")

    async def _come_back(self, why: Exception) -> None:
        pause = RESTART_PAUSES_SECONDS[0]
        try:
            while self.num_restarts < self._limits.max_restarts:
                self.num_restarts += 1
                log.warning("%s was lost (%s); it is started again in %g s", self.host.name, why, pause)
                await asyncio.to_thread(self.host.stop)
                await asyncio.sleep(pause)
                pause = min(2 * pause, RESTART_PAUSES_SECONDS[1])
                try:
                    await asyncio.to_thread(self.host.start)
                    await self.come_up()
                except (RunError, UserError, ServerLost, RequestRefused) as error:
                    why = error
                else:
                    return
            await self._fail(f"({why}); it has been started again {self._limits.max_restarts} times, and is not started again")
        except asyncio.CancelledError:
            raise
        except Exception as error:  # all that wait for it must hear of it
            await self._fail(f"({why}), and cannot be brought back: {error}")
        finally:
            self._changed()

    async def _fail(self, why: str) -> None:
        """Stop a server for good, so that it does not keep its device, and take note of the error."""
        try:
            await asyncio.to_thread(self.host.stop)
        except RunError as error:
            log.warning("%s", error)
        self.error = RunError(f"{self.host.name} was lost {why}")
        log.error("%s", self.error)

    def unchanged(self) -> AbstractAsyncContextManager[None]:
        """Context in which the server's state stays as it is."""
        return self._lock

    async def change(self, call: ServerCall) -> None:
        """`call(client)` while nobody else changes the server's state; where it fails the server is lost.

        Nothing happens while the server is not up: `bring_up` brings it to what it should be.
        """
        async with self._lock:
            if not self.is_up:
                return
            try:
                async with self.until_lost() as client:
                    await call(client)
            except Exception as error:  # whatever it is: between start and finish a server computes nothing of use
                self.lost(self.num_starts, error)

    async def close(self) -> None:
        """Hang up; end the server, if it is the run's own."""
        self._is_closed, self.is_up = True, False
        coming_back = self._coming_back
        for task in (coming_back, self._watching):
            if task is not None:
                task.cancel()
        await asyncio.to_thread(self.host.close)
        if coming_back is not None:
            await asyncio.gather(coming_back, return_exceptions=True)
        if self._client is not None:
            await self._client.close()


class ServerPool:
    """The servers of one engine: which is to generate next, and what all are told at once."""

    def __init__(
        self, hosts: Sequence[ServerHost], connect: Callable[[str, str], VllmClient], bring_up: ServerCall, limits: ServerLimits
    ) -> None:
        """See `ServerHandle`."""
        self._changed, self._limits = asyncio.Event(), limits
        self._is_closed = False
        self.handles = [ServerHandle(host, connect, bring_up, limits, self._wake) for host in hosts]

    def start(self) -> None:
        """Start what is the run's to start, all at once, and wait for it; end all if one does not come."""
        try:
            for handle in self.handles:
                handle.host.start()
            for handle in self.handles:
                handle.host.wait_until_ready()
        except BaseException:
            for handle in self.handles:
                handle.host.stop()
            raise

    async def come_up(self) -> None:
        """Connect to each, and bring it to the current version. Raises what doing so raises."""
        await asyncio.gather(*(handle.come_up() for handle in self.handles))

    async def everywhere(self, call: Callable[[ServerHandle, VllmClient], Awaitable[None]], *, opens: bool = False) -> None:
        """`call(handle, client)` on each that is up, all at once. One on which it fails is lost, and the others go on.

        `opens`: each has its gate opened as soon as it is done, whatever the others do.
        """

        async def one(handle: ServerHandle) -> None:
            await handle.change(partial(call, handle))
            if opens:
                handle.gate.set()

        await asyncio.gather(*(one(handle) for handle in self.handles))

    @contextlib.asynccontextmanager
    async def unchanged(self) -> AsyncIterator[None]:
        """Context in which no server's state is changed, and none is brought up."""
        async with contextlib.AsyncExitStack() as stack:
            for handle in self.handles:
                await stack.enter_async_context(handle.unchanged())
            yield

    @contextlib.contextmanager
    def gates_closed(self, *, opens: bool) -> Iterator[None]:
        """Context in which no sample begins, until its server's gate is opened. `opens`: all gates at the end."""
        for handle in self.handles:
            handle.gate.clear()
        try:
            yield
        finally:
            if opens:
                for handle in self.handles:
                    handle.gate.set()

    async def least_loaded(self) -> ServerHandle:
        """The instance with the fewest outstanding tokens, as soon as there is one.

        Raises `RunError` when all are lost for good, and `RuntimeError` once they are closed.
        """
        while True:
            if self._is_closed:
                raise RuntimeError("the rollout engine is closed")
            up = [handle for handle in self.handles if handle.is_up]
            if up:
                return min(up, key=lambda handle: handle.outstanding_tokens)
            errors = [handle.error for handle in self.handles if handle.error is not None]
            if len(errors) == len(self.handles):
                raise errors[-1]
            why_down = "; ".join(handle.why_down for handle in self.handles)
            with waiting(SERVER_START, seconds=self._limits.start_seconds, servers=why_down):
                await self._changed.wait()

    async def close(self) -> None:
        """End those that the run has started, and hang up on the others."""
        self._is_closed = True
        self._wake()
        await asyncio.gather(*(handle.close() for handle in self.handles))

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
