"""Workers that are forked from a process which has imported what they need begin as others do."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import psutil
import pytest

from asyncflow.cluster import fork_server, forking
from asyncflow.cluster.base import WorkerDied, WorkerSpec
from asyncflow.cluster.fork_server import Fork, Refused
from asyncflow.cluster.forking import IS_POSSIBLE, ForkServer, Refusal
from asyncflow.cluster.local import LocalCluster
from tests.conftest import ROOT
from tests.patience import patience

pytestmark = pytest.mark.skipif(not IS_POSSIBLE, reason="workers are forked on Linux alone")

WORKERS = """
import asyncio, gc, glob, json, os, random, sys
import numpy

async def tells(name, run_dir):
    found = {
        "environment": dict(os.environ), "folder": os.getcwd(), "path": sys.path, "session": os.getsid(0), "pid": os.getpid(),
        "parent": os.getppid(), "random": random.random(), "numpy": float(numpy.random.rand()), "collects": gc.isenabled(),
        "files": sorted(os.readlink(fd).split(":")[0].replace(name, "NAME") for fd in glob.glob("/proc/self/fd/*") if
                        os.path.exists(fd)),
    }
    print("printed", end="")
    (run_dir / f"{name}.json").write_text(json.dumps(found))

async def stays(name, run_dir):
    (run_dir / name).touch()
    await asyncio.sleep(600)
"""


@pytest.fixture
def servers() -> Iterator[None]:
    """None is left of the tests before, nor to those after."""
    before = forking._servers[:]
    forking._servers.clear()
    yield
    for server in forking._servers:
        server._process.kill()
        server._process.wait()
    forking._servers[:] = before


@pytest.fixture
def cluster(tmp_path: Path) -> LocalCluster:
    (tmp_path / "workers.py").write_text(WORKERS)
    return LocalCluster(tmp_path)


def spec(tmp_path: Path, function: str, name: str = "w", *imports: str, **environment: str) -> WorkerSpec:
    entry = f"{tmp_path / 'workers.py'}:{function}"
    return WorkerSpec(name, entry, {"COLOUR": "blue", "OPENBLAS_NUM_THREADS": "1", **environment}, imports=imports or ("numpy",))


def told(tmp_path: Path, name: str = "w") -> dict[str, object]:
    found: dict[str, object] = json.loads((tmp_path / f"{name}.json").read_text())
    return found


def nobody(name: str, why: str, is_final: bool) -> None:
    """Deaths are not looked at."""


async def run(cluster: LocalCluster, *specs: WorkerSpec) -> None:
    await cluster.start(specs)
    async with asyncio.timeout(patience(120)):
        await cluster.wait(nobody)
    assert await cluster.stop(60.0) == {}


async def test_workers_have_one_parent_that_has_imported_for_them(cluster: LocalCluster, tmp_path: Path) -> None:
    await run(cluster, spec(tmp_path, "tells", "a"), spec(tmp_path, "tells", "b"))
    a, b = told(tmp_path, "a"), told(tmp_path, "b")
    assert a["parent"] == b["parent"] != os.getpid()
    assert a["pid"] == a["session"] != b["pid"] == b["session"]
    server = psutil.Process(int(str(a["parent"])))
    assert any("numpy" in mapped.path for mapped in server.memory_maps())
    assert a["random"] != b["random"] and a["numpy"] != b["numpy"] and a["collects"] and b["collects"]


async def test_a_worker_finds_what_an_interpreter_of_its_own_would(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # what is printed is in the log all the same
    await run(cluster, spec(tmp_path, "tells", "first"))  # the server is there, with what was set then
    monkeypatch.setenv("SHAPE", "round")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    await run(cluster, spec(tmp_path, "tells", "forked"))
    own = spec(tmp_path, "tells", "own")
    await run(cluster, WorkerSpec(own.name, own.entry, own.environment))
    forked, own_interpreter = told(tmp_path, "forked"), told(tmp_path, "own")
    for what in ("environment", "folder", "path", "collects", "files"):
        assert forked[what] == own_interpreter[what], what
    assert (tmp_path / "logs" / "forked.log").read_text() == "printed"


@pytest.mark.usefixtures("servers")
async def test_a_worker_is_forked_before_modules_are_imported_for_later_ones(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollout begins while the trainer's modules are imported, though they were asked for first."""
    for module in ("first", "second"):
        begun, go = str(tmp_path / f"{module}.begun"), str(tmp_path / f"{module}.go")
        source = f"import os, time\nopen({begun!r}, 'w')\nwhile not os.path.exists({go!r}): time.sleep(0.01)\n"
        (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = spec(tmp_path, "tells", "w", "json")
    server = ForkServer.here({**os.environ, **worker.environment})
    server.prepare(["first", "second"])
    async with asyncio.timeout(patience(60)):
        while not (tmp_path / "first.begun").exists():
            await asyncio.sleep(0.01)
        running = asyncio.create_task(run(cluster, worker))
        while not server._asked:
            await asyncio.sleep(0.01)
        (tmp_path / "first.go").touch()
        while not (tmp_path / "w.json").exists() or not (tmp_path / "w.json").stat().st_size:  # it is there before it is written
            await asyncio.sleep(0.01)
    assert told(tmp_path)["parent"] == server._process.pid
    (tmp_path / "second.go").touch()
    await running


async def test_variables_that_libraries_read_once_have_a_server_of_their_own(cluster: LocalCluster, tmp_path: Path) -> None:
    threads = [spec(tmp_path, "tells", f"{count}", OMP_NUM_THREADS=count) for count in ("1", "2")]
    await run(cluster, *threads, spec(tmp_path, "tells", "rank", OMP_NUM_THREADS="2", RANK="1"))
    one, two, rank = (told(tmp_path, name)["parent"] for name in ("1", "2", "rank"))
    assert one != two == rank


@pytest.mark.usefixtures("servers")
async def test_where_a_fork_is_not_safe_a_worker_gets_an_interpreter(
    cluster: LocalCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (tmp_path / "starts_a_thread.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    await run(cluster, spec(tmp_path, "tells", "w", "starts_a_thread"))
    assert told(tmp_path)["parent"] == os.getpid()
    assert "worker w is not forked, and starts slower: something that it imported has started threads: there are 2" in caplog.text


async def test_what_cannot_be_imported_is_the_workers_to_say(cluster: LocalCluster, tmp_path: Path) -> None:
    await run(cluster, spec(tmp_path, "tells", "w", "no_such_module", "numpy"))
    assert told(tmp_path)["parent"] != os.getpid()


async def test_an_import_that_fails_in_whatever_way_leaves_the_others_alone(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, ends in (("fails", "raise RuntimeError('no such driver')"), ("leaves", "raise SystemExit(3)")):
        (tmp_path / f"{name}.py").write_text(ends)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    await cluster.start([spec(tmp_path, "stays"), spec(tmp_path, "tells", "second", "fails", "leaves")])
    await wait_for_file(tmp_path / "second.json")
    assert told(tmp_path, "second")["parent"] == psutil.Process(cluster.pids()["w"]).ppid()
    assert "w" in await cluster.stop(0.0)


@pytest.mark.usefixtures("servers")
@pytest.mark.parametrize("shortage", ["MemoryError()", "OSError(24, 'Too many open files')", "ImportError('cannot map it')"])
async def test_no_worker_begins_with_what_a_shortage_has_half_imported(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shortage: str
) -> None:
    """Half of torch cannot be imported again: every worker would have ended with an error that looks like the user's."""
    (tmp_path / "short").touch()
    source = (
        f"from pathlib import Path\nif (short := Path({str(tmp_path / 'short')!r})).exists():\n short.unlink()\n raise {shortage}"
    )
    (tmp_path / "halved.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, has_interpreter in (("first", True), ("second", False)):
        await run(cluster, spec(tmp_path, "tells", name, "halved"))
        assert (told(tmp_path, name)["parent"] == os.getpid()) == has_interpreter


def test_where_the_system_refuses_a_fork_the_server_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(fork_server.os, "fork", refused)
    monkeypatch.setattr(fork_server.os, "listdir", lambda folder: ["the thread"])
    monkeypatch.setattr(fork_server.gc, "freeze", lambda: None)
    word = fork_server._forked(Fork(7, (), "entry", "w", str(tmp_path), {}, "/"), [], (), "/")
    assert isinstance(word, Refused) and word.request == 7 and "Resource temporarily unavailable" in word.why


@pytest.mark.usefixtures("servers")
def test_two_runs_at_once_have_a_server_each_and_both_hear_of_their_workers(tmp_path: Path) -> None:
    """As two trainers in one process, each with an event loop in a thread of its own."""
    (tmp_path / "workers.py").write_text(WORKERS)
    both, parents = threading.Barrier(2), dict[str, object]()

    async def one(name: str) -> None:
        cluster = LocalCluster(tmp_path)
        await cluster.start([spec(tmp_path, "stays", f"{name}-stays")])
        await asyncio.to_thread(both.wait, patience(60))
        await cluster.start([spec(tmp_path, "tells", name)])
        await wait_for_file(tmp_path / f"{name}.json")
        assert f"{name}-stays" in await asyncio.wait_for(cluster.stop(0.0), patience(60))
        parents[name] = told(tmp_path, name)["parent"]

    threads = [threading.Thread(target=asyncio.run, args=(one(name),)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(120))
    assert len(set(parents.values())) == 2 and {server._process.pid for server in forking._servers} == set(parents.values())
    asyncio.run(run(LocalCluster(tmp_path), spec(tmp_path, "tells", "third")))
    assert told(tmp_path, "third")["parent"] in parents.values(), "whose event loop is closed serves another"


@pytest.mark.usefixtures("servers")
async def test_the_end_of_a_worker_is_heard_of_though_its_server_hangs(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "STATUS_SECONDS", 0.1)
    await cluster.start([spec(tmp_path, "stays")])
    (server,) = forking._servers
    server._process.send_signal(signal.SIGSTOP)
    assert list(await asyncio.wait_for(cluster.stop(0.0), patience(60))) == ["w"]
    assert cluster._children["w"].process.returncode == forking.UNKNOWN_STATUS
    server._process.send_signal(signal.SIGCONT)
    ended = await asyncio.create_subprocess_exec("true")
    await ended.wait()
    process = forking.ForkedProcess(ended.pid, FileIO(os.devnull, "w"))
    process.kill()  # there is nobody any more
    assert await asyncio.wait_for(process.wait(), patience(60)) == forking.UNKNOWN_STATUS


async def wait_for_file(file: Path) -> None:
    async with asyncio.timeout(patience(60)):
        while not (file.exists() and file.read_text()):
            await asyncio.sleep(0.01)


async def wait_for_file_to_be_there(file: Path) -> None:
    async with asyncio.timeout(patience(60)):
        while not file.exists():
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("servers")
async def test_workers_end_with_their_server_and_the_next_ones_have_a_new_one(cluster: LocalCluster, tmp_path: Path) -> None:
    await cluster.start([spec(tmp_path, "stays")])
    await wait_for_file_to_be_there(tmp_path / "w")
    worker = psutil.Process(cluster.pids()["w"])
    server = worker.ppid()
    os.kill(server, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"worker w .* was ended by SIGKILL"):
        await asyncio.wait_for(cluster.wait(nobody), patience(60))
    psutil.wait_procs([worker], timeout=patience(60))
    assert not worker.is_running() and await cluster.stop(0.0) == {}
    assert not psutil.pid_exists(server), "not even as a zombie"
    await run(LocalCluster(tmp_path), spec(tmp_path, "tells"))
    assert told(tmp_path)["parent"] != server


@pytest.mark.usefixtures("servers")
async def test_a_server_that_is_stopped_holds_nobody_up_when_its_connection_ends(cluster: LocalCluster, tmp_path: Path) -> None:
    await cluster.start([spec(tmp_path, "stays")])
    await wait_for_file_to_be_there(tmp_path / "w")
    (server,) = forking._servers
    server._process.send_signal(signal.SIGSTOP)
    server._socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(WorkerDied, match=r"worker w .* was ended by SIGKILL"):
        await asyncio.wait_for(cluster.wait(nobody), patience(60))
    assert server._process.poll() is not None and await cluster.stop(0.0) == {}


@pytest.mark.usefixtures("servers")
async def test_a_fork_that_finds_no_memory_to_be_taken_note_of_is_done_without(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever asked for it would wait until the server's deadline."""

    def no_memory(pid: int, stdin: FileIO) -> None:
        raise MemoryError

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    monkeypatch.setattr(forking, "ForkedProcess", no_memory)
    await asyncio.wait_for(run(cluster, spec(tmp_path, "tells")), patience(60))
    assert told(tmp_path)["parent"] == os.getpid(), "an interpreter of its own"


@pytest.mark.usefixtures("servers")
async def test_whoever_waits_for_a_lost_server_is_told_whatever_goes_wrong_as_it_ends(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(server: ForkServer) -> None:
        raise MemoryError

    await cluster.start([spec(tmp_path, "stays")])
    await wait_for_file_to_be_there(tmp_path / "w")
    (server,) = forking._servers
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    with monkeypatch.context() as patch:
        patch.setattr(ForkServer, "_end", no_memory)
        server._process.kill()
        with pytest.raises(WorkerDied, match=r"worker w .* was ended by SIGKILL"):
            await asyncio.wait_for(cluster.wait(nobody), patience(60))
    server._end()
    assert await cluster.stop(0.0) == {}


@pytest.mark.usefixtures("servers")
async def test_a_server_that_cannot_start_is_done_without(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking.sys, "executable", "/bin/false")
    server = ForkServer(dict(os.environ))
    with open(os.devnull, "wb") as log, pytest.raises(Refusal, match="it has ended with status 1"):
        await asyncio.wait_for(server.fork(spec(tmp_path, "tells"), tmp_path, {}, log.fileno()), patience(60))


@pytest.mark.usefixtures("servers")
async def test_a_server_whose_import_hangs_is_done_without(
    cluster: LocalCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it forks in the end is nobody's, and ends."""
    source = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
    (tmp_path / "hangs.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(forking, "ANSWER_SECONDS", 0.2)
    await run(cluster, spec(tmp_path, "tells", "own", "hangs"))
    assert told(tmp_path, "own")["parent"] == os.getpid()
    assert "worker own is not forked, and starts slower: its fork server has not answered within 0.2 s" in caplog.text
    (server,) = forking._servers
    monkeypatch.setattr(forking, "ANSWER_SECONDS", patience(60))
    await run(cluster, spec(tmp_path, "tells", "other"))
    assert told(tmp_path, "other")["parent"] not in (os.getpid(), server._process.pid), "nobody else waits for it"
    (tmp_path / "go").touch()
    async with asyncio.timeout(patience(60)):
        while server._hangs:
            await asyncio.sleep(0.01)
    await run(cluster, spec(tmp_path, "tells", "forked", "hangs"))
    assert told(tmp_path, "forked")["parent"] == server._process.pid
    async with asyncio.timeout(patience(60)):
        while psutil.Process(server._process.pid).children():
            await asyncio.sleep(0.01)


def test_a_server_is_used_by_one_event_loop_after_another(tmp_path: Path) -> None:
    (tmp_path / "workers.py").write_text(WORKERS)
    for name in ("first", "second"):
        asyncio.run(run(LocalCluster(tmp_path), spec(tmp_path, "tells", name)))
    assert told(tmp_path, "first")["parent"] == told(tmp_path, "second")["parent"]


def test_nothing_is_left_of_a_driver_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "workers.py").write_text(WORKERS)
    program = f"""
import asyncio
from pathlib import Path
from asyncflow.cluster.base import WorkerSpec
from asyncflow.cluster.local import LocalCluster

async def drive():
    cluster = LocalCluster(Path({str(tmp_path)!r}))
    await cluster.start([WorkerSpec("w", "{tmp_path / "workers.py"}:stays", imports=("asyncflow.types",))])
    print(cluster.pids()["w"], flush=True)
    await asyncio.sleep(600)

asyncio.run(drive())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) as driver:
        assert driver.stdout is not None
        worker = psutil.Process(int(driver.stdout.readline()))
        server = worker.parent()
        assert server is not None
        driver.kill()
    _, alive = psutil.wait_procs([worker, server], timeout=patience(60))
    assert not alive


async def test_what_glibc_reads_at_its_start_is_set_in_a_fork(cluster: LocalCluster, tmp_path: Path) -> None:
    """A block below the threshold lies on the heap; above it, it would be mapped by itself, and given back when it is freed. With
    one arena, which is the heap, a thread's blocks lie there, too, whatever their size."""
    (tmp_path / "workers.py").write_text("""
import ctypes, threading
async def allocates(name, run_dir):
    c = ctypes.CDLL(None)
    c.malloc.restype, c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    blocks = [c.malloc(96 << 20)]
    thread = threading.Thread(target=lambda: blocks.append(c.malloc(96 << 20)))
    thread.start()
    thread.join()
    def is_heap(block):
        return any(int(l.split("-")[0], 16) <= block < int(l.split("-")[1].split()[0], 16)
                   for l in open("/proc/self/maps") if "[heap]" in l)
    (run_dir / name).write_text(str([is_heap(block) for block in blocks]))
""")
    entry = f"{tmp_path / 'workers.py'}:allocates"
    some, all_of_them = {"MALLOC_MMAP_THRESHOLD_": str(10**9)}, {"MALLOC_MMAP_MAX_": "0", "MALLOC_ARENA_MAX": "1"}
    for name, environment in (("mapped", dict[str, str]()), ("kept", some), ("all kept", all_of_them)):
        await run(cluster, WorkerSpec(name, entry, environment, imports=("asyncflow.types",)))
    told = [(tmp_path / name).read_text() for name in ("mapped", "kept", "all kept")]
    assert told == ["[False, False]", "[True, False]", "[True, True]"]


@pytest.mark.usefixtures("servers")
async def test_a_server_that_was_begun_in_vain_ends_and_one_with_workers_stays(cluster: LocalCluster, tmp_path: Path) -> None:
    await run(cluster, spec(tmp_path, "tells"))
    (used,) = forking._servers
    vain = await asyncio.to_thread(ForkServer.here, {**os.environ, "OMP_NUM_THREADS": "7"})  # before there is an event loop
    process = psutil.Process(vain._process.pid)
    ForkServer.keep([])
    assert not process.is_running() and forking._servers == [used] and used.is_there
    assert ForkServer.here({**os.environ, "OMP_NUM_THREADS": "7"}) is not vain
