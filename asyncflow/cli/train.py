"""`asyncflow train`: run a configuration to its end."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from asyncflow.cli.arguments import refuse
from asyncflow.cli.display import Display
from asyncflow.cli.plan import load_planned
from asyncflow.cluster.torchrun import is_rank, run_rank
from asyncflow.config import Config, dump
from asyncflow.run_dir import JOB_FILE, RunDir
from asyncflow.threads import run_ready
from asyncflow.types import UserError

DRIVER_SECONDS = 120.0
"""Seconds after which a process that torchrun has started says that it still waits for the run's driver, which checks the inputs
first, and may have a model to download or a checkpoint to copy; and within which the first rank says what this launch is called."""

NUM_TRIED = 2
"""Rows of the data on which `--dry-run` tries the scorers."""


def train(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, as many as you like.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Check everything, print what would run, start nothing.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on from the run's newest whole checkpoint, or begin if there is none.")] = False,
    fork_from: Annotated[
        str | None,
        typer.Option(metavar="RUN[@STEP]", help="Begin a new run with another one's checkpoint; with --resume, or go on with it."),
    ] = None,
    fork_keep: Annotated[
        str | None,
        typer.Option(help="What a fork keeps beside the weights: optimizer, data, 'optimizer,data' (the default) or ''."),
    ] = None,
    print_config: Annotated[bool, typer.Option(help="Print the resolved configuration, and do nothing else.")] = False,
) -> None:
    """Train a model: generation and training side by side."""
    if fork_from is None:
        refuse({"--fork-keep": fork_keep}, "says what a fork keeps, and this is none: give --fork-from, too, or leave it out")
    resolved = load_planned(config, overrides or [], is_tried=dry_run or print_config)
    if print_config:
        print(dump(resolved), end="")
    elif is_rank() and dry_run:
        raise UserError("--dry-run starts nothing, and torchrun has started ranks: give it to `asyncflow train`, without torchrun")
    elif is_rank():
        options = {"--fork-from": fork_from, "--fork-keep": fork_keep}
        given = [word for name, value in options.items() if value is not None for word in (name, value)]
        raise typer.Exit(_run_rank(resolved, ["train", str(config), *(overrides or []), *given, *(["--resume"] if resume else [])]))
    elif dry_run:
        if fork_from is not None:
            _fork(resolved, fork_from, fork_keep, resume=resume, is_tried=True)
        else:
            RunDir(resolved.run_dir).check_place()
        asyncio.run(_dry_run(resolved))
    else:
        if fork_from is not None:
            _fork(resolved, fork_from, fork_keep, resume=resume)
        raise typer.Exit(run_ready(_train(resolved, resume or fork_from is not None)))


def _fork(config: Config, source: str, keep: str | None, *, resume: bool, is_tried: bool = False) -> None:
    """Make the folder of a run that begins with another one's checkpoint, and say what it takes and what differs; where it is only
    tried, say that alone. One that is to `resume` may be there."""
    from asyncflow.run.state.fork import KEPT, fork, fork_record, is_begun

    kept = None if keep is None else {name for name in keep.split(",") if name}
    if resume and is_begun(config, source, kept):
        return
    record = (fork_record if is_tried else fork)(config, source, KEPT if kept is None else kept, print)
    verb = "would be forked" if is_tried else "forked"
    print(f"{verb} from {record.origin} after {record.step} steps, with its {record.parts}")
    for key, (before, now) in record.differences.items():
        print(f"  {key}: {before!r} there, {now!r} here")


async def _train(config: Config, resume: bool) -> int:
    """Run to the end. Returns the exit status: 0, or 128 and the number of a signal that ended the run."""
    from asyncflow.run.worker_start import import_ahead

    import_ahead(config)
    from asyncflow.run.job import Job, run_with_signals

    began = time.monotonic()
    with Display(config.run.name, config.run.steps) as display:
        if line := _correction(config):
            display.log(line)
        job = Job(config, display, resume=resume)
        is_finished = await run_with_signals(job, job.run())
    verb = "finished" if is_finished else "interrupted"
    print(f"{verb} after {len(job.rows)} steps and {time.monotonic() - began:.1f} s")
    if job.certificate is not None:
        print(job.certificate.line)
    for name in ("model", "report.html", "trace.json", "certificate.json"):
        print(f"  {config.run_dir / name}")
    return 0 if is_finished else 128 + (job.ended_by or signal.SIGINT)


def _run_rank(config: Config, arguments: Sequence[str]) -> int:
    """Run as a process that torchrun has started."""
    from asyncflow.run.in_worker.connection import launch_in

    return run_rank(arguments, config.layout, config.run_dir / JOB_FILE, launch_in, patience_seconds=DRIVER_SECONDS)


async def _dry_run(config: Config) -> None:
    from asyncflow.model_folder import read_json
    from asyncflow.planner.hardware import find
    from asyncflow.run.device_shares import num_devices
    from asyncflow.run.factories import make_schedule, shape_of
    from asyncflow.run.models.model_source import SHAPES
    from asyncflow.run.preparation.checks import check_shapes
    from asyncflow.run.preparation.memory import Shapes, lines
    from asyncflow.run.preparation.notes import advice
    from asyncflow.run.preparation.prepare import prepare
    from asyncflow.run.preparation.prompts import left_out_lines

    if is_of_shapes := config.model.path.startswith(SHAPES):
        fields = check_shapes(config)
        context = config.model.max_context_tokens or 0
        longest = min(config.data.max_prompt_tokens or context, context - config.rollout.max_new_tokens)
        data = [f"{config.data.path}, not read: a model of shapes alone has no tokenizer"]
        rewards = []
    else:
        with tempfile.TemporaryDirectory(prefix="asyncflow-") as scratch:
            prepared = await prepare(config, Path(scratch))
            fields = read_json(prepared.model / "config.json")
            rewards = await _tried(config)
        context, prompts, held_out = prepared.max_context, prepared.prompts, prepared.held_out
        longest = max(len(prompt.ids) for prompt in prompts)
        data = [f"{len(prompts)} prompts to train on, {len(held_out)} held out"]
        data += left_out_lines(config, prepared.num_left_out, (len(prompts), len(held_out)))
    rows = config.train.prompts_per_step * config.rollout.group_size
    print(f"run        {config.run_dir}, {config.run.steps} steps, {config.schedule.name}, {config.algorithm.name}")
    print(f"model      {config.model.path}, context {context} tokens")
    for line in data:
        print(f"data       {line}")
    for line in rewards:
        print(f"reward     {line}")
    if line := _correction(config):
        print(f"off-policy {line}")
    for line in advice(config):
        print(f"advice     {line}")
    print(f"each step  {config.train.prompts_per_step} prompts x {config.rollout.group_size} responses = {rows} rows")
    if (shape := shape_of(config)).max_candidates:
        print(f"           with rewards that vary, of {shape.prompts_at_first} at first and {shape.max_candidates} at most")
    print(
        f"workers    {config.rollout.num_workers} rollout on {config.rollout.device} ({config.rollout.num_slots} slots, "
        f"{config.rollout.num_threads} threads each), {_evaluators(config)}{_layout(config)} on {config.train.device} "
        f"({config.train.num_threads} threads each), cluster {config.cluster.name}"
    )
    num_all, num_training = num_devices(config), config.layout.size
    print(f"devices    {num_all}: {num_all - num_training} that do not train, {num_training} that do")
    staleness = make_schedule(config).max_staleness
    usable = None if config.plan.hardware is None else find(config.plan.hardware).usable_bytes
    lengths = {"prompt_tokens": longest, "context": context, "max_staleness": staleness}
    for line in lines(config, Shapes.of(fields), **lengths, device_bytes=usable):
        print(line)
    if is_of_shapes:
        print("neither data, tokenizer nor machine was looked at: set model.path to the folder of a model")
    print("nothing was started")


def _correction(config: Config) -> str:
    """Description of how a run weighs samples of older versions, or of truncated sampling, where it has any; "" elsewhere."""
    from asyncflow.run.factories import make_algorithm, make_schedule

    staleness = make_schedule(config).max_staleness
    algorithm = make_algorithm(config)
    whys = [f"samples are up to {staleness} versions old"] if staleness else []
    if config.rollout.is_truncated:
        whys.append("tokens are drawn from the likeliest alone")
    if not whys:
        return ""
    return f"{' and '.join(whys)}; algorithm.correction={algorithm.correction}, train.old={config.train.old}"


async def _tried(config: Config) -> list[str]:
    """Rewards of a few made-up responses, a line each. Raises `UserError` for a scorer that fails on one of them."""
    from asyncflow.rewards.base import RewardFailure
    from asyncflow.run.trials.reward_trial import made_up, try_scorers

    if not config.reward.parts:
        return []
    lines, num_scored = [], 0
    for each in await try_scorers(config, [*made_up(config, NUM_TRIED)]):
        text = f"{each.sample.response:.40}" + " ..." * (len(each.sample.response) > 40)
        if not isinstance(each.outcome, RewardFailure):
            num_scored += 1
            lines.append(f"{each.outcome.reward:g} for {each.name}: {text!r}")
        elif each.outcome.kind == "skipped":
            lines.append(f"none for {each.name}: {text!r}")
        else:
            raise UserError(f"{each.outcome}, tried on {each.name}: {text!r}")
    if not num_scored:
        names = " and ".join(config.reward.names)
        raise UserError(
            f"{names} returned None for each of {len(lines)} tried responses, the data's own answers among them, and what has no "
            f"reward is left out: return a number"
        )
    return lines


def _evaluators(config: Config) -> str:
    count = config.eval.num_workers
    return f"{count} evaluator{'s' * (count > 1)} on {config.evaluators_device}, " if count else ""


def _layout(config: Config) -> str:
    layout = config.layout
    return "1 trainer" if layout.size == 1 else f"{layout.size} trainers (dp {layout.dp} x tp {layout.tp} x pp {layout.pp})"
