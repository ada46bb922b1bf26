"""A served run, as tests have it: `asyncflow serve` in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncflow.client import Client
from tests.e2e.commands import write_config
from tests.forked import Command
from tests.patience import patience


class Served:
    """`asyncflow serve` of a configuration, at a unix socket in its folder, or where it is told to listen. `url`: where it does."""

    def __init__(
        self, background: Callable[..., Command], folder: Path, tree: dict[str, Any], *options: str, listen: str | None = None
    ) -> None:
        self.folder, self._background = folder, background
        self.config = write_config(folder, tree)
        self.run_dir = Path(tree["run"]["dir"]) / tree["run"]["name"]
        self.key_file = self.run_dir.with_name(f"{self.run_dir.name}.service") / "keys.json"
        self.address = listen or f"unix:{folder / 'http.sock'}"
        self.start(*options)

    def start(self, *options: str) -> None:
        """Start the server, again perhaps, and wait until it answers."""
        self.command = self._background("serve", self.config, "--listen", self.address, *options)
        self.url = self.read_until("serving").split(" at ")[1].split(",")[0]

    def read_until(self, words: str) -> str:
        """Read what the server prints, until a line has these words. Returns the line."""
        deadline = time.monotonic() + patience(60)
        while words not in (line := self.command.stdout.readline()):
            assert line and time.monotonic() < deadline, self.command.communicate()
        return line

    def client(self, **options: Any) -> Client:
        return Client.connect(self.url, key_file=self.key_file, **options)
