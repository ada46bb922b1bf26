"""Number of threads that a process computes with, a thread that computes for an event loop, and a loop that starts none.

consumes: calls handed to `run`, one at a time in order (so that the thread is also its owner's lock)
waits for: the next call
is unblocked by: `run` and `close`

The thread is a daemon: an interpreter that must end waits `EXIT_SECONDS` for a computation to finish, and no longer.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from asyncflow import mkl

T = TypeVar("T")

PLACE_LINES: Final = 5
CHECKPOINT_FILES: Final = "checkpoint"
"""Name of a thread that is at a checkpoint's files, see `at_files`."""
EXIT_SECONDS: Final = 2.0
"""Seconds that an interpreter which ends gives a thread to end, too: one that is cut off in the middle of C++ takes the process
with it, by SIGABRT ("terminate called without an active exception")."""

START_SECONDS: Final = 60.0
"""Seconds in which the threads of an event loop are to begin."""

_to_end: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()


def end_at_exit(thread: threading.Thread, ask: Callable[[], object]) -> None:
    """Have a daemon thread end before the interpreter does; `ask` tells it to, and keeps nothing alive."""
    _to_end[thread] = ask


@atexit.register
def _end_threads() -> None:
    threads = [(thread, ask) for thread, ask in _to_end.items() if thread.is_alive()]
    for _, ask in threads:
        ask()
    deadline = time.monotonic() + EXIT_SECONDS
    for thread, _ in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def num_cores() -> int:
    """Number of this machine's cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_environment(count: int) -> dict[str, str]:
    """Environment of a worker that computes with so many threads: numerical libraries read it when they are imported."""
    return {
        "OMP_NUM_THREADS": str(count),
        "MKL_NUM_THREADS": str(count),
        "OPENBLAS_NUM_THREADS": "1",  # numpy's, which starts threads when it is imported, and multiplies nothing large here
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        **mkl.environment(),
    }


class ComputeThread:
    """Runs callables one after another in a single daemon thread; their results come back to the calling event loop."""

    def __init__(self, name: str, setup: Callable[[], None] | None = None) -> None:
        """`setup` runs first, inside the thread (thread counts of numerical libraries are per thread)."""
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop] | None]
        self._calls = queue.SimpleQueue()
        self._setup = setup
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._is_busy = False
        _living.add(self)
        end_at_exit(self._thread, partial(self._calls.put, None))
        self._thread.start()

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """Run `call(*args)` in the thread and return its result; its exception is raised here."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._calls.put((lambda: call(*args), future, loop))
        return await future

    @property
    def place(self) -> str:
        """Name of the thread and the innermost lines that it is at, the innermost last; empty while nothing is computed."""
        return _place(self._thread.name, self._thread.ident or 0) if self._is_busy else ""

    def close(self) -> None:
        """End the thread after the calls already handed in."""
        self._calls.put(None)

    def _loop(self) -> None:
        if self._setup is not None:
            self._setup()
        while (item := self._calls.get()) is not None:
            call, future, loop = item
            result, error = None, None
            self._is_busy = True
            try:
                result = call()
            except BaseException as caught:
                error = caught
            self._is_busy = False
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:  # the loop is closed: nobody waits for this answer any more
                return
            del item, call, future, loop, result, error  # what a call was given or has made may be a whole model


_living: weakref.WeakSet[ComputeThread] = weakref.WeakSet()


_at_files: dict[int, str] = {}  # names of what threads do that may hang with a disk, by the thread


@contextlib.contextmanager
def at_files(name: str) -> Iterator[None]:
    """Context of work of this thread with files, which a disk may hold up: `places` tells of it, by this name."""
    ident = threading.get_ident()
    _at_files[ident] = name
    try:
        yield
    finally:
        del _at_files[ident]


def places() -> list[str]:
    """Places of this process's threads that compute now, see `ComputeThread.place`, or are at files."""
    found = [thread.place for thread in list(_living)] + [_place(name, ident) for ident, name in list(_at_files.items())]
    return sorted(filter(None, found))


def _place(name: str, ident: int) -> str:
    """A name for a thread, and the innermost lines that it is at, the innermost last; empty for one that is not there."""
    frame, lines = sys._current_frames().get(ident), list[str]()
    while frame is not None and len(lines) < PLACE_LINES and frame.f_code is not ComputeThread._loop.__code__:
        code = frame.f_code
        lines.append(f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})")
        frame = frame.f_back
    return f"{name}: {' > '.join(reversed(lines))}" if lines else ""


def run_ready(main: Coroutine[Any, Any, T]) -> T:
    """Run as `asyncio.run` does, in an event loop that starts no thread while it runs, nor as it ends.

    `Thread.start` waits for ever where the new thread finds no memory for its first frame (python/cpython#140746), and asyncio
    starts threads for `to_thread`, for the end of each child process, and to end its executor: so a driver that was starved of
    memory for a moment stood still as it was about to say so. Here all threads are there from the start.
    """
    with asyncio.Runner(loop_factory=_ReadyLoop) as runner:
        return runner.run(main)


class _ReadyLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        count = min(32, num_cores() + 4)  # as many as asyncio's own may become
        self._executor, gate = ThreadPoolExecutor(count, "asyncio"), threading.Barrier(count + 1, timeout=START_SECONDS)
        for _ in range(count):
            self._executor.submit(gate.wait)
        gate.wait()
        self.set_default_executor(self._executor)
        self._has_watcher = sys.version_info < (3, 12) and hasattr(os, "pidfd_open")  # later it is Python's own choice
        if self._has_watcher:
            watcher = asyncio.PidfdChildWatcher()
            watcher.attach_loop(self)
            asyncio.set_child_watcher(watcher)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Let the threads end when they have done their work: the interpreter waits for that."""
        self._executor.shutdown(wait=False)

    def close(self) -> None:
        """See `asyncio.AbstractEventLoop.close`."""
        if self._has_watcher and not self.is_closed():
            asyncio.set_child_watcher(None)  # type: ignore[arg-type]
        super().close()


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if isinstance(error, StopIteration):  # which no future takes: the caller would wait for ever
        ended = RuntimeError("a call in a compute thread raised StopIteration")
        ended.__cause__ = error
        error = ended
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
