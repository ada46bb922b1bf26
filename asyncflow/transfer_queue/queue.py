"""A whole transfer queue in one process: its directory, its controllers and its units; others may join it.

    queue = TransferQueue(Schema(columns, tasks, group_bits=3), [MemoryStorage()])
    async with queue.running():
        client = queue.client()

`services` are what a `transport.Server` serves, so that other processes get in: clients with `TransferQueueClient.connect`, units
and controllers of their own with `node.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import msgspec

from asyncflow.run_dir import replace
from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.controller import Controller, TaskEvents
from asyncflow.transfer_queue.directory import Directory, Places
from asyncflow.transfer_queue.metrics import prometheus_text
from asyncflow.transfer_queue.notices import Superseded
from asyncflow.transfer_queue.schema import Schema
from asyncflow.transfer_queue.snapshot import SnapshotFile, snapshot_path
from asyncflow.transfer_queue.storage.base import QueueOwner, Storage
from asyncflow.transfer_queue.unit import AS_USUAL, StorageUnit, UnitOptions
from asyncflow.transport import Credentials, remote

log = logging.getLogger(__name__)


class SnapshotManifest(msgspec.Struct):
    """A snapshot of a whole queue: one file for each unit. It is written last, so without it there is no snapshot."""

    name: str
    files: list[SnapshotFile]


class TransferQueue:
    """Controllers and units of one process. `events`: by task."""

    def __init__(
        self,
        schema: Schema,
        storages: Sequence[Storage],
        *,
        tasks: Sequence[str] | None = None,
        events: Mapping[str, TaskEvents] | None = None,
        unit_options: UnitOptions = AS_USUAL,
        credentials: Credentials | None = None,
        owner: QueueOwner | None = None,
    ) -> None:
        """`storages`: one for each unit of this process, maybe none. `tasks`: whose controllers run in this process (all).

        `unit_options`: each unit's. `credentials`: to reach units that are served over TLS elsewhere. `owner`: attempt of a run
        whose queue it is; what other attempts of the run have stored is removed.
        """
        self.schema = schema
        self._unit_options = unit_options
        self.directory = Directory(schema, owner)
        self.services: dict[str, object] = {"directory": self.directory, "queue": self}
        self._here: dict[str, object] = {}
        self.places = Places(
            self.directory,
            "queue",
            here=self._here,
            credentials=credentials,
            known=self.directory.current,
        )
        self.controllers: dict[str, Controller] = {}
        for name in [task.name for task in schema.tasks] if tasks is None else tasks:
            self.controllers[name] = Controller(name, schema, (events or {}).get(name))
            self._serve(f"controller/{name}", self.controllers[name])
        self.units: list[StorageUnit] = []
        for number, storage in enumerate(storages):
            self.units.append(StorageUnit(storage, schema, unit_options))
            self._serve(f"unit/{number}", self.units[number])

    async def open(self) -> None:
        """Open the units' storages."""
        await asyncio.gather(*(unit.open(self.directory.current.owner) for unit in self.units))

    async def run(self) -> None:
        """Have the controllers of this process follow all units, those that join later too. `open` first. Runs until it is
        cancelled."""
        await asyncio.gather(self._learn(), *(self._follow(controller) for controller in self.controllers.values()))

    async def _learn(self) -> None:
        """Keep the list of units, also where all controllers are elsewhere. Runs until it is cancelled."""
        async for _ in self.places.changes():
            pass

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[TransferQueue]:
        """`open`, and `run` beside the block; closed at its end. If `run` fails, the block is cancelled, and this raises why:
        nobody would be served any more."""
        await self.open()
        block, is_in_block = asyncio.current_task(), True
        following = asyncio.create_task(self.run())

        def end_block(_: asyncio.Task[None]) -> None:
            if is_in_block and block is not None:
                block.cancel()

        following.add_done_callback(end_block)
        try:
            yield self
        finally:
            is_in_block = False
            following.cancel()
            try:
                with contextlib.suppress(asyncio.CancelledError):
                    await following
            finally:
                await self.close()

    def stop(self) -> None:
        """Answer every request to this process's controllers, now and later, with None: the consumers are to end."""
        for controller in self.controllers.values():
            controller.close()

    async def remove(self) -> None:
        """Have all units, those of other processes too, remove what the owner has stored: nobody wants it any more."""
        await asyncio.gather(*(self.places.get(StorageUnit, f"unit/{number}").remove() for number in self.places.units))

    async def close(self) -> None:
        """Answer all requests that wait, and let go of the storages."""
        self.stop()
        for unit in self.units:
            await unit.close()
        await self.places.close()

    def client(self) -> TransferQueueClient:
        """A client in this process."""
        return TransferQueueClient(self.places)

    def abandon(self, client: str) -> None:
        """Forget a client that has gone: what it held is delivered again."""
        for controller in self.controllers.values():
            controller.abandon(client)

    @remote
    async def snapshot(self, name: str) -> SnapshotManifest:
        """Write all rows of all units to the snapshot directory, without stopping the queue. Leases are not in it."""
        path = self._manifest(name)
        before = path.read_bytes() if path.exists() else None
        units = [(number, self.places.get(StorageUnit, f"unit/{number}")) for number in self.places.units]
        new = uuid.uuid4().hex[:8]  # the files of an earlier one of this name stay whole until the new manifest is there
        begun = {f"{name}.{new}.unit-{number}": unit for number, unit in units}
        written = await asyncio.gather(*(unit.snapshot(file) for file, unit in begun.items()), return_exceptions=True)
        files = [file for file in written if not isinstance(file, BaseException)]
        if failed := [error for error in written if isinstance(error, BaseException)]:  # the others' files are of no use
            await asyncio.gather(*(unit.forget_snapshot(file) for file, unit in begun.items()), return_exceptions=True)
            raise failed[0]
        manifest = SnapshotManifest(name, files)
        replace(path, msgspec.json.encode(manifest))
        if before is not None:
            for old in msgspec.json.decode(before, type=SnapshotManifest).files:
                await asyncio.gather(*(unit.forget_snapshot(old.name) for _, unit in units))
        return manifest

    @remote
    async def restore(self, name: str) -> int:
        """Take up the rows of a snapshot; their leases are over. Returns how many rows there are.

        Raises `ValueError` when there is no whole snapshot of this name.
        """
        try:
            manifest = msgspec.json.decode(self._manifest(name).read_bytes(), type=SnapshotManifest)
        except (OSError, msgspec.MsgspecError) as error:
            raise ValueError(f"there is no snapshot {name!r}: {error}") from error
        numbers, count = self.places.units, 0
        if not numbers:
            raise ValueError("there is no storage unit yet that could take up a snapshot")
        for i, file in enumerate(manifest.files):
            count += await self.places.get(StorageUnit, f"unit/{numbers[i % len(numbers)]}").restore(file.name)
        return count

    @remote
    async def metrics(self) -> str:
        """The state of tasks and units in Prometheus' text form."""
        return prometheus_text(*await self.client().status())

    async def _follow(self, controller: Controller) -> None:
        try:
            await follow_all(controller, self.places)
        except Superseded as error:
            log.warning("%s", error)
            self._here.pop(f"controller/{controller.spec.name}", None)
            controller.replace()  # clients find the other one in the directory

    def _manifest(self, name: str) -> Path:
        return snapshot_path(self._unit_options.snapshot_dir, f"{name}.json")

    def _serve(self, name: str, service: object) -> None:
        self._here[name] = self.services[name] = service
        self.directory.add(name)
        self.places.known = self.directory.current


async def follow_all(controller: Controller, places: Places) -> None:
    """Have a controller follow all units that there are, and those that join later. Runs until it is cancelled; raises
    `Superseded`."""
    followed: set[int] = set()
    try:
        async with asyncio.TaskGroup() as tasks:
            async for units in places.changes():
                for number in set(units) - followed:
                    tasks.create_task(controller.subscription.follow(number, places.get(StorageUnit, f"unit/{number}")))
                followed.update(units)
    except* Superseded as group:
        raise Superseded(f"task {controller.spec.name!r}: another controller has taken it over") from group
