"""Real processes of a queue are killed under load: clients go on, no acknowledged row is lost, every row is trained once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.leases import Want
from asyncflow.transport import ConnectionLost
from asyncflow.types import Batch, GroupMeta, Interval, Ragged
from tests.e2e.queue_processes import BITS, GROUP_SIZE, SCHEMA, ids_of
from tests.forked import Command
from tests.patience import patience


class Town:
    """The processes of a test, by name, and its own client."""

    client: TransferQueueClient

    def __init__(self, folder: Path, redis_url: str | None, *, hub_has_controllers: bool) -> None:
        self.folder, self.hub = folder, folder / "hub"
        self.losses, self.trained_file = folder / "losses", folder / "trained"
        self.processes: dict[str, Command] = {}
        self.killed: list[str] = []
        self.num_put = 0
        self._redis = [redis_url, folder.name] if redis_url else []
        self._has_controllers = hub_has_controllers
        for file in (self.losses, self.trained_file):
            file.touch()

    def start(self, name: str) -> None:
        kind, _, which = name.partition("/")
        attempt = self.killed.count(name)  # a controller comes back at another address, a unit where it was
        door = self.folder / (f"unit-{which}" if kind == "unit" else f"{kind}-{which}-{attempt}")
        arguments = {
            "hub": [self.hub, "yes" if self._has_controllers else "no", self.losses],
            "unit": [self.hub, which, door, *self._redis],
            "controller": [self.hub, which, door],
            "rollout": [self.hub, f"{name}.{attempt}"],
            "train": [self.hub, f"{name}.{attempt}", self.trained_file],
            "hold": [self.hub, name],
        }[kind]
        self.processes[name] = Command(kind, *map(str, arguments), main="tests.e2e.queue_processes:main")

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        assert process.poll() is None, f"{name} has ended by itself:\n{process.communicate()}"
        process.kill()
        process.wait(patience(10))
        self.killed.append(name)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.communicate(patience(10))

    async def join(self, units: int) -> None:
        async with asyncio.timeout(patience(20)):
            while True:
                with contextlib.suppress(ConnectionLost):
                    self.client = await TransferQueueClient.connect(f"unix:{self.hub}", "the test")
                    break
                await asyncio.sleep(0.05)
            await self.client.wait_for_units(units)

    async def put(self, *groups: int) -> None:
        metas = [GroupMeta(group, GROUP_SIZE, 0, Interval(0, 0)) for group in groups]
        prompts = Ragged.from_arrays([np.full(group % 5, group) for group in groups], "int64")
        await asyncio.wait_for(
            self.client.put(metas, Batch(np.empty(0, np.int64), np.array(groups), {"prompt": prompts})), patience(30)
        )

    async def feed(self) -> None:
        """For ever: all that this says it has put has been acknowledged."""
        while True:
            await self.put(self.num_put, self.num_put + 1)
            self.num_put += 2
            await asyncio.sleep(0.01)

    async def done(self, task: str = "train") -> int:
        async with asyncio.timeout(patience(30)):
            while task not in (tasks := (await self.client.status())[0]):  # its controller is being started
                await asyncio.sleep(0.1)
        return tasks[task].counts["done"]

    async def until_done(self, count: int, seconds: float = 30.0) -> None:
        deadline, done = time.monotonic() + patience(seconds), -1
        while (done := await self.done()) < count:
            assert time.monotonic() < deadline, f"{done} rows of {count} are done: {(await self.client.status())[0]}"
            await asyncio.sleep(0.05)

    def all_rows(self) -> list[int]:
        return [(group << BITS) + i for group in range(self.num_put) for i in range(GROUP_SIZE)]

    async def ends(self, *names: str) -> None:
        """These processes end by themselves, as they should."""
        deadline = time.monotonic() + patience(20)
        for name in names:
            process = self.processes[name]
            while process.poll() is None:
                assert time.monotonic() < deadline, f"{name} has not ended"
                await asyncio.sleep(0.02)
            assert process.returncode == 0, process.communicate()


@contextlib.asynccontextmanager
async def town(redis_url: str | None, names: list[str], *, hub_has_controllers: bool) -> AsyncIterator[Town]:
    with tempfile.TemporaryDirectory(prefix="aftown") as folder:  # short: a unix socket's path has at most 107 bytes
        made = Town(Path(folder), redis_url, hub_has_controllers=hub_has_controllers)
        try:
            made.start("hub")
            async with asyncio.timeout(patience(20)):
                while not made.hub.exists():
                    await asyncio.sleep(0.02)
            for name in names:
                made.start(name)
            async with asyncio.timeout(patience(60)):
                await made.join(sum(name.startswith("unit/") for name in names))
                yield made
                await made.client.disconnect()
        finally:
            made.end()


async def test_over_redis_nothing_is_lost_whoever_is_killed_and_every_row_is_trained_once(redis_url: str) -> None:
    parts = ["unit/0", "unit/1", "controller/rollout", "controller/train", "rollout/0", "rollout/1", "train/0"]
    async with town(redis_url, parts, hub_has_controllers=False) as t:
        feeding = asyncio.create_task(t.feed())
        await t.until_done(30)
        for victims in (
            ["unit/0"],
            ["controller/train"],
            ["rollout/0"],
            ["controller/rollout"],
            ["train/0"],
            ["unit/1", "controller/train"],
        ):
            for victim in victims:
                t.kill(victim)
            before = await t.done("rollout") if victims == ["rollout/0"] else 0
            for victim in victims:
                t.start(victim)
            await t.until_done(max(before, await t.done()) + 30)
            assert not feeding.done(), feeding
        feeding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await feeding
        await t.put(t.num_put, t.num_put + 1)  # the last one may or may not have been acknowledged
        t.num_put += 2
        rows = t.all_rows()
        await t.until_done(len(rows))
        counts = (await t.client.status())[0]["train"].counts
        assert {state: counts[state] for state in ("waiting", "ready", "leased", "dead", "filtered")} == dict.fromkeys(
            ("waiting", "ready", "leased", "dead", "filtered"), 0
        )
        await t.client.close()
        await t.ends("rollout/0", "rollout/1", "train/0")
        trained: dict[int, int] = {}
        for unit in (0, 1):
            of_unit = np.array([row for row in rows if (row >> BITS) % 2 == unit])
            [batch] = await t.client.read({unit: of_unit}, ["ids", "attempt"])
            assert [ids.tolist() for ids in batch.ragged("ids")] == [ids_of(row) for row in of_unit.tolist()]
            trained |= dict(zip(of_unit.tolist(), batch.dense("attempt").tolist(), strict=True))
        assert sorted(trained) == rows
        tried: dict[int, list[int]] = {}
        for line in t.trained_file.read_text().splitlines():
            what, attempt, of_attempt = json.loads(line)
            if what == "tries":
                tried[attempt] = of_attempt
            else:  # who was told that it had trained a row is the only one who has
                assert [trained[row] for row in of_attempt] == [attempt] * len(of_attempt)
        assert all(row in tried[attempt] for row, attempt in trained.items())
        assert len(t.killed) == 7


async def test_over_memory_what_a_killed_unit_had_is_named_exactly_and_the_rest_goes_on() -> None:
    parts = ["unit/0", "unit/1", "rollout/0", "train/0"]
    async with town(None, parts, hub_has_controllers=True) as t:
        for group in range(0, 120, 4):
            await t.put(*range(group, group + 4))
        t.num_put = 120
        await t.client.drop([4, 5, 6, 13])  # of unit 1: group 1, and a row of group 3
        await t.until_done(20)
        t.kill("unit/1")
        expected = [row for row in t.all_rows() if (row >> BITS) % 2 == 1 and row not in (4, 5, 6, 13)]
        t.start("unit/1")
        async with asyncio.timeout(patience(20)):
            while len(lines := t.losses.read_text().splitlines()) < len(SCHEMA.tasks):
                await asyncio.sleep(0.05)
        assert sorted(json.loads(line) for line in lines) == [["rollout", 1, expected], ["train", 1, expected]]
        await t.put(*range(1, 120, 2))  # made again
        await t.until_done(len(t.all_rows()))
        await t.client.close()
        await t.ends("rollout/0", "train/0")
        assert len(t.losses.read_text().splitlines()) == len(SCHEMA.tasks)


async def test_what_a_killed_consumer_held_goes_to_another_at_once() -> None:
    async with town(None, ["unit/0", "controller/rollout", "controller/train"], hub_has_controllers=False) as t:
        await t.put(0, 1, 2)
        t.start("hold/0")
        holder = t.processes["hold/0"]
        held = json.loads(await asyncio.wait_for(asyncio.to_thread(holder.stdout.readline), patience(20)))
        assert len(held) == 9
        waiting = asyncio.create_task(t.client.lease("rollout", Want(groups=9)))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        began = time.monotonic()
        t.kill("hold/0")
        leased = await asyncio.wait_for(waiting, patience(20))
        assert time.monotonic() - began < patience(20)  # and not after the 60 s of its lease
        assert leased is not None and leased.lease.indices == held
        assert leased.lease.deliveries == [[1] * GROUP_SIZE] * 3
