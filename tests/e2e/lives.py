"""Lives of a run: each is a process of its own, forked from one that has imported everything, and may end in any way."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncflow.build import saving
from asyncflow.checkpoint import folder
from asyncflow.config import parse
from asyncflow.engines.train import state, torch_engine
from asyncflow.job import Job, Listener, run_with_signals
from asyncflow.types import RunError, UserError

WARM = ["tests.e2e.lives", "asyncflow.job", "asyncflow.engines.train.torch_engine", "asyncflow.engines.rollout.engine",
        "transformers.models.qwen2.modeling_qwen2", "torch.distributed.checkpoint.hf_storage"]  # fmt: skip


class Life:
    """One start of a run, `cluster: inline`, in a process of its own. `harm`: see `harmed`."""

    def __init__(self, tree: Mapping[str, Any], *, resume: bool = True, harm: tuple[str, int] = ("", 0)) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(WARM)
        self.run_dir = Path(tree["run"]["dir"]) / tree["run"]["name"]
        self.log = self.run_dir.with_name("said.log")
        self._process = context.Process(target=_live, args=(dict(tree), resume, harm, str(self.log)))
        self._process.start()

    def wait_for_steps(self, number: int, seconds: float = 60.0) -> None:
        """Until the metrics of so many steps are written, or the life is over."""
        deadline = time.monotonic() + seconds
        while self.num_steps() < number and self._process.is_alive():
            assert time.monotonic() < deadline, f"waited in vain: {self.said()}"
            time.sleep(0.005)

    def wait_for(self, words: str, seconds: float = 60.0) -> None:
        """Until they are said."""
        deadline = time.monotonic() + seconds
        while words not in self.said():
            assert time.monotonic() < deadline and self._process.is_alive(), f"waited in vain: {self.said()}"
            time.sleep(0.01)

    def end(self, by: int | None = None, seconds: float = 60.0) -> int:
        """Have it end, by a signal perhaps. Returns the exit status as a shell sees it."""
        if by is not None and self._process.is_alive():
            assert self._process.pid is not None
            os.kill(self._process.pid, by)
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            raise AssertionError(f"it did not end: {self.said()}")
        code = self._process.exitcode
        assert code is not None
        return code if code >= 0 else 128 - code

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def num_steps(self) -> int:
        """Whose metrics are written."""
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0


def _live(tree: dict[str, Any], resume: bool, harm: tuple[str, int], log: str) -> None:
    os.setsid()
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    said = Path(log).open("w", buffering=1)  # noqa: SIM115

    class Written(Listener):
        def says(self, text: str) -> None:
            print(text, file=said)

    async def run() -> int:
        job = Job(parse({**tree, "cluster": "inline"}), Written(), resume=resume)
        is_finished = await run_with_signals(job, job.run())
        return 0 if is_finished else 128 + (job.ended_by or signal.SIGINT)

    sys.stderr = said
    with harmed(*harm):
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
        await asyncio.sleep(1.5)
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


@contextlib.contextmanager
def harmed(how: str, number: int) -> Iterator[None]:
    """Something happens at the write of this number to a checkpoint, from 0 on.

    `kill`: the process ends before it; `after`: right after it; `term`: it is told to end by SIGTERM; `full`: at the write of this
    number of the checkpoint of version 1, of the next number of that of version 2, and so on, there is no room. `load`:
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
    seen: Counter[int] = Counter()  # writes, by version; all together under -1
    lock = threading.Lock()

    def wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            named = str([*args[:1], getattr(options.get("storage_writer"), "path", "")])
            if "checkpoints" not in named:
                return original(*args, **options)
            found = re.search(r"step-(\d+)", named)
            version = int(found[1]) if found is not None else 0
            with lock:
                so_far, of_version = seen[-1], seen[version]
                seen[-1] += 1
                seen[version] += 1
            if how == "full" and name != "rmtree" and of_version == number + version - 1:
                if name == "write_driver":  # some of it was written
                    args[0].mkdir(parents=True, exist_ok=True)
                    (args[0] / "driver.msgpack").write_bytes(b"half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            is_it = so_far == number
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
