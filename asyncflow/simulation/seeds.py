"""Many simulated runs: in this process, or in several.

    outcomes --one line of JSON: what to do--> python -m asyncflow.simulation.seeds --a line of JSON for each run--> outcomes

consumes: seeds
waits for: the processes' next line
is unblocked by: a run that has ended, or a process that has
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from asyncflow.config import Config, parse
from asyncflow.engines.sleeping import Costs
from asyncflow.simulation.run import NO_FAULTS, Simulated, drawn_faults, simulate
from asyncflow.telemetry.idle import idle_ratios
from asyncflow.types import RunError

MAX_LINE_BYTES = 1 << 24
RUN_SECONDS = 1800.0
"""Of real time, for one run in a process of its own."""


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
    pools: dict[str, list[float]] = {}
    for worker, ratio in idle_ratios(run.spans, commits[0] if len(commits) > 1 else 0.0, commits[-1]).items():
        pools.setdefault(worker.partition("/")[0], []).append(ratio)
    return Outcome(
        seed=run.seed,
        seconds=run.seconds,
        steps=len(steps),
        tpspd=trained / seconds if seconds else 0.0,
        idle={pool: statistics.fmean(ratios) for pool, ratios in pools.items()},
        staleness_mean=statistics.fmean(row["staleness/mean"] for row in later) if later else 0.0,
        staleness_max=max((int(row["staleness/max"]) for row in steps), default=0),
        counts=dict(run.counts),
        violations=run.violations,
    )


async def outcomes(config: Config, costs: Costs, seeds: range, *, has_faults: bool, processes: int) -> AsyncIterator[Outcome]:
    """Figures of each seed, as they end. Raises `RunError` when a process has ended before its time."""
    tree = config.model_dump(mode="json")
    orders = [Order(tree, costs, list(seeds[i::processes]), has_faults) for i in range(min(processes, len(seeds)))]
    lines: asyncio.Queue[bytes | None] = asyncio.Queue()
    reading = [asyncio.create_task(_carry_out(order, lines)) for order in orders]
    try:
        for _ in seeds:
            while (line := await lines.get()) is None:  # one process has ended: if that was too soon, this raises
                for each in reading:
                    if each.done():
                        each.result()
            yield msgspec.json.decode(line, type=Outcome)
    finally:
        for each in reading:
            each.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def _carry_out(order: Order, lines: asyncio.Queue[bytes | None]) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "asyncflow.simulation.seeds",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MAX_LINE_BYTES,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.close()
        while line := await asyncio.wait_for(process.stdout.readline(), RUN_SECONDS):
            lines.put_nowait(line)
        if await process.wait():
            raise RunError(f"a simulating process ended with status {process.returncode}")
    except TimeoutError as error:
        raise RunError(f"a simulated run has not ended within {RUN_SECONDS:g} real seconds: take fewer steps or workers") from error
    finally:
        lines.put_nowait(None)
        if process.returncode is None:
            process.kill()
            await process.wait()


def run_seed(config: Config, costs: Costs, seed: int, *, has_faults: bool) -> Outcome:
    """Figures of one run, of which no file is kept."""
    faults = drawn_faults(config, costs, seed) if has_faults else NO_FAULTS
    return outcome(simulate(config, costs=costs, faults=faults, seed=seed))


def main() -> None:
    """Carry out the order on standard input."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    config = parse(order.config)
    gc.freeze()  # every run looks for what nobody took, but not among what was imported
    for seed in order.seeds:
        line = msgspec.json.encode(run_seed(config, order.costs, seed, has_faults=order.has_faults))
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
