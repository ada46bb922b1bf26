"""Starting the command line as a user does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.forked import Command
from tests.patience import patience
from tests.processes import below, words_of


def command_line(*arguments: str | Path) -> list[str]:
    """What a user types, in an interpreter of its own."""
    return [sys.executable, "-c", "from asyncflow.cli import main; main()", *map(str, arguments)]


def run_command(*arguments: str | Path, seconds: float = 600.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """`asyncflow ARGUMENTS`, finished, in so many seconds of a quiet machine. `environment`: what is added to this process's."""
    command = Command(*arguments, **environment)
    try:
        output, errors = command.communicate(patience(seconds))
    finally:
        command.kill()
    return subprocess.CompletedProcess(command.args, command.wait(), output, errors)


def verified(config: Path, *options: str, names: tuple[str, str] = ("synchronous", "periodic"), steps: int) -> str:
    """The words of `asyncflow verify`, which has found no difference between two runs of so many steps."""
    command = run_command("verify", config, "--steps", str(steps), *options, seconds=240.0)
    assert command.returncode == 0, command.stdout + command.stderr
    assert f"EQUAL: {names[0]} and {names[1]} gave the same bits in {steps} steps" in command.stdout
    return command.stdout


def wait_for(condition: Callable[[], Any], command: Command | None = None, seconds: float = 120.0) -> Any:
    """What it returns, as soon as that is something. The command it depends on must not end before."""
    deadline = time.monotonic() + patience(seconds)
    while not (found := condition()):
        assert command is None or command.poll() is None, command.communicate()
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return found


def write_config(folder: Path, tree: dict[str, Any]) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def kill_trainer(run_dir: Path) -> None:
    """Kill the first trainer of a run."""
    next(process for process in processes_of(run_dir) if words_of(process)[-2:-1] == ["trainer/0"]).kill()


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """The worker processes of a run, and the reward processes below them."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if "asyncflow.cluster.child" in words and str(run_dir) in words:
            found += [process, *below(process)]
    return found
