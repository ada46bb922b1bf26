"""`asyncflow replay`: train on a kept batch of a run again, and compare."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from asyncflow.run_dir import METRICS_FILE
from asyncflow.types import RunError


def replay(
    run: Annotated[Path, typer.Argument(help="A run's folder, such as runs/quickstart.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value: train otherwise than the run did.")] = None,
    step: Annotated[int, typer.Option(min=0, help="Which step; its batch was kept by telemetry.keep_batches.")] = 0,
) -> None:
    """Train on a saved batch again: from the nearest checkpoint before the step, on the kept batches from there on.

    Prints the step's loss, gradient norm and other metrics beside the run's, and whether they agree bit for bit. Exit status 1 if
    they were to and do not, or the run has left nothing to compare with.
    """
    with tempfile.TemporaryDirectory(prefix="asyncflow-replay-") as scratch:
        raise typer.Exit(asyncio.run(_replay(run, step, Path(scratch), overrides or [])))


async def _replay(run: Path, step: int, scratch: Path, overrides: list[str]) -> int:
    from asyncflow.cli.display import Display
    from asyncflow.replay import ReplayJob, compare, plan_replay, replay_config, same_number
    from asyncflow.run.job import run_with_signals

    plan = plan_replay(run, step)
    config = replay_config(run, plan, scratch, overrides)
    print(plan.line())
    with Display("replay", step + 1) as display:
        job = ReplayJob(config, plan, display)
        is_finished = await run_with_signals(job, job.run())
    if not is_finished:
        return 130
    if step not in job.rows:
        raise RunError(f"step {step} was not trained")
    comparison = compare(run, config.run_dir, plan, job.rows[step])
    table = Table(box=None)
    for name in ("metric", "run", "replay", ""):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for name, (theirs, mine) in sorted(comparison.metrics.items()):
        mark = "" if theirs is None or mine is None else "=" if same_number(theirs, mine) else f"{mine - theirs:+.3g}"
        table.add_row(name, *("-" if value is None else f"{value:.9g}" for value in (theirs, mine)), mark)
    Console(highlight=False).print(table)
    if comparison.losses is not None and comparison.tensors is not None:
        print(f"losses of micro-batches with the same bits: {comparison.losses[0]} of {comparison.losses[1]}")
        print(f"tensors of weights and optimiser state with other bits: {', '.join(comparison.tensors[:6]) or 'none'}")
    if not plan.is_exact:
        print(
            f"the weights are those of step {plan.weights_of}, not of step {step}: batches between them were not kept, so the "
            f"figures need not agree"
        )
    if not comparison.compared:
        raise RunError(
            f"there is nothing to compare the replay with: {run / METRICS_FILE} has no metrics of step {step}, and there are no "
            f"fingerprints of it (telemetry.fingerprints)"
        )
    verdict = "agree bit for bit" if comparison.is_equal else "do not agree bit for bit"
    why = "" if comparison.is_equal or config.train.accumulate == "exact" else (
        " (with train.accumulate=fp32 the last bits depend on the order in which groups come)"
    )  # fmt: skip
    print(f"run and replay {verdict}: {comparison.compared}{why}")
    is_to_agree = plan.is_exact and not overrides and config.train.accumulate == "exact"
    return 0 if comparison.is_equal or not is_to_agree else 1
