"""A run of many steps in real processes: nothing of what it takes of the machine grows.

Windows of 100 steps are compared: the second hundred, when everything has been made once, and the last one. Allowed are a sixteenth
of the resident memory and 8 MiB on top of it (allocators give back late, in steps), two file handles and two threads (of libraries'
pools), no file in shared memory, and half of a step's time, whose quickest quarter is compared since other work shares the machine.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncflow.config import parse
from asyncflow.run.job import Job, Listener
from tests.conftest import MODEL
from tests.depth import deep
from tests.patience import patience

STEPS, WINDOW = 400, 100
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "periodic": {},
    "delayed": {"train": {"old": "previous"}},
    "sub_step": {},
    "bounded": {},
}


class Watcher(Listener):
    """Observer that notes after each step what every process of the run takes."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.job = Job(parse(tree), self)
        self.taken: dict[str, list[dict[str, float]]] = {}
        self.num_shared: list[int] = []
        self.step_seconds: list[float] = []

    def step(self, step: int, row: Mapping[str, float]) -> None:
        for name, pid in {**self.job._cluster.pids(), "driver": psutil.Process().pid}.items():
            process = psutil.Process(pid)
            with process.oneshot():
                memory, handles, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
            self.taken.setdefault(name, []).append({"memory": memory, "handles": handles, "threads": threads})
        self.num_shared.append(sum(1 for _ in self.job.weights_dir.rglob("*")))
        self.step_seconds.append(row["perf/step_seconds"])


@deep
@pytest.mark.parametrize("mode", MODES)
def test_nothing_grows(mode: str, tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "run": {"name": "test", "dir": str(tmp_path), "steps": STEPS},
        "model": {"path": str(MODEL)},
        "data": {"path": "generated:arithmetic"},
        "schedule": mode,
        "rollout": {"num_workers": 2, "num_slots": 8, "group_size": 2, "max_new_tokens": 16},
        "train": {"prompts_per_step": 4, "learning_rate": 1e-5, **MODES[mode].get("train", {})},
        "eval": {"path": None},
        "telemetry": {"trackers": []},
        "checkpoint": {"every_steps": 20},
    }
    watcher = Watcher(tree)

    async def main() -> bool:
        async with asyncio.timeout(patience(280.0)):
            return await watcher.job.run()

    assert asyncio.run(main())
    early, late = slice(WINDOW, 2 * WINDOW), slice(STEPS - WINDOW, STEPS)
    grown = []
    for name, taken in watcher.taken.items():
        assert len(taken) == STEPS, name
        for what, allowed in (
            ("memory", lambda before: before / 16 + (8 << 20)),
            ("handles", lambda _: 2),
            ("threads", lambda _: 2),
        ):
            before, after = (statistics.median(each[what] for each in taken[window]) for window in (early, late))
            if after > before + allowed(before):
                grown.append(f"{name}: {what} {before:g} -> {after:g}")
    before, after = (max(watcher.num_shared[window]) for window in (early, late))
    if after > before:
        grown.append(f"files in shared memory {before} -> {after}")
    quick, later = (statistics.quantiles(watcher.step_seconds[window], n=4)[0] for window in (early, late))
    if later > 1.5 * quick:
        grown.append(f"seconds a step {quick:.3f} -> {later:.3f}")
    assert not grown, grown
