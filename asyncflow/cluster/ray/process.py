"""A worker's process, which its host has on some node of a Ray cluster: what the driver hears of it, and tells it.

    RayProcess (driver) --listen, kill--> RayHost (on some node): host.py
                   log <--what it prints, its end--

consumes: a worker's output and end, as its host tells
waits for: the host's next word; one that is out of reach or hangs, UNAVAILABLE_SECONDS at most
is unblocked by: the worker's output or end; the loss of its host; the end of a cluster that was started for the run
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from asyncflow.cluster.ray.connection import ASK_SECONDS, HOST_SECONDS, RayConnection, first_sentence, import_ray

LOST_STATUS: Final = 1  # of a worker whose host is gone
UNAVAILABLE_SECONDS: Final = 60.0  # so long a host may be out of reach or hang, and its worker lives on; more than LISTEN_SECONDS


class RayProcess:
    """A `WorkerProcess` at the other end of its host."""

    stdin = None  # the host has it

    def __init__(
        self,
        host: Any,
        pid: int,
        log: Path,
        connection: RayConnection,
        end_host: Callable[[], Awaitable[None]],
        *,
        is_here: bool,
    ) -> None:
        """`end_host` ends the host, and the worker with it. `is_here`: it is on the driver's node."""
        self.pid, self.is_here = pid, is_here
        self.returncode: int | None = None
        self._host, self._connection, self._end_host = host, connection, end_host
        self._following = asyncio.create_task(self._follow(log))
        self._killing: asyncio.Task[None] | None = None

    async def wait(self) -> int:
        """The exit status, when it has ended and all that it has printed is in its log."""
        return await asyncio.shield(self._following)

    def kill(self) -> None:
        """End the worker with SIGKILL, by its host."""
        if self._killing is None:
            self._killing = asyncio.create_task(self._kill())

    async def _kill(self) -> None:
        try:
            async with asyncio.timeout(HOST_SECONDS):
                await self._order_kill()
        except TimeoutError:  # it hangs
            await self._end_host()

    async def _order_kill(self) -> None:
        errors = import_ray().exceptions
        while self.returncode is None:
            try:
                await self._host.kill.remote()
            except errors.ActorUnavailableError:  # it lives on, out of reach: it may not have been told
                await asyncio.sleep(ASK_SECONDS)
            except errors.RayError:
                return
            else:
                return

    async def _follow(self, log: Path) -> int:
        errors, now = import_ray().exceptions, asyncio.get_running_loop().time
        answered_at = now()
        with log.open("ab", buffering=0) as file:
            while self.returncode is None:
                try:
                    async with asyncio.timeout(UNAVAILABLE_SECONDS):
                        output, self.returncode = await self._connection.answer(self._host.listen.remote())
                    answered_at = now()
                except (TimeoutError, ConnectionError, errors.RayError) as error:
                    is_unavailable = isinstance(error, errors.ActorUnavailableError)
                    if is_unavailable and now() - answered_at < UNAVAILABLE_SECONDS:
                        await asyncio.sleep(ASK_SECONDS)  # the network may come back, and its worker with it
                        continue
                    why = first_sentence(error)
                    if isinstance(error, TimeoutError):
                        why = f"it has not answered for {UNAVAILABLE_SECONDS:g} s"
                    if is_unavailable or isinstance(error, TimeoutError):  # it may come back, and is somebody else's then
                        await self._end_host()
                    output, self.returncode = f"its host is gone: {why}\n".encode(), LOST_STATUS
                file.write(output)
        return self.returncode


class NeverBegan:
    """A process that could not be started."""

    pid, returncode, stdin, is_here = 0, LOST_STATUS, None, False

    async def wait(self) -> int:
        """See `WorkerProcess.wait`."""
        return LOST_STATUS

    def kill(self) -> None:
        """Do nothing: there is nothing to be killed."""
