"""The serving side.

    door (unix, TLS) --accepts--> Connection: hello, then requests --> services[name].method --> replies, in any order

consumes: new connections
waits for: them; and looks now and then which of the old ones are late
is unblocked by: the event loop
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from asyncflow.transport.arena import Arena
from asyncflow.transport.connection import Connection, ReceiveRoom, ServerState
from asyncflow.transport.credentials import Credentials
from asyncflow.transport.limits import FrameLimits
from asyncflow.transport.stream import BACKLOG, Stream, listen, parse_address
from asyncflow.types import UserError


class Server:
    """Serves objects by name. `services`, the caller's own mapping, may gain and lose entries while it runs."""

    def __init__(
        self,
        services: Mapping[str, object],
        on_disconnect: Callable[[str], None] | None = None,
        *,
        credentials: Credentials | None = None,
        arena: Arena | None = None,
        limits: FrameLimits | None = None,
    ) -> None:
        """`on_disconnect` is told the `client_key` of every client that goes, if it had said hello.

        Large arrays are received into `arena`. If that has a file, those that lie in it are handed to clients on unix sockets by
        reference: an array that was returned stays as it is until the client has copied it, see `FrameLimits.hold_seconds`.
        """
        self.services = services
        self.limits = limits or FrameLimits()
        self._state = ServerState(self.services, on_disconnect, arena, self.limits, ReceiveRoom(self.limits.assembly_bytes), set())
        self._credentials = credentials
        self._doors: list[asyncio.Server] = []
        self._sweeping: asyncio.TimerHandle | None = None

    async def start(self, address: str | Path) -> str:
        """Open a door: `unix:/path/to.sock` (or a `Path`; mode 0600) or `tls:host:port` (port 0: any). Returns its address.

        Raises:
            UserError: it is no address, or one that needs credentials, and there are none.
        """
        place, loop = parse_address(address), asyncio.get_running_loop()
        if isinstance(place, Path):
            door = await loop.create_unix_server(partial(self._accepted, is_local=True), sock=listen(place), backlog=BACKLOG)
            opened = f"unix:{place}"
        elif self._credentials is None:
            raise UserError(f"the address {address} can be reached from other machines, so it needs credentials.")
        else:
            host, port = place
            door = await loop.create_server(
                partial(self._accepted, is_local=False),
                host,
                port,
                ssl=self._credentials.server_context,
                ssl_handshake_timeout=self.limits.hello_seconds,
                ssl_shutdown_timeout=1.0,
            )
            opened = f"tls:{f'[{host}]' if ':' in host else host}:{door.sockets[0].getsockname()[1]}"
        self._doors.append(door)
        if self._sweeping is None:
            self._sweep()
        return opened

    async def close(self) -> None:
        """Close the doors and hang up on everybody: handlers under way are cancelled."""
        for door in self._doors:
            door.close()
        self._doors.clear()
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        cancelled = [task for connection in self._state.connections for task in connection.tasks()]
        for connection in list(self._state.connections):
            connection.close("the server has closed")
        if cancelled:
            await asyncio.wait(cancelled, timeout=1.0)  # a handler may take its time, but not hold up the end

    def _accepted(self, *, is_local: bool) -> Stream:
        connection = Connection(self._state, is_local=is_local)
        return Stream(connection, self.limits.unsent_bytes, connection.open)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self._state.connections):
            connection.end_if_late(now)
        period = min(1.0, self.limits.hello_seconds / 4, self.limits.frame_seconds / 4)
        self._sweeping = loop.call_later(period, self._sweep)
