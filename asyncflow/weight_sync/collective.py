"""Weights by a broadcast of torch.distributed: the synchronous mode of the paper (AF 4, 8a). The trainer is rank 0.

    receivers --join(version)--> the sender: gathers them --seat (epoch, rank)--> all form the group, if it is not the last one
              <======================== chunks of the retained file ========================
              --ended(has it?)-->  all have it: the group is kept; or not: the next one is another epoch's

consumes: versions to publish; receivers that ask for one
waits for: the receivers that have not got the version yet, for a moment; each chunk, until the deadline
is unblocked by: their asking, their going

Publishing waits for nobody. A receiver that is late is served by a broadcast of its own; one that dies, hangs or is restarted
breaks the group: it is named in the log, the others raise `WeightSyncError` (as far as they miss bytes), ask again, and form the
next group without it. Receivers may join and leave: the next group is of those that ask then. The door is a unix socket in the
sender's directory, or `options.listen` between machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
from torch import Tensor

from asyncflow.threads import ComputeThread
from asyncflow.transport import ConnectionLost, Peer, client_key, client_name, proxy, remote
from asyncflow.transport.torch_store import RendezvousStore, reason
from asyncflow.types import Array, WeightSource
from asyncflow.weight_sync.base import Manifest, WeightSyncError, WeightSyncOptions
from asyncflow.weight_sync.door import Dialler, ServedSender
from asyncflow.weight_sync.group import Group
from asyncflow.weight_sync.layout import FileLayout
from asyncflow.weight_sync.staging import Arriving, expected

log = logging.getLogger(__name__)

SOCKET_FILE = "sender.sock"
GATHER_SECONDS = 5.0
LAST_WORDS_SECONDS: Final = 5.0
"""For which the members of a broadcast that has failed may say how it ended for them: at most half of the deadline, since others
ask for the next one meanwhile."""
"""Seconds that workers which have asked wait for those that have not."""


class Collective:
    """Weight sync by broadcasts, both ends: see the module's head."""

    def __init__(self, options: WeightSyncOptions) -> None:
        self._options = options

    def sender(self, incarnation: str) -> CollectiveSender:
        """The trainer's end, rank 0."""
        return CollectiveSender(self._options, incarnation)

    def receiver(self, name: str) -> CollectiveReceiver:
        """A rollout worker's end."""
        return CollectiveReceiver(self._options, name)


class Seat(msgspec.Struct, frozen=True):
    """A member's place in the group of that epoch; rank 0 is the sender's."""

    epoch: int
    rank: int
    size: int


class CollectiveSender(ServedSender):
    """Implements `WeightSender`, as rank 0: broadcasts the versions that it retains to those that ask for one.

    Client keys stand for the members: a receiver that has come back is another one.
    """

    def __init__(self, options: WeightSyncOptions, incarnation: str) -> None:
        super().__init__(options, incarnation, f"unix:{options.directory / SOCKET_FILE}")
        self._options, self._groups = options, _ProcessGroups(options)
        self._asked: dict[int, dict[str, asyncio.Future[Seat]]] = {}  # by version and client key
        self._has: dict[int, set[str]] = {}  # by version: the names of those that have it
        self._here: set[str] = set()  # names of those that have asked, and have not gone
        self._absent: set[str] = set()  # names of those that have gone and not come back
        self._expected = options.num_receivers  # so many are waited for, although they may not have asked yet
        self._epoch = 0
        self._members: tuple[str, ...] = ()  # client keys, from rank 1 on; none: the next group is a new one
        self._missing: set[str] = set()  # members that have not said how the broadcast under way has ended
        self._lost: set[str] = set()  # members of it that have gone
        self._box: dict[str, asyncio.Future[bytes]] = {}  # of the epoch: what the members leave for one another
        self._changed = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._broadcast_thread = ComputeThread("weight-broadcast")

    async def publish(self, version: int, source: WeightSource) -> Manifest:
        """See `WeightSender.publish`."""
        manifest = await super().publish(version, source)
        self._has[version] = set()  # no receiver has it yet
        for old in [old for old in self._has if self._files.get(old) is None]:
            del self._has[old]
        return manifest

    def gone(self, key: str) -> None:
        """Forget a client that has hung up."""
        self._here.discard(_name(key))
        self._absent.add(_name(key))
        for asked in self._asked.values():
            asked.pop(key, None)
        if key in self._members:
            self._break(f"{_name(key)} has gone")
        if key in self._missing:
            self._missing.discard(key)
            self._lost.add(key)
        self._notify()

    async def close(self) -> None:
        """See `WeightSender.close`. A broadcast under way ends by itself."""
        await super().close()
        if self._running is not None:
            self._running.cancel()
        self._broadcast_thread.close()

    @remote
    async def join(self, incarnation: str, version: int) -> Seat:
        """Wait for a seat in the broadcast of a version. Raises `WeightSyncError` if it is no longer kept."""
        self.file(incarnation, version)
        self._here.add(client_name.get())
        self._absent.discard(client_name.get())
        seat: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()
        self._asked.setdefault(version, {})[client_key.get()] = seat
        self._notify()
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        try:
            return await seat
        finally:
            if seat.cancelled():
                self._asked.get(version, {}).pop(client_key.get(), None)

    @remote
    async def put(self, epoch: int, key: str, value: bytes) -> None:
        """Leave something for the other members."""
        slot = self._slot(epoch, key)
        if not slot.done():
            slot.set_result(value)

    @remote
    async def get(self, epoch: int, key: str) -> bytes:
        """Wait for what another member leaves. Raises `WeightSyncError` when a member has gone."""
        return await asyncio.shield(self._slot(epoch, key))

    @remote
    async def ended(self, version: int, has_it: bool) -> None:
        """End the caller's part in a broadcast."""
        key = client_key.get()
        if has_it and version in self._has:
            self._has[version].add(client_name.get())
        if not has_it and key in self._members:
            self._break(f"{_name(key)} could not take it")
        self._missing.discard(key)
        self._notify()

    async def _run(self) -> None:
        """Broadcast to those that ask, one broadcast after another."""
        while self._asked:
            version = next(iter(self._asked))
            await self._until(partial(self._is_gathered, version), min(GATHER_SECONDS, self._options.deadline_seconds))
            asked = {key: seat for key, seat in self._asked.pop(version).items() if not seat.cancelled()}
            if asked:
                self._expected = min(self._expected, len(self._known(version, asked)))  # an absent one is waited for once
                await self._broadcast(version, asked)

    def _is_gathered(self, version: int) -> bool:
        asked = self._asked[version]
        known = self._known(version, asked)
        return not asked or (len(known) >= self._expected and self._here <= known)

    def _known(self, version: int, asked: Iterable[str]) -> set[str]:
        """Names of workers that need not be waited for, of `asked` (client keys) among others."""
        return {_name(key) for key in asked} | self._has.get(version, set()) | self._absent

    async def _broadcast(self, version: int, asked: Mapping[str, asyncio.Future[Seat]]) -> None:
        """Broadcast a version to the workers that have asked. Failures go to the log, and the receivers report them too."""
        try:
            file = self.file(self.incarnation, version)
        except WeightSyncError as error:
            for seat in asked.values():
                seat.set_exception(error)
            return
        if set(asked) != set(self._members):
            self._break("its members have changed")
            self._epoch, self._members, self._box = self._epoch + 1, tuple(asked), {}
        self._missing, self._lost = set(asked), set()
        for rank, key in enumerate(self._members, 1):
            asked[key].set_result(Seat(self._epoch, rank, len(asked) + 1))
        why, patience_seconds = "no word of how it ended", self._options.deadline_seconds
        try:
            own = Seat(self._epoch, 0, len(asked) + 1)
            await self._broadcast_thread.run(self._send, own, asyncio.get_running_loop(), file)
        except (RuntimeError, WeightSyncError, TimeoutError) as error:
            why, patience_seconds = reason(error), min(LAST_WORDS_SECONDS, patience_seconds / 2)  # the others find out as soon
        await self._until(lambda: not self._missing, patience_seconds)
        if unreached := self._missing | self._lost:
            names = ", ".join(sorted(map(_name, self._lost or unreached)))  # the silent ones may only be slow to say it
            log.warning("version %d did not reach %s (%s): the next broadcast is a new group's", version, names, why)
            self._break(why)

    def _send(self, seat: Seat, loop: asyncio.AbstractEventLoop, file: Array) -> None:
        """Send the file to the group. Runs in the thread."""
        with self._groups.of(seat.epoch, seat, self, loop) as group:
            group.send(file)

    def _break(self, why: str) -> None:
        """End the use of the group: nothing waits for it any more."""
        self._members = ()
        for slot in self._box.values():
            if not slot.done():
                slot.set_exception(WeightSyncError(f"the group for the broadcast has broken: {why}"))
                slot.exception()  # taken, if nobody waits

    def _slot(self, epoch: int, key: str) -> asyncio.Future[bytes]:
        if epoch != self._epoch or not self._members:
            raise WeightSyncError(f"group {epoch} for the broadcast is broken")
        return self._box.setdefault(key, asyncio.get_running_loop().create_future())

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until the condition holds, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class CollectiveReceiver:
    """Implements `WeightReceiver`."""

    def __init__(self, options: WeightSyncOptions, name: str) -> None:
        self._options = options
        self._file = np.empty(0, np.uint8)  # of the version that was fetched last
        self._layout: FileLayout | None = None
        self._dialler = Dialler(name, options, options.deadline_seconds)
        self._groups = _ProcessGroups(options)
        self._thread = ComputeThread("weight-receiver")

    async def fetch(self, manifest: Manifest) -> Mapping[str, Tensor]:
        """See `WeightReceiver.fetch`."""
        layout, deadline = expected(manifest, self._layout), self._options.deadline_seconds
        trainer = f"the trainer's sender at {manifest.served_at}"
        try:
            peer = await self._dialler.peer(manifest.served_at)
            sender = proxy(CollectiveSender, peer, "weights")
            async with asyncio.timeout(2 * deadline):  # one broadcast that breaks may be before this one
                seat = await sender.join(manifest.incarnation, manifest.version)
        except TimeoutError as error:
            await self._dialler.close()  # a connection that has gone silent would stay so
            raise WeightSyncError(f"{trainer} did not begin with version {manifest.version} within {2 * deadline:g} s") from error
        except ConnectionLost as error:
            raise WeightSyncError(f"{trainer} has gone: {error}") from error
        has_it = False
        try:
            tensors = await self._thread.run(self._receive, asyncio.get_running_loop(), peer, seat, layout, manifest)
            has_it = True
        except (RuntimeError, TimeoutError, ConnectionLost) as error:
            raise WeightSyncError(f"the broadcast of version {manifest.version} by {trainer} broke: {reason(error)}") from error
        finally:
            try:
                async with asyncio.timeout(deadline):
                    await sender.ended(manifest.version, has_it)
            except (ConnectionLost, TimeoutError):
                await self._dialler.close()
        return tensors

    async def release(self) -> None:
        """See `WeightReceiver.release`. The memory is this worker's own, and used again: new pages would halve the rate."""

    async def close(self) -> None:
        """See `WeightReceiver.close`."""
        await self._dialler.close()
        self._thread.close()

    def _receive(
        self, loop: asyncio.AbstractEventLoop, peer: Peer, seat: Seat, layout: FileLayout, manifest: Manifest
    ) -> Mapping[str, Tensor]:
        """Receive a version from the group. Runs in the thread."""
        sender = proxy(CollectiveSender, peer, "weights")
        if len(self._file) != manifest.num_bytes:
            self._file = np.empty(manifest.num_bytes, np.uint8)
        arriving = Arriving(self._file, layout, manifest)
        with self._groups.of((peer, seat.epoch), seat, sender, loop) as group:
            group.receive(manifest.num_bytes, arriving.write)
        tensors, self._layout = arriving.finish(), layout
        return tensors


class _ProcessGroups:
    """Groups of one end: each is kept from one broadcast to the next, until one fails. For the thread that broadcasts."""

    def __init__(self, options: WeightSyncOptions) -> None:
        self._options = options
        self._kept: tuple[object, Group] | None = None

    @contextlib.contextmanager
    def of(self, key: object, seat: Seat, sender: CollectiveSender, loop: asyncio.AbstractEventLoop) -> Iterator[Group]:
        """The group of that `key`, in which this end has the seat: the one that is kept, or one that now meets at the sender."""
        kept, self._kept = self._kept, None  # until it has held
        if kept is None or kept[0] != key:
            if kept is not None:
                kept[1].close()
            timeout, is_local = self._options.deadline_seconds, self._options.listen is None
            store, device = _store(sender, seat.epoch, loop, timeout), self._options.device
            kept = key, Group(store, seat.rank, seat.size, device=device, timeout_seconds=timeout, is_local=is_local)
        yield kept[1]
        self._kept = kept


def _store(sender: CollectiveSender, epoch: int, loop: asyncio.AbstractEventLoop, deadline_seconds: float) -> RendezvousStore:
    """Store for a thread that forms a group while `loop` talks to the sender."""

    def call(method: str, *arguments: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(getattr(sender, method)(epoch, *arguments), loop).result(deadline_seconds)

    return RendezvousStore(call)


def _name(key: str) -> str:
    """The name of the client that has this key."""
    return key.rpartition("@")[0]
