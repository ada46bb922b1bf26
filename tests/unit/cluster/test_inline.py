"""Workers as coroutines of one event loop."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from asyncflow.cluster.base import WorkerSpec
from asyncflow.cluster.inline import InlineCluster

WORKERS = """
import asyncio
from asyncflow.transport import client_name

async def well(name, run_dir):
    (run_dir / name).write_text(client_name.get())

async def broken(name, run_dir):
    raise ValueError("the wheel came off")

async def later(name, run_dir):
    await asyncio.sleep(0.2)
    raise ValueError("the wheel came off later")

async def stays(name, run_dir):
    await asyncio.sleep(60)
"""


def spec(tmp_path: Path, function: str, name: str) -> WorkerSpec:
    (tmp_path / "workers.py").write_text(WORKERS)
    return WorkerSpec(name, f"{tmp_path / 'workers.py'}:{function}", max_restarts=3)


def told(name: str, why: str) -> None:
    raise AssertionError(f"{name}: {why}")


async def test_workers_end_well_each_under_its_name(tmp_path: Path) -> None:
    cluster = InlineCluster(tmp_path)
    await cluster.start([spec(tmp_path, "well", "a"), spec(tmp_path, "well", "b")])
    await asyncio.wait_for(cluster.wait(told), 60.0)
    assert [(tmp_path / name).read_text() for name in "ab"] == ["a", "b"]
    assert await cluster.stop(1.0) == {} and cluster.pids() == {}


async def test_a_fault_is_raised_as_it_is_and_not_tried_again(tmp_path: Path) -> None:
    cluster = InlineCluster(tmp_path)
    await cluster.start([spec(tmp_path, "broken", "a"), spec(tmp_path, "stays", "b")])
    with pytest.raises(ValueError, match="the wheel came off"):
        await asyncio.wait_for(cluster.wait(told), 60.0)
    assert list(await cluster.stop(0.05)) == ["b"]


async def test_a_worker_that_fails_while_it_is_stopped_is_told_of(tmp_path: Path) -> None:
    cluster = InlineCluster(tmp_path)
    await cluster.start([spec(tmp_path, "broken", "a"), spec(tmp_path, "well", "b")])
    assert await cluster.stop(60.0) == {"a": ("ended with ValueError('the wheel came off')", True)}


async def test_workers_join_and_leave(tmp_path: Path) -> None:
    cluster = InlineCluster(tmp_path)
    await cluster.start([spec(tmp_path, "stays", "a"), spec(tmp_path, "stays", "b")])
    waiting = asyncio.create_task(cluster.wait(told))
    assert await cluster.end("b", 0.05) is False
    await cluster.start([spec(tmp_path, "well", "b"), spec(tmp_path, "later", "c")])
    assert await cluster.end("b", 5.0) is True and await cluster.end("c", 5.0) is True
    await asyncio.sleep(0.05)
    assert (tmp_path / "b").read_text() == "b" and not waiting.done()
    await cluster.start([spec(tmp_path, "broken", "d")])
    with pytest.raises(ValueError, match="the wheel came off"):
        await asyncio.wait_for(waiting, 60.0)
    assert list(await cluster.stop(0.05)) == ["a"]


async def test_who_outlives_the_others_is_ended_last(tmp_path: Path) -> None:
    cluster = InlineCluster(tmp_path)
    await cluster.start([replace(spec(tmp_path, "stays", "server"), outlives_others=True), spec(tmp_path, "well", "a")])
    await asyncio.wait_for(cluster.wait(told), 60.0)
    seen: list[bool] = []

    async def settle() -> None:
        seen.extend(cluster._tasks[name].done() for name in ("server", "a"))

    assert await cluster.stop(0.05, settle) == {}
    assert seen == [False, True] and cluster._tasks["server"].done()
