"""Leases: renewed, expired, given back, acknowledged."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.leases import StaleToken, Token
from asyncflow.types import Batch
from tests.contract.queue.house import (
    LEASE_SECONDS,
    SHORT,
    House,
    Open,
    counts,
    generate,
    is_outputs,
    leased,
    outputs,
    over,
    parked,
    put,
    status,
    stored_bytes,
    within,
)


async def test_marks_end_the_leases_of_a_task_without_outputs(client: TransferQueueClient) -> None:
    await put(client, 0, 1, 2)
    await generate(client)
    leases = [(await leased(client, "train", groups=2)).lease, (await leased(client, "train")).lease]
    await within(client.complete_marks(leases))
    assert await counts(client, "train") == {"done": 6}
    with pytest.raises(StaleToken, match="is over"):
        await client.complete_marks(leases)


async def test_of_several_leases_all_are_marked_or_none(client: TransferQueueClient) -> None:
    await put(client, 0, 1)
    await generate(client)
    good, lost = [(await leased(client, "train")).lease for _ in range(2)]
    await client.fail(lost, lost.indices, "lost")
    with pytest.raises(StaleToken):
        await client.complete_marks([good, lost])
    assert await counts(client, "train") == {"leased": 2, "ready": 2}


@over("process-1", "apart-1")
async def test_marks_of_several_leases_are_kept_but_for_those_that_are_over(open_house: Open) -> None:
    client = await (await open_house()).connect("w")
    await put(client, 0, 1, 2)
    await generate(client)
    first, lost, last = [(await leased(client, "train")).lease for _ in range(3)]
    client.leases.give_back(lost)
    again = (await leased(client, "train")).lease
    assert sorted(again.indices) == sorted(lost.indices)
    before = await client.mark([first])
    await asyncio.sleep(SHORT)  # the unit hears of the lost one with the controller's next question
    marked = await client.mark([first, lost, last])  # the first one again, as if its answer had been lost
    assert before.all() and marked.tolist() == [True, True, False, False, True, True]
    assert await counts(client, "train") == {"done": 4, "leased": 2}
    marked = await client.mark([lost, again, lost])
    assert marked.tolist() == [False, False, True, True, False, False] and not client.leases.held
    assert await counts(client, "train") == {"done": 6}
    assert (await client.mark([])).tolist() == []


async def test_only_a_task_without_outputs_is_marked(client: TransferQueueClient) -> None:
    await put(client, 0, 1)
    lease, lost = [(await leased(client)).lease for _ in range(2)]
    client.leases.give_back(lost)
    await leased(client)  # it has been given back, as a unit in the same process knows by now
    for leases in ([lease], [lost], [lease, lost]):
        with pytest.raises(ValueError, match="rollout"):
            await client.mark(leases)
    assert await counts(client, "rollout") == {"leased": 4}


async def test_leases_of_one_task_are_marked_together(client: TransferQueueClient) -> None:
    await put(client, 0, 1)
    await generate(client, 0)
    leases = [(await leased(client, task)).lease for task in ("train", "rollout")]
    for ended in (client.mark, client.complete_marks):
        with pytest.raises(ValueError, match="not of 'rollout' and 'train'"):
            await ended(leases)
    assert await counts(client, "train") == {"waiting": 2, "leased": 2}


async def test_a_row_is_marked_for_one_lease(client: TransferQueueClient) -> None:
    await put(client, 0, 1)
    await generate(client)
    first, second = [(await leased(client, "train")).lease for _ in range(2)]
    with pytest.raises(ValueError, match="twice"):
        await client.mark([first, second, first])
    assert await counts(client, "train") == {"leased": 4}


async def test_a_failed_row_comes_again_and_is_dead_for_everybody_in_the_end(client: TransferQueueClient) -> None:
    await put(client, 0)
    first = (await leased(client)).lease
    assert first.deliveries == [[0, 0]]
    await client.fail(first, [1], "the reward broke")
    again = (await leased(client)).lease
    assert (again.rows, again.deliveries, again.most_deliveries) == ([[1]], [[1]], 1)
    assert (await status(client, "rollout")).dead == {}
    await client.complete(first, outputs(0))
    waiting = await parked(client.lease("train"))
    await client.fail(again, [1], "the reward broke again")
    assert (await status(client, "rollout")).dead == {1: "the reward broke again"}
    found = await within(waiting)  # it does not wait for the dead one
    assert found is not None and found.lease.rows == [[0]]
    assert await counts(client, "rollout") == {"done": 1, "dead": 1} and (await counts(client, "train"))["dead"] == 1
    [kept] = await client.read({0: np.array([1])}, ["dead"])
    assert kept.ragged("dead")[0].tobytes() == b"the reward broke again"
    await client.complete(again, outputs(1))  # too late
    assert await counts(client, "rollout") == {"done": 1, "dead": 1}
    await client.drop([0, 1])
    assert (await status(client, "rollout")).dead == {} and await stored_bytes(client) == 0


async def test_filtered_rows_are_out_for_every_task_with_their_reason(client: TransferQueueClient) -> None:
    await put(client, 0, 1, 2)
    lease = (await leased(client)).lease
    await client.filter([lease.indices[0], 4, 9], "too easy")
    assert (await counts(client, "rollout"))["filtered"] == 3 and (await counts(client, "train"))["filtered"] == 3
    assert (await status(client, "rollout")).dead == {}
    stored = await client.complete(lease, outputs(*lease.indices))
    rest = await leased(client, groups=9)
    assert sorted(rest.lease.indices) == sorted({0, 1, 4, 5, 8, 9} - {4, 9, *lease.indices})
    await client.complete(rest.lease, outputs(*rest.lease.indices))
    train = await leased(client, "train", groups=9)
    assert sorted(train.lease.indices) == sorted({0, 1, 4, 5, 8, 9} - {lease.indices[0], 4, 9}) and stored[1]
    [kept] = await client.read({train.lease.units[0]: np.empty(0, np.int64)}, ["filtered"])
    assert len(kept) == 0
    await client.filter([4], "for another reason")  # the first one stays
    await client.drop(lease.indices)
    assert (await counts(client, "train"))["filtered"] == 2


async def test_a_late_failure_is_nothing(open_house: Open) -> None:
    client = await (await open_house(lease_seconds=0.1)).connect("w")
    await put(client, 0)
    old = (await leased(client)).lease
    new = (await leased(client)).lease  # when it has expired
    assert new.rows == [[0, 1]] and new.deliveries == [[1, 1]]
    for _ in range(3):
        await client.fail(old, [0, 1], "too late")
    assert (await status(client, "rollout")).dead == {}


async def test_a_stale_token_is_refused_as_such(client: TransferQueueClient) -> None:
    await put(client, 0, 1)
    lease = (await leased(client)).lease
    controller = client._controller("rollout")
    earlier = msgspec.structs.replace(lease, token=Token("rollout", "earlier", lease.token.lease))
    assert await controller.renew([lease.token, earlier.token]) == [earlier.token]
    with pytest.raises(StaleToken, match="lease 1 of task 'rollout' is over"):
        await client.renew(earlier)
    assert (await client.complete(earlier, outputs(*lease.indices))).tolist() == [False, False]
    await client.fail(lease, lease.indices, "given back")
    with pytest.raises(StaleToken):
        await controller.check([(lease.token, lease.indices)])


async def test_outputs_under_a_lease_that_has_expired_are_not_kept(open_house: Open) -> None:
    house = await open_house(lease_seconds=LEASE_SECONDS)
    slow, quick = await house.connect("slow"), await house.connect("quick")
    await put(quick, 0)
    old = (await leased(slow)).lease
    new = (await leased(quick)).lease
    renewing = asyncio.create_task(quick.renew_held())
    await put(quick, 3)  # with the next news a unit is told which leases are over; until then, the first to write wins
    await asyncio.sleep(SHORT)
    late = Batch(np.array([1]), np.array([0]), outputs(99).columns)
    assert (await slow.complete(old, late)).tolist() == [False]
    for row in (0, 1):
        assert (await quick.complete(new, outputs(row))).tolist() == [True]
    assert (await slow.complete(old, late)).tolist() == [False]
    assert is_outputs(await leased(quick, "train"))
    await quick.drop([0, 1, 12, 13])
    assert (await slow.complete(old, late)).tolist() == [False]
    assert await stored_bytes(quick) == 0  # nothing that nobody would ever free
    assert (await status(quick, "rollout")).counts["expired"] == 2
    renewing.cancel()


async def test_held_leases_are_kept_alive_for_as_long_as_they_are_held(open_house: Open) -> None:
    house = await open_house(lease_seconds=LEASE_SECONDS)
    client, other = await house.connect("w"), await house.connect("other")
    await put(client, 0, 1)
    renewing = asyncio.create_task(client.renew_held())
    kept = (await leased(client)).lease
    lost = (await leased(other)).lease
    other.leases.held.clear()  # in one process, too, it renews nothing
    if house.way == "process":
        client.leases.held[kept.token] = set(kept.indices)
    assert (await leased(client)).lease.indices == lost.indices
    await asyncio.sleep(2 * LEASE_SECONDS)
    assert (await client.complete(kept, outputs(*kept.indices))).tolist() == [True, True]
    assert (await status(client, "rollout")).counts["redelivered"] == 2
    assert not renewing.done()
    renewing.cancel()


@over("process-1", "apart-3")
async def test_renewing_goes_on_when_a_lease_was_lost_all_the_same(open_house: Open) -> None:
    client = await (await open_house(lease_seconds=LEASE_SECONDS)).connect("w")
    await put(client, 0, 1)
    lost, kept = (await leased(client)).lease, (await leased(client)).lease
    await client._controller("rollout").fail(lost.token, lost.indices, "behind the client's back", False)
    renewing = asyncio.create_task(client.renew_held())
    await asyncio.sleep(2 * LEASE_SECONDS)
    assert not renewing.done()
    await client._controller("rollout").check([(kept.token, kept.indices)])
    renewing.cancel()


async def test_what_a_leaving_worker_held_goes_to_another_at_once(house: House) -> None:
    leaver, stayer = await house.connect("leaver"), await house.connect("stayer")
    await put(stayer, 0)
    held = (await leased(leaver)).lease
    waiting = await parked(stayer.lease("rollout"))
    await house.leave("leaver")
    found = await within(waiting, 1.0)
    assert found is not None and found.lease.rows == [[0, 1]] and found.lease.deliveries == [[1, 1]]
    assert (await within(stayer.complete(found.lease, outputs(0)))).tolist() == [True]
    assert (await within(stayer.complete(held, outputs(0, 1)))).tolist() == [False, False]  # the unit has been told meanwhile
