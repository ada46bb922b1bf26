"""Processes of the transfer queue's benchmark: the queue, its units, clients that lease, and a client that receives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

from queue_payloads import SCHEMA, fingerprint

from asyncflow.transfer_queue.batches import WireBatch
from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.leases import Want
from asyncflow.transfer_queue.node import serve_unit
from asyncflow.transfer_queue.queue import TransferQueue
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.transport import Arena, Peer, Server, proxy, remote

ARENA_BYTES = 4 << 30
NUM_WINDOWS = 6
WINDOW_SECONDS = 0.5


class Plain:
    """Plain requests, on the queue's own socket: the answer is the argument."""

    @remote
    async def number(self, number: int) -> int:
        return number

    @remote
    async def rows(self, batch: WireBatch) -> WireBatch:
        return batch


@contextlib.asynccontextmanager
async def plain_requests(path: str) -> AsyncIterator[Plain]:
    """A connection of their own."""
    peer = await Peer.connect(f"unix:{path}", f"plain-{os.getpid()}")
    yield proxy(Plain, peer, "plain")
    await peer.close()


async def serve(path: str, num_units: int, arena_path: str) -> None:
    """Controllers and, unless there are to be several, the storage unit; until standard input closes."""
    queue = TransferQueue(SCHEMA, [MemoryStorage(unit=0)] if num_units == 1 else [])
    queue.services["plain"] = Plain()
    arena = Arena(ARENA_BYTES, Path(arena_path) if arena_path else None)
    async with queue.running():
        server = Server(queue.services, queue.abandon, arena=arena)
        await server.start(Path(path))
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.close()
        arena.close()


async def unit(hub: str, number: int) -> None:
    address = Path(f"{hub}.unit{number}")
    await serve_unit(f"unix:{hub}", number, MemoryStorage(unit=number), address, arena=Arena(ARENA_BYTES))


async def lease_many(path: str, in_flight: int) -> None:
    """Client with so many requests in flight: in one window of time plain ones, in the next one leases of 8 rows, metadata only.

    Prints how many of either were answered.
    """
    client = await TransferQueueClient.connect(f"unix:{path}", f"leaser-{os.getpid()}")
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    counts, began = [0, 0], time.perf_counter()

    async def one(plain: Plain) -> None:
        for window in range(2 * NUM_WINDOWS):
            while time.perf_counter() < began + (window + 1) * WINDOW_SECONDS:
                if window % 2:
                    leased = await client.lease("meta", Want(rows=8), columns=())
                    assert leased is not None and len(leased.lease.indices) == 8
                else:
                    assert await plain.number(counts[0]) >= 0
                counts[window % 2] += 1

    async with plain_requests(path) as plain:
        await asyncio.gather(*(one(plain) for _ in range(in_flight)))
    print(json.dumps(counts), flush=True)
    await client.disconnect()


async def receive(path: str, count: int) -> None:
    """A consumer that waits for single rows; prints when each one was in hand."""
    client = await TransferQueueClient.connect(f"unix:{path}", "receiver")
    print("ready", flush=True)
    moments = []
    for _ in range(count):
        leased = await client.lease("train", Want(rows=1))
        moment = time.monotonic()
        assert leased is not None
        moments.append((leased.lease.indices[0], moment, fingerprint(leased.batch, 0)))
    print(json.dumps(moments), flush=True)
    await client.disconnect()


def start(*arguments: object, wait: bool = True) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    if wait:
        assert process.stdout is not None
        if process.stdout.readline().strip() != b"ready":
            raise SystemExit(f"{arguments} did not start")
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()


@contextlib.asynccontextmanager
async def a_queue(num_units: int = 1, *, shared: bool = False) -> AsyncIterator[tuple[TransferQueueClient, str, int]]:
    """A queue in processes of its own: (a client, the queue's socket, its process id)."""
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/queue.sock"
        arena = f"/dev/shm/asyncflow-benchmark-{os.getpid()}" if shared else ""
        processes = [start("serve", path, num_units, arena)]
        try:
            if num_units > 1:
                processes += [start("unit", path, number, wait=False) for number in range(num_units)]
            client = await TransferQueueClient.connect(f"unix:{path}", "benchmark")
            await asyncio.wait_for(client.wait_for_units(num_units), 20)
            yield client, path, processes[0].pid
            await client.disconnect()
        finally:
            for process in processes[::-1]:
                end(process)


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    threading.stack_size(1 << 20)
    roles = {
        "serve": lambda: serve(rest[0], int(rest[1]), rest[2]),
        "unit": lambda: unit(rest[0], int(rest[1])),
        "lease": lambda: lease_many(rest[0], int(rest[1])),
        "receive": lambda: receive(rest[0], int(rest[1])),
    }
    asyncio.run(roles[role]())
