"""`asyncflow status`: what each worker of a live run does, and what it waits for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from asyncflow.types import UserError


def status(
    run: Annotated[Path, typer.Argument(help="A live run's folder, such as runs/quickstart.")],
    prometheus: Annotated[bool, typer.Option("--prometheus", help="Print the queue's metrics in Prometheus' text form.")] = False,
) -> None:
    """Show who does what in a live run, and what waits for what."""
    asyncio.run(_status(run, prometheus))


async def _status(run: Path, prometheus: bool) -> None:
    from asyncflow.run.status import Watch
    from asyncflow.run_dir import control_socket
    from asyncflow.transfer_queue.queue import TransferQueue
    from asyncflow.transport import ConnectionLost, Peer, proxy

    try:
        peer = await Peer.connect(control_socket(run), "status", timeout_seconds=5.0)
    except ConnectionLost as error:
        raise UserError(f"no run is live in {run}: {error}") from error
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
