"""`asyncflow serve`: a run as a server, driven by clients over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncflow.cli.arguments import need_service, refuse
from asyncflow.cli.plan import load_planned
from asyncflow.config import Config, load
from asyncflow.threads import run_ready
from asyncflow.types import RunError, UserError

if TYPE_CHECKING:
    from asyncflow.service.server import Listen
    from asyncflow.service.tinker.context import BaseModel

SERVICE_DIR = "service"
"""Beside the folder of a run, whose start may clear that: keys, certificate and audit lines stay."""
MAX_MODELS, MAX_ADAPTERS, MAX_RANK = 4, 8, 256
TINKER_DIR = "tinker"
"""Likewise, for a server of Tinker's API, whose checkpoints are there, too."""


def serve(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, as many as you like.")] = None,
    listen: Annotated[str, typer.Option(help="HOST:PORT (port 0: any), or unix:PATH.")] = "127.0.0.1:8321",
    certificate: Annotated[Path | None, typer.Option(help="PEM file with certificate and key, for TLS.")] = None,
    self_signed: Annotated[bool, typer.Option(help="TLS with a certificate made at the first start.")] = False,
    weights_from: Annotated[Path | None, typer.Option(help="Folder below which trainers outside may name weights.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the run's newest whole checkpoint, or begin if there is none.")] = False,
    tinker: Annotated[
        bool, typer.Option(help="Serve a model by Tinker's API instead; CONFIG may be its folder, or its name on the Hub.")
    ] = False,
    model_name: Annotated[
        str | None, typer.Option(help="With --tinker: the model's name for clients, by default its path.")
    ] = None,
    max_models: Annotated[
        int | None, typer.Option(min=1, help=f"With --tinker: models that may be in training at once; {MAX_MODELS} by default.")
    ] = None,
    samplers: Annotated[int | None, typer.Option(min=1, help="With --tinker: rollout engines that sample; 1 by default.")] = None,
    max_adapters: Annotated[
        int | None,
        typer.Option(min=1, help=f"With --tinker: adapters that such an engine holds at once; {MAX_ADAPTERS} by default."),
    ] = None,
    max_rank: Annotated[
        int | None, typer.Option(min=1, help=f"With --tinker: largest rank of an adapter; {MAX_RANK} by default.")
    ] = None,
    full_weights: Annotated[bool, typer.Option(help="With --tinker: train all weights where clients ask for adapters.")] = False,
) -> None:
    """Serve a run over HTTP: clients start it, put prompts, train steps, generate for it or train for it."""
    need_service("serve", "fastapi", "google.protobuf", "uvicorn")
    from asyncflow.service.server import Listen, tls

    if certificate is not None:
        tls(certificate)
    door = _Door(Listen.parse(listen), certificate, self_signed)
    if tinker:
        refuse({"--resume": resume, "--weights-from": weights_from}, "is for a run, and --tinker serves a model without one")
        bounds = {"models": max_models or MAX_MODELS, "adapters": max_adapters or MAX_ADAPTERS, "rank": max_rank or MAX_RANK}
        models = _Models(model_name, bounds, samplers or 1, full_weights)
        raise typer.Exit(run_ready(_serve_tinker(config, overrides or [], door, models)))
    of_models = {
        **{"--model-name": model_name, "--max-models": max_models, "--samplers": samplers, "--max-adapters": max_adapters},
        **{"--max-rank": max_rank, "--full-weights": full_weights},
    }
    refuse(of_models, "is for models that --tinker serves, and this serves a run: leave it out, or give --tinker")
    if weights_from is not None and not weights_from.is_dir():
        raise UserError(f"--weights-from {weights_from} is no folder: make it, or name one that is there")
    loaded = load_planned(config, overrides or [])
    raise typer.Exit(run_ready(_serve(loaded, door, weights_from=weights_from, resume=resume)))


@dataclass(frozen=True, slots=True)
class _Door:
    """Where a server listens, and with which certificate: a file, or one that is made at the first start."""

    place: Listen
    certificate: Path | None
    is_self_signed: bool

    def certified(self, folder: Path) -> tuple[Path | None, Path | None]:
        """The certificate with its key, and what clients are to trust of one that is made here, in `folder`."""
        from asyncflow.service.server import make_self_signed

        if not self.is_self_signed or self.certificate is not None:
            return self.certificate, None
        made = folder / "tls.pem"
        return made, make_self_signed(made, self.place.host)


@dataclass(frozen=True, slots=True)
class _Models:
    """Models that are served by Tinker's API: the base's name for clients, bounds (`Bounds`), rollout engines that sample."""

    name: str | None
    bounds: Mapping[str, int]
    num_samplers: int
    have_full_weights: bool


async def _serve(config: Config, door: _Door, *, weights_from: Path | None, resume: bool) -> int:
    """Serve until a client stops the run, or a signal does. Returns the exit status."""
    from asyncflow.cli.watch import predicted
    from asyncflow.run.job import Listener
    from asyncflow.service.app import AuditLog, GatePaths, make_app
    from asyncflow.service.hosted import HostedRun
    from asyncflow.service.keys import KeyRing
    from asyncflow.service.limits import Limits
    from asyncflow.service.routes import AT_ONCE, STREAMED, routes
    from asyncflow.service.server import HttpServer
    from asyncflow.service.watching import PUBLIC, Watched, watch_routes

    class Printed(Listener):
        def log(self, text: str) -> None:
            print(text, flush=True)

    folder = config.run_dir.with_name(f"{config.run_dir.name}.{SERVICE_DIR}")
    keys, limits, audit = KeyRing.open(folder / "keys.json", time.time), Limits(), AuditLog(folder / "audit.jsonl")
    certificate, trusted = door.certified(folder)
    hosted = HostedRun(config, folder / "journal", Printed(), resume=resume, weights_from=weights_from)
    description = f"The run {config.run.name}."
    paths = GatePaths(streamed=STREAMED, public=PUBLIC, at_once=AT_ONCE)
    app = make_app(
        title="AsyncFlow", description=description, keys=keys, limits=limits, audit=audit, paths=paths, ready=hosted.under_way
    )
    app.router.routes.extend(routes(hosted, keys).routes)  # included ones are matched twice: a seventh of a small request
    app.include_router(watch_routes(Watched(config.run_dir, predicted)))
    server = HttpServer(app, door.place, limits, certificate)
    address = await server.start()
    print(f"serving {config.run_dir} at {address}, with the keys in {keys.path}")
    print(f"try        {_example(address, keys.path, trusted)}", flush=True)
    try:
        status = await until_stopped(hosted.over)
    finally:
        with contextlib.suppress(Exception):  # `failure` says it
            await hosted.stop()
        await hosted.farewell()
        await server.stop()
        audit.close()
    if hosted.failure:
        raise RunError(hosted.failure)
    return status


async def _serve_tinker(path: Path, overrides: list[str], door: _Door, models: _Models) -> int:
    """Serve a model by Tinker's API until a signal comes. Returns the exit status."""
    from asyncflow.run.models.model_source import HubName, folder_of
    from asyncflow.service.tinker.serving import base_model, config_of_model

    is_model = path.is_dir() or (path.suffix not in (".yaml", ".yml") and HubName.of(str(path)) is not None)
    config = config_of_model(str(path), overrides) if is_model else load(path, overrides)
    with TemporaryDirectory(prefix="asyncflow-model-") as scratch:
        base = base_model(config, await folder_of(config.model.path, Path(scratch), print), models.name)
        return await _serve_base(config, base, door, models)


async def _serve_base(config: Config, base: BaseModel, door: _Door, models: _Models) -> int:
    from asyncflow.service.app import AuditLog, GatePaths, make_app
    from asyncflow.service.keys import KeyRing
    from asyncflow.service.limits import Limits
    from asyncflow.service.server import HttpServer
    from asyncflow.service.tickets import Tickets
    from asyncflow.service.tinker.context import Bounds
    from asyncflow.service.tinker.routes import LOOKS, routes
    from asyncflow.service.tinker.serving import KEY_PREFIX, sessions_of

    folder = config.run_dir.with_name(f"{config.run_dir.name}.{TINKER_DIR}")
    keys, limits, audit = KeyRing.open(folder / "keys.json", time.time, KEY_PREFIX), Limits(), AuditLog(folder / "audit.jsonl")
    certificate, trusted = door.certified(folder)
    options: dict[str, Any] = {"num_samplers": models.num_samplers, "trains_whole_weights": models.have_full_weights}
    try:
        async with sessions_of(config, base, folder, bounds=Bounds(**models.bounds), **options) as sessions:
            description = f"The model {base.name}, by the API of the tinker SDK."
            tickets = Tickets(time.monotonic)
            app = make_app(
                title="AsyncFlow",
                description=description,
                keys=keys,
                limits=limits,
                audit=audit,
                paths=GatePaths(looks=LOOKS),
                tickets=tickets,
            )
            app.include_router(routes(sessions, tickets))
            server = HttpServer(app, door.place, limits, certificate)
            address = await server.start()
            print(f"serving {base.name} at {address}, with the keys in {keys.path} and the checkpoints in {folder}")
            trust = f"SSL_CERT_FILE={trusted} " if trusted else ""
            print(f"try        {trust}TINKER_BASE_URL={address} TINKER_API_KEY={_secret_of(keys.path)} python", flush=True)
            try:
                return await until_stopped(asyncio.Event())
            finally:
                await server.stop()
    finally:
        audit.close()


async def until_stopped(over: asyncio.Event) -> int:
    """Wait until it is over, or a signal says so. Returns the exit status. A second signal cancels whoever waits here, whatever
    it does by then."""
    seen: list[int] = []
    caller = asyncio.current_task()

    def end(number: int) -> None:
        seen.append(number)
        over.set()
        if len(seen) > 1 and caller is not None:
            caller.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end, number)
    await over.wait()
    return 128 + seen[0] if seen else 0


def _example(address: str, keys: Path, trusted: Path | None) -> str:
    """Command that shows the run's status."""
    where = f"--unix-socket {address.removeprefix('unix:')} http://run" if address.startswith("unix:") else address
    secret = _secret_of(keys)
    return f'curl {f"--cacert {trusted} " if trusted else ""}-H "Authorization: Bearer {secret}" {where}/v1/status'


def _secret_of(keys: Path) -> str:
    """Shell expression for the first key's secret, so that the secret itself is not printed."""
    return f"$(python3 -c \"import json; print(json.load(open('{keys}'))['keys'][0]['secret'])\")"
