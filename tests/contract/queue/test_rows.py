"""Rows go in, and out."""

from __future__ import annotations

import asyncio

from asyncflow.transfer_queue.client import Leased, TransferQueueClient
from asyncflow.transfer_queue.leases import Want
from asyncflow.types import Batch
from tests.builders import loop_turns, meta
from tests.contract.queue.house import (
    COLUMNS,
    SHORT,
    House,
    counts,
    everything,
    generate,
    is_outputs,
    leased,
    outputs,
    over,
    parked,
    prompts_in,
    put,
    same,
    within,
)


async def test_what_was_put_and_completed_is_what_the_next_task_leases(client: TransferQueueClient) -> None:
    await put(client, 0, 1, 2)
    lease = (found := await leased(client, groups=9)).lease
    assert {m.group: rows for m, rows in zip(lease.groups, lease.rows, strict=True)} == {0: [0, 1], 1: [4, 5], 2: [8, 9]}
    assert found.batch.indices.tolist() == lease.indices and found.batch.groups.tolist() == [m.group for m in lease.groups]
    assert prompts_in(found) == {0: [0], 1: [1, 1], 2: [2, 2, 2]}
    for row in (5, 4, 9, 8, 0, 1):
        assert (await within(client.complete(lease, outputs(row)))).tolist() == [True]
    assert await counts(client, "rollout") == {"done": 6} and await counts(client, "train") == {"ready": 6}
    trained = await leased(client, "train", groups=9, partition=0)
    assert [m.group for m in trained.lease.groups] == [1, 2, 0]  # as they became ready
    assert is_outputs(trained) and prompts_in(trained) == {0: [0], 1: [1, 1], 2: [2, 2, 2]}


async def test_every_kind_of_column_comes_back_bit_by_bit_in_the_order_of_the_lease(client: TransferQueueClient) -> None:
    groups, names = [7, 1, 0, 5, 3, 2], [column.name for column in COLUMNS]
    stored = await within(client.put([meta(group, size=4) for group in groups], everything(groups)))
    assert stored.tolist() == [True] * 24
    train = await leased(client, "train", groups=6, columns=names)
    assert sorted(m.group for m in train.lease.groups) == sorted(groups)
    assert same(train.batch, everything([m.group for m in train.lease.groups]))
    assert same((await client.fetch(train.lease, [])).batch, Batch(train.batch.indices, train.batch.groups, {}))  # type: ignore[union-attr]


async def test_a_group_is_complete_with_its_last_row(client: TransferQueueClient) -> None:
    await put(client, 3, size=3)
    waiting = await parked(client.lease("train"))
    lease = (await leased(client)).lease
    for row in (12, 14):
        await client.complete(lease, outputs(row))
    await asyncio.sleep(SHORT)
    assert not waiting.done()
    await client.complete(lease, outputs(13))
    found = await within(waiting)
    assert found is not None and found.lease.rows == [[12, 13, 14]]


async def test_a_task_of_whole_groups_gets_groups_by_number_and_never_a_part(client: TransferQueueClient) -> None:
    await put(client, 0, 1, 2, size=3)
    lease = (await leased(client, groups=9)).lease
    await client.complete(lease, outputs(9, 1, 4, 0, 5, 8, 10))  # groups 0 and 1 lack a row, 2 is whole
    train = await leased(client, "train", rows=99)
    assert [(m.group, rows) for m, rows in zip(train.lease.groups, train.lease.rows, strict=True)] == [(2, [8, 9, 10])]
    await client.complete(lease, outputs(2, 6))
    assert sorted((await leased(client, "train", rows=99)).lease.rows) == [[0, 1, 2], [4, 5, 6]]


async def test_limits_on_groups_rows_and_tokens_bound_a_lease(client: TransferQueueClient) -> None:
    await put(client, 0, 3, 6, 9, size=3)  # one unit, rows of 1, 4, 7 and 10 tokens
    assert len((await leased(client, groups=1)).lease.groups) == 1
    assert [len(rows) for rows in (await leased(client, rows=2)).lease.rows] == [2]
    assert (await leased(client, tokens=5)).lease.indices == [14]  # of 4; the next row would be one of 7
    assert (await leased(client, tokens=15)).lease.indices == [24, 25]
    assert (await leased(client, tokens=1)).lease.indices == [26]  # one row, even if it is too heavy alone
    assert (await leased(client, rows=5, tokens=25)).lease.indices == [36, 37]


async def test_a_request_waits_for_at_least_so_many_rows_unless_the_step_has_no_more(client: TransferQueueClient) -> None:
    await put(client, 0, step=0)
    waiting = await parked(client.lease("rollout", Want(rows=4, at_least=3, partition=0)))
    await put(client, 1, step=1)
    await asyncio.sleep(SHORT)
    assert not waiting.done()
    await put(client, 2, step=0)
    found = await within(waiting)
    assert found is not None and sorted(found.lease.indices) == [0, 1, 8, 9]


async def test_only_what_the_installed_version_may_make_is_leased(client: TransferQueueClient) -> None:
    await put(client, 0, step=0)
    await put(client, 1, step=1)
    await put(client, 2, step=3, low=1)
    await put(client, 4, step=2)
    assert sorted(m.group for m in (await leased(client, groups=9, installed=1)).lease.groups) == [1, 2]
    waiting = await parked(client.lease("rollout", Want(installed=4)))
    await put(client, 3, step=4)
    found = await within(waiting)
    assert found is not None and found.lease.groups == [meta(3, step=4)]


async def test_evaluation_and_training_rows_go_to_their_own_tasks(client: TransferQueueClient) -> None:
    await put(client, 0, topic="eval")
    await put(client, 1)
    await generate(client)
    assert [m.group for m in (await leased(client, "train", groups=9)).lease.groups] == [1]
    assert [m.group for m in (await leased(client, "eval", groups=9)).lease.groups] == [0]


async def test_a_step_streams_its_groups_as_they_become_complete_and_ends(client: TransferQueueClient) -> None:
    await put(client, 0, 1, step=0)
    await put(client, 2, step=1)
    await generate(client)
    seen = []

    async def read() -> None:
        async for found in client.stream("train", Want(partition=0)):
            seen.append(found.lease.groups[0].group)
            if len(seen) == 2:
                await client.end_partition("train", 0)

    await within(read())
    assert sorted(seen) == [0, 1]
    assert await within(client.lease("train", Want(partition=0))) is None  # later ones too
    assert [m.group for m in (await leased(client, "train", partition=1)).lease.groups] == [2]
    waiting = await parked(client.lease("rollout", Want(partition=0)))  # the end of another task's step is nothing to it
    await client.end_partition("rollout", 0)
    assert await within(waiting) is None


async def test_closing_ends_every_stream_for_late_consumers_too(house: House, client: TransferQueueClient) -> None:
    other = await house.connect("other")
    waiting = [await parked(c.lease(task)) for c in (client, other) for task in ("rollout", "train")]
    await within(client.close("rollout"))
    assert [await within(waiting[i]) for i in (0, 2)] == [None, None]
    assert not waiting[1].done() and not waiting[3].done()
    await within(other.close())
    assert [await within(waiting[i]) for i in (1, 3)] == [None, None]
    late = await house.connect("late")
    assert [await within(late.lease(task)) for task in ("rollout", "train", "eval")] == [None] * 3


async def test_what_is_ready_when_a_step_or_a_task_ends_is_still_handed_out(client: TransferQueueClient) -> None:
    await put(client, 0, 1)
    await put(client, 2, step=1)
    await client.end_partition("rollout", 0)
    seen = [found.lease.groups[0].group async for found in client.stream("rollout", Want(partition=0))]
    assert sorted(seen) == [0, 1]
    await client.close("rollout")
    assert [m.group for m in (await leased(client, groups=9)).lease.groups] == [2]
    assert await within(client.lease("rollout")) is None


async def test_a_stream_that_is_left_early_takes_no_further_group(client: TransferQueueClient) -> None:
    await put(client, 0)
    await generate(client)
    stream = client.stream("train", Want(partition=0))
    assert (await within(anext(stream))).lease.groups[0].group == 0
    await stream.aclose()  # type: ignore[attr-defined]
    await asyncio.sleep(SHORT)
    await put(client, 1)
    await generate(client)
    assert (await leased(client, "train")).lease.groups[0].group == 1


async def test_a_request_can_be_withdrawn(client: TransferQueueClient) -> None:
    waiting, other_task = await parked(client.lease("rollout")), await parked(client.lease("train"))
    await client.withdraw("rollout")
    assert await within(waiting) is None and not other_task.done()
    other_task.cancel()


async def test_no_row_is_lost_with_an_asker_that_goes_as_its_answer_comes(client: TransferQueueClient) -> None:
    """Rows that nobody knows of would be delivered again, but only when their lease expires."""
    for group in range(60):
        asking = asyncio.create_task(client.lease("rollout", Want(groups=1)))
        await loop_turns(5)
        putting = asyncio.create_task(put(client, group))
        await loop_turns(group)
        asking.cancel()
        (found,) = await asyncio.gather(asking, return_exceptions=True)
        await putting
        if not isinstance(found, Leased):  # it came too late
            found = await leased(client)
        assert found.lease.groups[0].group == group and len(found.lease.indices) == 2


@over("unix-1", "apart-3")
async def test_withdrawing_concerns_nobody_else(house: House, client: TransferQueueClient) -> None:
    other = await house.connect("other")
    waiting = await parked(other.lease("rollout"))
    await client.withdraw("rollout")
    await asyncio.sleep(SHORT)
    assert not waiting.done()
    await put(client, 0)
    assert await within(waiting) is not None
