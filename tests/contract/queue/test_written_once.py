"""Outputs are written once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.types import Batch, GroupMeta
from tests.builders import meta
from tests.contract.queue.house import (
    House,
    Open,
    counts,
    is_outputs,
    leased,
    outputs,
    put,
    status,
    within,
)


async def test_the_first_writer_of_a_row_wins_and_the_other_is_told(house: House) -> None:
    slow, quick = await house.connect("slow"), await house.connect("quick")
    await put(quick, 0, 1)
    lease = (await leased(slow, groups=2)).lease
    wrong = outputs(0, 1, 5)
    wrong = Batch(wrong.indices, wrong.groups, {**wrong.columns, "reward": np.full(3, -9, np.float32)})
    assert (await within(quick.put([meta(0), meta(1)], outputs(1)))).tolist() == [True]
    assert (await within(quick.put([meta(0), meta(1)], wrong))).tolist() == [True, False, True]
    assert (await within(slow.complete(lease, outputs(*lease.indices)))).tolist() == [row == 4 for row in lease.indices]
    assert (await counts(slow, "rollout")) == {"done": 4}
    train = await leased(slow, "train", groups=2)
    assert dict(zip(train.lease.indices, train.batch.dense("reward").tolist(), strict=True)) == {0: -9, 1: 0.5, 4: 2, 5: -9}


async def test_of_two_that_write_the_same_row_at_once_one_wins(client: TransferQueueClient) -> None:
    await put(client, *range(6))
    rows = [4 * group + i for group in range(6) for i in range(2)]
    metas = [meta(group) for group in range(6)]

    def attempt(value: int) -> Batch:
        return Batch(np.array(rows), np.arange(6), {"ids": outputs(*rows).columns["ids"], "reward": np.full(12, value, np.float32)})

    first, second = await within(asyncio.gather(*(client.put(metas, attempt(value)) for value in (1, 2))))
    assert (first ^ second).all()
    train = await leased(client, "train", groups=6)
    winner = dict(zip(rows, np.where(first, 1, 2).tolist(), strict=True))
    assert train.batch.dense("reward").tolist() == [winner[row] for row in train.lease.indices]


async def test_outputs_are_written_all_or_none(client: TransferQueueClient) -> None:
    await put(client, 0)
    lease = (await leased(client)).lease
    reward = Batch(np.array([1]), np.array([0]), {"reward": np.array([7], np.float32)})
    assert (await client.put([meta(0)], reward)).tolist() == [True]
    assert (await client.complete(lease, outputs(0, 1))).tolist() == [True, False]
    with pytest.raises(LookupError, match="row 1 has no column 'ids'"):  # not even the one that was free
        await client.read({0: np.array([1])}, ["ids"])
    assert await counts(client, "rollout") == {"leased": 1, "done": 1}


class Broken(MemoryStorage):
    """Fails to write as often as it is told to."""

    failures = 0

    async def write(self, metas: Sequence[GroupMeta], batch: Batch) -> None:
        if self.failures:
            self.failures -= 1
            raise ValueError("the disk is full")
        await super().write(metas, batch)


async def test_a_write_that_failed_has_not_happened_and_may_be_repeated(open_house: Open) -> None:
    house = await open_house(storage=lambda number: Broken(), num_units=1, capacity_rows=2)
    client = await house.connect("w")
    broken = house.storages[0]
    assert isinstance(broken, Broken)
    broken.failures = 1
    with pytest.raises(ValueError, match="the disk is full"):
        await put(client, 0)
    assert (await client.status())[1][0].rows == 0 and await counts(client, "rollout") == {}
    await put(client, 0)  # its room has been given back
    lease = (await leased(client)).lease
    broken.failures = 1
    with pytest.raises(ValueError, match="the disk is full"):
        await client.complete(lease, outputs(0, 1))
    assert await counts(client, "rollout") == {"leased": 2}
    assert (await client.complete(lease, outputs(0, 1))).all()
    assert is_outputs(await leased(client, "train"))


async def test_the_same_completion_again_is_told_the_same(client: TransferQueueClient) -> None:
    """Its answer may have been lost."""
    await put(client, 0, 1)
    lease = (await leased(client, groups=2)).lease
    for _ in range(2):
        assert (await client.complete(lease, outputs(1, 4))).tolist() == [True, True]
    assert (await counts(client, "rollout")) == {"leased": 2, "done": 2}
    assert (await status(client, "rollout")).counts["done_total"] == 2
