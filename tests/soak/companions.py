"""Processes beside a run that are the soak's own: a Redis server, clients of a service. They are started again whenever they end: a
service that is begun again needs them all anew."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import psutil

from tests.soak.modes import ROOT

ASYNCFLOW = [sys.executable, "-c", "from asyncflow.cli import main; main()"]
PAUSE_SECONDS, REDIS_SECONDS = 0.5, 60.0


def command(name: str, folder: Path) -> list[str]:
    """What starts a companion. `name`: its role, perhaps with a number behind it."""
    service = [f"unix:{folder / 'http.sock'}", str(folder / "run.service" / "keys.json")]
    if name == "redis":
        redis = ["redis-server", "--port", "0", "--unixsocket", f"{folder}/redis.sock", "--unixsocketperm", "700"]
        return [*redis, "--dir", str(folder), "--save", "", "--appendonly", "yes", "--appendfsync", "always"]
    if name.startswith("generator"):
        return [*ASYNCFLOW, "join", service[0], "--key-file", service[1], "--num-slots", "16"]
    return [sys.executable, "-m", "tests.soak.clients", name, *service, str(folder.parent)]


class Companions:
    """The companions of a round."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._folder, self._said = folder, (folder.parent / "companions.log").open("ab")
        self._running: dict[str, subprocess.Popen[bytes]] = {name: self._start(name) for name in names}
        self._ended: dict[str, float] = {}

    def keep(self) -> None:
        """Start those again that have ended a moment ago."""
        for name, process in self._running.items():
            if process.poll() is not None and time.monotonic() - self._ended.setdefault(name, time.monotonic()) > PAUSE_SECONDS:
                del self._ended[name]
                self._running[name] = self._start(name)

    def until_ready(self) -> None:
        """Wait until Redis answers, where there is one: a run that begins without it is refused."""
        deadline = time.monotonic() + REDIS_SECONDS
        while "redis" in self._running and not self.has_redis():
            if time.monotonic() > deadline:
                raise SystemExit(f"redis-server does not start: {(self._folder.parent / 'companions.log').read_text()[-400:]}")
            time.sleep(0.05)
            self.keep()

    def has_redis(self) -> bool:
        """Whether Redis answers."""
        return self._asked(b"PING").startswith(b"+PONG")

    def num_keys(self) -> int:
        """Number of values in Redis; 0 where there is none, or it does not answer."""
        return int(self._asked(b"DBSIZE").removeprefix(b":") or 0) if "redis" in self._running else 0

    def _asked(self, command: bytes) -> bytes:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as link:
            link.settimeout(1.0)
            link.connect(str(self._folder / "redis.sock"))
            link.sendall(command + b"\r\n")
            return link.recv(16)
        return b""

    def roles(self) -> dict[str, list[psutil.Process]]:
        """Those that run, by role."""
        found: dict[str, list[psutil.Process]] = {}
        for name, process in self._running.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.poll() is None:
                    found.setdefault(name.rstrip(" 0123456789"), []).append(psutil.Process(process.pid))
        return found

    def end(self) -> None:
        """Kill them all."""
        for process in self._running.values():
            process.kill()
            process.wait()
        self._said.close()

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        output: IO[bytes] = self._said
        return subprocess.Popen(command(name, self._folder), stdout=output, stderr=output, cwd=ROOT, start_new_session=True)
