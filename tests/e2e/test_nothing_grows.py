"""A run of many steps in real processes: nothing of what it takes of the machine grows. What is noise says
tests/soak/growth.py, which looks at thousands of steps.

Windows of 100 steps are compared: the second hundred, when everything has been made once, and the last one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncflow.config import parse
from asyncflow.run.job import Job, Listener
from tests.conftest import merged
from tests.depth import deep
from tests.patience import patience
from tests.soak.growth import MODES, Taken, Windows, grown, processes, tree

STEPS = 400
COMPARED = Windows(range(100, 200), range(300, 400))


class Watcher(Listener):
    """Observer that notes after each step what every process of the run takes."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.job = Job(parse(tree), self)
        self.taken: list[Taken] = []
        self.step_seconds: dict[int, float] = {}

    def step(self, step: int, row: Mapping[str, float]) -> None:
        num_shared = sum(1 for _ in self.job.weights_dir.rglob("*"))
        self.taken.append(Taken(0, step, processes(psutil.Process()), num_shared))
        self.step_seconds[step] = row["perf/step_seconds"]


@deep
@pytest.mark.parametrize("mode", MODES)
def test_nothing_grows(mode: str, tmp_path: Path) -> None:
    watcher = Watcher(merged(tree(mode, tmp_path, STEPS), {"checkpoint": {"every_steps": 20}}))

    async def main() -> bool:
        async with asyncio.timeout(patience(280.0)):
            return await watcher.job.run()

    assert asyncio.run(main())
    assert [each.step for each in watcher.taken] == list(range(STEPS))
    assert {"driver", "rollout/0", "rollout/1", "trainer/0"} <= set(watcher.taken[-1].processes)
    assert (found := grown(watcher.taken, watcher.step_seconds, COMPARED)) == [], found
