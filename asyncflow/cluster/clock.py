"""Virtual time: an event loop whose clock jumps to the next timer, and processes that it can stop, freeze and kill.

A process is a context variable: whatever runs in its context belongs to it. The callbacks of a process that is paused are kept
until it goes on; those of one that was killed never run, so that not even its `finally` blocks do, as after `kill -9`. What runs
in no process is never stopped.

There are no threads and no sockets here: nothing outside may wake the loop, so a loop with nothing to do has come to its end.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from asyncflow.types import RunError

MAX_STEPS = 5_000  # of the loop, without a tick of the clock


class Deadlock(RunError):
    """End of a simulation in which nothing can ever happen again, or in which everything happens at one moment."""


class Process:
    """Part of the simulation that may be paused or killed as one. Restarted under the same name it is another process."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.loop = loop
        self.is_alive, self.is_paused = True, False
        self.backlog: list[Any] = []  # asyncio's handles
        loop.processes.append(self)
        self.on_death: list[Callable[[], None]] = []
        self._context = contextvars.Context()
        self._context.run(_process.set, self)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call something as this process."""
        return self._context.copy().run(function, *arguments)

    def start(self, main: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start a coroutine in this process."""
        return self.loop.create_task(main, name=name, context=self._context.copy())

    def pause(self) -> None:
        """Keep back everything that the process would do."""
        self.is_paused = True

    def resume(self) -> None:
        """Do what was kept back, and go on."""
        self.is_paused = False
        self.loop._ready.extend(self.backlog)
        self.backlog.clear()

    def kill(self) -> None:
        """End the process, and tell `on_death`."""
        self.is_alive = self.is_paused = False
        for report in self.on_death:
            report()


_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def current_process() -> Process:
    """Process whose code is running."""
    process = _process.get()
    assert process is not None, "this runs in no process"
    return process


class _NumberedTask(asyncio.Task[Any]):
    """asyncio keeps tasks in sets, and so may anybody: a `TaskGroup` cancels its own in the order of its set. By their numbers that
    is the same in every process; by their addresses, as usual, it is not."""

    def __init__(self, number: int, coro: Any, **options: Any) -> None:
        self._number = number  # first: what follows puts the task into a set
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    """Virtual seconds from 0. What is sent to an executor runs at once. `errors`: what the loop was told that nobody took."""

    _ready: deque[Any]  # asyncio's own: handles that are due, and a heap of those that have a time
    _scheduled: list[Any]

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.errors: list[dict[str, Any]] = []
        self.processes: list[Process] = []
        self._owners: weakref.WeakKeyDictionary[asyncio.Task[Any], Process | None] = weakref.WeakKeyDictionary()
        self._steps = 0
        self._numbers = itertools.count()
        self.set_task_factory(lambda loop, coro, **options: _NumberedTask(next(self._numbers), coro, loop=loop, **options))
        self.is_over = False  # everybody runs again, so that every task can end
        self.set_exception_handler(lambda loop, context: self.errors.append(context))

    def time(self) -> float:
        """Virtual time, in seconds."""
        return self.now

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """Task of a coroutine, which belongs to the process that creates it."""
        task = super().create_task(coro, **options)
        context = options.get("context")
        self._owners[task] = _process.get() if context is None else context.get(_process)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Call `func` at once: there are no threads."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # the caller's
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        scheduled, ready = self._scheduled, self._ready
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)
        if not ready:
            if not scheduled:
                raise Deadlock("no task has anything to do any more:\n" + self.waiting())
            if scheduled[0]._when > self.now:
                self.now, self._steps = scheduled[0]._when, 0
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise Deadlock(f"the clock stands still at {self.now}")
        while scheduled and scheduled[0]._when <= self.now:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(_process)
            if process is None or self.is_over or (process.is_alive and not process.is_paused):
                handle._run()
            else:
                process.backlog.append(handle)

    def _write_to_self(self) -> None:
        """Do nothing: there is no other thread to be woken by."""

    def living(self) -> list[asyncio.Task[Any]]:
        """The tasks that are not done, by name, but for those of processes that were killed."""
        tasks = (task for task in asyncio.all_tasks(self) if (owner := self._owners.get(task)) is None or owner.is_alive)
        return sorted(tasks, key=lambda task: task.get_name())

    def waiting(self) -> str:
        """Tasks that wait, and where."""
        lines = []
        for task in self.living():
            at = [f"{f.cr_frame.f_code.co_filename.rpartition('/')[2]}:{f.cr_frame.f_lineno}" for f in _awaited(task.get_coro())]
            lines.append(f"  {task.get_name()}: {' > '.join(at)}")
        return "\n".join(lines)

    def finish(self) -> None:
        """End every task, those of dead processes too."""
        self.is_over, self._steps = True, 0
        for process in self.processes:
            self._ready.extend(process.backlog)
        for _ in range(20):
            tasks = sorted((task for task in asyncio.all_tasks(self) if not task.done()), key=lambda task: task.get_name())
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.wait(tasks, timeout=30.0))
        self.close()


def _awaited(coroutine: Any) -> list[Any]:
    """A coroutine, the one that it awaits, and so on."""
    chain = []
    while getattr(coroutine, "cr_frame", None) is not None:
        chain.append(coroutine)
        coroutine = coroutine.cr_await
    return chain
