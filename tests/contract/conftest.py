"""Real servers for the contract suites, each started once, private to this machine, and ended by its process id."""

from __future__ import annotations

import importlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.contract.devices import BACKENDS, needed_devices
from tests.patience import patience
from tests.unit.engines.train.conftest import make_micro_batch, model_path  # noqa: F401  (fixtures)


@pytest.fixture(params=list(BACKENDS))
def device(request: pytest.FixtureRequest) -> str:
    """Each kind of device that is there."""
    kind: str = request.param
    needed_devices(kind)
    return kind


@contextmanager
def running(command: list[str], log: Path, is_ready: Callable[[], bool]) -> Iterator[None]:
    """A process that runs until the end of the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + patience(20)
            while not is_ready():
                assert process.poll() is None and time.monotonic() < deadline, (
                    f"{command[0]} did not start:\n{log.read_text()[-2000:]}"
                )
                time.sleep(0.02)
            yield
        finally:
            process.terminate()
            try:
                process.wait(patience(10))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def answers(kind: socket.AddressFamily, address: str | tuple[str, int]) -> bool:
    with socket.socket(kind, socket.SOCK_STREAM) as client:
        return client.connect_ex(address) == 0


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A redis-server on a private unix socket that writes each change to its log before it answers."""
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server on this machine: apt-get install redis-server")
    with tempfile.TemporaryDirectory(prefix="afredis") as folder:  # short: a unix socket's path has at most 107 bytes
        path = f"{folder}/socket"
        command = ["redis-server", "--port", "0", "--unixsocket", path, "--unixsocketperm", "700", "--dir", folder, "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", "always"]
        with running(command, Path(folder, "log"), lambda: answers(socket.AF_UNIX, path)):
            yield f"unix://{path}"


@pytest.fixture(scope="session")
def mooncake_master() -> Iterator[str]:
    """The address of a mooncake master on loopback."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        pytest.skip(f"mooncake does not load on this machine: {error}")
    program = Path(str(importlib.import_module("mooncake").__file__)).with_name("mooncake_master")
    port, metrics_port = free_port(), free_port()
    command = [str(program), "--rpc_address=127.0.0.1", f"--rpc_port={port}"]
    command += ["--metrics_host=127.0.0.1", f"--metrics_port={metrics_port}"]
    with (
        tempfile.TemporaryDirectory() as folder,
        running(command, Path(folder, "log"), lambda: answers(socket.AF_INET, ("127.0.0.1", port))),
    ):
        yield f"127.0.0.1:{port}"
