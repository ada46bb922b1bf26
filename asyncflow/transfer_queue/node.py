"""Units and controllers in processes of their own, joined to a queue that is served elsewhere.

Each listens on an address of its own and registers it in the directory; restarted, it registers again, and clients go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from asyncflow.transfer_queue.controller import Controller
from asyncflow.transfer_queue.directory import Directory, Places, remote_directory
from asyncflow.transfer_queue.queue import follow_all
from asyncflow.transfer_queue.storage.base import Storage
from asyncflow.transfer_queue.unit import AS_USUAL, StorageUnit, UnitOptions
from asyncflow.transport import Arena, Credentials, Peer, Server


async def serve_unit(
    directory_address: str | Path,
    number: int,
    storage: Storage,
    address: str | Path,
    *,
    options: UnitOptions = AS_USUAL,
    credentials: Credentials | None = None,
    arena: Arena | None = None,
    on_listening: Callable[[str], None] = lambda at: None,
) -> None:
    """Be unit `number` of the queue whose directory is served at `directory_address`, until its server has gone. `on_listening` is
    told where."""
    peer, directory = await _join(directory_address, f"unit/{number}", credentials)
    term = await directory.term()
    queue = await directory.describe(-1)
    unit = StorageUnit(storage, queue.schema, options)
    await unit.open(queue.owner)
    server = Server({f"unit/{number}": unit}, credentials=credentials, arena=arena)
    try:
        at = await server.start(address)
        await directory.register(f"unit/{number}", at, term)
        on_listening(at)
        await peer.wait_lost()
    finally:
        await server.close()
        await unit.close()


async def serve_controller(
    directory_address: str,
    task: str,
    address: str | Path,
    *,
    credentials: Credentials | None = None,
    on_listening: Callable[[str], None] = lambda at: None,
) -> None:
    """Be the controller of a task of the queue whose directory is served at `directory_address`, until its server has gone.

    Raises `Superseded` when another one has taken the task over.
    """
    name = f"controller/{task}"
    peer, directory = await _join(directory_address, name, credentials)
    places = Places(directory, name, peer=peer, credentials=credentials)
    schema, term = (await places.learn()).schema, await directory.term()
    controller = Controller(task, schema, term=term)
    server = Server({name: controller}, controller.abandon, credentials=credentials)

    async def join() -> None:
        for number in places.units:  # a controller that knows nothing yet would have everybody wait for a moment
            await controller.subscription.caught_up(number)
        at = await server.start(address)
        await directory.register(name, at, term)
        on_listening(at)
        await asyncio.Event().wait()

    running = [asyncio.create_task(coroutine) for coroutine in (follow_all(controller, places), join(), peer.wait_lost())]
    try:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        if not peer.is_lost:
            for ended in done:
                ended.result()  # raises why
    finally:
        for one in running:
            one.cancel()
        await server.close()
        controller.close()
        await places.close()


async def _join(directory_address: str | Path, name: str, credentials: Credentials | None) -> tuple[Peer, Directory]:
    peer = await Peer.connect(directory_address, name, credentials=credentials)
    return peer, remote_directory(peer)
