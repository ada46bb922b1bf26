"""What benchmarks of whole runs share: a run of real or of sleeping engines, and what its spans say of its steps.

The first steps, which load and warm up, and the last ones, before which rollout runs out of prompts, are left out of every figure.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncflow.config import parse
from asyncflow.engines.costs import Costs
from asyncflow.run.job import Job
from asyncflow.simulation.run import simulate
from asyncflow.telemetry.attribution import REASONS, attributed
from asyncflow.telemetry.gantt import step_ends
from asyncflow.telemetry.idle import Activity, busy_and_idle
from asyncflow.telemetry.spans import Span
from asyncflow.telemetry.trace import SPANS_FILE, read_spans

FIRST, LAST = 2, 2
"""Steps left out at the start and at the end."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a run has left: its metrics by step, and its spans, in which idle time has its reason.

    `measured`: the steps that figures are made of.
    """

    measured: Sequence[int]
    rows: Mapping[int, Mapping[str, float]]
    spans: list[Span]

    @property
    def windows(self) -> list[tuple[float, float]]:
        """Of each of those steps: from the update before it to its own, on the spans' clock."""
        ends = {int(step): end for step, end in step_ends(self.spans, 0.0)}
        return [(ends[step - 1], ends[step]) for step in self.measured]

    @property
    def wall(self) -> float:
        """Seconds that those steps took."""
        return sum(end - start for start, end in self.windows)

    def mean(self, metric: str) -> float:
        return statistics.fmean(self.rows[step][metric] for step in self.measured)

    def activity(self, worker: str) -> Activity:
        """What a worker did in the measured steps, idle time by reason."""
        busy, idle = Counter[str](), Counter[str]()
        for window in self.windows:
            of_step = busy_and_idle(self.spans, worker, *window)
            busy.update(of_step.busy)
            idle.update(of_step.idle)
        return Activity(self.wall, dict(busy), dict(idle))

    def share(self, worker: str, *states: str) -> float:
        """Of the measured steps' time, that a worker spends on these tasks, or waiting for these reasons."""
        activity = self.activity(worker)
        return sum(activity.busy.get(state, 0.0) + activity.idle.get(state, 0.0) for state in states) / self.wall

    def idle(self, worker: str) -> float:
        """Share of the measured steps' time that a worker waits."""
        return self.share(worker, *REASONS)

    def workers(self, pool: str) -> list[str]:
        """`rollout`: all rollout workers; other pools have one."""
        return sorted({span.worker for span in self.spans if span.worker.partition("/")[0] == pool})

    def seconds(self, task: str, step: int) -> dict[int, float]:
        """By group, what a task took for this step on the lane of its worker."""
        taken: dict[int, float] = {}
        for span in self.spans:
            if span.task == task and span.step == step and span.is_lane:
                taken[span.group] = taken.get(span.group, 0.0) + span.end - span.start
        return taken

    def occupancy(self, worker: str, num_slots: int) -> float:
        """Mean share of a worker's slots that hold a response while it generates.

        Rows come when their group is taken, and more of them than there are slots wait in the engine. They end within the piece of
        the lane's state that counts them (`telemetry.flush_seconds` long), in the middle of it as far as is known.
        """
        own = [span for span in self.spans if span.worker == worker]
        lane = [span for span in own if span.is_lane and span.task == "generate"]
        changes = [(span.start, span.rows) for span in own if span.task == "generate_group"]
        changes += [((span.start + span.end) / 2, -span.rows) for span in lane]
        full_seconds = 0.0
        for start, end in self.windows:
            held, since = 0, start
            for moment, change in sorted([*changes, (end, 0)]):
                now = min(max(moment, start), end)
                full_seconds += min(held, num_slots) / num_slots * (now - since)
                held, since = held + change, now
        return full_seconds / self.activity(worker).busy["generate"]


def run_real(tree: Mapping[str, Any]) -> Run:
    """A run of this configuration, in processes."""
    config = parse(tree)

    async def main() -> Job:
        job = Job(config)
        assert await job.run()
        return job

    job = asyncio.run(main())
    return Run(range(FIRST, config.run.steps - LAST), job.rows, attributed(read_spans(config.run_dir / SPANS_FILE)))


def run_sleeping(tree: Mapping[str, Any], costs: Costs) -> Run:
    """The same under a virtual clock, with engines that take what `costs` says."""
    config = parse(tree)
    simulated = simulate(config, costs=costs, run_dir=config.run_dir)
    assert not simulated.violations, simulated.violations
    return Run(range(FIRST, config.run.steps - LAST), simulated.rows, attributed(simulated.spans))
