"""Workers that Ray places. What needs Ray itself is skipped where it is not installed: `make test-deep SUITES=ray`."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from asyncflow.cluster import base
from asyncflow.cluster.base import WorkerDied, WorkerSpec
from asyncflow.cluster.ray import cluster as ray_cluster
from asyncflow.cluster.ray import connection as ray_connection
from asyncflow.cluster.ray import host as ray_host
from asyncflow.cluster.ray import places as ray_places
from asyncflow.cluster.ray import process as ray_process
from asyncflow.cluster.ray.cluster import RayCluster
from asyncflow.cluster.ray.host import Letter, RayHost
from asyncflow.types import UserError
from tests.patience import patience
from tests.processes import below, is_alive, name_of, words_of

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: make test-deep SUITES=ray")

WORKERS = """
import asyncio, os, subprocess, sys
from asyncflow.types import UserError

async def well(name, run_dir):
    (run_dir / name).write_text(os.environ.get("COLOUR", ""))
    print("all is well in", os.getcwd(), "with", [variable for variable in os.environ if variable.startswith("RAY_")])

async def raises(name, run_dir):
    raise ValueError("the wheel came off")

async def mistaken(name, run_dir):
    raise UserError("give another model")

async def exits(name, run_dir):
    os._exit(7)

async def stays(name, run_dir):
    (run_dir / name).write_text(str(os.getpid()))
    await asyncio.sleep(60)

async def stays_haunted(name, run_dir):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3)"])
    await stays(name, run_dir)

async def leaves(name, run_dir):
    while not (run_dir / "leave").exists():
        await asyncio.sleep(0.02)
    os._exit(7)

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

async def talks(name, run_dir):
    for number in range(40_000):
        print(f"line {number} " + 60 * "x")

async def bursts(name, run_dir):
    os.write(1, 65536 * b"a")  # what a reader takes at once, and it waits then
    await asyncio.sleep(0.3)
    os.write(1, b"\\nmy last words\\n")

async def haunted(name, run_dir):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(8)"])
    print("I leave something behind", flush=True)
    os._exit(7)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "workers.py").write_text(WORKERS)
    (tmp_path / "config.yaml").write_text("model: {path: m}\ndata: {path: d}\n")
    (tmp_path / "job.json").write_text("{}")
    return tmp_path


def spec(run_dir: Path, function: str, name: str = "w", **changes: Any) -> WorkerSpec:
    return WorkerSpec(name, f"{run_dir / 'workers.py'}:{function}", {"COLOUR": "blue"}, **changes)


# -- without Ray --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"adress": "auto"}, "'ray' has no option 'adress': did you mean 'address'"),
        ({"address": 3}, "'ray': address must be text or null, not 3"),
        (
            {"placement": {"rollout": "FAR"}},
            r"ray does not take these options: Invalid enum value 'FAR' - at `\$.placement\[...\]`",
        ),
        ({"placement": {"rolout": "PACK"}}, "ray does not take these options: Invalid enum value 'rolout'"),
        ({"resources": {"rollout": {"GPU": "two"}}}, "ray does not take these options: Expected `float`, got `str`"),
    ],
)
def test_options_that_are_none_are_one_sentence(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=f"^cluster {sentence}"):
        RayCluster(tmp_path, **options)


def test_without_ray_the_user_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'asyncflow-rl\[ray\]'"):
        RayCluster(tmp_path)


@pytest.fixture
def own_cluster(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return RayCluster(run_dir, forward=["MY_"])


def test_the_environment_of_a_worker_here_and_elsewhere(own_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MY_CHOICE", "NCCL_DEBUG", "A_SECRET", "HF_TOKEN", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "1")
    worker = WorkerSpec("trainer/3", "e", {"LOCAL_RANK": "3", "RANK": "3"})
    place = ray_places.WorkerPlace(worker, ray_places._PlacementGroup(None, set()), 0, {"CPU": 1.0})
    here = own_cluster._environment(place, is_remote=False)
    assert here["A_SECRET"] == here["MY_CHOICE"] == "1" and here["LOCAL_RANK"] == "3"
    elsewhere = own_cluster._environment(place, is_remote=True)
    assert elsewhere["MY_CHOICE"] == elsewhere["NCCL_DEBUG"] == "1" and elsewhere["RANK"] == "3"
    assert not {"A_SECRET", "PATH", "HF_TOKEN", "CUDA_VISIBLE_DEVICES"} & elsewhere.keys()
    assert "ASYNCFLOW_OWN_DEVICES" not in here | elsewhere
    place.needs = {"GPU": 1.0}
    for is_remote in (False, True):  # it sees its own device alone
        told = own_cluster._environment(place, is_remote=is_remote)
        assert told["LOCAL_RANK"] == "0" and told["ASYNCFLOW_OWN_DEVICES"]


def letter(run_dir: Path, function: str, **changes: Any) -> bytes:
    told = Letter(
        name="w",
        entry=f"{run_dir / 'workers.py'}:{function}",
        run_dir=str(run_dir),
        cwd=str(run_dir),
        run_id="r1",
        is_remote=False,
        environment={**os.environ, "COLOUR": "red", "RAY_AUTH_TOKEN": "secret"},
        files={},
    )
    return msgspec.msgpack.encode(msgspec.structs.replace(told, **changes))


def heard(host: RayHost) -> tuple[str, int]:
    """All that a worker says, and its status."""
    output, status = b"", None
    while status is None:
        more, status = host.listen()
        output += more
    return output.decode(), status


def await_file(path: Path) -> None:
    deadline = time.monotonic() + patience(30.0)
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def test_a_host_tells_what_its_worker_prints_and_how_it_ends(run_dir: Path) -> None:
    host = RayHost()
    pid = host.start(letter(run_dir, "well"))
    assert heard(host) == (f"all is well in {run_dir} with []\n", 0) and not psutil.pid_exists(pid)
    assert (run_dir / "w").read_text() == "red"
    host.start(letter(run_dir, "raises"))  # another process
    output, status = heard(host)
    assert "the wheel came off" in output and "all is well" not in output and status == 1
    host.leave()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_host_says_which_device_is_not_there() -> None:
    host = RayHost()
    assert host.lacks("rollout.device=cpu") == ""
    assert host.lacks("rollout.device=cuda") == "rollout.device is 'cuda', but PyTorch sees no GPU here: set it to cpu."


def test_a_host_kills_and_says_by_what_signal_it_ended(run_dir: Path) -> None:
    host = RayHost()
    host.start(letter(run_dir, "stays"))
    await_file(run_dir / "w")
    host.kill()
    assert heard(host)[1] == -9


def test_a_talkative_worker_waits_for_the_driver_and_loses_no_line(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_host, "OUTPUT_BYTES", 10_000)
    host = RayHost()
    host.start(letter(run_dir, "talks"))
    time.sleep(1.0)
    assert len(host._output) < 10_000 + (1 << 16)
    output, status = heard(host)
    assert status == 0 and [line.split()[1] for line in output.splitlines()] == [str(number) for number in range(40_000)]


def test_the_end_of_a_worker_is_told_though_another_process_has_its_output_open(run_dir: Path) -> None:
    host = RayHost()
    host.start(letter(run_dir, "haunted"))
    began = time.monotonic()
    assert heard(host) == ("I leave something behind\n", 7)
    assert time.monotonic() - began < patience(20.0)


def test_on_another_machine_a_worker_gets_files_of_the_run_and_folders_of_that_machine(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = run_dir / "memory"
    memory.mkdir()
    monkeypatch.setattr("asyncflow.cluster.ray.node_folders.SHARED_MEMORY", memory)
    monkeypatch.setattr("tempfile.tempdir", str(run_dir))
    host = RayHost()
    host.start(letter(run_dir, "stays", is_remote=True, environment={}, files={"key.pem": b"the key", "job.json": b"{}"}))
    copied = run_dir / "asyncflow-node-r1" / "files" / "run" / run_dir.name
    await_file(copied / "w")
    assert (copied / "key.pem").read_bytes() == b"the key" and (copied / "key.pem").stat().st_mode & 0o077 == 0
    worker = psutil.Process(int((copied / "w").read_text()))
    assert "the key" not in " ".join(worker.cmdline())
    assert worker.environ()["ASYNCFLOW_NODE_MEMORY"] == str(memory / "asyncflow-node-r1" / "weights")
    host.kill()
    assert heard(host)[1] == -9
    host.leave()
    assert not [*run_dir.glob("asyncflow-node-*"), *memory.iterdir()]


def test_a_run_of_any_name_has_a_folder_of_its_own_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run `model`, where the model's files lie beside it."""
    monkeypatch.setattr("asyncflow.cluster.ray.node_folders.SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "workers.py").write_text(WORKERS)
    host = RayHost()
    told = msgspec.msgpack.decode(letter(tmp_path, "well", is_remote=True, environment={}, files={"job.json": b"{}"}), type=Letter)
    host.start(msgspec.msgpack.encode(msgspec.structs.replace(told, run_dir="/elsewhere/model")))
    heard(host)
    node = tmp_path / "asyncflow-node-r1" / "files"
    assert (node / "run" / "model" / "job.json").exists() and not (node / "model").exists()
    host.leave()


def test_a_host_has_one_worker_at_a_time(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver has not heard of the first for a while, and starts another."""
    monkeypatch.setattr(ray_host, "READ_SECONDS", 0.3)
    host = RayHost()
    first = host.start(letter(run_dir, "stays_haunted"))
    await_file(run_dir / "w")
    second = host.start(letter(run_dir, "leaves"))
    assert second != first and not is_alive(first)
    time.sleep(0.8)  # the end of the first is not the second's
    assert host._status is None and is_alive(second)
    (run_dir / "leave").touch()
    assert heard(host) == ("", 7)
    host.leave()


def test_the_last_words_of_a_talkative_worker_wait_for_a_slow_driver(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_host, "OUTPUT_BYTES", 1000)
    monkeypatch.setattr(ray_host, "READ_SECONDS", 0.1)
    host = RayHost()
    pid = host.start(letter(run_dir, "bursts"))
    deadline = time.monotonic() + patience(30.0)
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.5)  # the driver is busy; the worker has ended with words in the pipe
    output, status = heard(host)
    assert status == 0 and output.splitlines()[-1] == "my last words"


# -- with Ray -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster of one node that the tests join, each for itself."""
    folder = tmp_path_factory.mktemp("ray")
    scratch = Path("/tmp") / f"asyncflow-ray-test-{os.getpid()}"  # a socket's path is short
    ray_host.write_private(scratch, {"token": ray_connection._token().encode()})
    os.environ.update(ray_connection._ALONE, RAY_AUTH_TOKEN_PATH=str(scratch / "token"))
    command = [sys.executable, "-m", "asyncflow.cluster.ray.guard", str(scratch)]
    with (folder / "log").open("wb") as log:
        guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    assert guard.stdout is not None and guard.stdin is not None
    address = guard.stdout.readline().decode().strip()
    assert address, (folder / "log").read_text()
    yield address
    everyone = below(guard.pid)
    guard.stdin.close()
    assert guard.wait(patience(60)) == 0
    assert not [process for process in everyone if process.is_running()]
    assert not scratch.exists()


@pytest.fixture
async def cluster(run_dir: Path, address: str) -> AsyncIterator[RayCluster]:
    cluster = RayCluster(run_dir, address=address)
    yield cluster
    await cluster.stop(0.0)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "RESTART_SECONDS", (0.05, 0.1))


class Deaths:
    """What the driver is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, bool]] = []

    def __call__(self, name: str, why: str, is_final: bool) -> None:
        self.told.append((name, why, is_final))


@needs_ray
async def test_a_worker_that_ends_well(cluster: RayCluster, run_dir: Path) -> None:
    await cluster.start([spec(run_dir, "well")])
    deaths = Deaths()
    await asyncio.wait_for(cluster.wait(deaths), patience(60.0))
    assert deaths.told == [] and (run_dir / "w").read_text() == "blue"
    assert (run_dir / "logs" / "w.log").read_text() == f"all is well in {os.getcwd()} with []\n"
    assert cluster.pids() == {}


@needs_ray
@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        ("raises", WorkerDied, "worker w .* ended with status 1; its last words: ValueError: the wheel came off"),
        ("exits", WorkerDied, "worker w .* ended with status 7; its last words: nothing"),
        ("mistaken", UserError, "^give another model$"),
    ],
)
async def test_a_worker_that_fails(cluster: RayCluster, run_dir: Path, function: str, error: type[Exception], words: str) -> None:
    await cluster.start([spec(run_dir, function), spec(run_dir, "stays", "other")])
    with pytest.raises(error, match=words):
        await asyncio.wait_for(cluster.wait(Deaths()), patience(60.0))
    assert list(await cluster.stop(0.1)) == ["other"]


@needs_ray
@pytest.mark.usefixtures("soon")
async def test_one_that_dies_is_started_again_and_one_that_dies_too_often_has_failed(cluster: RayCluster, run_dir: Path) -> None:
    deaths = Deaths()
    await cluster.start([spec(run_dir, "clumsy", max_restarts=3)])
    await asyncio.wait_for(cluster.wait(deaths), patience(60.0))
    assert (run_dir / "starts").read_text() == "III" and (run_dir / "w").exists()
    for (_, why, _), start, pause in zip(deaths.told, (1, 2), ("0.05", "0.1"), strict=True):
        assert f"its last words: RuntimeError: start {start} was too hard" in why and why.endswith(f"again in {pause} s")
    (run_dir / "starts").unlink()
    await cluster.start([spec(run_dir, "doomed", "v", max_restarts=1)])
    async with asyncio.timeout(patience(60.0)):
        while len(deaths.told) < 4:
            await asyncio.sleep(0.05)
    assert deaths.told[3][0] == "v" and deaths.told[3][2] and (run_dir / "starts").read_text() == "II"


@needs_ray
@pytest.mark.usefixtures("soon")
@pytest.mark.smoke
async def test_a_worker_whose_host_is_killed_gets_another_one(cluster: RayCluster, run_dir: Path) -> None:
    deaths = Deaths()
    await cluster.start([spec(run_dir, "stays", max_restarts=2)])
    waiting = asyncio.create_task(cluster.wait(deaths))
    first = await own_pid(run_dir)
    host = psutil.Process(first).parent()
    assert host is not None and host.name().startswith("ray::RayHost")
    (run_dir / "w").unlink()
    host.kill()
    second = await own_pid(run_dir)
    assert second != first and not is_alive(first)  # its control pipe has closed
    assert cluster.pids() == {"w": second}
    ((name, why, is_final),) = deaths.told
    assert name == "w" and "its host is gone" in why and not is_final
    assert list(await cluster.stop(0.1)) == ["w"] and not is_alive(second)
    await asyncio.wait([waiting])
    import ray

    assert await cluster.stop(0.1) == {} and not ray.is_initialized()  # once more is nothing


@needs_ray
async def test_a_host_that_hangs_does_not_outlive_its_cluster_s_stop(
    cluster: RayCluster, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (ray_connection, ray_places, ray_process, ray_cluster):
        monkeypatch.setattr(module, "HOST_SECONDS", 2.0)
    await cluster.start([spec(run_dir, "stays")])
    worker = await own_pid(run_dir)
    host = psutil.Process(worker).parent()
    assert host is not None and host.name().startswith("ray::RayHost")
    host.suspend()
    try:
        assert list(await asyncio.wait_for(cluster.stop(0.1), patience(50.0))) == ["w"]
        deadline = time.monotonic() + patience(30.0)
        while host.is_running() or is_alive(worker):  # Ray kills it when it does not end by itself
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
    finally:
        if host.is_running():
            host.kill()


@needs_ray
async def test_who_leaves_is_not_missed_and_who_joins_is_watched(cluster: RayCluster, run_dir: Path) -> None:
    deaths = Deaths()
    functions = {"a": "leaves", "b": "stays", "c": "stays"}
    await cluster.start([spec(run_dir, function, name, max_restarts=1) for name, function in functions.items()])
    waiting = asyncio.create_task(cluster.wait(deaths))
    await asyncio.sleep(0.1)
    ending = asyncio.create_task(cluster.end("a", 30.0))
    await asyncio.sleep(0.1)
    (run_dir / "leave").touch()
    assert await ending
    assert not await cluster.end("b", 0.0)
    await cluster.start([spec(run_dir, "raises", "a")])  # of the same name, another one
    with pytest.raises(WorkerDied, match=r"worker a .* the wheel came off"):
        await asyncio.wait_for(waiting, patience(60.0))
    assert deaths.told == []


@needs_ray
async def test_in_a_cluster_with_room_for_two_another_comes_when_one_has_left(run_dir: Path, address: str) -> None:
    half = {"rollout": {"CPU": ray_connection.LOCAL_CPUS // 2}}
    cluster = RayCluster(run_dir, address=address, start_seconds=60.0, resources=half)
    (run_dir / "rollout").mkdir()
    try:
        await cluster.start([spec(run_dir, "stays", f"rollout/{number}") for number in range(2)])
        waiting = asyncio.create_task(cluster.wait(Deaths()))
        assert not await cluster.end("rollout/1", 0.0)
        await cluster.start([spec(run_dir, "stays", "rollout/1")])
        joining = asyncio.create_task(cluster.start([spec(run_dir, "stays", "rollout/2")]))
        await asyncio.sleep(0.5)
        assert not joining.done() and cluster.pids().keys() == {"rollout/0", "rollout/1"}
        assert not await cluster.end("rollout/0", 0.0)  # who joins is waiting for room already
        await joining
        assert cluster.pids().keys() == {"rollout/1", "rollout/2"} and not waiting.done()
    finally:
        await cluster.stop(0.0)


@needs_ray
async def test_there_is_no_room_for_what_the_cluster_does_not_have(run_dir: Path, address: str) -> None:
    resources = {"rollout": {"telescope": 1}, "reward": {"memory": 1e6, "CPU": 0.5}}
    cluster = RayCluster(run_dir, address=address, start_seconds=2.0, resources=resources)
    try:
        cluster._options = msgspec.structs.replace(cluster._options, start_seconds=60.0)
        await cluster.start([spec(run_dir, "exits", "reward")])  # for this there is
        cluster._options = msgspec.structs.replace(cluster._options, start_seconds=2.0)
        with pytest.raises(
            UserError, match=r"no room for 1 rollout worker\(s\) of {'CPU': 2.0, 'telescope': 1.0} each for 2 s, and .*"
        ):
            await cluster.start([spec(run_dir, "well", "rollout/0", needs={"CPU": 2.0})])
    finally:
        assert await cluster.stop(patience(10.0)) == {}  # the first one ends by itself


@needs_ray
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
async def test_a_device_that_its_node_lacks_is_said_before_any_worker_starts(cluster: RayCluster, run_dir: Path) -> None:
    """What Ray counts as a GPU may be none for PyTorch."""
    workers = [spec(run_dir, "stays"), spec(run_dir, "stays", "v", needs={"CPU": 1.0}, device="train.device=cuda")]
    with pytest.raises(UserError, match=r"^on the node \w{12} of the Ray cluster: train.device is 'cuda', but PyTorch sees no GPU"):
        await cluster.start(workers)
    assert not (run_dir / "w").exists() and not (run_dir / "logs").exists()


@needs_ray
async def test_a_cluster_that_is_not_there_is_said_at_once(run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    cluster, began = RayCluster(run_dir, address=f"127.0.0.1:{port}"), time.monotonic()
    with pytest.raises(UserError, match=f"nothing answers at cluster.address=127.0.0.1:{port}: start the cluster first"):
        await cluster.start([spec(run_dir, "well")])
    assert time.monotonic() - began < patience(20.0) and await cluster.stop(0.0) == {}


@needs_ray
async def test_a_cluster_of_its_own_is_closed_to_others_and_leaves_nothing(run_dir: Path) -> None:
    cluster = RayCluster(run_dir)
    await cluster.start([spec(run_dir, "stays")])
    guard = cluster._connection._guard
    assert guard is not None
    everyone = below(guard.pid)
    names = {name_of(process) for process in everyone}
    assert {"gcs_server", "raylet"} <= names
    doors = [door for p in everyone for door in connections_of(p) if door.status == psutil.CONN_LISTEN]
    assert doors and not [door for door in doors if door.laddr.ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")]
    token = (cluster._connection._scratch or Path()) / "token"
    assert token.stat().st_mode & 0o077 == 0
    secret = token.read_text()
    assert not [p for p in [*everyone, psutil.Process(guard.pid)] if secret in " ".join(words_of(p))]
    stranger = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False)"
    import ray

    joined = [sys.executable, "-c", stranger, ray.get_runtime_context().gcs_address]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN_PATH"}
    guess = {"RAY_AUTH_TOKEN": "a" * 64, "RAY_NUM_REDIS_GET_RETRIES": "1"}
    refused = subprocess.run(joined, env={**environment, **guess}, capture_output=True, text=True, timeout=patience(100))
    assert refused.returncode != 0 and "uthenticat" in refused.stderr, refused.stderr
    await cluster.stop(0.1)
    assert not [process for process in everyone if process.is_running()] and not token.parent.exists()


def connections_of(process: psutil.Process) -> list[Any]:
    try:
        return process.net_connections("inet")
    except psutil.NoSuchProcess:
        return []


async def own_pid(run_dir: Path) -> int:
    path = run_dir / "w"
    async with asyncio.timeout(patience(60.0)):
        while not (path.exists() and path.read_text()):
            await asyncio.sleep(0.02)
    return int(path.read_text())
