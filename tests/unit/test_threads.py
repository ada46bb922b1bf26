"""Computation in a thread of its own, for an event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from asyncflow.threads import ComputeThread, at_files, places, run_ready
from tests.patience import patience, until


async def test_calls_run_in_order_in_one_other_thread() -> None:
    thread, seen = ComputeThread("test"), list[tuple[int, int]]()
    await asyncio.gather(*(thread.run(lambda i=i: seen.append((i, threading.get_ident()))) for i in range(5)))
    assert [i for i, _ in seen] == list(range(5))
    assert {ident for _, ident in seen} == {seen[0][1]} and seen[0][1] != threading.get_ident()
    thread.close()


async def test_setup_runs_inside_the_thread() -> None:
    idents: list[int] = []
    thread = ComputeThread("test", setup=lambda: idents.append(threading.get_ident()))
    assert idents == [await thread.run(threading.get_ident)]
    thread.close()


async def test_an_exception_reaches_the_caller_and_the_thread_goes_on() -> None:
    thread = ComputeThread("test")
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 // 0)
    assert await thread.run(lambda: 7) == 7
    thread.close()


async def test_a_call_that_raises_what_no_future_takes_ends_its_wait() -> None:
    thread, nothing = ComputeThread("test"), iter(())
    with pytest.raises(RuntimeError, match="a call in a compute thread raised StopIteration") as caught:
        await asyncio.wait_for(thread.run(lambda: next(nothing)), patience(5.0))
    assert isinstance(caught.value.__cause__, StopIteration)
    assert await thread.run(lambda: 7) == 7
    thread.close()


async def test_a_cancelled_call_does_not_hold_the_loop() -> None:
    thread, begun, release = ComputeThread("test"), threading.Event(), threading.Event()
    call = asyncio.create_task(thread.run(lambda: begun.set() or release.wait(patience(5.0))))
    await until(begun.is_set)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call, patience(0.5))
    release.set()
    assert await thread.run(lambda: 1) == 1
    thread.close()


def test_a_closed_loop_ends_the_thread_quietly() -> None:
    begun, release = threading.Event(), threading.Event()

    async def leave() -> ComputeThread:
        thread = ComputeThread("test")
        call = thread.run(lambda: begun.set() or release.wait(patience(5.0)))
        thread.waiting = asyncio.ensure_future(call)  # type: ignore[attr-defined]
        await until(begun.is_set)
        return thread

    thread = asyncio.run(leave())
    release.set()
    thread._thread.join(patience(2.0))
    assert not thread._thread.is_alive()


async def test_nothing_of_a_call_is_kept_while_the_thread_waits() -> None:
    class Weights:
        pass

    thread, given = ComputeThread("test"), Weights()
    alive = [weakref.ref(given), weakref.ref(await thread.run(lambda weights: Weights(), given))]
    del given
    await asyncio.sleep(0.05)
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    thread.close()


SCRIPT = """
import asyncio, sys, time
from asyncflow.threads import ComputeThread

def compute(seconds):
    time.sleep(seconds)
    print("computed", flush=True)

async def main():
    asyncio.get_running_loop().create_task(ComputeThread("test").run(compute, float(sys.argv[1])))
    await asyncio.sleep(0.01)

asyncio.run(main())
"""


@pytest.mark.parametrize(("seconds", "said"), [(0.3, "computed\n"), (600.0, "")])
def test_an_interpreter_that_ends_waits_for_a_computation_but_not_for_ever(seconds: float, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(seconds)], capture_output=True, text=True, timeout=patience(30), check=True
    )
    assert done.stdout == said


async def test_a_thread_at_files_tells_where_it_is_until_it_is_done(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")

    def write() -> None:
        with at_files("notes"):
            pipe.write_text("words")

    writing = asyncio.create_task(asyncio.to_thread(write))
    while not (found := places()):
        await asyncio.sleep(0.01)
    assert len(found) == 1 and found[0].startswith("notes: ") and "write (test_threads.py:" in found[0]
    assert await asyncio.to_thread(pipe.read_text) == "words"
    await writing
    assert places() == []


STARVED = """
import asyncio, faulthandler, mmap, resource, sys, threading, time
from asyncflow.threads import run_ready

faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)


async def main():
    threads = [threading.Thread(target=time.sleep, args=(0.1,)) for _ in range(4)]  # their stacks are kept for others
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.05) for _ in range(2)))
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), -1))
    mmap.mmap(-1, 12 << 30)


{"run_ready": run_ready, "asyncio.run": asyncio.run}[sys.argv[1]](main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere address space is not limited")
def test_an_error_of_a_process_without_memory_is_said_and_does_not_wait_for_a_thread_that_cannot_begin() -> None:
    """As of a driver that was starved of memory before its workers were there: asyncio's own end of it stands still for ever."""
    command = [sys.executable, "-c", STARVED, "run_ready", str(patience(30))]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=patience(60))
    assert "Cannot allocate memory" in ended.stderr and "Timeout" not in ended.stderr


async def seen_from_within() -> tuple[set[threading.Thread], str, int]:
    names = [await asyncio.to_thread(lambda: threading.current_thread().name) for _ in range(3)]
    before = set(threading.enumerate())
    await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.01) for _ in range(50)))
    process = await asyncio.create_subprocess_exec("sh", "-c", "exit 7")
    return set(threading.enumerate()) - before, names[0].partition("_")[0], await process.wait()


def test_a_ready_loop_starts_no_thread_and_leaves_others_as_they_were() -> None:
    for _ in range(2):  # one run after another, as `verify` does
        assert run_ready(seen_from_within()) == (set(), "asyncio", 7)

    async def plain() -> int:
        return await (await asyncio.create_subprocess_exec("sh", "-c", "exit 3")).wait()

    assert asyncio.run(plain()) == 3
