"""Who is placed where, and when: over a Ray of the test's own, which has room for so many bundles."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncflow.cluster import base
from asyncflow.cluster.base import WorkerDied, WorkerSpec
from asyncflow.cluster.ray import cluster as ray_cluster
from asyncflow.cluster.ray import connection as ray_connection
from asyncflow.cluster.ray import places as ray_places
from asyncflow.cluster.ray import process as ray_process
from asyncflow.cluster.ray.cluster import RayCluster
from asyncflow.types import RunError, UserError
from tests.patience import patience

USERS = (ray_connection, ray_places, ray_process, ray_cluster)
"""Who uses Ray, and waits for it."""


class RayError(Exception):
    pass


class ActorUnavailableError(RayError):
    pass


class Group:
    def __init__(self, ray: Ray, bundles: Sequence[Mapping[str, float]]) -> None:
        self.ray, self.bundles, self.is_there = ray, bundles, False

    def wait(self, seconds: float) -> bool:
        self.ray.ask()
        if not self.is_there and self.ray.room >= len(self.bundles):
            self.ray.room -= len(self.bundles)
            self.is_there = True
        return self.is_there


class Actor:
    """A host, whose methods Ray calls."""

    def __init__(self, ray: Ray, place: tuple[Group, int]) -> None:
        self.ray, self.place = ray, place
        self.calls: list[str] = []
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.errors: list[Exception] = []
        self.hangs = False
        self.is_gone = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            self.ray.ask()
            self.calls.append(name)
            await self.ray.may_answer.wait()
            if self.errors:
                raise self.errors.pop(0)
            if self.hangs:
                await self.is_gone.wait()
            return await getattr(self, f"_{name}")()

        return SimpleNamespace(remote=call)

    async def _node(self) -> str:
        return self.ray.nodes.get(self.place[1], "here")

    async def _sees(self) -> bool:
        return self.ray.shares_files

    async def _start(self) -> int:
        if self.ray.start_error is not None:
            raise self.ray.start_error
        self.ended = asyncio.get_running_loop().create_future()
        return 4242

    async def _listen(self) -> tuple[bytes, int]:
        done, _ = await asyncio.wait(
            [self.ended, gone := asyncio.ensure_future(self.is_gone.wait())], return_when="FIRST_COMPLETED"
        )
        if gone in done:
            raise RayError("The actor is dead. More words")
        gone.cancel()
        return b"", self.ended.result()

    async def _kill(self) -> None:
        if not self.ended.done():
            self.ended.set_result(-9)

    async def _leave(self) -> None:
        return None


class Ray:
    """What is used of it."""

    exceptions = SimpleNamespace(RayError=RayError, ActorUnavailableError=ActorUnavailableError)

    def __init__(self, room: int) -> None:
        self.room, self.is_up = room, True
        self.groups: list[Group] = []
        self.removed: list[Group] = []
        self.actors: list[Actor] = []
        self.strategies: list[str] = []
        self.asked: list[tuple[int, float, float]] = []  # by actors: a bundle, its CPUs and GPUs
        self.labels: list[Any] = []
        self.nodes: dict[int, str] = {}  # of bundles that are not on the driver's
        self.shares_files = True
        self.start_error: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        schedules = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, bundle: (group, bundle))
        self.util = SimpleNamespace(
            placement_group=self._group, remove_placement_group=self._remove, scheduling_strategies=schedules
        )

    def ask(self) -> None:
        assert self.is_up, "Ray was asked when there was none"

    def available_resources(self) -> dict[str, float]:
        return {"CPU": float(self.room)}

    def remote(self, kind: type) -> Any:
        def options(*, scheduling_strategy: tuple[Group, int], **rest: Any) -> Any:
            self.asked.append((scheduling_strategy[1], rest["num_cpus"], rest["num_gpus"]))
            return SimpleNamespace(remote=lambda: self._actor(scheduling_strategy))

        return SimpleNamespace(options=options)

    def kill(self, actor: Actor) -> None:
        self.ask()
        actor.calls.append("killed")
        actor.is_gone.set()

    def shutdown(self) -> None:
        self.is_up = False

    def _actor(self, place: tuple[Group, int]) -> Actor:
        self.ask()
        self.actors.append(Actor(self, place))
        return self.actors[-1]

    def _group(self, bundles: list[dict[str, float]], *, strategy: str, bundle_label_selector: Any) -> Group:
        self.ask()
        self.groups.append(Group(self, bundles))
        self.strategies.append(strategy)
        self.labels.append(bundle_label_selector)
        return self.groups[-1]

    def _remove(self, group: Group) -> None:
        self.ask()
        self.removed.append(group)
        self.room += len(group.bundles) * group.is_there


Make = Callable[..., tuple[RayCluster, Ray]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    (tmp_path / "config.yaml").write_text("model: {path: m}\ndata: {path: d}\n")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    for module in (ray_places, ray_process):
        monkeypatch.setattr(module, "ASK_SECONDS", 0.01)
    monkeypatch.setattr(base, "RESTART_SECONDS", (0.01, 0.01))

    def make(room: int, **options: Any) -> tuple[RayCluster, Ray]:
        ray, cluster = Ray(room), RayCluster(tmp_path, **options)
        for module in USERS:
            monkeypatch.setattr(module, "import_ray", lambda: ray)
        cluster._connection.node, cluster._connection._is_ours = "here", True
        return cluster, ray

    return make


def rollouts(*numbers: int, **changes: Any) -> list[WorkerSpec]:
    return [WorkerSpec(f"rollout/{number}", "m:f", needs={"CPU": 1.0}, **changes) for number in numbers]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(patience(60.0)):
        while not condition():
            await asyncio.sleep(0.01)


async def ends(cluster: RayCluster, name: str) -> None:
    cluster._places.by_name[name].host.ended.set_result(0)
    assert await asyncio.wait_for(cluster.end(name, 5.0), patience(60.0))


async def test_who_joins_takes_the_place_of_one_that_has_left(make: Make) -> None:
    cluster, ray = make(2, start_seconds=0.5)
    await cluster.start(rollouts(0, 1))
    for name in ("rollout/1", "rollout/0", "rollout/1"):  # again and again
        bundle = cluster._places.by_name[name].bundle
        await ends(cluster, name)
        await cluster.start(rollouts(int(name[-1])))
        assert cluster._places.by_name[name].bundle == bundle
    assert len(ray.groups) == 1 and ray.room == 0 and not ray.removed
    assert list(await cluster.stop(0.0)) == ["rollout/0", "rollout/1"]
    assert ray.removed == ray.groups and ray.room == 2


async def test_a_group_that_all_have_left_is_given_back(make: Make) -> None:
    cluster, ray = make(2, start_seconds=0.5)
    await cluster.start(rollouts(0))
    await cluster.start(rollouts(1))
    await ends(cluster, "rollout/1")
    assert ray.removed == ray.groups[1:] and ray.room == 1
    await cluster.start(rollouts(2))  # of a group of its own, as the other one is gone
    assert len(ray.groups) == 3
    await cluster.stop(0.0)


async def test_a_place_that_comes_free_while_one_waits_for_room_is_taken(make: Make) -> None:
    """A worker that leaves, or has failed, goes when the other is coming already."""
    cluster, ray = make(2, start_seconds=5.0)
    await cluster.start(rollouts(0, 1))
    joining = asyncio.create_task(cluster.start(rollouts(2)))
    await until(lambda: len(ray.groups) == 2)
    await ends(cluster, "rollout/1")
    await asyncio.wait_for(joining, patience(60.0))
    assert cluster._places.by_name["rollout/2"].bundle == 1 and ray.removed == ray.groups[1:] and ray.room == 0
    await cluster.stop(0.0)


async def test_a_place_of_other_needs_or_of_another_pool_is_no_place(make: Make) -> None:
    cluster, ray = make(3, start_seconds=0.1)
    await cluster.start(rollouts(0, 1))
    await ends(cluster, "rollout/1")
    await cluster.start([WorkerSpec("reward", "m:f", needs={"CPU": 1.0})])
    assert len(ray.groups) == 2
    with pytest.raises(UserError, match="no room for 1 rollout"):
        await cluster.start([WorkerSpec("rollout/2", "m:f", needs={"CPU": 2.0})])
    assert ray.removed == ray.groups[2:]
    await cluster.stop(0.0)


async def test_who_waits_for_room_when_the_cluster_is_stopped_is_not_placed(make: Make) -> None:
    cluster, ray = make(1, start_seconds=30.0)
    await cluster.start(rollouts(0))
    joining = asyncio.create_task(cluster.start(rollouts(1)))
    await until(lambda: len(ray.groups) == 2)
    await asyncio.wait_for(cluster.stop(0.0), patience(60.0))
    with pytest.raises(RunError, match="the run is ending"):
        await joining
    assert ray.removed == ray.groups[::-1] or ray.removed == ray.groups
    with pytest.raises(RunError, match="the run is ending"):
        await cluster.start(rollouts(2))  # Ray is asked nothing: the test's own would say so


async def test_who_is_called_back_while_waiting_for_room_leaves_no_group(make: Make) -> None:
    cluster, ray = make(0, start_seconds=30.0)
    joining = asyncio.create_task(cluster.start(rollouts(0)))
    await until(lambda: ray.groups)
    joining.cancel()
    await asyncio.wait([joining])
    assert joining.cancelled() and ray.removed == ray.groups
    await cluster.stop(0.0)


async def test_one_that_leaves_when_the_cluster_is_stopped_has_left_before_ray_goes(make: Make) -> None:
    cluster, ray = make(2)
    await cluster.start(rollouts(0, 1))
    leaver = cluster._places.by_name["rollout/1"].host
    leaver.ended.set_result(0)
    await until(lambda: cluster._children["rollout/1"].process.returncode == 0)
    ray.may_answer.clear()
    ending = asyncio.create_task(cluster.end("rollout/1", 5.0))
    await until(lambda: "leave" in leaver.calls)
    cluster._places.by_name["rollout/0"].host.ended.set_result(0)
    stopping = asyncio.create_task(cluster.stop(5.0))
    await asyncio.sleep(0.05)
    assert ray.is_up and not stopping.done()
    ray.may_answer.set()
    assert await asyncio.wait_for(stopping, patience(60.0)) == {} and await ending
    assert not ray.is_up and ray.removed == ray.groups


async def test_one_that_is_being_started_again_when_it_leaves_is_gone_when_it_has_left(make: Make) -> None:
    cluster, ray = make(2)
    await cluster.start(rollouts(0, 1, max_restarts=3))
    waiting = asyncio.create_task(cluster.wait(lambda *death: None))
    host = cluster._places.by_name["rollout/1"].host
    await until(lambda: "listen" in host.calls)
    ray.may_answer.clear()
    num_calls = len(host.calls)
    host.ended.set_result(7)
    await until(lambda: len(host.calls) > num_calls)  # it is being started again
    ending = asyncio.create_task(cluster.end("rollout/1", 5.0))
    await asyncio.sleep(0.05)
    assert not ending.done() and "rollout/1" in cluster._places.by_name
    ray.may_answer.set()
    await asyncio.wait_for(ending, patience(60.0))
    assert host.ended.done() and host.calls[-2:] == ["leave", "killed"] and not waiting.done()
    assert cluster._places._pools[0].free == [1]
    await cluster.stop(0.0)
    await asyncio.wait([waiting])


async def test_a_host_out_of_reach_for_a_while_is_not_gone(make: Make, tmp_path: Path) -> None:
    cluster, ray = make(1)
    actor = Actor(ray, (Group(ray, []), 0))
    actor.errors = [ActorUnavailableError("the network is down") for _ in range(3)]
    ended: list[bool] = []

    async def end_host() -> None:
        ended.append(True)

    process = ray_process.RayProcess(actor, 1, tmp_path / "log", cluster._connection, end_host, is_here=True)
    await until(lambda: actor.calls.count("listen") == 4)
    assert process.returncode is None
    actor.errors = [ActorUnavailableError("the network is down")]
    process.kill()  # is not lost either
    assert await asyncio.wait_for(process.wait(), patience(60.0)) == -9
    assert actor.calls.count("kill") == 2 and (tmp_path / "log").read_bytes() == b"" and not ended


async def test_a_host_out_of_reach_for_long_is_gone(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster, ray = make(1)
    monkeypatch.setattr(ray_process, "UNAVAILABLE_SECONDS", 0.1)
    actor = Actor(ray, (Group(ray, []), 0))
    actor.errors = [ActorUnavailableError("the network is down")] * 10_000
    ended: list[bool] = []

    async def end_host() -> None:
        ended.append(True)

    process = ray_process.RayProcess(actor, 1, tmp_path / "log", cluster._connection, end_host, is_here=True)
    assert await asyncio.wait_for(process.wait(), patience(60.0)) == ray_process.LOST_STATUS
    assert "its host is gone: the network is down" in (tmp_path / "log").read_text() and ended


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("is_killed", [False, True])
async def test_the_end_of_the_run_s_own_cluster_is_the_end_of_its_hosts(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hangs: bool, is_killed: bool
) -> None:
    """Its owner says so, as it ends; one that was killed itself says nothing, and hosts are waited for as everywhere."""
    cluster, ray = make(1)
    guard, goes = tmp_path / "guard", tmp_path / "goes"
    guard.write_text(f"#!/bin/sh\necho here\nuntil [ -e {goes} ]; do sleep 0.01; done\n{'kill -9 $$' if is_killed else ''}\n")
    guard.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(guard))
    monkeypatch.setattr(ray_connection, "_was_imported_alone", True)
    if is_killed:
        monkeypatch.setattr(ray_process, "UNAVAILABLE_SECONDS", 0.3)
    assert await cluster._connection._begin_cluster(patience(60.0)) == "here"
    await cluster.start([WorkerSpec("trainer/0", "m:f", needs={"CPU": 1.0})])
    waiting = asyncio.create_task(cluster.wait(lambda name, why, is_final: None))
    host = ray.actors[0]
    if hangs:
        await until(lambda: "listen" in host.calls)
    else:
        host.errors = [ActorUnavailableError("the network is down")] * 100_000
    goes.touch()
    ended = "the Ray cluster that was started for this run has ended, of which logs/ray.log tells"
    lost = "it has not answered for 0.3 s" if hangs else "the network is down"
    with pytest.raises(WorkerDied, match=f"worker trainer/0 .* its host is gone: {lost if is_killed else ended}"):
        await asyncio.wait_for(waiting, patience(20.0))
    await asyncio.wait_for(cluster.stop(0.0), patience(60.0))


async def test_a_host_that_hangs_is_ended_and_its_worker_is_started_on_another(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cluster, ray = make(1)
    monkeypatch.setattr(ray_process, "UNAVAILABLE_SECONDS", 1.0)
    await cluster.start(rollouts(0, max_restarts=1))
    deaths: list[str] = []
    waiting = asyncio.create_task(cluster.wait(lambda name, why, is_final: deaths.append(why)))
    hung = ray.actors[0]
    await until(lambda: "killed" in hung.calls)
    await until(lambda: len(ray.actors) == 2 and "start" in ray.actors[1].calls)
    assert "its host is gone: it has not answered for 1 s" in deaths[0]
    ray.actors[1].ended.set_result(0)
    await asyncio.wait_for(waiting, patience(60.0))
    await asyncio.wait_for(cluster.stop(0.0), patience(60.0))
    assert ray.room == 1


async def test_a_host_that_hangs_does_not_keep_the_cluster_from_stopping(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, ray = make(2)
    for module in USERS:
        monkeypatch.setattr(module, "HOST_SECONDS", 0.2)
    await cluster.start(rollouts(0, 1))
    hung, other = ray.actors
    await until(lambda: "listen" in hung.calls)
    hung.hangs = True
    assert list(await asyncio.wait_for(cluster.stop(0.1), patience(60.0))) == ["rollout/0", "rollout/1"]
    assert "killed" in hung.calls and other.ended.done() and ray.room == 2


async def test_what_a_host_refuses_is_said_in_its_words(make: Make) -> None:
    cluster, ray = make(1)
    error = RayError("ray::RayHost.start() (pid=7). Traceback")
    error.cause = UserError("/x must be a folder. Remove it")  # type: ignore[attr-defined]
    ray.start_error = error
    with pytest.raises(RunError, match=r"^worker rollout/0 could not be started: /x must be a folder. Remove it$"):
        await cluster.start(rollouts(0))
    await cluster.stop(0.0)


async def test_no_group_is_asked_of_a_head_that_is_gone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's function would wait for it for ever."""
    cluster, ray = make(1)

    async def answers(address: str) -> bool:
        return False

    monkeypatch.setattr(ray_connection, "_answers", answers)
    with pytest.raises(RunError, match=r"the head of the Ray cluster at .* does not answer"):
        await cluster.start(rollouts(0))
    assert ray.groups == []
    await cluster.stop(0.0)


async def test_a_placement_that_no_cluster_has_is_refused(make: Make) -> None:
    cluster, ray = make(9, placement={"trainer": "STRICT_SPREAD"})
    trainers = [WorkerSpec(f"trainer/{rank}", "m:f", needs={"CPU": 1.0}) for rank in range(2)]
    with pytest.raises(
        UserError, match=r"cluster.placement.trainer=STRICT_SPREAD asks for 2 nodes, but trainers stay on this machine"
    ):
        await cluster.start(trainers)
    assert ray.groups == []
    await cluster.start(trainers[:1])
    assert ray.strategies == ["STRICT_SPREAD"]
    await cluster.stop(0.0)


def trainers(count: int) -> list[WorkerSpec]:
    told: dict[str, Any] = {"environment": {"LOCAL_WORLD_SIZE": f"{count}", "STORE": "a file"}, "apart": {"STORE": "driver"}}
    return [WorkerSpec(f"trainer/{rank}", "m:f", needs={"CPU": 1.0}, **told) for rank in range(count)]


@pytest.fixture
def several_nodes(make: Make, tmp_path: Path) -> Make:
    """A cluster whose trainers may be anywhere."""
    (tmp_path / "config.yaml").write_text("model: {path: m}\ndata: {path: d}\nqueue: {listen: 'tls:h:0'}\n")
    (tmp_path / "key.pem").touch()
    (tmp_path / "job.json").touch()
    return lambda room, **options: make(room, trainers="anywhere", **options)


async def test_trainers_on_several_nodes_are_told_so_and_the_first_one_stays(several_nodes: Make) -> None:
    cluster, ray = several_nodes(4)
    ray.nodes = {1: "there", 2: "there"}
    await cluster.start([*trainers(3), *rollouts(0)])
    here = {"ray.io/node-id": "here"}
    assert ray.labels == [[here, {}, {}], [here]]  # rollouts have no door to weights elsewhere
    environments = [cluster._environment(cluster._places.by_name[f"trainer/{rank}"], is_remote=rank > 0) for rank in range(3)]
    assert [(e["LOCAL_WORLD_SIZE"], e["STORE"]) for e in environments] == [("1", "driver"), ("2", "driver"), ("2", "driver")]
    await cluster.stop(0.0)


async def test_trainers_that_are_all_here_are_as_they_are_locally(several_nodes: Make) -> None:
    cluster, _ = several_nodes(2)
    await cluster.start(trainers(2))
    environments = [cluster._environment(cluster._places.by_name[f"trainer/{rank}"], is_remote=False) for rank in range(2)]
    assert [(e["LOCAL_WORLD_SIZE"], e["STORE"]) for e in environments] == [("2", "a file")] * 2
    await cluster.stop(0.0)


async def test_a_trainer_where_the_runs_folder_is_not_seen_is_refused_before_anybody_is_started(several_nodes: Make) -> None:
    cluster, ray = several_nodes(3)
    ray.nodes, ray.shares_files = {1: "there"}, False
    with pytest.raises(UserError, match=r"trainer/1 would be on a node that does not see .*, where trainers write checkpoints"):
        await cluster.start([*rollouts(0), *trainers(2)])
    assert not [actor for actor in ray.actors if "start" in actor.calls]
    await cluster.stop(0.0)
    assert ray.room == 3


async def test_workers_that_ray_does_not_have_are_refused_in_a_sentence(make: Make) -> None:
    cluster, ray = make(1, resources={"rollout": {"TPU": 1.5}})

    def refuses(*_: object, **options: object) -> Any:
        raise ValueError("The number of requested 'TPU' was set to 1.5. Supported are 1")

    ray.remote = refuses  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"no such workers as rollout with .*'TPU': 1.5.*: The number .*; change cluster.resources"):
        await cluster.start(rollouts(0))
    await cluster.stop(0.0)


async def test_where_the_cluster_is_decides_who_may_go_elsewhere(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` is an address, and a process may have been in a cluster before."""
    (tmp_path / "config.yaml").write_text("model: {path: m}\ndata: {path: d}\nqueue: {listen: 'tls:127.0.0.1:0'}\n")

    async def answers(address: str) -> bool:
        return True

    monkeypatch.setattr(ray_connection, "_answers", answers)
    for address in (None, "auto"):
        for head, labels in (("127.0.0.1:6379", None), ("10.0.0.1:6379", [{"ray.io/node-id": "here"}])):
            cluster, ray = make(1, address=address)
            ray.is_initialized = lambda: True  # type: ignore[attr-defined]
            context = SimpleNamespace(get_node_id=lambda: "here", gcs_address=head)
            ray.get_runtime_context = lambda context=context: context  # type: ignore[attr-defined]
            monkeypatch.setitem(ray_connection.sys.modules, "ray", ray)  # type: ignore[attr-defined]
            cluster._connection.node = ""
            await cluster.start([WorkerSpec("reward", "m:f", needs={"CPU": 1.0})])
            assert ray.labels == [labels]
            await cluster.stop(0.0)


async def test_who_is_needed_by_others_is_ended_after_them(make: Make) -> None:
    cluster, ray = make(2)
    await cluster.start([WorkerSpec("storage/0", "m:f", needs={"CPU": 1.0}, outlives_others=True), *rollouts(0)])
    unit, worker = (cluster._places.by_name[name].host for name in ("storage/0", "rollout/0"))
    seen: list[bool] = []

    async def settle() -> None:
        seen.extend(actor.ended.done() for actor in (unit, worker))

    assert list(await cluster.stop(0.0, settle)) == ["rollout/0"]
    assert seen == [False, True] and unit.ended.done() and ray.room == 2


async def test_who_is_needed_by_others_is_started_again_while_the_cluster_stops(make: Make) -> None:
    cluster, _ = make(2)
    unit = WorkerSpec("storage/0", "m:f", needs={"CPU": 1.0}, outlives_others=True, max_restarts=3)
    await cluster.start([unit, *rollouts(0, max_restarts=3)])
    waiting = asyncio.create_task(cluster.wait(lambda *death: None))
    hosts = [cluster._places.by_name[name].host for name in ("storage/0", "rollout/0")]
    await until(lambda: all("listen" in host.calls for host in hosts))

    async def settle() -> None:
        hosts[0].ended.set_result(-9)
        await until(lambda: hosts[0].calls.count("start") == 2)

    assert list(await asyncio.wait_for(cluster.stop(0.0, settle), patience(60.0))) == ["rollout/0"]
    assert hosts[0].ended.done() and hosts[1].calls.count("start") == 1
    await asyncio.wait_for(waiting, patience(60.0))


@pytest.mark.parametrize("seconds", [30.0, 0.2])
async def test_a_cluster_of_one_s_own_leaves_the_environment_as_it_was(
    make: Make, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Here it does not come up: Ray ends at once, or says nothing."""
    cluster, _ = make(1, start_seconds=seconds)
    for name in ("RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    before = dict(os.environ)
    monkeypatch.setattr(ray_connection, "_was_imported_alone", True)
    monkeypatch.setattr(ray_connection.sys, "executable", "/bin/false" if seconds == 30.0 else "/bin/cat")  # type: ignore[attr-defined]
    monkeypatch.setattr(ray_connection, "HOST_SECONDS", 1.0)
    why = "Ray has ended instead of starting" if seconds == 30.0 else "Ray did not start within 0.2 s"
    real = asyncio.create_subprocess_exec
    monkeypatch.setattr(asyncio, "create_subprocess_exec", lambda program, *arguments, **options: real(program, **options))
    with pytest.raises(RunError, match=why):
        await cluster._connection._begin_cluster(cluster._options.start_seconds)
    assert os.environ["RAY_AUTH_TOKEN_PATH"] and "RAY_AUTH_TOKEN" not in os.environ
    cluster._connection._is_ours = False
    await cluster.stop(0.0)
    assert dict(os.environ) == before


async def test_a_cluster_without_a_token_is_joined_with_a_warning(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, ray = make(1, address="auto")
    monkeypatch.delitem(ray_connection.sys.modules, "ray", raising=False)  # type: ignore[attr-defined]
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "1")
    ray.init = lambda address, **options: None  # type: ignore[attr-defined]
    ray.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "here", gcs_address="")  # type: ignore[attr-defined]
    for mode, is_warned in (("token", False), ("disabled", True)):
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        caplog.clear()
        await cluster._connection.connect(cluster._options)
        assert (
            "RAY_AUTH_MODE=disabled: everybody who reaches the Ray cluster at auto can run code on it" in caplog.text
        ) == is_warned


async def test_workers_that_share_devices_have_equal_parts_of_one_bundle(make: Make) -> None:
    cluster, ray = make(2)
    needs = {"CPU": 3.0, "GPU": 1.0}
    own = [WorkerSpec(f"trainer/{rank}", "m:f", needs=needs) for rank in range(2)]
    guests = [WorkerSpec(name, "m:f", needs=needs, shares="trainer/1") for name in ("reference/0", "critic")]
    await cluster.start([*own, *guests])
    assert [group.bundles for group in ray.groups] == [[needs, needs]]
    assert ray.asked == [(0, 3.0, 1.0), *[(1, 1.0, 0.3333)] * 3]
    places = cluster._places
    assert places.by_name["critic"].pool is places.by_name["trainer/0"].pool
    await places.leave("critic")
    assert not places._pools[0].free, "the bundle is the trainer's"
    await cluster.stop(0.0)
    assert ray.removed == ray.groups
