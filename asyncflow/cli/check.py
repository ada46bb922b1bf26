"""`asyncflow check`: the machine, the versions, and what is missing for which feature; or what a layer of a model costs here."""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from asyncflow.config import load
from asyncflow.devices import CPU
from asyncflow.model_folder import read_json
from asyncflow.threads import num_cores
from asyncflow.types import UserError

CORE = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "msgspec", "plotly")
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "ray": (("ray",), "workers placed by Ray, on one machine or several (cluster=ray)"),
    "vllm": (("httpx2",), "rollouts on vLLM (rollout.engine=vllm), which may be in an environment of its own"),
    "redis": (("redis",), "samples kept in Redis (queue.storage=redis)"),
    "maths": (("math-verify",), "rewards of mathematical expressions (reward.scorer=maths)"),
    "mooncake": (("mooncake-transfer-engine",), "samples kept in Mooncake Store (queue.storage=mooncake)"),
    "data": (("datasets",), "Parquet files, saved data sets and the Hugging Face Hub (data.path)"),
    "service": (("fastapi", "uvicorn", "httptools", "aiohttp", "protobuf"), "a run, or Tinker's API, over HTTP (asyncflow serve)"),
    "gguf": (("gguf", "accelerate"), "models in GGUF files (model.path)"),
    "wandb": (("wandb",), "metrics on Weights & Biases (telemetry.trackers)"),
    "mcp": (("mcp",), "tools of MCP servers (environment.tools)"),
    "environments": (
        ("gymnasium", "openenv-core", "reasoning-gym", "skyrl-gym", "textarena", "verifiers"),
        "other people's environments (environment), which may be in an environment of their own",
    ),
    "deepspeed": (("deepspeed",), "training with DeepSpeed (train.engine=deepspeed)"),
    "megatron": (("megatron-core",), "training with Megatron-Core (train.engine=megatron)"),
}
"""By extra of pyproject.toml: the packages that AsyncFlow imports, and what for."""
COSTS_FILE = "costs.json"
DOORS = (
    "ranks, weight_sync collective and network, agents and vLLM's nccl listen on loopback, unless a key `listen` or cluster=ray "
    "says otherwise; a run without these opens none"
)
"""Ports on which a run of `asyncflow train` listens."""


def check(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="A model, as model.path takes it: will it run, on what, with how much memory? key.path=value of a run's "
            "configuration, with a model or --profile.",
            metavar="[MODEL] [KEY=VALUE]...",
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A run's YAML file: time a layer of its model, under its layout, instead.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="With --profile: packed tokens of the micro-batches to try.")] = "256,1024,4096",
    repeats: Annotated[int, typer.Option(min=1, help="With --profile: how often each piece of work is timed.")] = 5,
    deadline: Annotated[float, typer.Option(min=1.0, help="With --profile: seconds until it is stopped.")] = 600.0,
) -> None:
    """Show the machine, versions, devices and ports, and what is missing for which feature.

    With a model: which engines train it and generate with it, and the memory that this takes. Of the Hub's only what describes it
    is downloaded.

    With --profile CONFIG: time one layer of the configuration's model under `plan.train` (forward, backward, optimiser,
    collectives, weights), then rollout, rewards, reference and critic, and keep it as a trace in runs/NAME-profile, with the costs
    that `asyncflow simulate --costs` takes.
    """
    given = list(arguments or [])
    model = given.pop(0) if given and "=" not in given[0] else None
    if model is not None and profile is not None:
        raise UserError(f"asyncflow check takes a model ({model!r}) or --profile CONFIG, whose configuration names one")
    if profile is not None:
        _profile(profile, given, _token_counts(tokens), repeats, deadline)
    elif model is not None:
        _check_model(model, given)
    elif given:
        raise UserError(f"asyncflow check takes {given[0]!r} with a model or --profile CONFIG alone")
    else:
        _show()


def _check_model(model: str, overrides: list[str]) -> None:
    from asyncflow.run.models.model_check import checked

    with tempfile.TemporaryDirectory(prefix="asyncflow-") as scratch:
        for line in asyncio.run(checked(model, overrides, Path(scratch))):
            print(line)


def _show() -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for title, rows in (("Machine", _machine()), ("Devices", _devices()), ("Versions", _versions()), ("Extras", _extras())):
        table = Table(title=title, show_header=False, box=None, title_justify="left", title_style="bold")
        for name, value in rows:
            table.add_row(escape(f"  {name}"), escape(value))
        console.print(table)


def _token_counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"--tokens {text!r} is no list of numbers such as 256,1024") from error
    if min(counts) < 2:
        raise UserError(f"--tokens {text!r}: a micro-batch has 2 tokens or more")
    return counts


def _profile(path: Path, overrides: list[str], tokens: tuple[int, ...], repeats: int, deadline_seconds: float) -> None:
    from asyncflow.planner.measured import profiled
    from asyncflow.run.trials.profile import profile, profiled_model
    from asyncflow.telemetry.profile import costs, table
    from asyncflow.telemetry.trace import SPANS_FILE, read_spans

    config = load(path, overrides)
    folder = asyncio.run(profile(config, tokens=tokens, repeats=repeats, deadline_seconds=deadline_seconds))
    layout = config.layout
    print(f"One layer of {config.model.path}, dp {layout.dp} x tp {layout.tp} x pp {layout.pp} on {config.train.device}")
    shown = Table(box=None)
    shown.add_column("  what")
    for name in ("at once", "takes", "that is"):
        shown.add_column(f"  {name}", justify="right")
    for row in table(costs(read_spans(folder / SPANS_FILE))):
        shown.add_row(*(escape(f"  {cell}") for cell in row))
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(shown)
    fields = read_json(profiled_model(folder) / "config.json")
    found, residuals = profiled(
        config,
        read_spans(folder / SPANS_FILE),
        num_layers=int(fields["num_hidden_layers"]),
        prompt_tokens=max(tokens) / (config.rollout.group_size + 1),
    )
    (folder / COSTS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    for residual in residuals:
        print(f"  {residual.line()}")
    for residual in residuals:
        if warning := residual.warning():
            print(f"warning: {warning}")
    for name in (SPANS_FILE, COSTS_FILE, "trace.json"):
        print(f"  {folder / name}")


def _machine() -> list[tuple[str, str]]:
    memory, shm = psutil.virtual_memory(), Path("/dev/shm")
    rows = [
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        ("python", platform.python_version()),
        ("cores", f"{num_cores()}"),
        ("memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available"),
    ]
    if shm.is_dir():
        rows.append(("shared memory", f"{shutil.disk_usage(shm).free / 2**30:.1f} GiB free in {shm}"))
    else:
        rows.append(("shared memory", "no /dev/shm: weights travel through files in the run's folder"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rows.append(("ports", f"{DOORS}; loopback works (tried {probe.getsockname()[1]})"))
    return rows


def _devices() -> list[tuple[str, str]]:
    import torch

    from asyncflow.engines.devices import accelerators

    rows = [(CPU, f"{torch.get_num_threads()} threads by default; {torch.backends.cpu.get_cpu_capability()}")]
    none = [("accelerators", f"none: rollout.device and train.device must be {CPU}")]
    return rows + (accelerators() or none)


def _versions() -> list[tuple[str, str]]:
    return [("asyncflow", _version("asyncflow-rl") or "not installed"), *((n, _version(n) or "missing") for n in CORE)]


def _extras() -> list[tuple[str, str]]:
    rows = []
    for name, (packages, purpose) in EXTRAS.items():
        versions = {package: _version(package) for package in packages}
        has = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
        if not all(versions.values()):
            lacks = ", ".join(package for package, version in versions.items() if not version)
            has = f"{has}{'; ' if has else ''}missing{f' {lacks}' if has else ''}: pip install 'asyncflow-rl[{name}]'"
        rows.append((name, f"{has}, for {purpose}"))
    return rows


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
