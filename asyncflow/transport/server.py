"""The serving side.

    door (unix, TLS) --accepts--> Connection: hello, then requests --> services[name].method --> replies, in any order

consumes: new connections
waits for: them; and looks now and then which of the old ones are late
is unblocked by: the event loop
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from asyncflow.transport.arena import Arena
from asyncflow.transport.connection import Connection, House, ReceiveRoom
from asyncflow.transport.credentials import Credentials
from asyncflow.transport.frames import FrameLimits
from asyncflow.transport.stream import TlsStream, UnixStream, listen, parse_address
from asyncflow.types import UserError

log = logging.getLogger(__name__)


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
        self._house = House(self.services, on_disconnect, arena, self.limits, ReceiveRoom(self.limits.assembly_bytes), set())
        self._credentials = credentials
        self._listeners: list[socket.socket] = []
        self._tls_doors: list[asyncio.Server] = []
        self._sweeping: asyncio.TimerHandle | None = None

    async def start(self, address: str | Path) -> str:
        """Open a door: `unix:/path/to.sock` (or a `Path`; mode 0600) or `tls:host:port` (port 0: any). Returns its address.

        Raises:
            UserError: it is no address, or one that needs credentials, and there are none.
        """
        place = parse_address(address)
        if isinstance(place, Path):
            listener = listen(place)
            self._listeners.append(listener)
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)
            opened = f"unix:{place}"
        else:
            if self._credentials is None:
                raise UserError(f"the address {address} can be reached from other machines, so it needs credentials.")
            opened = await self._open_tls(*place)
        if self._sweeping is None:
            self._sweep()
        return opened

    async def close(self) -> None:
        """Close the doors and hang up on everybody: handlers under way are cancelled."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()
        for door in self._tls_doors:
            door.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        cancelled = [task for connection in self._house.connections for task in connection.tasks()]
        for connection in list(self._house.connections):
            connection.close("the server has closed")
        if cancelled:
            await asyncio.wait(cancelled, timeout=1.0)  # a handler may take its time, but not hold up the end

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # out of file descriptors: until somebody goes
            log.error("a connection could not be accepted: %s", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(1.0, self._accept_again, listener)
            return
        connection = Connection(self._house, is_local=True)
        connection.open(UnixStream(accepted, connection, self.limits.unsent_bytes))

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def _open_tls(self, host: str, port: int) -> str:
        def protocol() -> TlsStream:
            connection = Connection(self._house, is_local=False)
            return TlsStream(connection, self.limits.unsent_bytes, connection.open)

        door = await asyncio.get_running_loop().create_server(
            protocol,
            host,
            port,
            ssl=cast(Credentials, self._credentials).server_context,
            ssl_handshake_timeout=self.limits.hello_seconds,
            ssl_shutdown_timeout=1.0,
        )
        self._tls_doors.append(door)
        name = f"[{host}]" if ":" in host else host
        return f"tls:{name}:{door.sockets[0].getsockname()[1]}"

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self._house.connections):
            connection.end_if_late(now)
        period = min(1.0, self.limits.hello_seconds / 4, self.limits.frame_seconds / 4)
        self._sweeping = loop.call_later(period, self._sweep)
