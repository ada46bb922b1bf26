"""Engines that a configuration names, imported and their options checked, in a process of their own: the driver imports no torch,
and a file of the user's may import anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from asyncflow.registry import check_options

ASKED_FILE: Final = "asked"


class AskedEngine(msgspec.Struct):
    """Engine that a configuration names, its options, and the names of the arguments that a run gives it."""

    kind: str
    name: str
    options: dict[str, Any]
    known: dict[str, str]
    given: list[str]


async def check(name: str, folder: Path) -> None:
    """Main of the process: check the list of `AskedEngine` in a file of the folder. Raises `UserError` for the first that cannot be
    had, and `RunError` for want of memory or file handles."""
    for asked in msgspec.msgpack.decode((folder / ASKED_FILE).read_bytes(), type=list[AskedEngine]):
        check_options(asked.kind, asked.name, asked.options, asked.known, asked.given)
