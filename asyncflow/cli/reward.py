"""`asyncflow reward`: try a configuration's scorers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from asyncflow.config import load
from asyncflow.types import UserError

SHOWN = 60
"""Characters of a response in a line."""


def reward(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, as many as you like.")] = None,
    responses: Annotated[
        Path | None, typer.Option(help="JSON Lines with a `response` each, and the row's columns; a run's unscored.jsonl.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Without that: so many rows of the data, with made-up responses.")] = 4,
) -> None:
    """Score responses as a run would, each in a process that can be killed. Exit 1 if one of them cannot be scored."""
    from asyncflow.rewards.base import RewardFailure
    from asyncflow.run.trials.reward_trial import made_up, responses_in, try_scorers

    resolved = load(config, overrides or [])
    given = [*(responses_in(responses) if responses is not None else made_up(resolved, rows))]
    if not given:
        raise UserError(f"{responses} has no responses")
    tried = asyncio.run(try_scorers(resolved, given))
    names, scored, num_failed = resolved.reward.names, [], 0
    for each in tried:
        text = " ".join(each.sample.response.split())
        shown = text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."
        if isinstance(each.outcome, RewardFailure):
            is_skipped = each.outcome.kind == "skipped"
            num_failed += not is_skipped
            print(
                f"{'skipped' if is_skipped else each.outcome.kind:>9}  {each.name}: {shown!r}\n{each.outcome.trace or each.outcome}"
            )
            continue
        scored.append(each.outcome.reward)
        parts = zip(names, each.outcome.parts, strict=False)
        details = "".join(f"  {name} {'none' if part is None else f'{part:g}'}" for name, part in parts) if len(names) > 1 else ""
        print(f"{each.outcome.reward:9.4g}  {each.name}: {shown!r}{details}")
    mean = f", mean {sum(scored) / len(scored):.4g}" if scored else ""
    print(f"{len(scored)} of {len(tried)} responses scored{mean}, {num_failed} failed")
    if num_failed:
        raise typer.Exit(1)
