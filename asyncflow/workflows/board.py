"""The board: which policy versions are published, and which worker serves which.

A version is a step count: version v is what v committed steps have made. Version 0 is the model that the run started from: every
worker has it from the same files. The last `max_staleness` + 1 versions are kept, so that rows that are due under an older one can
be made again when their worker has died: one of those that are past it is called back.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import msgspec

from asyncflow.transport import client_name, remote
from asyncflow.weight_sync.base import Manifest
from asyncflow.workflows.schedule import Progress, Schedule
from asyncflow.workflows.signal import Signal


class Target(msgspec.Struct, frozen=True):
    """The version that a worker is to serve. `manifest` is None for version 0, the worker's own files."""

    version: int
    manifest: Manifest | None


class Board:
    """One model's version line. Implements `Fleet`."""

    def __init__(self, schedule: Schedule, progress: Progress, signal: Signal, clock: Callable[[], float]) -> None:
        self.published = 0
        self.serving: dict[str, int] = {}
        self.installing: dict[str, int] = {}
        self.stale: dict[str, str] = {}  # workers whose weights could not be brought up to date, and why
        self.given_up: set[str] = set()  # workers that have died for the last time
        self.step_seconds: float | None = None
        self.swap_seconds: float | None = None
        self.is_stopping = False
        self.on_installed: Callable[[int], None] = lambda version: None
        self.on_stale: Callable[[str, str], None] = lambda worker, why: None
        self._schedule, self._progress, self._signal, self._clock = schedule, progress, signal, clock
        self._kept: dict[int, Manifest] = {}
        self._published_at: float | None = None
        self._granted_at: dict[str, float] = {}

    # -- the trainer's ------------------------------------------------------------------------------------------------------

    @remote
    async def publish(self, manifest: Manifest) -> None:
        """The trainer has published a version. Versions only rise; anything else is a `ValueError`."""
        if manifest.version <= self.published:
            raise ValueError(f"version {manifest.version} was published after version {self.published}")
        self.published, self._kept[manifest.version] = manifest.version, manifest
        for version in [v for v in self._kept if v < manifest.version - self._schedule.max_staleness]:
            del self._kept[version]
        now = self._clock()
        if self._published_at is not None:
            self.step_seconds = now - self._published_at
        self._published_at = now
        self._signal.notify()

    # -- a rollout worker's -------------------------------------------------------------------------------------------------

    @remote
    async def join(self) -> Target | None:
        """The version that a worker starts with: the newest one, unless rows are left that only an older one may generate.

        None: the run is stopping.
        """
        if self.is_stopping:
            return None
        behind = self._behind()
        version = self.published if behind is None else behind
        self._grant(client_name.get(), version)
        return Target(version, self._kept.get(version))

    @remote
    async def next_target(self, serving: int) -> Target | None:
        """Wait until the calling worker is to serve another version than this one, and say which. None: the run is stopping.

        It may be fetched at once; `may_install` says when it is to be installed.
        """
        await self._signal.until(lambda: self.is_stopping or self._target(serving) != serving)
        if self.is_stopping:
            return None
        version = self._target(serving)
        return Target(version, self._kept.get(version))

    @remote
    async def may_install(self, version: int, serving: int) -> bool:
        """Wait until the calling worker may install its target. False: it has another target by now, or the run is stopping."""

        def is_over() -> bool:
            return self.is_stopping or self._target(serving) != version

        def is_granted() -> bool:
            return version < serving or self._schedule.may_install(version, self._progress, self)

        await self._signal.until(lambda: is_over() or is_granted())
        if is_over():
            return False
        self._grant(client_name.get(), version)
        return True

    @remote
    async def installed(self, version: int) -> None:
        """The calling worker serves this version from now on."""
        worker = client_name.get()
        self.serving[worker] = version
        self.stale.pop(worker, None)
        self.installing.pop(worker, None)
        self.swap_seconds = self._clock() - self._granted_at.pop(worker, self._clock())
        self.on_installed(version)
        self._signal.notify()

    @remote
    async def failed(self, why: str) -> None:
        """The calling worker could not get the weights that it is to serve: it takes no prompts until it has."""
        worker = client_name.get()
        self.installing.pop(worker, None)
        self.stale[worker] = why
        self.on_stale(worker, why)
        self._signal.notify()

    # -- the driver's -------------------------------------------------------------------------------------------------------

    def died(self, worker: str, is_given_up: bool) -> None:
        """A worker has died, and is started again or not."""
        if is_given_up:
            self.given_up.add(worker)
        self.forget(worker)

    def forget(self, worker: str) -> None:
        """A worker has gone: nothing is waited for or kept on its behalf."""
        for book in (self.serving, self.installing, self.stale, self._granted_at):
            book.pop(worker, None)
        self._signal.notify()

    async def all_serve(self, version: int) -> None:
        """Wait until every worker that is not stale serves this version, or a later one."""
        await self._signal.until(
            lambda: self.published >= version and all(v >= version for w, v in self.serving.items() if w not in self.stale)
        )

    @property
    def newest(self) -> Manifest | None:
        """What was published last."""
        return self._kept.get(self.published)

    def num_unhealthy(self) -> int:
        """Workers that serve nothing, and may not soon: given up, or without the weights that they are to have."""
        return len(self.given_up | self.stale.keys())

    def stop(self) -> None:
        """Nothing more is granted."""
        self.is_stopping = True
        self._signal.notify()

    def _grant(self, worker: str, version: int) -> None:
        self.installing[worker] = version
        self._granted_at[worker] = self._clock()
        self._signal.notify()

    def _target(self, serving: int) -> int:
        """What a worker that serves this version is to serve next: the newest, unless rows in nobody's hands need another first."""
        behind = self._behind()
        if behind is not None and behind < serving:
            return behind
        ahead = self._progress.oldest_unleased(serving + 1)
        return self.published if ahead is None else min(self.published, ahead)

    def _behind(self) -> int | None:
        """The version that rows in nobody's hands need, if every worker is past it or takes nothing; else None."""
        needed = self._progress.oldest_unleased(0)
        if needed is None or needed >= self.published or (needed and needed not in self._kept):
            return None
        serving = (version for worker, version in self.serving.items() if worker not in self.stale)
        return needed if all(version > needed for version in chain(serving, self.installing.values())) else None
