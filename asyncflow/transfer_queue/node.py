"""Units and controllers in processes of their own, joined to a queue that is served elsewhere.

Each listens on an address of its own and registers it in the directory; restarted, it registers again, and clients go on.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from asyncflow.transfer_queue.controller import Controller
from asyncflow.transfer_queue.directory import Directory, Places, remote_directory
from asyncflow.transfer_queue.queue import follow_all
from asyncflow.transfer_queue.storage.base import Storage
from asyncflow.transfer_queue.unit import StorageUnit
from asyncflow.transport import Credentials, Peer, Server


async def serve_unit(
    hub: str,
    number: int,
    storage: Storage,
    address: str | Path,
    *,
    credentials: Credentials | None = None,
    notify_timeout_seconds: float = 5.0,
    capacity_rows: int | None = None,
    capacity_bytes: int | None = None,
    snapshot_dir: Path | None = None,
) -> None:
    """Be unit `number` of the queue whose directory is served at `hub`, until the hub has gone."""
    peer, directory = await _join(hub, f"unit/{number}", credentials)
    unit = StorageUnit(
        storage,
        (await directory.describe(-1)).schema,
        notify_timeout_seconds=notify_timeout_seconds,
        capacity_rows=capacity_rows,
        capacity_bytes=capacity_bytes,
        snapshot_dir=snapshot_dir,
    )
    await unit.open()
    server = Server({f"unit/{number}": unit}, credentials=credentials)
    try:
        await directory.register(f"unit/{number}", await server.start(address))
        await peer.wait_lost()
    finally:
        await server.close()
        await unit.close()


async def serve_controller(hub: str, task: str, address: str | Path, *, credentials: Credentials | None = None) -> None:
    """Be the controller of a task of the queue whose directory is served at `hub`, until the hub has gone."""
    peer, directory = await _join(hub, f"controller/{task}", credentials)
    places = Places(directory, f"controller/{task}", peer=peer, credentials=credentials)
    schema = (await places.learn()).schema
    controller = Controller(task, schema)
    server = Server({f"controller/{task}": controller}, controller.abandon, credentials=credentials)
    following = asyncio.create_task(follow_all([controller], places))
    gone = asyncio.create_task(peer.wait_lost())
    try:
        for number in places.units:  # a controller that knows nothing yet would have everybody wait for a moment
            await controller.caught_up(number)
        await directory.register(f"controller/{task}", await server.start(address))
        await asyncio.wait([following, gone], return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            await following  # raises why
    finally:
        following.cancel()
        gone.cancel()
        await server.close()
        controller.close()
        await places.close()


async def _join(hub: str, name: str, credentials: Credentials | None) -> tuple[Peer, Directory]:
    peer = await Peer.connect(hub, name, credentials=credentials)
    return peer, remote_directory(peer)
