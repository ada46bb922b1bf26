"""The board: which policy versions are trained, published, and installed where.

A version is a step count: version v is what v committed steps have made. Version 0 is the model that the run started from: every
worker loads it from the same files.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncflow.transport import client_name, remote
from asyncflow.weight_sync.base import Manifest
from asyncflow.workflows.schedule import Progress, Schedule
from asyncflow.workflows.signal import Signal


class Board:
    """One model's version line."""

    def __init__(self, schedule: Schedule, progress: Progress, signal: Signal) -> None:
        self.published: Manifest | None = None
        self.versions: dict[str, int] = {}
        self.is_stopping = False
        self.on_installed: Callable[[int], None] = lambda version: None
        self._schedule, self._progress, self._signal = schedule, progress, signal

    @remote
    async def publish(self, manifest: Manifest) -> None:
        """The trainer has published a version. Versions only rise; anything else is a `ValueError`."""
        if self.published is not None and manifest.version <= self.published.version:
            raise ValueError(f"version {manifest.version} was published after version {self.published.version}")
        self.published = manifest
        self._signal.notify()

    @remote
    async def newer_than(self, installed: int) -> Manifest | None:
        """Wait for a published version above `installed`. None: the run is stopping."""
        await self._signal.until(lambda: self.is_stopping or (self.published is not None and self.published.version > installed))
        return None if self.is_stopping else self.published

    @remote
    async def may_install(self, version: int) -> bool:
        """Wait until the schedule grants the installation of a version to the calling worker. False: the run is stopping."""
        await self._signal.until(lambda: self.is_stopping or self._schedule.may_install(version, self._progress))
        return not self.is_stopping

    @remote
    async def installed(self, version: int) -> None:
        """The calling worker serves this version from now on."""
        self.versions[client_name.get()] = version
        self.on_installed(version)
        self._signal.notify()

    def stop(self) -> None:
        """Nothing more is granted."""
        self.is_stopping = True
        self._signal.notify()
