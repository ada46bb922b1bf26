"""`asyncflow queue`: a transfer queue without a run. A YAML file declares its columns and tasks.

group_size: 8
columns: [{name: prompt_ids, dtype: int64, ragged: true, per: group}, {name: response_ids, dtype: int64, ragged: true}]
tasks: [{name: rollout, reads: [prompt_ids], writes: [response_ids], whole_groups: false}, {name: train, reads: [response_ids]}]
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncflow.types import UserError

if TYPE_CHECKING:
    from asyncflow.transfer_queue.queue import TransferQueue
    from asyncflow.transfer_queue.schema import Schema
    from asyncflow.transfer_queue.storage.base import Storage
    from asyncflow.transport import Arena, Credentials, Peer, Server

ARENA_BYTES = 64 << 30  # of address space

app = typer.Typer(help="Serve a transfer queue on its own, and look into one.", no_args_is_help=True, rich_markup_mode=None)

DirectoryAddress = Annotated[str, typer.Argument(help="Where the queue is served: unix:PATH or tls:HOST:PORT.")]
Address = Annotated[str, typer.Option(help="Where to listen: unix:PATH or tls:HOST:PORT (port 0: any).")]
QueueKey = Annotated[Path | None, typer.Option(help="The queue's key, made with `asyncflow queue key`; needed for tls: addresses.")]
StorageChoice = Annotated[str, typer.Option("--storage", help="memory, redis:URL, or mooncake:MASTER (host:port).")]
CapacityBytes = Annotated[int | None, typer.Option(help="Bytes that a storage unit may hold; admission waits for room.")]
CapacityRows = Annotated[int | None, typer.Option(help="Rows that a storage unit may hold; admission waits for room.")]
Snapshots = Annotated[Path | None, typer.Option(help="Where snapshots are written.")]


@app.command()
def serve(
    schema: Annotated[Path, typer.Argument(help="A YAML file with group_size, columns and tasks.")],
    address: Annotated[list[str], typer.Option(help="Where to listen; may be given twice, for two doors.")],
    units: Annotated[int, typer.Option(help="Storage units in this process; 0: all join from other processes.")] = 1,
    controllers: Annotated[bool, typer.Option(help="Whether the tasks' controllers run in this process.")] = True,
    storage: StorageChoice = "memory",
    capacity_bytes: CapacityBytes = None,
    capacity_rows: CapacityRows = None,
    snapshot_dir: Snapshots = None,
    restore: Annotated[str, typer.Option(help="Take up the rows of this snapshot first.")] = "",
    key: QueueKey = None,
) -> None:
    """Serve a queue's controllers, and storage units, until SIGINT or SIGTERM."""
    from asyncflow.transfer_queue.queue import TransferQueue
    from asyncflow.transfer_queue.unit import UnitOptions

    storages = [_storage(storage, number) for number in range(units)]
    credentials = _credentials(key)
    queue = TransferQueue(
        _schema(schema),
        storages,
        tasks=None if controllers else (),
        unit_options=UnitOptions(capacity_rows=capacity_rows, capacity_bytes=capacity_bytes, snapshot_dir=snapshot_dir),
        credentials=credentials,
    )
    _run(_until_stopped(_serve(queue, address, restore, credentials)))


@app.command()
def unit(
    directory_address: DirectoryAddress,
    number: Annotated[int, typer.Option(help="The unit's number; a unit that takes another's place takes its number.")],
    address: Address,
    storage: StorageChoice = "memory",
    capacity_bytes: CapacityBytes = None,
    capacity_rows: CapacityRows = None,
    snapshot_dir: Snapshots = None,
    key: QueueKey = None,
) -> None:
    """Be a storage unit of a queue that is served elsewhere, until that one ends."""
    from asyncflow.transfer_queue.node import serve_unit
    from asyncflow.transfer_queue.unit import UnitOptions

    serving = serve_unit(
        directory_address,
        number,
        _storage(storage, number),
        address,
        options=UnitOptions(capacity_rows=capacity_rows, capacity_bytes=capacity_bytes, snapshot_dir=snapshot_dir),
        credentials=_credentials(key),
        on_listening=_print_address,
    )
    _run(_until_stopped(serving))


@app.command()
def controller(
    directory_address: DirectoryAddress, task: Annotated[str, typer.Argument()], address: Address, key: QueueKey = None
) -> None:
    """Be a task's controller of a queue that is served elsewhere, in place of the one it has, until that one ends."""
    from asyncflow.transfer_queue.node import serve_controller

    _run(
        _until_stopped(
            serve_controller(directory_address, task, address, credentials=_credentials(key), on_listening=_print_address)
        )
    )


@app.command()
def metrics(directory_address: DirectoryAddress, key: QueueKey = None) -> None:
    """Print the state of tasks and units in Prometheus' text form."""
    print(_run(_ask(directory_address, key, "metrics")), end="")


@app.command()
def snapshot(directory_address: DirectoryAddress, name: Annotated[str, typer.Argument()], key: QueueKey = None) -> None:
    """Write all rows of a live queue to its snapshot directory."""
    manifest = _run(_ask(directory_address, key, "snapshot", name))
    print(f"{sum(file.rows for file in manifest.files)} rows, {sum(file.bytes for file in manifest.files)} bytes")


@app.command(name="key")
def new_key(path: Annotated[Path, typer.Argument(help="A new file, readable by you alone.")]) -> None:
    """Make a queue's key: a process that has it may connect by tls:."""
    from asyncflow.transport import Credentials

    Credentials.create(path)


async def _serve(queue: TransferQueue, addresses: list[str], restore: str, credentials: Credentials | None) -> None:
    from asyncflow.transport import Server

    async with queue.running():
        if restore:
            print(f"{await queue.restore(restore)} rows restored", flush=True)
        with contextlib.closing(_arena()) as arena:
            server = Server(queue.services, queue.abandon, credentials=credentials, arena=arena)
            await _listen(server, addresses)


async def _listen(server: Server, addresses: list[str]) -> None:
    """Serve until cancelled."""
    try:
        for address in addresses:
            _print_address(await server.start(address))
        await asyncio.Event().wait()
    finally:
        await server.close()


async def _ask(directory_address: str, key: Path | None, method: str, *arguments: Any) -> Any:
    from asyncflow.transfer_queue.queue import TransferQueue
    from asyncflow.transport import ConnectionLost, Peer, proxy

    try:
        peer: Peer = await Peer.connect(directory_address, "asyncflow queue", credentials=_credentials(key))
    except ConnectionLost as error:
        raise UserError(f"no queue is served there, or it does not let you in: {error}") from error
    try:
        return await getattr(proxy(TransferQueue, peer, "queue"), method)(*arguments)
    finally:
        await peer.close()


def _print_address(address: str) -> None:
    print(f"listening at {address}", flush=True)


async def _until_stopped(service: Coroutine[Any, Any, None]) -> None:
    """Run until SIGINT or SIGTERM, and end in order, even where the shell that started the process in the background set SIGINT to
    be ignored."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(service)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return asyncio.run(work)
    except ValueError as error:
        raise UserError(str(error)) from error


def _arena() -> Arena:
    """Folder in shared memory where clients on this machine read large rows. Files of processes that are gone are removed."""
    from asyncflow.transport import Arena

    directory, prefix = Path("/dev/shm"), "asyncflow-queue-"
    if not os.access(directory, os.W_OK):
        return Arena(ARENA_BYTES)
    for stale in directory.glob(f"{prefix}*"):
        pid = stale.name.removeprefix(prefix)
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and stale.stat().st_uid == os.getuid():
            stale.unlink(missing_ok=True)
    return Arena(ARENA_BYTES, directory / f"{prefix}{os.getpid()}")


def _credentials(key: Path | None) -> Credentials | None:
    from asyncflow.transport import Credentials

    return None if key is None else Credentials.load(key)


def _storage(choice: str, unit: int) -> Storage:
    """Storage from `name` or `name:where`, where the backend is."""
    from asyncflow.registry import build
    from asyncflow.transfer_queue import STORAGES

    name, _, where = choice.partition(":")
    option = {"redis": "url", "mooncake": "master"}.get(name)
    if where and option is None:
        raise UserError(f"the storage {name!r} takes nothing after its name")
    options = {"unit": unit, **({option: where} if where and option else {})}
    storage: Storage = build("queue storage", name, options, STORAGES)
    return storage


def _schema(path: Path) -> Schema:
    import yaml

    from asyncflow.transfer_queue.schema import Schema

    try:
        return Schema.of(yaml.safe_load(path.read_text("utf-8")))
    except OSError as error:
        raise UserError(f"the queue's file {path} cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
