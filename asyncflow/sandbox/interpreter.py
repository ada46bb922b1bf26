"""Interpreters that processes of the user's code run in: here, or on another machine.

    /envs/theirs/bin/python                      an interpreter of this machine
    ssh://anna@node-7:2222/envs/theirs/bin/python    one of another machine, by ssh's own settings and keys

The pipes of a process on another machine are ssh's: no port is opened for it. It ends with the connection, since the kernel there
kills it when sshd's process for this connection is gone.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Final

from asyncflow.types import UserError

PACKAGE_FOLDER: Final = str(Path(__file__).parents[2])
"""Folder of this package; on another machine too, where both see one file system. Elsewhere it is installed there."""
SCHEME: Final = "ssh://"
_OPTIONS: Final = ("-T", *shlex.split("-o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"))
"""Options of ssh: no terminal and no questions; a machine that says nothing for 15 s is lost."""
_ADDRESS: Final = re.compile(r"ssh://((?:\w[\w.-]*@)?\w[\w.-]*)(?::(\d+))?(/.+)", re.ASCII)
"""User and host, port, path."""


def command_of(python: str, module: str) -> tuple[str, ...]:
    """Command that runs `module` in that interpreter, with the owner's process id as argument, on another machine 0. Raises
    `UserError`."""
    if not python.startswith(SCHEME):
        return (python, "-u", "-m", module, str(os.getpid()))
    found = _ADDRESS.fullmatch(python)
    if found is None:
        raise UserError(f"interpreter {python!r}: write it as ssh://HOST/path/to/python or ssh://USER@HOST:PORT/path/to/python")
    where, port, path = found.groups()
    there = ("env", f"PYTHONPATH={PACKAGE_FOLDER}", path, "-u", "-m", module, "0")
    return ("ssh", *_OPTIONS, *(("-p", port) if port else ()), "--", where, f"exec {shlex.join(there)}")
