"""Weights over TCP, in the background: the asynchronous mode of the paper (AF 4, 8c). One receiver per machine serves its workers.

    trainer's machine                    a machine with rollout workers
    retained files <--read(from, to)---- NodeReceiver --> files of its own <--- SharedMemoryReceiver of every worker
                   ------ chunks ------>     ^                                       |
                                             +-------------- hold(manifest) ---------+

consumes: versions to publish; manifests to fetch
waits for: the next chunk; the machine's receiver
is unblocked by: the sender's answers; after a loss, by connecting again

The workers of a machine share a folder. The one that locks the file there is its receiver; the kernel releases the lock when
that process ends, and the next worker that asks takes over. The receiver pulls a version once: bytes that have been hashed are not
asked for again when a connection is lost. A file gets its name when all bytes are there and their hash is right.

A version whose tensors are all 16 bits wide comes as differences (differences.py) from the newest one that the machine has, chunk
by chunk, where they are smaller. Where the hash is not right then, it comes whole; so does every `WHOLE_EVERY`-th.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from torch import Tensor

from asyncflow.threads import ComputeThread
from asyncflow.transport import ConnectionLost, Peer, Server, proxy, remote
from asyncflow.transport.ahead import read_ahead
from asyncflow.types import Array, UserError
from asyncflow.waits import PULL, waiting
from asyncflow.weight_sync.base import Manifest, WeightSyncError, WeightSyncOptions
from asyncflow.weight_sync.differences import DamagedDifference, apply, difference
from asyncflow.weight_sync.door import Dialler, ServedSender
from asyncflow.weight_sync.files import VersionFiles, make_private
from asyncflow.weight_sync.shared_memory import SharedMemoryReceiver
from asyncflow.weight_sync.staging import copy_and_hash

LISTEN = "tls:127.0.0.1:0"
NODE_DIR, SOCKET_FILE, LOCK_FILE, FILES_PREFIX = "node", "receiver.sock", "receiver.lock", "files-"
NARROW = frozenset({"bfloat16", "float16"})  # dtypes of which a step leaves many numbers as they are
NO_BYTES = np.empty(0, np.uint8)
WHOLE_EVERY = 32  # versions
_RETRY_SECONDS = 0.05


class Network:
    """Weight sync over the network, both ends: see the module's head. Raises `UserError` without a key."""

    def __init__(self, options: WeightSyncOptions) -> None:
        if options.key is None:
            raise UserError("weight_sync 'network' needs the run's key.")
        self._options = options

    def sender(self, incarnation: str) -> NetworkSender:
        """The trainer's end."""
        return NetworkSender(self._options, incarnation)

    def receiver(self, name: str) -> NetworkReceiver:
        """A rollout worker's end."""
        return NetworkReceiver(self._options, name)


class NetworkSender(ServedSender):
    """Implements `WeightSender`: serves the bytes of the versions that it retains."""

    def __init__(self, options: WeightSyncOptions, incarnation: str) -> None:
        super().__init__(options, incarnation, LISTEN)
        self._comparing = ComputeThread("weight-differences")

    @remote
    async def read(self, incarnation: str, version: int, begin: int, end: int) -> Array:
        """Bytes of a version's file: uint8 [end - begin]. Raises `WeightSyncError` if it is no longer kept."""
        file = self.file(incarnation, version)
        if not 0 <= begin < end <= len(file):
            raise ValueError(f"version {version} has no bytes {begin} to {end}")
        return file[begin:end]

    @remote
    async def read_difference(self, incarnation: str, version: int, base: int, begin: int, end: int) -> Array:
        """The same bytes as their difference from those of version `base`: uint8 [m]. Empty where `base` is no longer kept, or
        differs too much: then they are to be read."""
        new, old = await self.read(incarnation, version, begin, end), self._files.get(base)
        made = None if old is None else await self._comparing.run(difference, new, old[begin:end])
        is_kept = old is not None and self._files.get(base) is old  # all the time: it was not being written over
        return NO_BYTES if made is None or not is_kept else made

    async def close(self) -> None:
        """See `WeightSender.close`."""
        await super().close()
        self._comparing.close()


class NodeReceiver:
    """The service of a machine's receiver: pulls versions into files, which the workers of the machine read."""

    def __init__(self, directory: Path, options: WeightSyncOptions, name: str) -> None:
        """`directory`: for the files, not there yet."""
        self._files = VersionFiles(directory, options.keep, options.deadline_seconds)
        self._deadline_seconds, self._name = options.deadline_seconds, name
        self._pulls: dict[int, tuple[Manifest, asyncio.Task[Path]]] = {}  # by version, the last one asked for
        self._one_by_one = asyncio.Lock()
        self._dialler = Dialler(name, options, min(5.0, options.deadline_seconds))
        self._thread = ComputeThread("weight-node")
        self.num_received = 0
        """Bytes of versions that have come over the network, as they came."""

    @remote
    async def hold(self, manifest: Manifest) -> Manifest | None:
        """The manifest of this machine's own file of a version. None: it is on its way, ask again.

        Raises `WeightSyncError` when the sender does not answer, or no longer has it, or when the hash is not the manifest's.
        """
        self._pulls = {version: known for version, known in self._pulls.items() if self._is_good(version, known[1])}
        known, pull = self._pulls.get(manifest.version, (None, None))
        if pull is None or known != manifest:
            pull = asyncio.create_task(self._pull(manifest))
            self._pulls[manifest.version] = manifest, pull
        await asyncio.wait([pull], timeout=self._deadline_seconds / 4)
        is_over = pull.done() and not pull.cancelled()
        return msgspec.structs.replace(manifest, address=str(pull.result())) if is_over else None

    async def close(self) -> None:
        """Stop pulling."""
        for _, pull in self._pulls.values():
            pull.cancel()
        await self._dialler.close()
        await self._thread.run(self._files.close)
        self._thread.close()

    def _is_good(self, version: int, pull: asyncio.Task[Path]) -> bool:
        """Whether this pull of a version is under way, or has given a file that is still there."""
        return not pull.done() or (not pull.cancelled() and pull.exception() is None and self._files.get(version) is not None)

    async def _pull(self, manifest: Manifest) -> Path:
        async with self._one_by_one:
            base = self._base_of(manifest)
            if not await self._pulled(manifest, base) and not (base is not None and await self._pulled(manifest, None)):
                raise WeightSyncError(
                    f"what {manifest.served_at} sent of version {manifest.version} does not have the hash of its manifest: it is "
                    f"damaged, or no longer kept and written over"
                )
            return self._files.commit(manifest.version)

    def _base_of(self, manifest: Manifest) -> int | None:
        """The newest version here that this one may come as differences from."""
        if not manifest.version % WHOLE_EVERY or not all(spec.dtype in NARROW for spec in manifest.tensors.values()):
            return None
        held = (known for version, (known, pull) in self._pulls.items() if pull.done() and self._is_good(version, pull))
        same = (known.version for known in held if (known.incarnation, known.tensors) == (manifest.incarnation, manifest.tensors))
        return max((version for version in same if version != manifest.version), default=None)

    async def _pulled(self, manifest: Manifest, base: int | None) -> bool:
        """Bring a version's bytes into the file that is begun for it. Returns whether they have its hash."""
        clock = asyncio.get_running_loop().time
        old = None if base is None else self._files.get(base)  # also where its own file is written over, chunk by chunk
        base = None if old is None else base
        with waiting(PULL, version=manifest.version, address=manifest.served_at) as pull:
            file: Array | None = None
            digest, done = xxhash.xxh3_128(), 0
            progress = clock()
            while done < manifest.num_bytes:
                try:
                    async with contextlib.aclosing(self._chunks(manifest, done, base)) as chunks:
                        async for end, chunk, is_difference in chunks:
                            if file is None:  # not sooner: a version that is gone is to cost no other
                                file = await self._thread.run(self._begin, manifest)
                            target, before = file[done:end], old[done:end] if is_difference and old is not None else None
                            await self._thread.run(_bring, target, before, chunk, digest)
                            done, progress = end, clock()
                            self.num_received += len(chunk)
                            pull.moved(len(chunk))
                except (ConnectionLost, TimeoutError) as error:
                    await self._dialler.close()  # a connection that has gone silent would stay so
                    if clock() + _RETRY_SECONDS > progress + self._deadline_seconds:
                        raise WeightSyncError(
                            f"the trainer's sender at {manifest.served_at} sent {self._name} nothing of version "
                            f"{manifest.version} for {self._deadline_seconds:g} s: {error or 'it does not answer'}"
                        ) from error
                    await asyncio.sleep(_RETRY_SECONDS)
                except DamagedDifference:
                    return False
        return digest.hexdigest() == manifest.hash

    def _begin(self, manifest: Manifest) -> Array:
        """Begin a version: its file. Runs in the thread."""
        file = self._files.begin(manifest.version, manifest.num_bytes)
        if len(file) != manifest.num_bytes:
            raise WeightSyncError(f"version {manifest.version} has another size than those fetched before it")
        return file

    async def _chunks(self, manifest: Manifest, begin: int, base: int | None) -> AsyncGenerator[tuple[int, Array, bool], None]:
        """The bytes of a version from `begin` on, a few chunks asked for ahead: of each its end in the file, its bytes or their
        difference from those of `base` (uint8 [n]), and whether it is that."""
        source = proxy(NetworkSender, await self._dialler.peer(manifest.served_at), "weights")

        async def read(at: int, end: int) -> tuple[int, Array, bool]:
            if base is not None:
                made = await source.read_difference(manifest.incarnation, manifest.version, base, at, end)
                if len(made):
                    return end, made, True
            return end, await source.read(manifest.incarnation, manifest.version, at, end), False

        async with contextlib.aclosing(read_ahead(read, begin, manifest.num_bytes, self._deadline_seconds)) as chunks:
            async for chunk in chunks:
                yield chunk


def _bring(target: Array, before: Array | None, chunk: Array, digest: xxhash.xxh3_128) -> None:
    """Write a chunk into a version's file, or, where it is a difference from the bytes `before`, what the two make; and hash it."""
    if before is None:
        copy_and_hash(target, chunk, digest)
        return
    np.copyto(target, before)  # nothing, where the same memory is written over
    apply(chunk, target)
    digest.update(target.data)


class NetworkReceiver:
    """Implements `WeightReceiver`; the one that finds none on its machine is the machine's `NodeReceiver`, too."""

    def __init__(self, options: WeightSyncOptions, name: str) -> None:
        self._options, self._name = options, name
        self._directory = options.directory / NODE_DIR
        self._shared = SharedMemoryReceiver()
        self._lock_fd = -1  # locked while `_node` is this machine's receiver
        self._node: NodeReceiver | None = None
        self._server: Server | None = None
        self._peer: Peer | None = None

    @property
    def num_received(self) -> int:
        """Bytes of versions that have come to this worker over the network for its machine; differences count as they came."""
        return 0 if self._node is None else self._node.num_received

    async def fetch(self, manifest: Manifest) -> Mapping[str, Tensor]:
        """See `WeightReceiver.fetch`."""
        return await self._shared.fetch(await self._held(manifest))

    async def release(self) -> None:
        """See `WeightReceiver.release`."""
        await self._shared.release()

    async def close(self) -> None:
        """See `WeightReceiver.close`. Another worker of the machine becomes its receiver when it next asks."""
        if self._peer is not None:
            await self._peer.close()
        if self._node is not None and self._server is not None:
            await self._server.close()
            await self._node.close()
            os.close(self._lock_fd)
        await self._shared.close()

    async def _held(self, manifest: Manifest) -> Manifest:
        """The manifest of this machine's own file."""
        deadline = self._options.deadline_seconds
        while True:
            try:
                async with asyncio.timeout(deadline):
                    held = await self._ask(manifest)
            except TimeoutError as error:
                receiver = (self._directory / LOCK_FILE).read_text()
                raise WeightSyncError(
                    f"{receiver}, which receives weights for the workers of its machine, did not answer within {deadline:g} s"
                ) from error
            if held is not None:
                return held

    async def _ask(self, manifest: Manifest) -> Manifest | None:
        while True:
            try:
                return await (await self._machines_receiver()).hold(manifest)
            except ConnectionLost:  # it has ended: perhaps this worker is the next one
                await asyncio.sleep(_RETRY_SECONDS)

    async def _machines_receiver(self) -> NodeReceiver:
        """Receiver of this machine: this worker's own, or that of another one."""
        if self._node is not None:
            return self._node
        if self._peer is None or self._peer.is_lost:
            make_private(self._directory)
            fd = os.open(self._directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
            else:
                return await self._become_receiver(fd)
            self._peer = await Peer.connect(self._directory / SOCKET_FILE, self._name)
        return proxy(NodeReceiver, self._peer, "node")

    async def _become_receiver(self, lock_fd: int) -> NodeReceiver:
        os.truncate(lock_fd, 0)
        os.write(lock_fd, self._name.encode())
        for left in self._directory.glob(f"{FILES_PREFIX}*"):  # by the one before; readers of it have the files mapped
            shutil.rmtree(left)
        node = NodeReceiver(self._directory / f"{FILES_PREFIX}{uuid.uuid4().hex}", self._options, self._name)
        server = Server({"node": node})
        try:
            await server.start(self._directory / SOCKET_FILE)
        except BaseException:
            await node.close()
            os.close(lock_fd)
            raise
        self._lock_fd, self._node, self._server = lock_fd, node, server
        return node
