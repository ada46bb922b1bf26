"""Engines that a configuration names, imported and their options checked: `python -m asyncflow.engines.check`. The driver imports
no torch, and a file of the user's may import anything."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from asyncflow.registry import check_options
from asyncflow.types import UserError
from asyncflow.user_file import status_of


class AskedEngine(msgspec.Struct):
    """Engine that a configuration names, its options, and the names of the arguments that a run gives it."""

    kind: str
    name: str
    options: dict[str, Any]
    known: dict[str, str]
    given: list[str]


def main() -> None:
    """Check a list of `AskedEngine` from standard input. Exit 2, with a sentence, for the first that cannot be had; 1 for want of
    memory or file handles."""
    for asked in msgspec.msgpack.decode(sys.stdin.buffer.read(), type=list[AskedEngine]):
        try:
            check_options(asked.kind, asked.name, asked.options, asked.known, asked.given)
        except UserError as error:
            print(error, file=sys.stderr)
            sys.exit(status_of(error))


if __name__ == "__main__":
    main()
