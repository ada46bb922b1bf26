"""`asyncflow serve`: a run as a server, driven by clients over HTTP."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from asyncflow.cli.plan import load_planned
from asyncflow.config import Config
from asyncflow.types import UserError

SERVICE_DIR = "service"
"""Beside the folder of a run, whose start may clear that: keys, certificate and audit lines stay."""


def serve(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, as many as you like.")] = None,
    listen: Annotated[str, typer.Option(help="HOST:PORT (port 0: any), or unix:PATH.")] = "127.0.0.1:8321",
    certificate: Annotated[Path | None, typer.Option(help="PEM file with certificate and key, for TLS.")] = None,
    self_signed: Annotated[bool, typer.Option(help="TLS with a certificate made at the first start.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on from the run's newest whole checkpoint, or begin if there is none.")] = False,
) -> None:
    """Serve a run over HTTP: clients start it, put prompts, train steps, generate for it or train for it."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(f"asyncflow serve needs the extra `service` ({error}): pip install 'asyncflow-rl[service]'") from error
    raise typer.Exit(asyncio.run(_serve(load_planned(config, overrides or []), listen, certificate, self_signed, resume)))


async def _serve(config: Config, listen: str, certificate: Path | None, self_signed: bool, resume: bool) -> int:
    """Serve until a client stops the run, or a signal does. Returns the exit status."""
    from asyncflow.run.job import Listener
    from asyncflow.service.app import AuditLog, make_app
    from asyncflow.service.hosted import HostedRun
    from asyncflow.service.keys import KeyRing
    from asyncflow.service.limits import Limits
    from asyncflow.service.routes import routes
    from asyncflow.service.server import HttpServer, Listen, make_self_signed

    class Printed(Listener):
        def log(self, text: str) -> None:
            print(text, flush=True)

    place, folder = Listen.parse(listen), config.run_dir.with_name(f"{config.run_dir.name}.{SERVICE_DIR}")
    keys, limits, audit = KeyRing.open(folder / "keys.json", time.time), Limits(), AuditLog(folder / "audit.jsonl")
    trusted = None
    if self_signed and certificate is None:
        certificate = folder / "tls.pem"
        trusted = make_self_signed(certificate, place.host)
    hosted = HostedRun(config, Printed(), resume=resume)
    app = make_app(title="AsyncFlow", description=f"The run {config.run.name}.", keys=keys, limits=limits, audit=audit)
    app.include_router(routes(hosted))
    server = HttpServer(app, place, limits, certificate)
    address = await server.start()
    print(f"serving {config.run_dir} at {address}, with the keys in {keys.path}")
    print(f"try        {_example(address, keys.path, trusted)}", flush=True)
    seen: list[int] = []

    def end(number: int) -> None:
        seen.append(number)
        hosted.over.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end, number)
    try:
        await hosted.over.wait()
    finally:
        await hosted.stop()
        await server.stop()
        audit.close()
    return 128 + seen[0] if seen else 0


def _example(address: str, keys: Path, trusted: Path | None) -> str:
    """Command that shows the run's status."""
    where = f"--unix-socket {address.removeprefix('unix:')} http://run" if address.startswith("unix:") else address
    secret = f"$(python3 -c \"import json; print(json.load(open('{keys}'))['keys'][0]['secret'])\")"
    return f'curl {f"--cacert {trusted} " if trusted else ""}-H "Authorization: Bearer {secret}" {where}/v1/status'
