"""Attempts of a run: each is a process of its own, forked from one that has imported everything, and may end in any way."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from asyncflow.checkpoint import folder
from asyncflow.config import parse
from asyncflow.engines.train import state, torch_engine
from asyncflow.run.job import Job, Listener, run_with_signals
from asyncflow.run.state import saving
from asyncflow.run.state.fork import fork, is_begun
from asyncflow.types import RunError, UserError
from tests.e2e.operations import watch
from tests.forked import context
from tests.patience import patience


class AttemptProcess:
    """One start of a run, `cluster: inline`, in a process of its own. `harm`: see `harmed`. `kill_before`: a kind of operation on
    the run's folder, before which it is killed; every operation is noted in a file (`tests/e2e/operations.py`). `killed_after`:
    so many steps, with whose metrics it is killed, however fast it is."""

    def __init__(
        self,
        tree: Mapping[str, Any],
        *,
        resume: bool = True,
        harm: tuple[str, int] = ("", 0),
        kill_before: str | None = None,
        killed_after: int | None = None,
        origin: str = "",
    ) -> None:
        """`origin`: the run is a fork of that one."""
        self.run_dir = Path(tree["run"]["dir"]) / tree["run"]["name"]
        self.log = self.run_dir.with_name("said.log")
        self.operations = self.run_dir.with_name("operations.txt")
        of_folder = (str(self.operations), kill_before)
        self._process = context().Process(
            target=_run_attempt, args=(dict(tree), resume, harm, str(self.log), of_folder, killed_after, origin)
        )
        self._process.start()

    def wait_for_steps(self, number: int, seconds: float = 60.0) -> None:
        """Until the metrics of so many steps are written, or the attempt is over."""
        deadline = time.monotonic() + patience(seconds)
        while self.num_steps() < number and self._process.is_alive():
            assert time.monotonic() < deadline, f"waited in vain: {self.said()}"
            time.sleep(0.005)

    def wait_for(self, words: str, seconds: float = 60.0) -> None:
        """Until they are said."""
        deadline = time.monotonic() + patience(seconds)
        while words not in self.said():
            assert time.monotonic() < deadline and self._process.is_alive(), f"waited in vain: {self.said()}"
            time.sleep(0.01)

    def end(self, by: int | None = None, seconds: float = 60.0) -> int:
        """Have it end, by a signal perhaps. Returns the exit status as a shell sees it."""
        if by is not None and self._process.is_alive():
            assert self._process.pid is not None
            os.kill(self._process.pid, by)
        self._process.join(patience(seconds))
        if self._process.is_alive():
            self._process.kill()
            raise AssertionError(f"it did not end: {self.said()}")
        code = self._process.exitcode
        assert code is not None
        return code if code >= 0 else 128 - code

    def kill(self) -> None:
        """Have it end by SIGKILL at once, with all processes below it."""
        assert self._process.pid is not None
        process = psutil.Process(self._process.pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        assert self.end() == 137, self.said()

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def num_steps(self) -> int:
        """Whose metrics are written."""
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0


def _run_attempt(
    tree: dict[str, Any],
    resume: bool,
    harm: tuple[str, int],
    log: str,
    operations: tuple[str, str | None],
    killed_after: int | None,
    origin: str,
) -> None:
    os.setsid()
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    said = Path(log).open("w", buffering=1)  # noqa: SIM115
    if operations[1] is not None:
        watch(Path(tree["run"]["dir"]) / tree["run"]["name"], *operations)

    class Written(Listener):
        def log(self, text: str) -> None:
            print(text, file=said)

        def step(self, step: int, row: Mapping[str, float]) -> None:
            if killed_after == step + 1:
                os.kill(os.getpid(), signal.SIGKILL)

    async def run() -> int:
        config = parse({**tree, "cluster": "inline"})
        if origin and not (resume and is_begun(config, origin, None)):
            fork(config, origin, {"data", "optimizer"}, Written().log)
        job = Job(config, Written(), resume=resume)
        is_finished = await run_with_signals(job, job.run())
        return 0 if is_finished else 128 + (job.ended_by or signal.SIGINT)

    sys.stderr = said
    with harmed(*harm, Path(log).with_name("no-room.jsonl")):
        try:
            status = asyncio.run(run())
        except (RunError, UserError) as error:
            print(error, file=said)
            status = 1 if isinstance(error, RunError) else 2
    said.flush()
    os._exit(status)


@contextlib.contextmanager
def patched(owner: Any, name: str, by: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _slow(load: Callable[..., Any], number: int) -> Callable[..., Any]:
    async def load_slowly(engine: Any, folder: Path) -> None:
        if number:
            os.kill(os.getpid(), number)
        await asyncio.sleep(1.5)  # the meaning is a time: longer than `run.stop_grace_seconds` of whoever is interrupted
        await load(engine, folder)

    return load_slowly


def _slow_updates(optim_step: Callable[..., Any], seconds: float, number: int) -> Callable[..., Any]:
    made = itertools.count()

    async def step_slowly(engine: Any, normaliser: int) -> Any:
        if not next(made):
            os.kill(os.getpid(), number)
        await asyncio.sleep(seconds)
        return await optim_step(engine, normaliser)

    return step_slowly


class Full:
    """A disk that has no room for each write of a checkpoint once, at one of each checkpoint."""

    def __init__(self, told: Path) -> None:
        self._told, self._version = told, 0
        lines = told.read_text().splitlines() if told.exists() else []
        self._failed = {what for line in lines for what, is_failed in [json.loads(line)] if is_failed}
        self._is_done = False  # with the version's

    def has_room_for(self, name: str, named: str) -> bool:
        """`named`: the paths. What is of no version, or of one before, is a write of the checkpoint under way."""
        version = max((int(found) for found in re.findall(r"step-(\d+)", named)), default=0)
        if version > self._version:
            self._version, self._is_done = version, False
        below = re.match(r"[\w./-]*", named.rpartition("checkpoints")[2]) if "checkpoints" in named else None
        what = f"{name} {'checkpoints' + re.sub('[0-9]+', 'n', below[0]) if below else 'the folder'}"
        is_failed = not self._is_done and what not in self._failed
        if is_failed:
            self._is_done = True
            self._failed.add(what)
        with self._told.open("a") as file:
            file.write(json.dumps([what, is_failed]) + "\n")
        return not is_failed


@contextlib.contextmanager
def harmed(how: str, number: int, no_room: Path) -> Iterator[None]:
    """Something happens at the write of this number to a checkpoint, from 0 on.

    `kill`: the process ends before it; `after`: right after it; `term`: it is told to end by SIGTERM; `full`: there is no room at
    one write of each checkpoint, at another one each time, in this attempt and those before it, until there has been none at each;
    `no_room` has a line for every write, which says whether it has failed. `load`:
    a checkpoint is loaded slowly, and the process gets the signal of this number, unless it is 0, as soon as that begins.
    `updates` and a number of milliseconds, which each update takes: the process gets the signal of this number in the first one.
    """
    if not how:
        yield
        return
    if how == "load":
        with patched(torch_engine.TorchEngine, "load_state", _slow(torch_engine.TorchEngine.load_state, number)):
            yield
        return
    if how.startswith("updates"):
        seconds = int(how.removeprefix("updates")) / 1000
        with patched(torch_engine.TorchEngine, "optim_step", _slow_updates(torch_engine.TorchEngine.optim_step, seconds, number)):
            yield
        return
    places: list[tuple[Any, str]] = [
        (saving, "write_driver"),
        (saving, "_write_all"),
        (state, "save"),
        (folder, "_hashed_and_synced"),
        (folder, "replace"),
        (folder, "sync_folder"),
        (folder.Path, "rename"),
        (folder.shutil, "rmtree"),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name in places]
    writes = itertools.count()
    full = Full(no_room)
    lock = threading.Lock()

    def wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            named = str([*args[:1], getattr(options.get("storage_writer"), "path", "")])
            if "checkpoints" not in named and name != "sync_folder":  # which is of the folder, too, that has them
                return original(*args, **options)
            with lock:
                is_it = next(writes) == number
                has_room = how != "full" or options.get("ignore_errors") or full.has_room_for(name, named)
            if not has_room:
                if name == "write_driver":  # some of it was written
                    args[0].mkdir(parents=True, exist_ok=True)
                    (args[0] / "driver.msgpack").write_bytes(b"half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if is_it and how in ("kill", "term"):
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGTERM)
            result = original(*args, **options)
            if is_it and how == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for owner, name, original in originals:
        setattr(owner, name, wrapped(name, original))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
