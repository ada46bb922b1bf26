"""A process that imports what workers need, once, and forks them: `python -m asyncflow.cluster.fork_server`, with its socket as
standard input.

    ForkServer (driver) --Import, Fork--> this process --fork--> worker: a session of its own, child.py's main
                        <--Forked, Refused, Ended--

consumes: the driver's requests to fork, in order; then its requests to import, a module at a time; the ends of its children
waits for: the next one, where nothing is left to import
is unblocked by: the driver, or the driver's end, which ends this process

A fork copies the calling thread alone, so a lock that another thread holds stays locked for ever in the copy. This process has
therefore one thread. It looks before each fork whether that is so, and refuses where a library has started another. It imports, and
does nothing else: no tensor is made here, no device is touched. Linux only (forking.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import random
import select
import signal
import socket
import sys
import traceback
from collections import deque
from pathlib import Path
from typing import Final, NoReturn

import msgspec
from setproctitle import setproctitle

TITLE: Final = "asyncflow-fork-server"
"""Its name in lists of processes."""
MAX_MESSAGE_BYTES: Final = 1 << 20
_MALLOC: Final = {
    "MALLOC_TRIM_THRESHOLD_": -1,
    "MALLOC_TOP_PAD_": -2,
    "MALLOC_MMAP_THRESHOLD_": -3,
    "MALLOC_MMAP_MAX_": -4,
    "MALLOC_ARENA_MAX": -8,
}
"""Variables that glibc reads when a process starts, with mallopt's number of each: a fork does not start anew, so it calls
mallopt."""


class Import(msgspec.Struct, frozen=True, tag=True):
    """Import these modules, for workers that come later. A worker that is asked for meanwhile is forked first: rollout begins while
    the trainer's modules are imported."""

    modules: tuple[str, ...]


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Import `modules`, then fork a worker. Two file descriptors come with it: the reading end of the worker's control pipe, and
    its log. `request` comes back with the answer. `environment` is all of its environment, `folder` its working directory."""

    request: int
    modules: tuple[str, ...]
    entry: str
    name: str
    run_dir: str
    environment: dict[str, str]
    folder: str


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Fork`."""

    request: int
    pid: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The other answer: a fork would not be safe, or is not possible, and why. `is_for_good`: nor will a later one be."""

    request: int
    why: str
    is_for_good: bool = False


class WorkerEnded(msgspec.Struct, frozen=True, tag=True):
    """A worker has ended. `status`: its exit status, minus the signal's number if one ended it."""

    pid: int
    status: int


ForkServerRequest = Import | Fork
Word = Forked | Refused | WorkerEnded


def main() -> None:
    """Serve until the driver's end of the socket closes."""
    setproctitle(TITLE)
    gc.disable()  # an import makes objects that stay: looking for garbage among them takes a fifth of its time
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    decode, folder = msgspec.msgpack.Decoder(ForkServerRequest).decode, os.getcwd()
    with socket.socket(fileno=os.dup(0)) as driver:
        os.set_inheritable(driver.fileno(), False)
        poll = select.poll()
        for descriptor in (driver.fileno(), woken):
            poll.register(descriptor, select.POLLIN)
        imports: deque[str] = deque()
        half_imported = ""
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(0 if imports else None)}
            if woken in ready:
                os.read(woken, 1 << 12)
                _report_ends(driver)
            if driver.fileno() in ready:
                message, descriptors, _, _ = socket.recv_fds(driver, MAX_MESSAGE_BYTES, 2)
                if not message:
                    return
                request = decode(message)
                if isinstance(request, Import):
                    imports += request.modules
                    continue
                for module in request.modules:
                    half_imported = half_imported or _import(module)
                word: Word = Refused(request.request, half_imported, is_for_good=True)
                if not half_imported:
                    word = _forked(request, descriptors, (driver.fileno(), woken, wake), folder)
                _send(driver, word)
                for descriptor in descriptors:
                    os.close(descriptor)
            elif imports:
                half_imported = half_imported or _import(imports.popleft())


def _import(module: str) -> str:
    """Import a module. Returns why no worker is to begin with what is here, where a shortage of the machine's has cut the import
    off: what is half there may not be imported a second time (torch's cannot)."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        pass  # the process that needs it says so in its own words
    except (MemoryError, OSError, SystemError, ImportError) as error:  # a library that cannot be mapped is an ImportError
        return f"its fork server has not come through the import of {module}: {type(error).__name__}: {error}"
    except (Exception, SystemExit):
        pass
    return ""


def _forked(request: Fork, descriptors: list[int], not_for_child: tuple[int, ...], folder: str) -> Word:
    if (num_threads := len(os.listdir("/proc/self/task"))) != 1:
        return Refused(request.request, f"something that it imported has started threads: there are {num_threads}")
    gc.freeze()  # what is here is the children's too: their garbage collection is not to write into shared pages
    try:
        child = os.fork()
    except OSError as error:  # no memory, or no more processes: those that there are go on
        return Refused(request.request, f"the system refuses a fork: {error}")
    if child == 0:
        _work(request, descriptors, not_for_child, folder)
    return Forked(request.request, child)


def _work(request: Fork, descriptors: list[int], not_for_child: tuple[int, ...], folder: str) -> NoReturn:
    """The child: what an interpreter of its own would have found at its start."""
    status = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control, log = descriptors
        os.dup2(control, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for descriptor in (*descriptors, *not_for_child):
            os.close(descriptor)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.folder)
        sys.path[:1] = [request.folder if place == folder else place for place in sys.path[:1]]
        # Lists of processes are to call it what they call one with an interpreter of its own.
        setproctitle(" ".join((sys.executable, "-m", "asyncflow.cluster.child", request.entry, request.name, request.run_dir)))
        _set_malloc(request.environment)
        random.seed()
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed()
        gc.enable()
        from asyncflow.cluster.child import main as work

        status = work(request.entry, request.name, Path(request.run_dir))
    except BaseException:  # before the worker's own main could say so
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, or on a full disk
                stream.flush()
        os._exit(status)


def _set_malloc(environment: dict[str, str]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for name, number in _MALLOC.items():
        if mallopt is not None and name in environment:
            mallopt(number, int(environment[name]))


def _report_ends(driver: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):  # there is none left
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            _send(driver, WorkerEnded(pid, os.waitstatus_to_exitcode(status)))


def _send(driver: socket.socket, word: Word) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the driver has gone: the next look at the socket says so
        driver.sendall(msgspec.msgpack.encode(word))


if __name__ == "__main__":
    main()
    os._exit(0)  # what has been imported is not taken down piece by piece
