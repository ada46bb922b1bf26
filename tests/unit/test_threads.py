"""Computation in a thread of its own, for an event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from asyncflow.threads import ComputeThread, at_files, places
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
