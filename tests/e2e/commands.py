"""Starting the command line as a user does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import yaml


def command_line(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-c", "from asyncflow.cli import main; main()", *map(str, arguments)]


def run_command(*arguments: str | Path, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """`asyncflow ARGUMENTS`, finished."""
    return subprocess.run(command_line(*arguments), capture_output=True, text=True, timeout=timeout, check=False)


def write_config(folder: Path, tree: dict[str, Any]) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """The worker processes of a run, and the reward processes below them."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if str(run_dir) in " ".join(process.info["cmdline"] or []) and "asyncflow.cluster.child" in (process.info["cmdline"] or []):
            found += [process, *process.children(recursive=True)]
    return found
