"""Many simulated runs: in this process, or in several.

    Simulators --a line of JSON: an order--> python -m asyncflow.simulation.seeds --a line of JSON for each run--> Simulators

consumes: orders
waits for: the processes' next line
is unblocked by: a run that has ended, or a process that has
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from asyncflow.config import Config, parse
from asyncflow.engines.costs import Costs
from asyncflow.simulation.run import NO_FAULTS, Simulated, drawn_faults, simulate
from asyncflow.telemetry.idle import idle_of_pools
from asyncflow.types import RunError

MAX_LINE_BYTES = 1 << 24
RUN_SECONDS = 1800.0
"""Seconds of real time for one run in a process of its own."""


class Order(msgspec.Struct, frozen=True):
    """Order to a process. `config` as `Config.model_dump` has it."""

    config: dict[str, Any]
    costs: Costs
    seeds: list[int]
    has_faults: bool


class Outcome(msgspec.Struct, frozen=True):
    """Figures of a run. Times are virtual seconds; ratios and rates leave out the first step, which loads.

    `idle`: by pool, the mean over its workers of the share of time that they wait.
    """

    seed: int
    seconds: float
    steps: int
    step_seconds: float
    tpspd: float
    idle: dict[str, float]
    staleness_mean: float
    staleness_max: int
    counts: dict[str, int]
    violations: list[str]


def outcome(run: Simulated) -> Outcome:
    """Figures of a run."""
    steps = [run.rows[step] for step in sorted(run.rows)]
    later = steps[1:] or steps
    seconds = sum(row["perf/step_seconds"] for row in later)
    trained = sum(row["perf/tpspd"] * row["perf/step_seconds"] for row in later)
    commits = sorted(span.end for span in run.spans if span.task == "optim_step") or [run.seconds]
    return Outcome(
        seed=run.seed,
        seconds=run.seconds,
        steps=len(steps),
        step_seconds=seconds / len(later) if later else 0.0,
        tpspd=trained / seconds if seconds else 0.0,
        idle=idle_of_pools(run.spans, commits[0] if len(commits) > 1 else 0.0, commits[-1]),
        staleness_mean=statistics.fmean(row["staleness/mean"] for row in later) if later else 0.0,
        staleness_max=max((int(row["staleness/max"]) for row in steps), default=0),
        counts=dict(run.counts),
        violations=run.violations,
    )


class Simulators:
    """Processes that simulate, each one order after another. Used as `async with`; they end with it."""

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._free: asyncio.Queue[Process] = asyncio.Queue()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Simulators:
        async with self._stack:
            for _ in range(self._num_processes):
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "asyncflow.simulation.seeds",
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MAX_LINE_BYTES,
                )  # fmt: skip
                self._stack.push_async_callback(_end, process)
                self._free.put_nowait(process)
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def outcomes(self, order: Order) -> AsyncIterator[Outcome]:
        """Figures of each seed of an order, as they end, by the next process that is free. Raises `RunError` when it has ended
        before its time."""
        process = await self._free.get()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        for _ in order.seeds:
            try:
                line = await asyncio.wait_for(process.stdout.readline(), RUN_SECONDS)
            except TimeoutError as error:
                raise RunError(
                    f"a simulated run has not ended within {RUN_SECONDS:g} real seconds: take fewer steps or workers"
                ) from error
            if not line:
                raise RunError(f"a simulating process ended with status {await process.wait()}")
            yield msgspec.json.decode(line, type=Outcome)
        self._free.put_nowait(process)


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


async def outcomes(config: Config, costs: Costs, seeds: range, *, has_faults: bool, processes: int) -> AsyncIterator[Outcome]:
    """Figures of each seed, as they end. Raises `RunError` when a process has ended before its time."""
    tree, count = config.model_dump(mode="json"), min(processes, len(seeds))
    found: asyncio.Queue[Outcome] = asyncio.Queue()

    async def carry_out(order: Order) -> None:
        async for each in simulators.outcomes(order):
            found.put_nowait(each)

    async with Simulators(count) as simulators, asyncio.TaskGroup() as group:
        for i in range(count):
            group.create_task(carry_out(Order(tree, costs, list(seeds[i::count]), has_faults)))
        for _ in seeds:
            yield await found.get()


def run_seed(config: Config, costs: Costs, seed: int, *, has_faults: bool) -> Outcome:
    """Figures of one run, of which no file is kept."""
    faults = drawn_faults(config, costs, seed) if has_faults else NO_FAULTS
    return outcome(simulate(config, costs=costs, faults=faults, seed=seed))


def main() -> None:
    """Carry out the orders on standard input, a line each."""
    gc.freeze()  # every run looks for what nobody took, but not among what was imported
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Order)
        config = parse(order.config)
        for seed in order.seeds:
            outcome_line = msgspec.json.encode(run_seed(config, order.costs, seed, has_faults=order.has_faults))
            sys.stdout.buffer.write(outcome_line + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
