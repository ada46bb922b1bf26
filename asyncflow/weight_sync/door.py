"""The door of a sender whose receivers ask it for versions, and a receiver's way to it."""

from __future__ import annotations

import msgspec

from asyncflow.transport import Credentials, Peer, Server
from asyncflow.types import WeightSource
from asyncflow.weight_sync.base import Manifest, WeightSyncOptions
from asyncflow.weight_sync.shared_memory import SharedMemorySender


class ServedSender(SharedMemorySender):
    """`WeightSender` that retains versions as the shared memory's does. Its door answers what a subclass marks as `remote`."""

    def __init__(self, options: WeightSyncOptions, incarnation: str, listen: str) -> None:
        """`listen`: the door where the options name none. It is opened with the first version."""
        super().__init__(options, incarnation)
        self._listen = options.listen or listen
        self._server = Server({"weights": self}, self.gone, credentials=credentials_of(options))
        self._served_at = ""

    async def publish(self, version: int, source: WeightSource) -> Manifest:
        """See `WeightSender.publish`."""
        if not self._served_at:
            self._served_at = await self._server.start(self._listen)
        return msgspec.structs.replace(await super().publish(version, source), served_at=self._served_at)

    def gone(self, key: str) -> None:
        """Event: a client has hung up."""

    async def close(self) -> None:
        """See `WeightSender.close`."""
        await self._server.close()
        await super().close()


class Dialler:
    """Connection of a receiver to the sender, made anew when it is lost, or when the sender is at another door."""

    def __init__(self, name: str, options: WeightSyncOptions, timeout_seconds: float) -> None:
        self._name, self._credentials, self._timeout_seconds = name, credentials_of(options), timeout_seconds
        self._peer: Peer | None = None

    async def peer(self, address: str) -> Peer:
        """The sender at this door. Raises `ConnectionLost`."""
        if self._peer is None or self._peer.is_lost or self._peer.address != address:
            await self.close()
            self._peer = await Peer.connect(
                address, self._name, credentials=self._credentials, timeout_seconds=self._timeout_seconds
            )
        return self._peer

    async def close(self) -> None:
        """Hang up."""
        if self._peer is not None:
            await self._peer.close()


def credentials_of(options: WeightSyncOptions) -> Credentials | None:
    """The run's credentials, if it has a key."""
    return None if options.key is None else Credentials.load(options.key)
