"""`asyncflow simulate`: a configuration under a virtual clock, with engines that sleep."""

from __future__ import annotations

import asyncio
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from asyncflow.config import Config, load
from asyncflow.types import UserError

if TYPE_CHECKING:
    from asyncflow.engines.costs import Costs
    from asyncflow.simulation.seeds import Outcome


def simulate(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, as many as you like.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many runs, each of another seed.")] = 1,
    first: Annotated[int, typer.Option(min=0, help="The first of them, whose report is kept.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="How many run at once.")] = 1,
    faults: Annotated[
        bool, typer.Option(help="Slow, dying and stalled workers, some that join and leave, late rewards, lost weights.")
    ] = False,
    costs: Annotated[Path | None, typer.Option(help="A JSON file: what everything takes, in seconds.")] = None,
) -> None:
    """Run the loops of a configuration without its model, in virtual time, and check that no law is broken.

    Exit code 0: none was, 1: some were, each with the command that repeats it.
    """
    resolved, given = load(config, overrides or []), _costs(costs)
    began = time.monotonic()
    found = asyncio.run(_run(resolved, given, range(first, first + seeds), faults, processes))
    _print(resolved, found, time.monotonic() - began)
    failed = [outcome for outcome in found if outcome.violations]
    for outcome in failed:
        print(f"seed {outcome.seed}: {'; '.join(outcome.violations)}")
        again = [
            *("asyncflow", "simulate", str(config), *(overrides or []), "--first", str(outcome.seed)),
            *(["--faults"] if faults else []),
            *(["--costs", str(costs)] if costs else []),
        ]
        print(f"  again: {shlex.join(again)}")
    print(f"{len(found)} runs, {len(failed)} of them with violations")
    raise typer.Exit(1 if failed else 0)


def _costs(path: Path | None) -> Costs:
    from asyncflow.engines.costs import Costs

    if path is None:
        return Costs()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Costs)
    except OSError as error:
        raise UserError(f"the costs {path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UserError(f"the costs {path} are not what they should be: {error}") from error


async def _run(config: Config, costs: Costs, seeds: range, has_faults: bool, processes: int) -> list[Outcome]:
    """Run the first seed in this process, with its report, and the others on whatever cores are free."""
    from asyncflow.simulation.run import NO_FAULTS, drawn_faults
    from asyncflow.simulation.run import simulate as simulate_one
    from asyncflow.simulation.seeds import outcome, outcomes

    run_dir = config.run.dir / f"{config.run.name}-simulated"
    drawn = drawn_faults(config, costs, seeds[0]) if has_faults else NO_FAULTS
    kept = await asyncio.to_thread(simulate_one, config, costs=costs, faults=drawn, seed=seeds[0], run_dir=run_dir)
    print(f"seed {seeds[0]}: {run_dir / 'report.html'}, {run_dir / 'trace.json'}")
    found, console = [outcome(kept)], Console()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("runs", total=len(seeds), completed=1)
        async for each in outcomes(config, costs, seeds[1:], has_faults=has_faults, processes=processes):
            found.append(each)
            num_failed = sum(bool(one.violations) for one in found)
            progress.update(bar, advance=1, description=f"runs, {num_failed} with violations")
            if not console.is_terminal and len(found) % 100 == 0:  # a log shows no bar
                print(f"{len(found)} of {len(seeds)} runs, {num_failed} with violations", flush=True)
    return found


def _print(config: Config, found: Sequence[Outcome], real_seconds: float) -> None:
    whole = [outcome for outcome in found if outcome.steps == config.run.steps] or found
    virtual = [outcome.seconds for outcome in whole]
    idle = {pool: statistics.fmean(o.idle.get(pool, 0.0) for o in whole) for pool in whole[0].idle}
    counts = sum((Counter(outcome.counts) for outcome in found), Counter())
    print(f"{config.schedule.name}, {config.rollout.num_workers} rollout workers, {config.run.steps} steps a run")
    print(
        f"  virtual time   median {statistics.median(virtual):,.1f} s a run ({min(virtual):,.1f} to {max(virtual):,.1f}), "
        f"{sum(o.seconds for o in found) / real_seconds:,.0f} times as fast as real time"
    )
    print(f"  throughput     TPSPD {statistics.median(o.tpspd for o in whole):,.1f} (median)")
    print(f"  idle           {', '.join(f'{pool} {ratio:.1%}' for pool, ratio in sorted(idle.items()))}")
    print(
        f"  staleness      mean {statistics.fmean(o.staleness_mean for o in whole):.2f}, max {max(o.staleness_max for o in whole)}"
    )
    print(f"  happened       {', '.join(f'{count:,} {what}' for what, count in sorted(counts.items()))}")
