"""One suite over every way to the queue: its objects in this process, or behind a socket; on one unit, or on two."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncflow.transfer_queue.client import Leased, TransferQueueClient
from asyncflow.transfer_queue.controller import Controller
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.transfer_queue.table import DeadRow, StaleToken, TaskSpec, Token
from asyncflow.transfer_queue.unit import StorageUnit
from asyncflow.transport import Peer, Server, client_name, proxy
from asyncflow.types import Batch, Column, GroupMeta, Interval, Ragged

BITS = 2
COLUMNS = (
    Column("prompt", "int64", ragged=True, per="group"),
    Column("ids", "int64", ragged=True),
    Column("reward", "float32"),
)
LEASE_SECONDS = 0.3


def specs(lease_seconds: float) -> list[TaskSpec]:
    return [
        TaskSpec("rollout", ("prompt",), ("ids", "reward"), whole_groups=False, lease_seconds=lease_seconds, max_failures=2),
        TaskSpec("train", ("prompt", "ids", "reward"), lease_seconds=lease_seconds),
    ]


@dataclass
class Queue:
    """The queue's parts, what its books were told, and a client for every worker."""

    tasks: list[TaskSpec]
    controllers: dict[str, Controller]
    units: list[StorageUnit]
    connect: Callable[[str], Coroutine[Any, Any, TransferQueueClient]]
    leave: Callable[[str], Coroutine[Any, Any, None]]
    done: list[int] = field(default_factory=list)
    dead: list[DeadRow] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(unit.storage.nbytes for unit in self.units)


@pytest.fixture(params=[("objects", 1), ("objects", 2), ("socket", 1), ("socket", 2)], ids=lambda p: f"{p[0]}-{p[1]}")
def make_queue(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    over, num_units = request.param

    def build(lease_seconds: float) -> Queue:
        queue = Queue(specs(lease_seconds), {}, [], connect=None, leave=None)  # type: ignore[arg-type]
        for task in queue.tasks:
            told = {"on_done": queue.done.extend, "on_dead": queue.dead.extend} if task.name == "rollout" else {}
            queue.controllers[task.name] = Controller(task, BITS, **told)  # type: ignore[arg-type]
        queue.units += [StorageUnit(MemoryStorage(BITS), COLUMNS, queue.controllers) for _ in range(num_units)]
        return queue

    async def opened(lease_seconds: float = 30.0) -> AsyncIterator[Queue]:
        queue = build(lease_seconds)
        peers: dict[str, Peer] = {}

        def gone(name: str) -> None:
            for controller in queue.controllers.values():
                controller.abandon(name)

        services: dict[str, object] = {f"controller/{name}": c for name, c in queue.controllers.items()}
        server = Server(services | {f"unit/{i}": unit for i, unit in enumerate(queue.units)}, gone)
        if over == "socket":
            await server.start(tmp_path / "s.sock")

        async def connect(name: str) -> TransferQueueClient:
            if over == "objects":
                return TransferQueueClient(queue.tasks, queue.controllers, queue.units, BITS)
            peer = peers[name] = await Peer.connect(tmp_path / "s.sock", name)
            controllers = {task.name: proxy(Controller, peer, f"controller/{task.name}") for task in queue.tasks}
            units = [proxy(StorageUnit, peer, f"unit/{i}") for i in range(num_units)]
            return TransferQueueClient(queue.tasks, controllers, units, BITS)

        async def leave(name: str) -> None:
            if over == "objects":
                gone("driver")
            else:
                await peers.pop(name).close()
                await asyncio.sleep(0.02)

        queue.connect, queue.leave = connect, leave
        yield queue
        for peer in peers.values():
            await peer.close()
        await server.close()

    return opened


@pytest.fixture
async def queue(make_queue: Callable[..., AsyncIterator[Queue]]) -> AsyncIterator[Queue]:
    async for made in make_queue():
        yield made


@pytest.fixture
async def hasty_queue(make_queue: Callable[..., AsyncIterator[Queue]]) -> AsyncIterator[Queue]:
    """Its leases are over within `LEASE_SECONDS`."""
    async for made in make_queue(LEASE_SECONDS):
        yield made


async def within(request: Coroutine[Any, Any, Any]) -> Any:
    return await asyncio.wait_for(request, 3)


async def put(client: TransferQueueClient, *groups: int, step: int = 0, size: int = 2) -> None:
    metas = [GroupMeta(group, size, step, Interval(step, step)) for group in groups]
    prompts = Ragged.from_arrays([np.full(group + 1, group) for group in groups], "int64")
    await client.put(metas, Batch(np.empty(0, np.int64), np.array(groups), {"prompt": prompts}))


def outputs(*rows: int) -> Batch:
    """Rows of one group; row r has r values r and reward r / 2."""
    ids = Ragged.from_arrays([np.full(row, row) for row in rows], "int64")
    indices = np.array(rows)
    return Batch(indices, np.unique(indices >> BITS), {"ids": ids, "reward": indices.astype(np.float32) / 2})


async def generate(client: TransferQueueClient, groups: int = 9) -> None:
    """Lease what is ready for rollout and complete it, row by row."""
    leased = await within(client.lease("rollout", groups=groups))
    for row in leased.lease.indices:
        assert (await within(client.complete(leased.lease, outputs(row)))).tolist() == [True]


def prompts_of(leased: Leased) -> dict[int, list[int]]:
    return {group: leased.batch.ragged("prompt")[i].tolist() for i, group in enumerate(leased.batch.groups.tolist())}


async def test_what_was_put_and_completed_is_what_the_next_task_leases(queue: Queue) -> None:
    client = await queue.connect("w")
    await put(client, 0, 1, 2)
    leased = await within(client.lease("rollout", groups=9))
    handed_out = {m.group: rows for m, rows in zip(leased.lease.groups, leased.lease.rows, strict=True)}
    assert handed_out == {0: [0, 1], 1: [4, 5], 2: [8, 9]}
    assert sorted(leased.batch.indices.tolist()) == [0, 1, 4, 5, 8, 9]
    assert prompts_of(leased) == {0: [0], 1: [1, 1], 2: [2, 2, 2]}
    for row in (5, 4, 9, 8, 0, 1):
        await client.complete(leased.lease, outputs(row))
    assert queue.done == [5, 4, 9, 8, 0, 1]
    trained = await within(client.lease("train", groups=9, step=0))
    assert [m.group for m in trained.lease.groups] == [1, 2, 0]
    batch = trained.batch
    for i, row in enumerate(batch.indices.tolist()):
        assert batch.ragged("ids")[i].tolist() == [row] * row and batch.dense("reward")[i] == row / 2
    assert prompts_of(trained) == {0: [0], 1: [1, 1], 2: [2, 2, 2]}


async def test_a_group_is_complete_with_its_last_row(queue: Queue) -> None:
    client = await queue.connect("w")
    waiting = asyncio.create_task(client.lease("train"))
    await put(client, 3, size=3)
    leased = await within(client.lease("rollout"))
    for row in (12, 14):
        await client.complete(leased.lease, outputs(row))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await client.complete(leased.lease, outputs(13))
    found = await asyncio.wait_for(waiting, 3)
    assert found is not None and found.lease.rows == [[12, 13, 14]]


async def test_a_step_streams_its_groups_as_they_become_complete_and_ends(queue: Queue) -> None:
    client = await queue.connect("w")
    await put(client, 0, 1, step=0)
    await put(client, 2, step=1)
    await generate(client)
    seen = []

    async def read() -> None:
        async for leased in client.stream("train", 0):
            seen.append(leased.lease.groups[0].group)
            if len(seen) == 2:
                await client.end_step("train", 0)

    await within(read())
    assert seen == [0, 1]
    assert (await within(client.lease("train", step=1))).lease.groups[0].group == 2


async def test_only_what_the_installed_version_may_make_is_leased(queue: Queue) -> None:
    client = await queue.connect("w")
    await put(client, 0, step=0)
    await put(client, 1, step=1)
    leased = await within(client.lease("rollout", groups=9, installed=1))
    assert [m.group for m in leased.lease.groups] == [1]


async def test_marks_end_the_leases_of_a_task_without_outputs(queue: Queue) -> None:
    client = await queue.connect("w")
    await put(client, 0, 1, 2)
    await generate(client)
    leases = [(await within(client.lease("train", groups=2))).lease, (await within(client.lease("train"))).lease]
    await client.complete_marks(leases)
    assert queue.controllers["train"].table.counts() == {"waiting": 0, "ready": 0, "leased": 0, "done": 6, "redelivered": 0}
    with pytest.raises(StaleToken, match="is over"):
        await client.complete_marks(leases)


async def test_of_several_leases_all_are_marked_or_none(queue: Queue) -> None:
    client = await queue.connect("w")
    await put(client, 0, 1)
    await generate(client)
    good, lost = [(await within(client.lease("train"))).lease for _ in range(2)]
    await queue.controllers["train"].fail(lost.token, lost.indices, "lost")
    with pytest.raises(StaleToken):
        await client.complete_marks([good, lost])
    counts = queue.controllers["train"].table.counts()
    assert (counts["done"], counts["leased"], counts["ready"]) == (0, 2, 2)


async def test_a_failed_row_comes_again_and_is_given_up_in_the_end(queue: Queue) -> None:
    client = await queue.connect("w")
    await put(client, 0)
    leased = await within(client.lease("rollout"))
    await client.fail(leased.lease, [1], "the reward broke")
    again = await within(client.lease("rollout"))
    assert again.lease.rows == [[1]] and again.lease.attempt == 1 and queue.dead == []
    await client.fail(again.lease, [1], "the reward broke again")
    assert queue.dead == [DeadRow(0, 1, "the reward broke again")]
    await client.complete(leased.lease, outputs(0))
    await client.drop([1])
    assert (await within(client.lease("train"))).lease.rows == [[0]]


async def test_a_late_failure_is_nothing(queue: Queue) -> None:
    client = await queue.connect("w")
    await put(client, 0)
    leased = await within(client.lease("rollout"))
    queue.controllers["rollout"].table.expire(1e9)
    await client.fail(leased.lease, [0, 1], "too late")
    assert (await within(client.lease("rollout"))).lease.rows == [[0, 1]] and queue.dead == []


async def test_a_stale_token_is_refused_as_such(queue: Queue) -> None:
    client = await queue.connect("w")
    await put(client, 0)
    leased = await within(client.lease("rollout"))
    token = leased.lease.token
    controller = client._controllers["rollout"]
    await controller.renew(token)
    with pytest.raises(StaleToken, match="lease 1 of task 'rollout' is over"):
        await controller.renew(Token("rollout", "earlier", token.lease))
    await client.fail(leased.lease, [0, 1], "given back")
    with pytest.raises(StaleToken):
        await controller.check(token, [0])


async def test_outputs_under_a_lease_that_is_over_are_not_kept(queue: Queue) -> None:
    slow, quick = await queue.connect("slow"), await queue.connect("quick")
    await put(quick, 0)
    old = await within(slow.lease("rollout"))
    queue.controllers["rollout"].table.expire(1e9)
    new = await within(quick.lease("rollout"))
    late = replace(outputs(99), indices=np.array([1]), groups=np.array([0]))
    assert (await slow.complete(old.lease, late)).tolist() == [False]
    for row in (0, 1):
        assert (await quick.complete(new.lease, outputs(row))).tolist() == [True]
    assert (await slow.complete(old.lease, late)).tolist() == [False]
    trained = await within(quick.lease("train"))
    assert trained.batch.ragged("ids")[1].tolist() == [1] and queue.done == [0, 1]
    await quick.drop([0, 1])
    assert (await slow.complete(old.lease, late)).tolist() == [False]
    assert queue.nbytes == 0  # nothing that nobody would ever free


async def test_the_row_that_was_dropped_while_it_was_made_is_not_kept(queue: Queue) -> None:
    client = await queue.connect("w")
    await put(client, 0)
    leased = await within(client.lease("rollout"))
    await client.drop([0, 1])
    assert (await client.complete(leased.lease, outputs(1))).tolist() == [False]
    assert queue.nbytes == 0


async def test_dropping_frees_everything(queue: Queue) -> None:
    client = await queue.connect("w")
    await put(client, 0, 1, 2)
    await generate(client)
    assert queue.nbytes > 0
    await client.drop([])
    await client.drop([0, 1, 4, 5, 8, 9])
    assert queue.nbytes == 0
    assert [sum(c.table.counts().values()) for c in queue.controllers.values()] == [0, 0]


async def test_a_write_that_does_not_fit_is_refused_naming_row_and_column(queue: Queue) -> None:
    client = await queue.connect("w")
    await put(client, 0)
    leased = await within(client.lease("rollout"))
    with pytest.raises(ValueError, match="row 1, column 'reward': declared float32"):
        await client.complete(leased.lease, Batch(np.array([1]), np.array([0]), {"reward": np.ones(1)}))
    if len(queue.units) > 1:
        with pytest.raises(ValueError, match="group by group"):
            await client.complete(leased.lease, outputs(1, 5))


async def test_closing_ends_every_stream(queue: Queue) -> None:
    client = await queue.connect("w")
    waiting = [asyncio.create_task(client.lease(task)) for task in ("rollout", "train")]
    await asyncio.sleep(0.02)
    await client.close("rollout")
    assert await asyncio.wait_for(waiting[0], 3) is None
    assert not waiting[1].done()
    await client.close()
    assert await asyncio.wait_for(waiting[1], 3) is None
    assert await within(client.lease("train")) is None


async def test_a_request_can_be_withdrawn(queue: Queue) -> None:
    client = await queue.connect("w")
    waiting = asyncio.create_task(client.lease("rollout"))
    await asyncio.sleep(0.02)
    await client.withdraw("rollout")
    assert await asyncio.wait_for(waiting, 3) is None


async def test_a_stream_that_is_left_early_takes_no_further_group(queue: Queue) -> None:
    client = await queue.connect("w")
    await put(client, 0)
    await generate(client)
    stream = client.stream("train", 0)
    assert (await within(anext(stream))).lease.groups[0].group == 0
    await stream.aclose()  # type: ignore[attr-defined]
    await asyncio.sleep(0.02)
    await put(client, 1)
    await generate(client)
    assert (await within(client.lease("train"))).lease.groups[0].group == 1


async def test_held_leases_are_kept_alive_for_as_long_as_they_are_held(hasty_queue: Queue) -> None:
    client, other = await hasty_queue.connect("w"), await hasty_queue.connect("other")
    await put(client, 0, 1)
    renewing = asyncio.create_task(client.renew_held())
    kept = await within(client.lease("rollout"))
    await within(other.lease("rollout"))  # by a client that renews nothing
    again = await within(client.lease("rollout"))
    assert again.lease.groups[0].group == 1
    await asyncio.sleep(2 * LEASE_SECONDS)
    for row in (0, 1):
        assert (await client.complete(kept.lease, outputs(row))).tolist() == [True]
    assert hasty_queue.controllers["rollout"].table.num_redelivered == 2
    assert not renewing.done()
    renewing.cancel()


async def test_renewing_goes_on_when_a_lease_was_lost_all_the_same(hasty_queue: Queue) -> None:
    client = await hasty_queue.connect("w")
    await put(client, 0, 1)
    lost, kept = await within(client.lease("rollout")), await within(client.lease("rollout"))
    hasty_queue.controllers["rollout"].table._release(lost.lease.token.lease)
    renewing = asyncio.create_task(client.renew_held())
    await asyncio.sleep(2 * LEASE_SECONDS)
    assert not renewing.done()
    await hasty_queue.controllers["rollout"].check(kept.lease.token, kept.lease.indices)
    renewing.cancel()


async def test_what_a_leaving_worker_held_goes_to_another_at_once(queue: Queue) -> None:
    leaver, stayer = await queue.connect("leaver"), await queue.connect("stayer")
    await put(stayer, 0)
    assert (await within(leaver.lease("rollout"))) is not None
    waiting = asyncio.create_task(stayer.lease("rollout"))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await queue.leave("leaver")
    found = await asyncio.wait_for(waiting, 3)
    assert found is not None and found.lease.rows == [[0, 1]] and found.lease.attempt == 1


async def test_a_lease_whose_columns_cannot_be_read_is_not_kept_alive(queue: Queue) -> None:
    client = await queue.connect("w")
    await put(client, 0)
    for unit in queue.units:
        unit.storage.drop(np.array([0, 1]))
    with pytest.raises(LookupError, match="group 0 has no column 'prompt'"):
        await within(client.lease("rollout"))
    assert client._held == {}


async def test_a_controller_that_cannot_take_a_notice_fails_the_writer(queue: Queue) -> None:
    def broken(rows: list[int]) -> None:
        raise ValueError(f"the books do not know row {rows[0]}")

    client = await queue.connect("w")
    await put(client, 0)
    leased = await within(client.lease("rollout"))
    queue.controllers["rollout"]._on_done = broken
    with pytest.raises(ValueError, match="do not know row 1"):
        await within(client.complete(leased.lease, outputs(1)))


async def test_a_controller_that_does_not_answer_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    class Silent(Controller):
        async def notify(self, *notice: Any) -> None:  # type: ignore[override]
            await asyncio.sleep(10)

    tasks = specs(30.0)
    controllers = {"rollout": Controller(tasks[0], BITS), "train": Silent(tasks[1], BITS)}
    unit = StorageUnit(MemoryStorage(BITS), COLUMNS, controllers, notify_timeout_seconds=0.05)
    client = TransferQueueClient(tasks, controllers, [unit], BITS)
    client_name.set("w")
    with caplog.at_level(logging.ERROR):
        await within(put(client, 0))
    assert "controller 'train' has not taken a notice" in caplog.text
    assert (await within(client.lease("rollout"))).lease.rows == [[0, 1]]
