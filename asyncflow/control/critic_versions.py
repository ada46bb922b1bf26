"""Critic versions: which version of the critic is published, for the workers that compute values by it.

A version is a step count: version v is what training on v steps has made. Version 0 is in the files that the critic starts from. A
resumed run from version `first` begins when the critic has published that version. The values of step s are those of version s, and
the critic trains step s when all of these are there: so of the steps before the published version nothing is left to compute.
"""

from __future__ import annotations

from asyncflow import waits
from asyncflow.control.policy_versions import Target
from asyncflow.control.signal import Signal
from asyncflow.transport import remote
from asyncflow.weight_sync.base import Manifest


class CriticVersions:
    """Version line of the critic. In the critic's own process, where it computes the values itself, or a service of the driver."""

    def __init__(self, signal: Signal, first: int = 0) -> None:
        self.newest = Target(-1 if first else 0, None)
        self.is_stopping = False
        self._signal = signal

    @remote
    async def publish(self, version: int, manifest: Manifest | None) -> None:
        """Take note of a version that the critic has published. Versions only rise; anything else is a `ValueError`. Without a
        manifest it is there already for a loop that waits: in the engine that has trained it."""
        if version <= self.newest.version:
            raise ValueError(f"version {version} of the critic was published after version {self.newest.version}")
        self.newest = Target(version, manifest)
        self._signal.notify()

    @remote
    async def reaches(self, step: int) -> Target | None:
        """Wait until the version is `step` or more, and return it. None: the run is stopping."""
        await self._signal.until(lambda: self.is_stopping or self.newest.version >= step, waits.CRITIC_VERSION, version=step)
        return None if self.is_stopping else self.newest

    def stop(self) -> None:
        """Stop the run: nobody waits any more."""
        self.is_stopping = True
        self._signal.notify()
