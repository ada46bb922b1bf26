"""What transformers' module of a model says, asked for in a process: rollout workers do without transformers.

waits for: the process, `LOOK_UP_SECONDS` at most
is unblocked by: its end
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Final

from asyncflow.types import RunError, UserError

LOOK_UP_SECONDS: Final = 600.0


def look_up(module: str, what: str, *given: object) -> Any:
    """Answer of a program of `asyncflow.engines.train` that prints JSON. `what`: it, in words. Raises `UserError` where the program
    says that there is none, and `RunError`."""
    command = [sys.executable, "-m", f"asyncflow.engines.train.{module}", *map(str, given)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_UP_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{what} were not found within {LOOK_UP_SECONDS:g} s: is the machine overloaded?") from error
    if found.returncode:
        last = (found.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise (UserError if found.returncode == 2 else RunError)(f"{what} are not known: {last}")
    return json.loads(found.stdout.splitlines()[-1])
