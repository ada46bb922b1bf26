"""Rows that the run's queue keeps on a server of others', such as Redis, where this machine uses it."""

from __future__ import annotations

from asyncflow.config import Config
from asyncflow.run.factories import make_storage, queue_schema
from asyncflow.run.helper_devices import ON_ONE_MACHINE
from asyncflow.transfer_queue import ASKED_STORAGES
from asyncflow.transfer_queue.storage.base import QueueOwner
from asyncflow.types import RunError, UserError


def reaches_storage(config: Config) -> bool:
    """Whether the driver uses the server of the queue's storage, or could, since its machine is the units' too."""
    is_here = config.queue.place == "driver" or config.cluster.name in ON_ONE_MACHINE
    return config.queue.storage.name in ASKED_STORAGES and is_here


async def check_storage(config: Config) -> None:
    """Check that the server of the queue's storage is there, before any worker is started. Raises `UserError`."""
    if not reaches_storage(config):
        return
    storage = make_storage(config, 0)
    try:
        await storage.open(queue_schema(config))
    except RunError as error:
        raise UserError(f"queue.storage: {error}") from error
    await storage.close()


async def remove_from_server(config: Config, owner: QueueOwner) -> None:
    """Remove what units have stored, when their processes have ended: one that was started again while the run ended has stored
    something once more. Raises `RunError` if the server does not answer."""
    storage = make_storage(config, 0)
    try:
        await storage.open(queue_schema(config), owner)
        await storage.remove()
    finally:
        await storage.close()
