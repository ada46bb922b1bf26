"""`asyncflow status`: what each worker of a live run does, and what it waits for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncflow.types import UserError

if TYPE_CHECKING:
    from asyncflow.transport import Peer


def status(
    run: Annotated[Path, typer.Argument(help="A live run's folder, such as runs/quickstart.")],
    prometheus: Annotated[bool, typer.Option("--prometheus", help="Print the queue's metrics in Prometheus' text form.")] = False,
) -> None:
    """Show what each worker of a live run does, and what waits for what."""
    asyncio.run(_status(run, prometheus))


async def live_run(run: Path, name: str) -> Peer:
    """Connection to the run in a folder, as `name`. Raises `UserError` where none is live."""
    from asyncflow.run_dir import RunDir, control_socket
    from asyncflow.transport import ConnectionLost, Peer

    if not RunDir(run).is_run():
        raise UserError(f"there is no run in {run}: name a run's folder, such as runs/quickstart")
    if not control_socket(run).exists():
        raise UserError(f"no run is live in {run}: it has ended, or does not listen yet")
    try:
        return await Peer.connect(control_socket(run), name, timeout_seconds=5.0)
    except ConnectionLost as error:
        raise UserError(f"no run is live in {run}, which was killed: {error}") from error


async def _status(run: Path, prometheus: bool) -> None:
    from asyncflow.run.watch import Watch
    from asyncflow.transfer_queue.queue import TransferQueue
    from asyncflow.transport import proxy

    peer = await live_run(run, "status")
    if prometheus:
        print(await proxy(TransferQueue, peer, "queue").metrics(), end="")
        await peer.close()
        return
    answer = await proxy(Watch, peer, "status").status()
    await peer.close()
    print(f"{answer.run}: {answer.committed} of {answer.steps} steps, last progress {answer.idle_seconds:.1f} s ago")
    for line in [*answer.workers, *answer.stored, *answer.waits]:
        print(f"  {line}")
    for task, counts in answer.queue.items():
        print(f"  task {task}: {', '.join(f'{count} {name}' for name, count in counts.items())}")
