"""What a client does when the parts that it asks are not of one mind."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, cast

import numpy as np

from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.controller import Handed
from asyncflow.transfer_queue.directory import Places
from asyncflow.transfer_queue.leases import Lease, Token, Want
from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.types import Column, GroupMeta, Interval

SCHEMA = Schema((Column("prompt", "int64"), Column("reward", "float32")), (TaskSpec("rollout", ("prompt",), ("reward",)),), 1)
LEASE = Lease(Token("rollout", "one", 1), [GroupMeta(0, 1, 0, Interval(0, 0))], [[0]], [[0]], [0])


class Parts:
    """A controller that leases a row, and a unit that has lost the row's columns and says so when `says` is set."""

    schema, units = SCHEMA, (0,)

    def __init__(self) -> None:
        self.says, self.request_keys = asyncio.Event(), itertools.count(1)
        self.num_leases = 0

    def get(self, interface: type, name: str) -> Any:
        return self

    async def lease(self, want: Any, columns: list[str], key: int) -> Handed:
        self.num_leases += 1
        if self.num_leases > 1:
            await asyncio.Event().wait()
        return Handed(LEASE, None)

    async def read(self, rows: np.ndarray, columns: list[str]) -> Any:
        await self.says.wait()
        raise LookupError("row 0 has no column 'prompt'")

    async def present(self, rows: np.ndarray) -> np.ndarray:
        return rows

    async def withdraw(self, key: int | None) -> None: ...

    async def give_back(self, token: Token) -> None: ...


async def test_what_was_withdrawn_while_it_was_fetched_is_not_asked_for_again() -> None:
    parts = Parts()
    client = TransferQueueClient(cast(Places, parts))
    leasing = asyncio.create_task(client.lease("rollout", Want(installed=0)))
    while not parts.num_leases:
        await asyncio.sleep(0)
    await client.withdraw("rollout")
    parts.says.set()
    async with asyncio.timeout(0.5):
        assert await leasing is None
    assert parts.num_leases == 1
