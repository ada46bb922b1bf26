"""Worker processes: how they start, end, and are ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from asyncflow.cluster import base
from asyncflow.cluster.base import WorkerDied, WorkerSpec
from asyncflow.cluster.local import LocalCluster
from asyncflow.types import UserError
from tests.depth import in_gate
from tests.patience import patience
from tests.processes import is_alive

WORKERS = """
import asyncio, os, time
from asyncflow.types import RunError, UserError

async def well(name, run_dir):
    (run_dir / name).write_text(os.environ.get("COLOUR", ""))

async def raises(name, run_dir):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(broken())

async def broken():
    raise ValueError("the wheel came off")

async def mistaken(name, run_dir):
    raise UserError("give another model")

async def short(name, run_dir):
    raise UserError("the model cannot be read") from OSError(24, "Too many open files")

async def exits(name, run_dir):
    os._exit(7)

async def stays(name, run_dir):
    (run_dir / name).touch()
    await asyncio.sleep(60)

async def clumsy(name, run_dir):
    starts = run_dir / "starts"
    with starts.open("a") as log:
        log.write("I")
    if len(starts.read_text()) <= 2:
        raise RuntimeError(f"start {len(starts.read_text())} was too hard")
    (run_dir / name).touch()

async def doomed(name, run_dir):
    with (run_dir / "starts").open("a") as log:
        log.write("I")
    raise RuntimeError("not again")

async def serves(name, run_dir):
    (run_dir / name).touch()
    await asyncio.sleep(60)

async def asks(name, run_dir):
    while not (run_dir / "server").exists():
        await asyncio.sleep(0.01)

async def stumbles(name, run_dir):
    while not (run_dir / "stop").exists():
        await asyncio.sleep(0.01)
    raise ValueError("the model cannot be written")

async def computes(name, run_dir):
    (run_dir / name).touch()
    while True:
        pass
"""


WAYS = {"an interpreter of its own": (), "a fork": ("asyncflow.types",)}


class Cluster(LocalCluster):
    """Starts every worker in one of the two ways."""

    imports: tuple[str, ...] = ()

    async def start(self, workers: Sequence[WorkerSpec]) -> None:
        await super().start([replace(worker, imports=self.imports) for worker in workers])


@pytest.fixture(params=in_gate("a fork", of=WAYS))
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> LocalCluster:
    (tmp_path / "workers.py").write_text(WORKERS)
    cluster = Cluster(tmp_path)
    cluster.imports = WAYS[request.param]
    return cluster


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts come after 0.05 s at first."""
    monkeypatch.setattr(base, "RESTART_SECONDS", (0.05, 0.1))


def spec(tmp_path: Path, function: str, name: str = "w", *, max_restarts: int = 0) -> WorkerSpec:
    return WorkerSpec(name, f"{tmp_path / 'workers.py'}:{function}", {"COLOUR": "blue"}, max_restarts)


class Deaths:
    """What the driver is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.final: list[bool] = []
        self.first = asyncio.Event()

    def __call__(self, name: str, why: str, is_final: bool) -> None:
        self.told.append((name, why))
        self.final.append(is_final)
        self.first.set()


async def test_a_worker_that_ends_well(cluster: LocalCluster, tmp_path: Path) -> None:
    await cluster.start([spec(tmp_path, "well")])
    deaths = Deaths()
    await cluster.wait(deaths)
    assert deaths.told == []
    assert (tmp_path / "w").read_text() == "blue"
    assert await cluster.stop(60.0) == {} and cluster.pids() == {}


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        ("raises", WorkerDied, "worker w .* ended with status 1; its last words: ValueError: the wheel came off"),
        ("exits", WorkerDied, "worker w .* ended with status 7; its last words: nothing"),
        ("mistaken", UserError, "^give another model$"),
        ("short", WorkerDied, "worker w .* ended with status 1; its last words: the model cannot be read"),
        ("missing", UserError, "has no 'missing'"),
    ],
)
async def test_a_worker_that_fails(
    cluster: LocalCluster, tmp_path: Path, function: str, error: type[Exception], words: str
) -> None:
    await cluster.start([spec(tmp_path, function), spec(tmp_path, "stays", "other")])
    with pytest.raises(error, match=words):
        await asyncio.wait_for(cluster.wait(Deaths()), patience(60.0))
    assert list(await cluster.stop(0.1)) == ["other"]


async def test_a_worker_that_fails_while_it_is_stopped_is_told_of(cluster: LocalCluster, tmp_path: Path) -> None:
    await cluster.start([spec(tmp_path, "stumbles"), spec(tmp_path, "well", "other")])
    deaths = Deaths()
    waiting = asyncio.create_task(cluster.wait(deaths))
    await asyncio.sleep(0)
    stopped = asyncio.create_task(cluster.stop(patience(60.0)))
    await asyncio.sleep(0)
    (tmp_path / "stop").touch()
    ended = await stopped
    waiting.cancel()
    assert list(ended) == ["w"] and deaths.told == []
    assert (
        "ended with status 1; its last words: ValueError: the model cannot be written" in ended["w"].how and ended["w"].has_failed
    )


async def test_a_worker_whose_log_is_gone_has_said_nothing(cluster: LocalCluster, tmp_path: Path) -> None:
    await cluster.start([spec(tmp_path, "stays")])
    (tmp_path / "logs" / "w.log").unlink()
    os.kill(cluster.pids()["w"], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"worker w .* was ended by SIGKILL; its last words: nothing"):
        await asyncio.wait_for(cluster.wait(Deaths()), patience(60.0))


@pytest.mark.usefixtures("soon")
async def test_a_worker_that_dies_is_started_again_after_a_pause_that_doubles(cluster: LocalCluster, tmp_path: Path) -> None:
    deaths = Deaths()
    await cluster.start([spec(tmp_path, "clumsy", max_restarts=3)])
    await asyncio.wait_for(cluster.wait(deaths), patience(60.0))
    assert (tmp_path / "starts").read_text() == "III" and (tmp_path / "w").exists()
    assert [name for name, _ in deaths.told] == ["w", "w"]
    for (_, why), start, pause in zip(deaths.told, (1, 2), ("0.05", "0.1"), strict=True):
        assert f"its last words: RuntimeError: start {start} was too hard" in why
        assert why.endswith(f"it is started again in {pause} s")
    assert await cluster.stop(60.0) == {} and cluster.pids() == {}


@pytest.mark.usefixtures("soon")
async def test_one_that_dies_too_often_has_failed_and_the_others_go_on(cluster: LocalCluster, tmp_path: Path) -> None:
    deaths = Deaths()
    await cluster.start([spec(tmp_path, "doomed", max_restarts=2), spec(tmp_path, "stays", "other")])
    waiting = asyncio.create_task(cluster.wait(deaths))
    while len(deaths.told) < 3:
        await asyncio.wait_for(deaths.first.wait(), patience(60.0))
        deaths.first.clear()
    await asyncio.sleep(0.3)  # longer than any pause
    assert len(deaths.told) == 3 and not waiting.done() and (tmp_path / "starts").read_text() == "III"
    assert deaths.told[2][1].endswith("it has been started again 2 times, and is not started again")
    assert deaths.final == [False, False, True]
    assert cluster.pids().keys() == {"other"}
    assert list(await cluster.stop(0.1)) == ["other"]
    await asyncio.wait([waiting])


@pytest.mark.usefixtures("soon")
async def test_a_mistake_of_the_users_is_not_tried_again(cluster: LocalCluster, tmp_path: Path) -> None:
    deaths = Deaths()
    await cluster.start([spec(tmp_path, "mistaken", max_restarts=3)])
    with pytest.raises(UserError, match=r"^give another model$"):
        await asyncio.wait_for(cluster.wait(deaths), patience(60.0))
    assert deaths.told == [] and cluster._children["w"].num_restarts == 0


@pytest.mark.usefixtures("soon")
async def test_a_run_that_has_come_up_goes_on_without_who_finds_a_mistake(cluster: LocalCluster, tmp_path: Path) -> None:
    deaths, asked = Deaths(), list[str]()

    def continues_without(name: str) -> bool:
        asked.append(name)
        return True

    await cluster.start([spec(tmp_path, "stays", "first", max_restarts=3)])
    waiting = asyncio.create_task(cluster.wait(deaths, continues_without))
    await asyncio.sleep(0)
    await cluster.start([spec(tmp_path, "mistaken", "joiner", max_restarts=3)])
    await asyncio.wait_for(deaths.first.wait(), patience(60.0))
    await asyncio.sleep(0.3)  # longer than any pause
    ((name, why),) = deaths.told
    assert (name, deaths.final) == ("joiner", [True]) and "found a mistake: give another model (more in " in why
    assert why.endswith("it would fail again, so it is not started again") and cluster._children["joiner"].num_restarts == 0
    assert not waiting.done() and cluster.pids().keys() == {"first"}
    await cluster.start([spec(tmp_path, "mistaken", "needed")])  # one that is never started again
    with pytest.raises(UserError, match=r"^give another model$"):
        await asyncio.wait_for(waiting, patience(60.0))
    assert asked == ["joiner"] and list(await cluster.stop(0.1)) == ["first"]


@pytest.mark.usefixtures("soon")
async def test_workers_may_join_and_are_started_again_as_the_others_are(cluster: LocalCluster, tmp_path: Path) -> None:
    deaths = Deaths()
    await cluster.start([spec(tmp_path, "stays", "first")])
    waiting = asyncio.create_task(cluster.wait(deaths))
    await asyncio.sleep(0)
    await cluster.start([spec(tmp_path, "clumsy", "joiner", max_restarts=3)])
    while not (tmp_path / "joiner").exists():
        await asyncio.sleep(0.02)
    assert [name for name, _ in deaths.told] == ["joiner", "joiner"] and not waiting.done()
    await cluster.start([spec(tmp_path, "raises", "broken")])
    with pytest.raises(WorkerDied, match=r"worker broken .* the wheel came off"):
        await asyncio.wait_for(waiting, patience(60.0))
    assert list(await cluster.stop(0.1)) == ["first"]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(("function", "grace_seconds", "is_in_time"), [("exits", 20.0, True), ("computes", 0.1, False)])
async def test_who_leaves_is_not_missed_however_it_ends(
    cluster: LocalCluster, tmp_path: Path, function: str, grace_seconds: float, is_in_time: bool
) -> None:
    deaths = Deaths()
    await cluster.start([spec(tmp_path, function, max_restarts=3), spec(tmp_path, "stays", "other")])
    waiting = asyncio.create_task(cluster.wait(deaths))
    assert await cluster.end("w", grace_seconds) is is_in_time
    await asyncio.sleep(0.3)  # longer than any pause
    assert not waiting.done() and deaths.told == [] and cluster.pids().keys() == {"other"}
    await cluster.start([spec(tmp_path, "well")])  # under its name
    await asyncio.wait_for(cluster._children["w"].process.wait(), patience(60.0))
    assert (tmp_path / "w").read_text() == "blue"
    assert list(await cluster.stop(0.1)) == ["other"]
    await asyncio.wait([waiting])


async def test_who_leaves_in_the_pause_before_a_restart_is_not_started(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "RESTART_SECONDS", (600.0, 600.0))
    deaths = Deaths()
    await cluster.start([spec(tmp_path, "doomed", max_restarts=3)])
    waiting = asyncio.create_task(cluster.wait(deaths))
    await asyncio.wait_for(deaths.first.wait(), patience(60.0))
    assert await cluster.end("w", 60.0) is True
    await asyncio.wait_for(waiting, patience(60.0))
    assert (tmp_path / "starts").read_text() == "I" and cluster.pids() == {}
    assert await cluster.stop(60.0) == {}


async def test_no_worker_is_started_again_once_the_cluster_is_stopped(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "RESTART_SECONDS", (2.0, 2.0))
    deaths = Deaths()
    await cluster.start([spec(tmp_path, "doomed", max_restarts=3)])
    waiting = asyncio.create_task(cluster.wait(deaths))
    await asyncio.wait_for(deaths.first.wait(), patience(60.0))
    assert await cluster.stop(60.0) == {}  # in the middle of the pause
    await asyncio.wait([waiting])
    assert asyncio.all_tasks() == {asyncio.current_task()}  # nothing is left that could start it
    assert (tmp_path / "starts").read_text() == "I" and cluster.pids() == {} and len(deaths.told) == 1


@pytest.mark.usefixtures("soon")
async def test_workers_are_started_again_whether_or_not_somebody_waits(cluster: LocalCluster, tmp_path: Path) -> None:
    """A run that is stepped by hand waits for the cluster during its steps only."""
    deaths = Deaths()
    await cluster.start([spec(tmp_path, "clumsy", max_restarts=3)])
    while not (tmp_path / "w").exists():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(cluster.wait(deaths), 0.02)
    await asyncio.wait_for(cluster.wait(deaths), patience(60.0))
    assert len(deaths.told) == 2  # each death once


async def test_one_that_does_not_end_in_time_is_killed(cluster: LocalCluster, tmp_path: Path) -> None:
    await cluster.start([spec(tmp_path, "computes")])
    await started(tmp_path)
    began = time.monotonic()
    assert list(await cluster.stop(0.2)) == ["w"]
    assert time.monotonic() - began < patience(30.0) and cluster.pids() == {}


@pytest.mark.skipif(sys.platform == "win32", reason="control pipes are POSIX")
@pytest.mark.parametrize("function", ["stays", "computes"])
async def test_the_end_of_the_control_pipe_ends_the_worker(cluster: LocalCluster, tmp_path: Path, function: str) -> None:
    await cluster.start([spec(tmp_path, function)])
    await started(tmp_path)
    process = cluster._children["w"].process
    assert process.stdin is not None
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), patience(60.0)) == 0


async def started(tmp_path: Path) -> None:
    while not (tmp_path / "w").exists():
        await asyncio.sleep(0.02)


async def test_who_outlives_the_others_is_not_waited_for_and_is_ended_last(cluster: LocalCluster, tmp_path: Path) -> None:
    server = replace(spec(tmp_path, "serves", "server"), outlives_others=True)
    await cluster.start([server, spec(tmp_path, "asks", "client"), spec(tmp_path, "stays", "late")])
    waiting = asyncio.create_task(cluster.wait(lambda *_: None))
    assert not await cluster.end("late", 0.5)
    await asyncio.wait_for(waiting, patience(60.0))  # the server goes on
    settled: list[set[str]] = []

    async def settle() -> None:
        settled.append(set(cluster.pids()))

    assert await cluster.stop(0.5, settle) == {}  # nobody had to be told that it was killed
    assert settled == [{"server"}] and cluster.pids() == {}


async def test_who_outlives_the_others_is_ended_even_if_they_could_not_settle(cluster: LocalCluster, tmp_path: Path) -> None:
    await cluster.start([replace(spec(tmp_path, "serves", "server"), outlives_others=True)])

    async def settle() -> None:
        raise ValueError("in vain")

    with pytest.raises(ValueError, match="in vain"):
        await cluster.stop(0.5, settle)
    assert cluster.pids() == {}


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("dies", [False, True])
async def test_workers_that_are_kept_are_those_that_are_started_next(cluster: LocalCluster, tmp_path: Path, dies: bool) -> None:
    """They are watched anew then. One that has died meanwhile is started."""
    names = ("kept", "other")
    await cluster.start([spec(tmp_path, "stays", name, max_restarts=3) for name in names])
    waiting, before = asyncio.create_task(cluster.wait(Deaths())), cluster.pids()
    await asyncio.sleep(0)
    assert list(await cluster.stop(0.0, keep={"kept"})) == ["other"] and not is_alive(before["other"]) and cluster.pids() == {}
    waiting.cancel()
    if dies:
        os.kill(before["kept"], signal.SIGKILL)
        async with asyncio.timeout(patience(60.0)):
            await cluster._kept["kept"].process.wait()
    await cluster.start([spec(tmp_path, "stays", name, max_restarts=3) for name in names])
    now = cluster.pids()
    assert now.keys() == set(names) and (now["kept"] == before["kept"]) != dies and now["other"] != before["other"]
    deaths = Deaths()
    waiting = asyncio.create_task(cluster.wait(deaths))
    await asyncio.sleep(0)
    os.kill(now["kept"], signal.SIGKILL)
    await asyncio.wait_for(deaths.first.wait(), patience(60.0))
    assert [name for name, _ in deaths.told] == ["kept"]
    assert "other" in await cluster.stop(0.0)
    waiting.cancel()


async def test_workers_that_are_kept_and_not_started_again_end_when_the_cluster_is_stopped(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    await cluster.start([spec(tmp_path, "stays")])
    (pid,) = cluster.pids().values()
    assert await cluster.stop(0.0, keep={"w"}) == {} and is_alive(pid)
    assert list(await cluster.stop(0.0)) == ["w"] and not is_alive(pid)


@pytest.mark.usefixtures("soon")
async def test_who_outlives_the_others_is_started_again_until_they_have_settled(cluster: LocalCluster, tmp_path: Path) -> None:
    server = replace(spec(tmp_path, "serves", "server", max_restarts=3), outlives_others=True)
    await cluster.start([server, spec(tmp_path, "stays")])
    deaths = Deaths()
    waiting = asyncio.create_task(cluster.wait(deaths))
    await asyncio.sleep(0)

    async def settle() -> None:
        first = cluster.pids()["server"]
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(patience(60.0)):
            while cluster.pids().get("server", first) == first:
                await asyncio.sleep(0.01)

    assert list(await cluster.stop(0.1, settle)) == ["w"]
    await asyncio.wait_for(waiting, patience(60.0))
    assert [name for name, _ in deaths.told] == ["server"] and cluster.pids() == {}
