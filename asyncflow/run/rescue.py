"""The newest weights, back from a rollout worker: where a trainer was lost that alone had them.

    rollout workers: give_back --wants; begin; write, a piece after another; ended--> driver: Rescue --file--> Life: the run's model

Without staleness new weights are written over the only published file (weight_sync/files.py), so none is whole if the trainer dies
then. Whoever generates by the newest version has it, too: in the rollout engine's own dtype. Every worker offers it; one gives it.

consumes: what an engine exports
waits for: the trainers' end, `seconds` at most: until then they may save the model themselves; for who gives, to end or to be gone
is unblocked by: the end of their connections
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from asyncflow.control.policy_versions import PolicyVersions
from asyncflow.engines.base import RolloutEngine
from asyncflow.registry import load
from asyncflow.telemetry.hub import Hub
from asyncflow.transport import client_name, remote
from asyncflow.types import Array
from asyncflow.weight_sync.base import Manifest
from asyncflow.weight_sync.files import PATTERN
from asyncflow.weight_sync.layout import FileLayout

TRAINERS: Final = "trainer/"
_PIECE_BYTES: Final = 4 << 20
_LOOK_SECONDS: Final = 0.05


class Rescue:
    """The driver's service. `published`: the newest weights' file and version, once they have been given back."""

    def __init__(
        self,
        folder: Path,
        versions: PolicyVersions,
        hub: Hub,
        seconds: float,
        *,
        has_failed: Callable[[], bool],
        has_saved: Callable[[], bool],
        says: Callable[[str], None],
    ) -> None:
        """`folder`: for the weights, private, in memory. `has_failed()`: whether the run ends since something has gone wrong, and
        `has_saved()`: whether the trainer has saved the model all the same."""
        self.published: Manifest | None = None
        self._folder, self._versions, self._hub, self._seconds = folder, versions, hub, seconds
        self._has_failed, self._has_saved, self._says = has_failed, has_saved, says
        self._giver: str | None = None
        self._fds: list[int] = []  # the last one is being written

    def may_be_needed(self) -> bool:
        """Whether the newest weights are nowhere but in rollout workers, and perhaps in trainers that are about to end."""
        newest = self._versions.newest
        is_lost = newest is not None and bool(newest.address) and not Path(newest.address).is_file()  # simulated ones have none
        return is_lost and self._has_failed() and not self._has_saved()

    @remote
    async def wants(self, version: int) -> bool:
        """Whether the calling worker is to give its weights. Not before the trainers' end, unless that is certain sooner."""
        if not self._is_wanted(version) or not await self._hub.have_left(TRAINERS, self._seconds):
            return False
        while self._giver is not None and self._giver in self._hub.states and self.published is None:
            await asyncio.sleep(_LOOK_SECONDS)
        if not self._is_wanted(version):
            return False
        self._giver = client_name.get()
        return True

    @remote
    async def begin(self, version: int, num_bytes: int) -> bool:
        """The weights come as a safetensors file of so many bytes. False: there is no room."""
        path = self._path(version)
        try:
            for unfinished in (*self._folder.glob(f"{PATTERN}.tmp"), path):  # nobody can use them, and they take room
                unfinished.unlink(missing_ok=True)
            self._fds.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            await asyncio.to_thread(os.posix_fallocate, self._fds[-1], 0, num_bytes)
        except OSError as error:
            self._says(f"there is no room in {self._folder} for the weights that rollout workers have left: {error.strerror}")
            self._giver = None
            return False
        return True

    @remote
    async def write(self, begin: int, piece: Array) -> None:
        """Bytes of that file: uint8 [n], from `begin` on."""
        os.pwrite(self._fds[-1], piece.data, begin)  # memory, and no thread that may outlive the file

    @remote
    async def ended(self, version: int) -> None:
        """Take note that all bytes of the version have been written."""
        path = self._path(version)
        self.published = Manifest("rescued", version, str(path), "", path.stat().st_size, {})

    def close(self) -> None:
        """Nothing more is taken. The folder is another's to remove."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _is_wanted(self, version: int) -> bool:
        newest = self._versions.newest
        return self.may_be_needed() and newest is not None and version == newest.version and self.published is None

    def _path(self, version: int) -> Path:
        return self._folder / f"rescued-{version}.safetensors"


async def give_back(rescue: Rescue, engine: RolloutEngine, version: int) -> None:
    """Send the weights that an engine has installed to the driver, if it wants them. Version 0 is the run's own files."""
    if not version or not await rescue.wants(version) or (source := await engine.export_weights()) is None:
        return
    layout = FileLayout(source.specs)
    raw_bytes = load("function", "asyncflow.weight_sync.staging:raw_bytes")  # the driver has no torch
    if not await rescue.begin(version, layout.num_bytes):
        return
    await rescue.write(0, np.frombuffer(layout.head, np.uint8))
    async for name, tensor in source.tensors():
        begin, data = layout.spans[name][0], raw_bytes(tensor)
        for at in range(0, len(data), _PIECE_BYTES):
            await rescue.write(begin + at, data[at : at + _PIECE_BYTES])
    await rescue.ended(version)
