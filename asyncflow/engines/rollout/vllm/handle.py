"""One vLLM server in the hands of the engine: what it is asked, what it holds, and how it comes back when it is lost.

    generate ----> a free slot --> the server
    install -----> pause, start / update / finish, resume        one lock: between start and finish nobody resumes
    lost --------> ended, started again, given the current weights, and used again

consumes: samples, versions
waits for: a free slot; the gate, which is closed while the server's state is changed; the server
is unblocked by: another sample's end; that change's end; the server's answer; its loss, which is looked for every `WATCH_SECONDS`
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from asyncflow.engines.rollout.vllm.client import RequestRefused, ServerLost, VllmClient
from asyncflow.engines.rollout.vllm.process import ServerOptions, ServerProcess
from asyncflow.types import RunError, UserError

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
WATCH_SECONDS = 2.0
RESTART_PAUSES_SECONDS = (0.5, 30.0)  # at first, and at most: it doubles


Call = Callable[[VllmClient], Awaitable[None]]


class ServerHost(Protocol):
    """Source of a server, which starts it and starts it again. `key_from`: where its key comes from, for a sentence."""

    name: str
    key_from: str

    def start(self) -> None:
        """Have a server, without waiting for it. Raises `UserError` if there can be none."""
        ...

    def wait_until_ready(self) -> tuple[str, str]:
        """Its address and key. Blocks. Raises `RunError` if it does not come."""
        ...

    def stop(self) -> None:
        """End it, if it is this run's."""
        ...

    def close(self) -> None:
        """End it for good: it is not started again."""
        ...


class OwnServer:
    """A server that the run starts. Its methods may be called from several threads."""

    key_from = "that was made for it"

    def __init__(self, options: ServerOptions, name: str) -> None:
        self.name = name
        self.server: ServerProcess | None = None
        self._options = options
        self._is_closed = False
        self._changing = threading.Lock()

    def start(self) -> None:
        """See `ServerHost`."""
        self.stop()
        with self._changing:
            if self._is_closed:
                raise RunError(f"{self.name} is not wanted any more")
            self.server = ServerProcess(self._options, self.name)
            self.server.spawn()

    def wait_until_ready(self) -> tuple[str, str]:
        """See `ServerHost`."""
        assert self.server is not None, "`start` first"
        self.server.wait_until_ready()
        return self.server.address, self.server.key

    def stop(self) -> None:
        """See `ServerHost`."""
        with self._changing:
            if self.server is not None:
                self.server.stop()
                self.server = None

    def close(self) -> None:
        """See `ServerHost`."""
        self._is_closed = True
        self.stop()


class RunningServer:
    """A server that somebody else has started. `key_variable`: the environment variable that has its key."""

    def __init__(self, address: str, key: str, key_variable: str) -> None:
        self.name = f"the vLLM server at {address}"
        self.key_from = f"in the environment variable {key_variable}"
        self._address, self._key = address, key

    def start(self) -> None:
        """Do nothing: the server runs, or its owner starts it again."""

    def wait_until_ready(self) -> tuple[str, str]:
        """See `ServerHost`. Whether it answers is asked by its instance."""
        return self._address, self._key

    def stop(self) -> None:
        """Do nothing: the server is not ours to stop."""

    def close(self) -> None:
        """Do nothing: the server is not ours to stop."""


class ServerHandle:
    """State of one server."""

    def __init__(
        self,
        host: ServerHost,
        connect: Callable[[str, str], VllmClient],
        *,
        num_slots: int,
        max_restarts: int,
        start_seconds: float,
        changed: Callable[[], None],
    ) -> None:
        """`connect(address, key)`. `changed` is told when the server is to be had again, or is lost for good."""
        self.host = host
        self.num_slots = num_slots
        self.is_up = False
        self.error: RunError | None = None  # lost for good
        self.outstanding_tokens = 0
        self.num_outstanding = 0
        self.num_served = 0
        self.num_restarts = 0
        self.gate = asyncio.Event()  # open: samples may begin
        self.gate.set()
        self._connect, self._changed = connect, changed
        self._max_restarts, self._start_seconds = max_restarts, start_seconds
        self._slots = asyncio.Semaphore(num_slots)
        self._lock = asyncio.Lock()
        self._asked: set[asyncio.Timeout] = set()  # of the calls under way
        self._life = 0
        self._client: VllmClient | None = None
        self._coming_back: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def client(self) -> VllmClient:
        """The server's, of its present life."""
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
    async def until_lost(self) -> AsyncIterator[VllmClient]:
        """The server's client, for a call that is cut off when the server is lost: one that hangs would not end it.

        Raises `ServerLost` then.
        """
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._asked.add(limit)
                yield self.client
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ServerLost(f"{self.host.name} was lost meanwhile") from error
        finally:
            self._asked.discard(limit)

    async def come_up(self, update: Call) -> None:
        """Once the host has the server: connect, have it brought to the current weights by `update`, and use it.

        Raises `RunError` if it does not come, `UserError` if it does not take its key, and what `update` raises.
        """
        address, key = await asyncio.to_thread(self.host.wait_until_ready)
        client = self._connect(address, key)
        unused: VllmClient | None = client
        try:
            await self._until_it_answers(client)  # without the lock: an install on the other instances does not wait for this one
            async with self._lock:
                await update(client)
                self._check_open()
                if self._watching is not None:
                    self._watching.cancel()
                unused, self._client = self._client, client
                self._life += 1
                self.is_up = True
                self._watching = asyncio.create_task(self._watch(client, self._life, update), name=f"watching {self.host.name}")
        finally:  # of the life before, or of one that did not come
            if unused is not None:
                await unused.close()

    async def _watch(self, client: VllmClient, life: int, update: Call) -> None:
        """A front end whose engine has died answers some requests with an error, and others not at all; one that hangs, none."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if not self.is_up or life != self._life:  # the client may be closed by now
                return
            why: Exception = ServerLost("it does not answer, or its engine has died")
            try:
                if await self._is_ready(client):
                    continue
            except UserError as error:  # its owner has started it again, with another key
                why = error
            self.lost(life, why, update)

    async def _until_it_answers(self, client: VllmClient) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._start_seconds
        while not await self._is_ready(client):
            self._check_open()
            if loop.time() > deadline:
                raise RunError(f"{self.host.name} did not answer within {self._start_seconds:g} s: start it again")
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

    @property
    def life(self) -> int:
        """Number of starts of the server: a loss that was seen in an earlier one is no news."""
        return self._life

    def lost(self, life: int, why: Exception, update: Call) -> None:
        """The server is of no use any more, as was seen in its life number `life`. Has it brought back in the background."""
        if not self.is_up or life != self._life or self._is_closed:
            return
        self.is_up = False
        asked, self._asked = self._asked, set()
        for limit in asked:
            limit.reschedule(asyncio.get_running_loop().time())
        self._coming_back = asyncio.create_task(self._come_back(why, update), name=f"bringing back {self.host.name}")

    async def _come_back(self, why: Exception, update: Call) -> None:
        pause = RESTART_PAUSES_SECONDS[0]
        try:
            while self.num_restarts < self._max_restarts:
                self.num_restarts += 1
                log.warning("%s was lost (%s); it is started again in %g s", self.host.name, why, pause)
                await asyncio.to_thread(self.host.stop)
                await asyncio.sleep(pause)
                pause = min(2 * pause, RESTART_PAUSES_SECONDS[1])
                try:
                    await asyncio.to_thread(self.host.start)
                    await self.come_up(update)
                except (RunError, UserError, ServerLost, RequestRefused) as error:
                    why = error
                else:
                    return
            await self._give_up(f"({why}); it has been started again {self._max_restarts} times, and is not started again")
        except asyncio.CancelledError:
            raise
        except Exception as error:  # those who wait for it must hear of it
            await self._give_up(f"({why}), and cannot be brought back: {error}")
        finally:
            self._changed()

    async def _give_up(self, why: str) -> None:
        """A server that nobody uses does not keep its device."""
        try:
            await asyncio.to_thread(self.host.stop)
        except RunError as error:
            log.warning("%s", error)
        self.error = RunError(f"{self.host.name} was lost {why}")
        log.error("%s", self.error)

    def unchanged(self) -> AbstractAsyncContextManager[None]:
        """Context in which the server's state stays as it is."""
        return self._lock

    async def change(self, call: Call, update: Call) -> None:
        """`call(client)` while nobody else changes the server's state; where it fails the server is lost.

        Nothing happens while the server is not up: `update` brings it to what it should be.
        """
        async with self._lock:
            if not self.is_up:
                return
            try:
                async with self.until_lost() as client:
                    await call(client)
            except Exception as error:  # whatever it is: between start and finish a server computes nothing of use
                self.lost(self._life, error, update)

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
