"""Worker processes: how they start, end, and are ended."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from asyncflow.cluster.base import WorkerDied, WorkerSpec
from asyncflow.cluster.local import LocalCluster
from asyncflow.types import UserError

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

async def exits(name, run_dir):
    os._exit(7)

async def stays(name, run_dir):
    (run_dir / name).touch()
    await asyncio.sleep(60)

async def computes(name, run_dir):
    (run_dir / name).touch()
    while True:
        pass
"""


@pytest.fixture
def cluster(tmp_path: Path) -> LocalCluster:
    (tmp_path / "workers.py").write_text(WORKERS)
    return LocalCluster(tmp_path)


def spec(tmp_path: Path, function: str, name: str = "w") -> WorkerSpec:
    return WorkerSpec(name, f"{tmp_path / 'workers.py'}:{function}", {"COLOUR": "blue"})


async def test_a_worker_that_ends_well(cluster: LocalCluster, tmp_path: Path) -> None:
    await cluster.start([spec(tmp_path, "well")])
    await cluster.wait()
    assert (tmp_path / "w").read_text() == "blue"
    assert await cluster.stop(1.0) == [] and cluster.pids() == {}


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        ("raises", WorkerDied, "worker w .* ended with status 1; its last words: ValueError: the wheel came off"),
        ("exits", WorkerDied, "worker w .* ended with status 7; its last words: nothing"),
        ("mistaken", UserError, "^give another model$"),
        ("missing", UserError, "has no 'missing'"),
    ],
)
async def test_a_worker_that_fails(
    cluster: LocalCluster, tmp_path: Path, function: str, error: type[Exception], words: str
) -> None:
    await cluster.start([spec(tmp_path, function), spec(tmp_path, "stays", "other")])
    with pytest.raises(error, match=words):
        await asyncio.wait_for(cluster.wait(), 20.0)
    assert await cluster.stop(0.1) == ["other"]


async def test_one_that_does_not_end_in_time_is_killed(cluster: LocalCluster, tmp_path: Path) -> None:
    await cluster.start([spec(tmp_path, "computes")])
    await started(tmp_path)
    began = time.monotonic()
    assert await cluster.stop(0.2) == ["w"]
    assert time.monotonic() - began < 1.5 and cluster.pids() == {}


@pytest.mark.skipif(sys.platform == "win32", reason="control pipes are POSIX")
@pytest.mark.parametrize("function", ["stays", "computes"])
async def test_the_end_of_the_control_pipe_ends_the_worker(cluster: LocalCluster, tmp_path: Path, function: str) -> None:
    await cluster.start([spec(tmp_path, function)])
    await started(tmp_path)
    process = cluster._children[0].process
    assert process.stdin is not None
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), 5.0) == 0


async def started(tmp_path: Path) -> None:
    while not (tmp_path / "w").exists():
        await asyncio.sleep(0.02)
