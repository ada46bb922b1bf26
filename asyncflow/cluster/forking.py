"""The driver's end of a fork server: workers that begin with what it has imported.

    ForkServer.here(environment) --fork--> fork_server.py --> worker
                                 <--ends--

consumes: worker specs; a server's words
waits for: a server's answer, as long as it takes to import what the worker needs, `ANSWER_SECONDS` at most
is unblocked by: the answer, the server's end, or the deadline; after the last two the worker starts otherwise

Importing torch and transformers takes longer than all the rest of a small run's start, so it is done once, and while the driver
still checks the run's inputs. A server lasts as long as the process that has started it, for all of its runs: it ends when its
socket closes.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from asyncflow.cluster.base import WorkerSpec
from asyncflow.cluster.fork_server import MAX_MESSAGE_BYTES, Ended, Fork, Import, Refused, Word
from asyncflow.types import RunError

IS_POSSIBLE: Final = sys.platform == "linux"
"""Elsewhere what torch computes with does not outlive a fork (macOS), or there is none (Windows)."""
ANSWER_SECONDS: Final = 120.0
"""So long a server may import what a worker needs: many times what it takes on a slow disk."""
_READ_AT_IMPORT: Final = (
    "OMP_", "MKL_", "OPENBLAS_", "GOMP_", "KMP_", "TORCH", "PYTORCH", "HF_", "TRANSFORMERS_", "CUDA_", "NCCL_", "LD_", "PYTHON"
)  # fmt: skip
"""How variables begin that libraries read once, when they are imported: a worker for whom one differs has a server of its own."""

_servers: dict[tuple[tuple[str, str], ...], ForkServer] = {}
os.register_at_fork(after_in_child=_servers.clear)  # they are the parent's


def read_at_import(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables that libraries read once, when they are imported, in order."""
    return tuple(sorted((name, value) for name, value in environment.items() if name.startswith(_READ_AT_IMPORT)))


class Refusal(RunError):
    """A fork would not be safe: the worker is to be started otherwise."""


class ControlPipe:
    """The writing end of a worker's control pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def close(self) -> None:
        """The worker ends with it. It may be closed already."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class ForkedProcess:
    """A `WorkerProcess` that a fork server has as its child."""

    def __init__(self, pid: int, stdin: ControlPipe) -> None:
        self.pid, self.stdin = pid, stdin
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        """The exit status, minus the signal's number if one ended it."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def ended(self, status: int) -> None:
        """The server says so."""
        self.returncode = status
        self._ended.set()


class ForkServer:
    """Fork server of this process, seen from the event loop that uses it at present."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it; it does nothing yet. `environment`: all of its own."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = self._start(theirs, dict(environment))
        atexit.register(self._process.kill)  # in the middle of an import it would not see at once that its socket has closed
        for side in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, side, MAX_MESSAGE_BYTES)
        self._socket.setblocking(False)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: deque[tuple[asyncio.Future[ForkedProcess], ControlPipe]] = deque()
        self._children: dict[int, ForkedProcess] = {}
        self._is_lost = self._has_forked = False

    @classmethod
    def here(cls, environment: Mapping[str, str]) -> ForkServer:
        """This process's server for workers of that environment; it is started if there is none."""
        key = read_at_import(environment)
        if (server := _servers.get(key)) is None or not server.is_there:
            server = _servers[key] = cls(environment)
        return server

    @staticmethod
    def _start(theirs: socket.socket, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Its process, with `theirs` as standard input."""
        command = [sys.executable, "-m", "asyncflow.cluster.fork_server"]
        return subprocess.Popen(command, stdin=theirs.fileno(), env=environment, start_new_session=True)

    @property
    def is_there(self) -> bool:
        """Whether it can be asked."""
        return not self._is_lost and self._process.poll() is None

    @staticmethod
    def keep(needed: Sequence[ForkServer]) -> None:
        """End this process's servers that are not `needed` and have never forked anybody."""
        for key, server in list(_servers.items()):
            if server not in needed and not server._has_forked:
                server._socket.close()
                server._process.kill()  # it has nobody who would miss it
                server._process.wait()
                del _servers[key]

    def prepare(self, modules: Sequence[str]) -> None:
        """Have it import these, and do not wait for it."""
        self._send(Import(tuple(modules)))

    async def fork(self, spec: WorkerSpec, run_dir: Path, environment: Mapping[str, str], log: int) -> ForkedProcess:
        """A worker's process, whose output goes to the file descriptor `log`. Raises `Refusal`."""
        self._attach()
        self._has_forked = True
        theirs, own = os.pipe()
        control = ControlPipe(own)
        request = Fork(spec.imports, spec.entry, spec.name, str(run_dir), dict(environment), os.getcwd())
        answer: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        self._asked.append((answer, control))
        try:
            self._send(request, [theirs, log])
        finally:
            os.close(theirs)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await answer
        except TimeoutError:  # should it fork one later, that one's control pipe is closed at once
            raise Refusal(f"its fork server has not answered within {ANSWER_SECONDS:g} s: does an import hang?") from None

    def _attach(self) -> None:
        """Hear its words in this event loop. What it said to one before is of workers that are nobody's any more."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._socket)
            self._loop = loop
            self._asked.clear()
            self._children.clear()
            loop.add_reader(self._socket, self._hear)

    def _hear(self) -> None:
        try:
            while message := self._socket.recv(MAX_MESSAGE_BYTES):
                self._heard(msgspec.msgpack.decode(message, type=Word))
        except BlockingIOError:
            return
        except ConnectionResetError:
            pass
        self._lost()

    def _heard(self, word: Word) -> None:
        if isinstance(word, Ended):
            if (child := self._children.pop(word.pid, None)) is not None:
                child.ended(word.status)
            return
        answer, control = self._asked.popleft()
        if isinstance(word, Refused):
            control.close()
            if not answer.done():
                answer.set_exception(Refusal(word.why))
            return
        child = self._children[word.pid] = ForkedProcess(word.pid, control)
        if answer.done():  # nobody waits for it any more
            control.close()
        else:
            answer.set_result(child)

    def _lost(self) -> None:
        """The server has ended, which it never does by itself. Nobody can tell how its children end, so they are killed."""
        self._is_lost = True
        status = self._process.wait()  # else it would stay, as a zombie, until this process starts another
        assert self._loop is not None
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for answer, control in self._asked:
            control.close()
            if not answer.done():
                answer.set_exception(Refusal(f"it has ended with status {status}"))
        for child in self._children.values():
            child.kill()
            child.ended(-signal.SIGKILL)
        self._asked.clear()
        self._children.clear()

    def _send(self, message: Import | Fork, descriptors: Sequence[int] = ()) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended, of which `_hear` hears
            socket.send_fds(self._socket, [msgspec.msgpack.encode(message)], descriptors)
