"""`asyncflow watch`: a live page about a run, or about all runs of a folder. `asyncflow compare`: runs over each other."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from asyncflow.cli.arguments import need_service
from asyncflow.config import load
from asyncflow.run_dir import CONFIG_FILE
from asyncflow.types import UserError

PREDICTION_SECONDS: Final = 300.0
"""A simulation of some steps takes seconds; one that takes longer than this is left."""
_NEVER_SIMULATED: Final = ("reward", "environment", "episodes")
"""Sections whose parts a simulation has its own for, so that their code is not imported."""
_KEY_NAME = "page"
_REDIRECT = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={address}"><title>AsyncFlow</title>'


def watch(
    folder: Annotated[Path, typer.Argument(help="A run's folder, such as runs/quickstart, or a folder of runs.")],
    listen: Annotated[str, typer.Option(help="127.0.0.1:PORT (port 0: any), or unix:PATH.")] = "127.0.0.1:0",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Show a live page about a run: what every worker does and waits for, its metrics, its samples."""
    need_service("watch", "fastapi", "httptools", "uvicorn")
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    raise typer.Exit(asyncio.run(serve_page(folder, listen, opens=browser)))


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of two runs or more.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("compare.html"),
) -> None:
    """Write a page that compares runs: curves over each other, settings that differ, what their workers waited for."""
    from asyncflow.telemetry.compare import write_comparison
    from asyncflow.telemetry.run_reader import RunReader

    if len({run.resolve() for run in runs}) < 2:
        raise UserError("a comparison needs the folders of two runs or more")
    for run in runs:
        if not (run / CONFIG_FILE).is_file():
            raise UserError(f"{run} is no run's folder: it has no {CONFIG_FILE}")
    names = _names(runs)
    readers = {name: RunReader(run) for name, run in zip(names, runs, strict=True)}
    for reader in readers.values():
        reader.read_all()
    print(write_comparison(readers, output))


def _names(runs: list[Path]) -> list[str]:
    """Names that tell the runs apart: of their folders, or their whole paths."""
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


async def serve_page(folder: Path, listen: str, *, opens: bool) -> int:
    """Serve the page until a signal comes. Returns the exit status. Raises `UserError`."""
    from asyncflow.cli.serve import until_stopped
    from asyncflow.service.app import AuditLog, GatePaths, make_app
    from asyncflow.service.keys import KeyRing
    from asyncflow.service.limits import Limits
    from asyncflow.service.server import HttpServer, Listen
    from asyncflow.service.watching import PAGE, PUBLIC, LocalOnly, Watched, watch_routes

    place = Listen.parse(listen)
    if not place.is_private:
        raise UserError(
            f"--listen {listen} can be reached from other machines, and this page is for this one: take 127.0.0.1:PORT or "
            f"unix:PATH, and reach it from elsewhere by ssh -L"
        )
    with tempfile.TemporaryDirectory(prefix="asyncflow-watch-") as scratch:  # of mode 0700: nobody else reads the key there
        keys = KeyRing(Path(scratch) / "keys.json", [], time.time)
        secret = keys.add(_KEY_NAME, "read").secret
        app = make_app(
            title="AsyncFlow",
            description="Runs, while they go on and afterwards.",
            keys=keys,
            limits=Limits(),
            audit=AuditLog(None),
            paths=GatePaths(public=PUBLIC),
        )
        app.add_middleware(LocalOnly)
        app.include_router(watch_routes(Watched(folder, predicted)))
        server = HttpServer(app, place, Limits())
        address = await server.start()
        if place.path is not None:
            print(f"{folder} is shown at {address}: forward a port to it, such as ssh -L 8000:{place.path} HOST, and open")
            print(f"http://localhost:8000{PAGE}#key={secret}", flush=True)
        else:
            print(f"{folder} is shown at {address}{PAGE}#key={secret}", flush=True)
            if opens:
                _open(f"{address}{PAGE}#key={secret}", Path(scratch))
        try:
            await until_stopped(asyncio.Event())
            return 0
        finally:
            await server.stop()


async def predicted(run: Path, change: str) -> str:
    """Sentence about the seconds of a step with a changed configuration, by `asyncflow plan --from`; "" where it cannot say, and
    where that would import a part of somebody's own: the page runs no code that a run names."""
    try:
        tree = load(run / CONFIG_FILE).model_dump(mode="json")
    except UserError:
        return ""
    if _names_code({name: section for name, section in tree.items() if name not in _NEVER_SIMULATED}):
        return ""
    command = [sys.executable, "-m", "asyncflow", "plan", "--from", str(run), change, "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        output, _ = await asyncio.wait_for(process.communicate(), PREDICTION_SECONDS)
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        return ""
    before, then = (msgspec.json.decode(output)[name]["step_seconds"] for name in ("measured", "predicted"))
    return f"By the run's own costs the planner predicts {then:.3g} s a step with {change}, instead of {before:.3g} s."


def _names_code(tree: object) -> bool:
    """Whether a choice in a configuration is `file.py:Name` or `module:Name`."""
    if isinstance(tree, Mapping):
        return ":" in str(tree.get("name")) or any(map(_names_code, tree.values()))
    return isinstance(tree, list) and any(map(_names_code, tree))


def _open(address: str, scratch: Path) -> None:
    """Open the page in a browser, by a file that only this user can read: arguments of a process are seen by everybody."""
    path = scratch / "open.html"
    path.write_text(_REDIRECT.format(address=address), encoding="utf-8")
    os.chmod(path, 0o600)
    webbrowser.open(path.as_uri())
