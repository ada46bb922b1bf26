"""Processes of tests that begin with everything imported: forks of one server, also where tests run in several processes.

    context().Process(target=...)                a function in a process of its own
    Command("train", config)                     `asyncflow train config`, and its workers, likewise; used as `subprocess.Popen` is
    Command(..., main="module:function")         another program with arguments

An interpreter that imports torch and transformers takes seconds, and a whole run would start three of them. The few tests of how a
command starts do start one: `command_line` in tests/e2e/commands.py.
"""

from __future__ import annotations

import multiprocessing
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NoReturn

from setproctitle import getproctitle

from asyncflow.mkl import keep_bits_of_rows
from asyncflow.registry import load
from asyncflow.threads import thread_environment as threads

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # more threads than cores: those that wait are not to keep one busy
BEGAN_WITH = dict(os.environ)
"""The environment before anything of `MODULES` is imported, some of which add to it."""
MODULES = [
    "asyncflow.cli.verbs", "asyncflow.run.job", "asyncflow.trainer", "asyncflow.replay", "asyncflow.run.workers",
    "asyncflow.cluster.fork_server", "asyncflow.cluster.child", "asyncflow.cluster.local", "asyncflow.engines.rollout.engine",
    "asyncflow.engines.train.torch_engine", "asyncflow.engines.train.parallel.many_ranks", "asyncflow.weight_sync.shared_memory",
    "asyncflow.simulation.run", "numpy.ma", "tensorboardX", "plotly.graph_objects", "torch.distributed.fsdp",
    "torch.distributed.checkpoint.hf_storage", "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3", "transformers.models.llama.modeling_llama", "transformers.generation.utils",
]  # fmt: skip


def context() -> ForkServerContext:
    """What starts processes with all of `MODULES`."""
    found = multiprocessing.get_context("forkserver")
    if not _joined():
        found.set_forkserver_preload(["tests.forked_imports"])
        kept = dict(os.environ)
        os.environ.update(threads(1))  # as workers have it: read when torch is imported
        try:
            forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(kept)
    return found


def address() -> str:
    """Where this process's server is found. It is started if there is none."""
    context()
    found: str = _server()._forkserver_address
    return found


def join(address: str) -> None:
    """Have the processes of this one's tests be forks of another one's server."""
    server = _server()
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)  # it does not end with this process
    server.ensure_running = resource_tracker.ensure_running


def _server() -> Any:
    return forkserver._forkserver  # type: ignore[attr-defined]


def _joined() -> bool:
    return "ensure_running" in vars(_server())


class Command:
    """`asyncflow ARGUMENTS`, begun."""

    def __init__(self, *arguments: str | Path, ignores: int = 0, main: str = "asyncflow.cli:main", **environment: str) -> None:
        """`ignores`: a signal that it is started to ignore. `environment`: what is added to this process's."""
        self.args = [main.partition(":")[0], *map(str, arguments)]
        makes = context()
        out, err = makes.Pipe(duplex=False), makes.Pipe(duplex=False)
        settings = {**os.environ, **environment}
        self._process = makes.Process(
            target=_run, args=(main, self.args, out[1], err[1], settings, os.getcwd(), ignores), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        for theirs in (out[1], err[1]):
            theirs.close()
        self.stdout, self.stderr = (open(os.dup(pipe[0].fileno())) for pipe in (out, err))  # noqa: SIM115
        self._text = ""

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit status, or minus the signal's number; None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it prints until it ends, what has been read from `stdout` by line excepted. Raises `TimeoutExpired`."""
        deadline = time.monotonic() + (timeout or 1e6)
        streams = {stream.fileno(): (stream, bytearray()) for stream in (self.stdout, self.stderr) if not stream.closed}
        with selectors.DefaultSelector() as held:
            for number in streams:
                held.register(number, selectors.EVENT_READ)
            while held.get_map():
                if not (ready := held.select(max(0.0, deadline - time.monotonic()))):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
                for key, _ in ready:
                    if chunk := os.read(key.fd, 1 << 16):
                        streams[key.fd][1].extend(chunk)
                    else:
                        held.unregister(key.fd)
        self.wait(max(0.0, deadline - time.monotonic()))
        for stream, _ in streams.values():
            stream.close()
        out, err = (bytes(text).decode() for _, text in streams.values()) if streams else ("", "")
        return out, err


def _run(
    main: str, arguments: list[str], out: Connection, err: Connection, environment: dict[str, str], folder: str, ignored: int
) -> None:
    """The process of a command."""
    os.setsid()
    if ignored:
        signal.signal(ignored, signal.SIG_IGN)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    out.close()
    err.close()
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    getproctitle()  # it finds where a title goes as long as the environment is where it was
    set_environment(environment)
    keep_bits_of_rows()  # as the import of its engines would have it
    os.chdir(folder)
    sys.argv = arguments
    fork_workers_from_here()
    status: Any = 1
    try:
        status = load("program", main)() or 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def set_environment(environment: dict[str, str]) -> None:
    """Have this as the environment, without what imports alone have added to it."""
    added = os.environ.keys() - BEGAN_WITH.keys()
    os.environ.clear()
    os.environ.update({name: value for name, value in environment.items() if name not in added})


def fork_workers_from_here() -> None:
    """A fork server of this command is a fork, too, where it would import the same."""

    def forked(theirs: socket.socket, environment: dict[str, str]) -> _Child:
        if (child := os.fork()) == 0:
            _serve_forks(theirs, environment)
        return _Child(child)

    _start_fork_servers_by(forked)


@contextmanager
def fork_servers_from_ours() -> Iterator[None]:
    """Fork servers of this process, which has threads, are meanwhile forks of the tests' server, where they would import the
    same."""
    from asyncflow.cluster import forking

    def forked(theirs: socket.socket, environment: dict[str, str]) -> _Process:
        process = context().Process(target=_serve_forks, args=(theirs, environment), daemon=True)
        process.start()
        return _Process(process)

    started = forking.ForkServer._start
    _start_fork_servers_by(forked)
    try:
        yield
    finally:
        forking.ForkServer._start = started  # type: ignore[method-assign]


def _start_fork_servers_by(forked: Callable[[socket.socket, dict[str, str]], Any]) -> None:
    from asyncflow.cluster import forking

    started = forking.ForkServer._start

    def start(theirs: socket.socket, environment: dict[str, str]) -> Any:
        is_same = forking.read_at_import(environment) == forking.read_at_import({**BEGAN_WITH, **threads(1)})
        return (forked if is_same else started)(theirs, environment)

    forking.ForkServer._start = staticmethod(start)  # type: ignore[method-assign,assignment]


def _serve_forks(theirs: socket.socket, environment: dict[str, str]) -> NoReturn:
    """The process of a fork server."""
    from asyncflow.cluster import fork_server

    os.setsid()
    os.dup2(theirs.fileno(), 0)
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(environment)
    fork_server.main()
    os._exit(0)


class _Process:
    """As much of `subprocess.Popen` as a fork server's owner uses."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.poll, self.kill = lambda: self.returncode, process.kill

    @property
    def returncode(self) -> int | None:
        found: int | None = self._process.exitcode
        return found

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a fork server", seconds or 0.0)
        return self.returncode


class _Child:
    """The same of a child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int | None:
        return self._look(0)

    def _look(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode
