"""Commands and servers that run in the background of a test."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.forked import Command
from tests.patience import patience


@pytest.fixture
def background() -> Iterator[Callable[..., Command]]:
    """Starts commands that are ended with the test."""
    started: list[Command] = []

    def start(*arguments: str | Path) -> Command:
        process = Command(*arguments)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def redis_url() -> Iterator[str]:
    """A redis-server of this test that writes each change to its log before it answers."""
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server on this machine: apt-get install redis-server")
    with tempfile.TemporaryDirectory(prefix="afredis") as folder:
        command = ["redis-server", "--port", "0", "--unixsocket", f"{folder}/s", "--unixsocketperm", "700", "--dir", folder]
        command += ["--save", "", "--appendonly", "yes", "--appendfsync", "always"]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + patience(10)
            while not Path(folder, "s").exists():
                assert time.monotonic() < deadline and server.poll() is None, "redis-server did not start"
                time.sleep(0.02)
            yield f"unix://{folder}/s"
        finally:
            server.terminate()
            server.wait(patience(10))
