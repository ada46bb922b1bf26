"""The newest weights, back from a rollout worker: where a trainer was lost that alone had them.

    rollout worker: give_back --wants; write, a piece after another; ended--> driver: Rescue --file--> Life: the run's model

Without staleness new weights are written over the only published file (weight_sync/files.py), and a trainer on another machine has
its files there. Whoever generates by a version has it, too: in the rollout engine's own dtype.

consumes: what an engine exports
waits for: the trainers' end, `seconds` at most: until then they may save the model themselves
is unblocked by: their connections' end
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from asyncflow.engines.base import RolloutEngine
from asyncflow.registry import load
from asyncflow.telemetry.hub import Hub
from asyncflow.transport import remote
from asyncflow.types import Array
from asyncflow.weight_sync.base import Manifest
from asyncflow.weight_sync.files import PATTERN
from asyncflow.weight_sync.layout import Layout
from asyncflow.workflows.board import Board

TRAINERS: Final = "trainer/"
_PIECE_BYTES: Final = 4 << 20


class Rescue:
    """The driver's service. `published`: the newest weights' file and version, once they have been given back."""

    def __init__(
        self, folder: Path, board: Board, hub: Hub, has_saved: Callable[[], bool], seconds: float, says: Callable[[str], None]
    ) -> None:
        """`folder`: for the weights, private, in memory. `has_saved()`: whether the trainer has saved the model after all."""
        self.published: Manifest | None = None
        self._folder, self._board, self._hub, self._has_saved, self._seconds = folder, board, hub, has_saved, seconds
        self._says = says
        self._files: dict[int, int] = {}  # of versions that are on their way, descriptors
        self._newest = 0

    def is_needed(self) -> bool:
        """Whether the trainers have gone without the newest weights being anywhere but in rollout workers."""
        has_trainers = any(worker.startswith(TRAINERS) for worker in self._hub.states)
        return self._has_lost_file() and not has_trainers and not self._has_saved()

    @remote
    async def wants(self, version: int, num_bytes: int) -> bool:
        """Whether the calling worker is to give its weights, a safetensors file of so many bytes. Not before the trainers' end,
        unless that is certain sooner."""
        if not self._has_lost_file() or not await self._hub.have_left(TRAINERS, self._seconds):
            return False
        if version <= self._newest or self._has_saved():
            return False
        self._newest = version  # of two workers with the same version, one is enough
        try:
            for unfinished in self._folder.glob(f"{PATTERN}.tmp"):  # what was being written: nobody can use it, and it takes room
                unfinished.unlink()
            self._files[version] = fd = os.open(self._path(version), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            await asyncio.to_thread(os.posix_fallocate, fd, 0, num_bytes)
        except OSError as error:
            self._says(f"there is no room in {self._folder} for the weights that rollout workers have left: {error.strerror}")
            return False
        return True

    @remote
    async def write(self, version: int, begin: int, piece: Array) -> None:
        """Bytes of that file: uint8 [n], from `begin` on."""
        await asyncio.to_thread(os.pwrite, self._files[version], piece.data, begin)

    @remote
    async def ended(self, version: int) -> None:
        """All bytes are there."""
        os.close(self._files.pop(version))
        if self.published is None or version > self.published.version:
            self.published = Manifest("rescued", version, str(self._path(version)), "", self._path(version).stat().st_size, {})

    def close(self) -> None:
        """Nothing more is taken. The folder is another's to remove."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def _has_lost_file(self) -> bool:
        newest = self._board.newest
        return newest is not None and not Path(newest.address).is_file()

    def _path(self, version: int) -> Path:
        return self._folder / f"rescued-{version}.safetensors"


async def give_back(rescue: Rescue, engine: RolloutEngine, version: int) -> None:
    """Send the weights that an engine has installed to the driver, if it wants them. Version 0 is the run's own files."""
    source = await engine.export_weights() if version else None
    if source is None:
        return
    layout, raw_bytes = Layout(source.specs), load("function", "asyncflow.weight_sync.staging:raw_bytes")  # the driver has no torch
    if not await rescue.wants(version, layout.num_bytes):
        return
    await rescue.write(version, 0, np.frombuffer(layout.head, np.uint8))
    async for name, tensor in source.tensors():
        begin, data = layout.spans[name][0], raw_bytes(tensor)
        for at in range(0, len(data), _PIECE_BYTES):
            await rescue.write(version, begin + at, data[at : at + _PIECE_BYTES])
    await rescue.ended(version)
