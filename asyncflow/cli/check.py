"""`asyncflow check`: the machine, the versions, and what is missing for which feature."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
from pathlib import Path

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

CORE = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "msgspec", "plotly")
USED = {
    "mooncake": ("mooncake-transfer-engine", "samples kept in Mooncake Store (queue.storage=mooncake)"),
    "redis": ("redis", "samples kept in Redis (queue.storage=redis)"),
    "wandb": ("wandb", "metrics on Weights & Biases (telemetry.trackers)"),
}
RESERVED = {
    "ray": "clusters of several machines",
    "vllm": "rollouts on vLLM",
    "service": "driving a run over HTTP",
    "deepspeed": "training with DeepSpeed",
    "megatron": "training with Megatron-Core",
}


def check() -> None:
    """Show the machine, versions, devices and ports, and what is missing for which feature."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for title, rows in (("Machine", _machine()), ("Devices", _devices()), ("Versions", _versions()), ("Extras", _extras())):
        table = Table(title=title, show_header=False, box=None, title_justify="left", title_style="bold")
        for name, value in rows:
            table.add_row(escape(f"  {name}"), escape(value))
        console.print(table)


def _machine() -> list[tuple[str, str]]:
    memory, shm = psutil.virtual_memory(), Path("/dev/shm")
    rows = [
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        ("python", platform.python_version()),
        ("cores", f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}"),
        ("memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available"),
    ]
    if shm.is_dir():
        rows.append(("shared memory", f"{shutil.disk_usage(shm).free / 2**30:.1f} GiB free in {shm}"))
    else:
        rows.append(("shared memory", "no /dev/shm: weights travel through files in the run's folder"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rows.append(("ports", f"a run opens none; loopback works (tried {probe.getsockname()[1]})"))
    return rows


def _devices() -> list[tuple[str, str]]:
    import torch

    rows = [("cpu", f"{torch.get_num_threads()} threads by default; {torch.backends.cpu.get_cpu_capability()}")]
    rows += [(f"cuda:{i}", torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]
    if not torch.cuda.is_available():
        rows.append(("cuda", "none: rollout.device and train.device must be cpu"))
    return rows


def _versions() -> list[tuple[str, str]]:
    return [("asyncflow", _version("asyncflow-rl") or "not installed"), *((n, _version(n) or "missing") for n in CORE)]


def _extras() -> list[tuple[str, str]]:
    rows = [
        (name, _version(package) or f"missing, for {purpose}: pip install 'asyncflow-rl[{name}]'")
        for name, (package, purpose) in USED.items()
    ]
    return [*rows, *((name, f"for {purpose}: nothing in this version uses it") for name, purpose in RESERVED.items())]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
