"""The simulated cluster: a wire that keeps order, workers that die, stand still and come back, and a plan of that by seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from asyncflow.cluster.base import WorkerDied, WorkerSpec
from asyncflow.cluster.clock import VirtualLoop
from asyncflow.cluster.faults import Faults
from asyncflow.cluster.simulated import SimulatedCluster
from asyncflow.cluster.wire import SimulatedPeer, Wire
from asyncflow.transport import ConnectionLost, RemoteError, client_key, client_name, proxy, remote


class Desk:
    """A service that notes who asks, in what order."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.open = asyncio.Event()
        self.cancelled: list[str] = []

    @remote
    async def ask(self, number: int) -> str:
        self.asked.append((client_name.get(), number))
        return client_key.get()

    @remote
    async def park(self) -> None:
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled.append(client_name.get())
            raise

    @remote
    async def fail(self, is_known: bool) -> None:
        raise LookupError("no such thing") if is_known else ZeroDivisionError("it broke")


class World:
    """A loop, a desk and a wire to it."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.loop, self.gone = VirtualLoop(), []
        self.desk = Desk()
        self.wire = Wire(self.loop, {"desk": self.desk}, self.gone.append, rng=random.Random(0))
        self.faults = faults or Faults()
        self.starts: list[tuple[str, float]] = []
        self.deaths: list[str] = []

    def run(self, main: Coroutine[Any, Any, Any]) -> None:
        self.loop.run_until_complete(self.loop.create_task(main, name="test"))
        assert not self.loop.errors
        assert [task.get_name() for task in self.loop.living()] == []
        self.loop.finish()

    def cluster(self, main: Any) -> SimulatedCluster:
        return SimulatedCluster(self.wire, {"main": main}, self.faults)

    async def serves(self, name: str, peer: SimulatedPeer) -> None:
        """A worker that is parked until the desk opens."""
        self.starts.append((name, self.loop.time()))
        await proxy(Desk, peer, "desk").park()
        await peer.close()

    def died(self, name: str, why: str, is_final: bool) -> None:
        self.deaths.append(f"{name} {why}")


def test_requests_of_a_client_arrive_in_order_and_in_its_name() -> None:
    world = World()

    async def asks(name: str, peer: SimulatedPeer) -> None:
        desk = proxy(Desk, peer, "desk")
        keys = await asyncio.gather(*(desk.ask(number) for number in range(50)))
        assert set(keys) == {keys[0]} and keys[0].startswith(f"{name}@")
        await peer.close()

    async def main() -> None:
        cluster = world.cluster(asks)
        await cluster.start([WorkerSpec(name, "main") for name in ("a", "b")])
        await cluster.wait(world.died)
        assert await cluster.stop(1.0) == {}

    world.run(main())
    for name in ("a", "b"):
        assert [number for who, number in world.desk.asked if who == name] == list(range(50))
    assert 0 < world.loop.now < 0.1
    assert [who for who, _ in world.desk.asked] != ["a"] * 50 + ["b"] * 50  # side by side


def test_errors_cross_as_they_do_between_processes() -> None:
    world = World()

    async def asks(name: str, peer: SimulatedPeer) -> None:
        desk = proxy(Desk, peer, "desk")
        with pytest.raises(LookupError, match="no such thing"):
            await desk.fail(True)
        with pytest.raises(RemoteError, match=r"desk\.fail failed: ZeroDivisionError: it broke"):
            await desk.fail(False)
        with pytest.raises(LookupError, match="no service"):
            await proxy(Desk, peer, "chair").ask(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(desk.park(), 1.0)
        await asyncio.sleep(1.0)
        assert world.desk.cancelled == [name]  # what nobody waits for any more is cancelled there, too
        await world.wire.close()
        await asyncio.sleep(1.0)
        assert peer.is_lost
        with pytest.raises(ConnectionLost):
            await desk.ask(1)

    async def main() -> None:
        cluster = world.cluster(asks)
        await cluster.start([WorkerSpec("a", "main")])
        await cluster.wait(world.died)

    world.run(main())


def test_who_dies_is_gone_for_the_server_and_comes_back_later_each_time() -> None:
    world = World(Faults(deaths=((1.0, "a"), (10.0, "a"), (20.0, "a"))))

    async def main() -> None:
        cluster = world.cluster(world.serves)
        await cluster.start([WorkerSpec("a", "main", max_restarts=2), WorkerSpec("b", "main")])
        waiting = asyncio.create_task(cluster.wait(world.died))
        await asyncio.sleep(30.0)
        assert cluster.num_deaths == 3 and not waiting.done()
        assert len(world.wire.peers) == 1
        world.desk.open.set()
        assert await cluster.stop(1.0) == {}
        await asyncio.sleep(1.0)
        waiting.cancel()

    world.run(main())
    assert world.starts == [("a", 0.0), ("b", 0.0), ("a", 1.5), ("a", 11.0)]
    assert world.desk.cancelled == ["a"] * 3
    assert [key.partition("@")[0] for key in world.gone] == ["a", "a", "a", "b"]
    assert len(set(world.gone)) == 4
    assert [death.split(";")[0] for death in world.deaths] == ["a was killed"] * 2 + [
        "a was killed once too often, and is not started again"
    ]


def test_who_stands_still_does_nothing_and_goes_on_at_the_latest_when_all_stop() -> None:
    world = World(Faults(stalls=((1.0, "a", 4.0), (10.0, "a", 1e6))))

    async def asks(name: str, peer: SimulatedPeer) -> None:
        for number in range(12):
            await proxy(Desk, peer, "desk").ask(number)
            world.starts.append((name, round(world.loop.time())))
            await asyncio.sleep(1.0)

    async def main() -> None:
        cluster = world.cluster(asks)
        await cluster.start([WorkerSpec("a", "main")])
        await asyncio.sleep(100.0)
        assert cluster.num_stalls == 2
        assert await cluster.stop(60.0) == {}
        await world.wire.close()

    world.run(main())
    assert [when for _, when in world.starts] == [0, 5, 6, 7, 8, 9, 100, 101, 102, 103, 104, 105]


def test_a_worker_that_fails_ends_the_run_with_its_name_and_one_that_stays_is_killed() -> None:
    world = World()

    async def fails(name: str, peer: SimulatedPeer) -> None:
        await asyncio.sleep(1.0 if name == "a" else 1e9)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(proxy(Desk, peer, "desk").fail(True))

    async def main() -> None:
        cluster = world.cluster(fails)
        await cluster.start([WorkerSpec(name, "main") for name in ("a", "b")])
        with pytest.raises(WorkerDied, match="worker a ended with LookupError: no such thing"):
            await cluster.wait(world.died)
        assert list(await cluster.stop(5.0)) == ["b"]
        assert cluster.late == ["b"] and len(cluster.failures) == 1
        await world.wire.close()

    world.run(main())


def test_who_joins_lives_as_the_others_and_who_leaves_dies_for_nobody() -> None:
    world = World(Faults(deaths=((0.5, "b"), (1.0, "c"), (11.0, "b"), (20.5, "b")), stalls=((0.5, "b", 1e6),)))

    async def main() -> None:
        cluster = world.cluster(world.serves)
        await cluster.start([WorkerSpec("a", "main", max_restarts=9), WorkerSpec("c", "main", max_restarts=9)])
        waiting = asyncio.create_task(cluster.wait(world.died))
        await asyncio.sleep(1.2)
        assert await cluster.end("c", 60.0) is True  # in the pause before it is started again
        assert world.loop.time() == pytest.approx(1.2)
        await asyncio.sleep(8.8)
        await cluster.start([WorkerSpec("b", "main", max_restarts=9), WorkerSpec("c", "main")])
        assert await cluster.end("c", 5.0) is False
        assert world.loop.time() == pytest.approx(15.0)
        ending = asyncio.create_task(cluster.end("b", 60.0))
        assert await ending is True  # by its death
        assert world.loop.time() == pytest.approx(20.5)
        await asyncio.sleep(30.0)
        assert not waiting.done() and len(world.wire.peers) == 1
        world.desk.open.set()
        assert await cluster.stop(1.0) == {}
        assert cluster.num_deaths == 3 and cluster.num_stalls == 0 and cluster.num_cut_short == 1
        await waiting

    world.run(main())
    assert world.starts == [("a", 0.0), ("c", 0.0), ("b", 10.0), ("c", 10.0), ("b", 11.5)]
    assert [death.split(";")[0] for death in world.deaths] == ["c was killed", "b was killed"]


def test_a_plan_is_its_seeds_and_spares_the_first_worker() -> None:
    workers = [f"rollout/{i}" for i in range(4)]
    plans = [Faults.drawn(seed, workers, 2.0, 20.0) for seed in range(100)]
    assert plans == [Faults.drawn(seed, workers, 2.0, 20.0) for seed in range(100)]
    assert len({str(plan) for plan in plans}) > 80
    for plan in plans:
        assert "rollout/0" not in {*plan.slow, *plan.broken_fetches, *plan.hanging_fetches, *(who for _, who in plan.deaths)}
        assert all(2.0 <= when <= 20.0 for when, _ in plan.deaths)
    for happens in ("slow", "deaths", "stalls", "late_rewards", "broken_fetches", "hanging_fetches"):
        assert 20 < sum(bool(getattr(plan, happens)) for plan in plans) < 90, happens
    assert Faults.drawn(0, ["rollout/0"], 0.0, 1.0).deaths == ()


def test_a_plan_may_change_the_size_of_a_run_and_is_the_same_else() -> None:
    workers, sizes = ["rollout/0", "rollout/1"], (1, 2, 4)
    for seed in range(100):
        plan, before = (Faults.drawn(seed, workers, 2.0, 20.0, sizes=chosen) for chosen in (sizes, ()))
        assert all(resize.size in sizes and 2.0 <= resize.when <= 20.0 for resize in plan.resizes) and before.resizes == ()
        assert plan.deaths[: len(before.deaths)] == before.deaths and plan.late_rewards == before.late_rewards
        harmed = {*plan.slow, *plan.broken_fetches, *(who for _, who in plan.deaths), *(who for _, who, _ in plan.stalls)}
        assert harmed <= {f"rollout/{i}" for i in range(4)} and "rollout/0" not in {*plan.slow, *plan.broken_fetches}
        if not any(resize.size > 2 for resize in plan.resizes):
            assert harmed <= set(workers)
    plans = [Faults.drawn(seed, workers, 2.0, 20.0, sizes=sizes) for seed in range(100)]
    assert 30 < sum(bool(plan.resizes) for plan in plans) < 80
    assert any("rollout/3" in {who for _, who in plan.deaths} for plan in plans)
