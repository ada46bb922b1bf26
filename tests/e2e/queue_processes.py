"""The processes of a queue, for tests that kill them: `python -m tests.e2e.queue_processes KIND ARGUMENTS`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import numpy as np

from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.controller import TaskEvents
from asyncflow.transfer_queue.leases import Want
from asyncflow.transfer_queue.node import serve_controller, serve_unit
from asyncflow.transfer_queue.queue import TransferQueue
from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.transfer_queue.storage.servers.redis import RedisStorage
from asyncflow.transport import Server
from asyncflow.types import Batch, Column, Ragged

BITS = 2
GROUP_SIZE = 3
SCHEMA = Schema(
    (
        Column("prompt", "int64", ragged=True, per="group"),
        Column("ids", "int64", ragged=True),
        Column("attempt", "int64"),
    ),
    (
        TaskSpec("rollout", ("prompt",), ("ids",), whole_groups=False, lease_seconds=60.0),  # nothing here is saved by an expiry
        TaskSpec("train", ("prompt", "ids"), ("attempt",), lease_seconds=60.0),
    ),
    BITS,
)


def ids_of(row: int) -> list[int]:
    return [row * 1000 + i for i in range(row % 7)]


async def hub(address: str, has_controllers: str, losses: str) -> None:
    """`losses`: the file that says which rows the controllers, if they are here, have lost."""

    def lost(task: str, unit: int, rows: list[int]) -> None:
        with open(losses, "a") as file:
            file.write(json.dumps([task, unit, rows]) + "\n")

    events = {task.name: TaskEvents(on_lost=lambda unit, rows, task=task.name: lost(task, unit, rows)) for task in SCHEMA.tasks}
    queue = TransferQueue(SCHEMA, [], tasks=None if has_controllers == "yes" else [], events=events)
    async with queue.running():
        server = Server(queue.services, queue.abandon)
        await server.start(Path(address))
        await asyncio.Event().wait()


async def unit(hub: str, number: str, address: str, *redis: str) -> None:
    storage = RedisStorage(redis[0], redis[1], unit=int(number)) if redis else MemoryStorage()
    await serve_unit(f"unix:{hub}", int(number), storage, Path(address))


async def controller(hub: str, task: str, address: str) -> None:
    await serve_controller(f"unix:{hub}", task, Path(address))


async def rollout(hub: str, name: str) -> None:
    client = await TransferQueueClient.connect(f"unix:{hub}", name)
    async for leased in client.stream("rollout", Want(groups=2)):
        await asyncio.sleep(0.002)
        for rows, meta in zip(leased.lease.rows, leased.lease.groups, strict=True):
            ids = Ragged.from_arrays([np.array(ids_of(row), np.int64) for row in rows], "int64")
            await client.complete(leased.lease, Batch(np.array(rows), np.array([meta.group]), {"ids": ids}))
    await client.disconnect()


async def train(hub: str, name: str, record: str) -> None:
    """Writes into its record, before each attempt, the rows of it, and afterwards those that it was told are kept."""
    client = await TransferQueueClient.connect(f"unix:{hub}", name)
    number = os.getpid() << 20
    with open(record, "a", buffering=1) as file:
        async for leased in client.stream("train", Want(groups=4)):
            number, rows = number + 1, leased.lease.indices
            assert [ids.tolist() for ids in leased.batch.ragged("ids")] == [ids_of(row) for row in rows], rows
            file.write(json.dumps(["tries", number, rows]) + "\n")
            batch = Batch(leased.batch.indices, leased.batch.groups, {"attempt": np.full(len(rows), number)})
            kept = await client.complete(leased.lease, batch)
            file.write(json.dumps(["kept", number, leased.batch.indices[kept].tolist()]) + "\n")
    await client.disconnect()


async def hold(hub: str, name: str) -> None:
    """Lease everything there is, say so, and do nothing more."""
    client = await TransferQueueClient.connect(f"unix:{hub}", name)
    leased = await client.lease("rollout", Want(groups=1000))
    assert leased is not None
    print(json.dumps(leased.lease.indices), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """The process of that kind, until it ends."""
    kinds = {"hub": hub, "unit": unit, "controller": controller, "rollout": rollout, "train": train, "hold": hold}
    asyncio.run(kinds[sys.argv[1]](*sys.argv[2:]))
