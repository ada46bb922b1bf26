"""`asyncflow cluster`: change what a live run runs on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from asyncflow.cli.status import live_run
from asyncflow.types import RunError, UserError

ANSWER_SECONDS = 180.0
"""Seconds for which the answer is waited for. A run whose cluster lets joiners wait longer for room goes on with it all the
same."""

app = typer.Typer(help="Change what a live run runs on.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def cluster() -> None:
    """Change what a live run runs on."""


@app.command()
def scale(
    size: Annotated[str, typer.Argument(metavar="rollout=NUMBER", help="How many workers the run is to have.")],
    run: Annotated[Path, typer.Option(help="The live run's folder, such as runs/quickstart.")],
    grace: Annotated[float, typer.Option(min=0, help="Seconds that workers which leave may take to end what they hold.")] = 60.0,
) -> None:
    """Let rollout workers join or leave a live run.

    A joiner gets the current weights and takes prompts. A leaver takes no more of them, ends the responses that it has begun, and
    goes; what it has not ended in time is made again by the others.
    """
    asyncio.run(_scale(run, *_parsed(size), grace))


def _parsed(size: str) -> tuple[str, int]:
    pool, _, number = size.partition("=")
    try:
        return pool, int(number)
    except ValueError as error:
        raise UserError(f"{size!r} is not of the form rollout=NUMBER") from error


async def _scale(run: Path, pool: str, size: int, grace_seconds: float) -> None:
    from asyncflow.run.services.scaling import Scaling
    from asyncflow.transport import ConnectionLost, proxy

    peer = await live_run(run, "scale")
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            print(await proxy(Scaling, peer, "scaling").scale(pool, size, grace_seconds))
    except TimeoutError as error:
        raise RunError(
            f"the run in {run} did not answer within {ANSWER_SECONDS:g} s: `asyncflow status` says what it does"
        ) from error
    except ConnectionLost as error:
        raise RunError(f"the run in {run} has ended meanwhile: {error}") from error
    finally:
        await peer.close()
