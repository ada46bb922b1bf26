"""The driver's end of a fork server: workers that begin with what it has imported.

    ForkServer.here(environment) --fork--> fork_server.py --> worker
                                 <--ends--

consumes: worker specs; a server's words
waits for: a server's answer, as long as it takes to import what the worker needs, `ANSWER_SECONDS` at most
is unblocked by: the answer, the server's end, or the deadline; after the last two the worker starts otherwise

Importing torch and transformers takes longer than all the rest of a small run's start, so it is done once, and while the driver
still checks the run's inputs. A server serves one event loop at a time, one run after another: it ends with the process that has
started it, when its socket closes.
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
import threading
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec

from asyncflow.cluster.base import WorkerSpec
from asyncflow.cluster.fork_server import MAX_MESSAGE_BYTES, Fork, Import, Refused, Word, WorkerEnded
from asyncflow.types import RunError

IS_POSSIBLE: Final = sys.platform == "linux"
"""Elsewhere what torch computes with does not outlive a fork (macOS), or there is none (Windows)."""
ANSWER_SECONDS: Final = 120.0
"""Seconds for which a server may import what a worker needs: many times what it takes on a slow disk."""
STATUS_SECONDS: Final = 10.0
"""Seconds that a server may take after a worker's end to say how it ended."""
LOST_SECONDS: Final = 1.0
"""Seconds in which a server whose connection has ended is to end; the event loop stands meanwhile."""
UNKNOWN_STATUS: Final = 255
"""Exit status of a worker whose server does not say it."""
_READ_AT_IMPORT: Final = (
    "OMP_", "MKL_", "OPENBLAS_", "GOMP_", "KMP_", "TORCH", "PYTORCH", "HF_", "TRANSFORMERS_", "CUDA_", "NCCL_", "LD_", "PYTHON"
)  # fmt: skip
"""Beginnings of the names of variables that libraries read once, when they are imported: a worker for which one differs
has a server of its own."""

_servers: list[ForkServer] = []
_choosing = threading.Lock()  # runs of one process have event loops in several threads
os.register_at_fork(after_in_child=_servers.clear)  # they are the parent's


def read_at_import(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables that libraries read once, when they are imported, in order."""
    return tuple(sorted((name, value) for name, value in environment.items() if name.startswith(_READ_AT_IMPORT)))


class Refusal(RunError):
    """A fork would not be safe: the worker is to be started otherwise."""


class ForkedProcess:
    """A `WorkerProcess` that a fork server has as its child."""

    def __init__(self, pid: int, stdin: FileIO) -> None:
        """Make it in the event loop that is to hear of the end of the process. `stdin`: the writing end of its control pipe, with
        which the worker ends."""
        self.pid, self.stdin = pid, stdin
        self.returncode: int | None = None
        self._ended, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self._handle: int | None = None  # readable from its end on, whatever its server does
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self._is_gone()
        except OSError:  # no more files, or an old kernel: only its server tells of its end
            pass
        else:
            self._loop.add_reader(self._handle, self._is_gone)

    async def wait(self) -> int:
        """The exit status, minus the signal's number if one ended it; `UNKNOWN_STATUS` where its server does not say it in time."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """End the process with SIGKILL, if it has not ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, which this loop has not heard yet
                os.kill(self.pid, signal.SIGKILL)

    def ended(self, status: int) -> None:
        """Note how the child ended: the server says so, or nothing can. The first word counts."""
        if self.returncode is None:
            self.returncode = status
            self._ended.set()
            self.forget()

    def forget(self) -> None:
        """End of the watch over it: its handle is closed."""
        if self._handle is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._handle)
            os.close(self._handle)
            self._handle = None

    def _is_gone(self) -> None:
        self.forget()
        self._loop.call_later(STATUS_SECONDS, self.ended, UNKNOWN_STATUS)


class ForkServer:
    """Fork server of this process, seen from the event loop that uses it at present."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it; it does nothing yet. `environment`: all of its own."""
        self._key = read_at_import(environment)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = self._start(theirs, dict(environment))
        atexit.register(self._process.kill)  # in the middle of an import it would not see at once that its socket has closed
        for side in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, side, MAX_MESSAGE_BYTES)
        self._socket.setblocking(False)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_asked = 0
        self._asked: dict[int, tuple[asyncio.Future[ForkedProcess], FileIO]] = {}
        self._children: dict[int, ForkedProcess] = {}
        self._is_lost = self._hangs = self._refuses = False

    @classmethod
    def here(cls, environment: Mapping[str, str]) -> ForkServer:
        """Server of this process for workers of that environment; it is started if there is none. One that another run uses at
        present, in an event loop of its own, is that run's. Called in an event loop, it is this loop's from now on."""
        try:
            loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        key = read_at_import(environment)
        with _choosing:
            for lost in [server for server in _servers if not server.is_there]:
                _servers.remove(lost)
            server = next((server for server in _servers if server._key == key and server._may_serve(loop)), None)
            if server is None:
                server = cls(environment)
                _servers.append(server)
            if loop is not None:
                server._attach(loop)
            return server

    @staticmethod
    def _start(theirs: socket.socket, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start the server's process, with `theirs` as standard input."""
        command = [sys.executable, "-m", "asyncflow.cluster.fork_server"]
        return subprocess.Popen(command, stdin=theirs.fileno(), env=environment, start_new_session=True)

    @property
    def is_there(self) -> bool:
        """Whether the server runs and answers."""
        return not self._is_lost and self._process.poll() is None

    @staticmethod
    def keep(needed: Sequence[ForkServer]) -> None:
        """End this process's servers that are not `needed` and serve no event loop."""
        with _choosing:
            for server in [server for server in _servers if server not in needed and server._may_serve(None)]:
                _servers.remove(server)
                server._forget_workers()
                server._end()

    def prepare(self, modules: Sequence[str]) -> None:
        """Let the server import modules. Does not wait for it."""
        with contextlib.suppress(OSError):  # then it imports them when a worker needs them
            self._send(Import(tuple(modules)))

    async def fork(self, spec: WorkerSpec, run_dir: Path, environment: Mapping[str, str], log: int) -> ForkedProcess:
        """A worker's process, whose output goes to the file descriptor `log`. Raises `Refusal`."""
        loop = asyncio.get_running_loop()
        self._attach(loop)
        theirs, own = os.pipe()
        self._num_asked, number = self._num_asked + 1, self._num_asked
        request = Fork(number, spec.imports, spec.entry, spec.name, str(run_dir), dict(environment), os.getcwd())
        answer: asyncio.Future[ForkedProcess] = loop.create_future()
        self._asked[number] = answer, FileIO(own, "w")
        try:
            self._send(request, [theirs, log])
            async with asyncio.timeout(ANSWER_SECONDS):
                return await answer
        except TimeoutError:  # should it fork one later, that one's control pipe is closed at once
            self._hangs = True
            raise Refusal(f"its fork server has not answered within {ANSWER_SECONDS:g} s: does an import hang?") from None
        except OSError as error:
            self._asked.pop(number)[1].close()
            raise Refusal(f"its fork server cannot be asked: {error}") from error
        finally:
            os.close(theirs)

    def _may_serve(self, loop: asyncio.AbstractEventLoop | None) -> bool:
        return not self._hangs and not self._refuses and (self._loop is None or self._loop is loop or self._loop.is_closed())

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hear its words in this event loop."""
        if self._loop is not loop:
            self._forget_workers()
            self._loop = loop
            loop.add_reader(self._socket, self._receive)

    def _forget_workers(self) -> None:
        """Workers of an event loop that is closed are nobody's any more: their control pipes close, and they end."""
        for _, control in self._asked.values():
            control.close()
        for child in self._children.values():
            child.stdin.close()
            child.forget()
        self._asked.clear()
        self._children.clear()

    def _receive(self) -> None:
        try:
            while message := self._socket.recv(MAX_MESSAGE_BYTES):
                self._received(msgspec.msgpack.decode(message, type=Word))
        except BlockingIOError:
            return
        except ConnectionResetError:
            pass
        self._lost()

    def _received(self, word: Word) -> None:
        if isinstance(word, WorkerEnded):
            if (child := self._children.pop(word.pid, None)) is not None:
                child.ended(word.status)
            return
        self._hangs = False
        if word.request not in self._asked:  # of a run that is over: the control pipe is closed, and the worker ends
            return
        answer, control = self._asked.pop(word.request)
        if isinstance(word, Refused):
            control.close()
            self._refuses = word.is_for_good  # the next worker has a new one
            if not answer.done():
                answer.set_exception(Refusal(word.why))
        elif answer.done():  # nobody waits for it any more
            control.close()
        else:
            try:
                child = self._children[word.pid] = ForkedProcess(word.pid, control)
            except BaseException as error:  # no memory: its control pipe closes, and it ends
                control.close()
                answer.set_exception(Refusal(f"its process cannot be taken note of: {error!r}"))
                raise
            answer.set_result(child)

    def _lost(self) -> None:
        """Take note that the server has ended, which it never does by itself. Nobody can tell how its children end: they are
        killed."""
        self._is_lost = True
        assert self._loop is not None
        self._loop.remove_reader(self._socket)
        try:
            self._end()
        finally:  # whatever goes wrong: somebody waits for each of them
            asked, children = [*self._asked.values()], [*self._children.values()]
            self._asked.clear()
            self._children.clear()
            for answer, control in asked:
                control.close()
                if not answer.done():
                    answer.set_exception(Refusal(f"it has ended with status {self._process.returncode}"))
            for child in children:
                child.kill()
                child.ended(-signal.SIGKILL)

    def _end(self) -> None:
        """End the server's process, and close what this one keeps for it. A process that has ended is reaped: it would stay, as a
        zombie."""
        self._socket.close()
        if self._is_lost:  # or its connection alone, and it computes or is stopped
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LOST_SECONDS)
        self._process.kill()
        self._process.wait()
        atexit.unregister(self._process.kill)

    def _send(self, message: Import | Fork, descriptors: Sequence[int] = ()) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended, of which `_receive` learns
            socket.send_fds(self._socket, [msgspec.msgpack.encode(message)], descriptors)
