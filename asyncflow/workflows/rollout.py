"""A rollout worker: which groups it takes, which weights it serves.

consumes: admitted groups that its installed version may generate, at most its free slots and its fair share of a batch
waits for: groups; a published version and the board's leave to install it
is unblocked by: the feed, its own responses (which free slots), the trainer's publishing, the end of the other workers' rows
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from asyncflow.engines.base import Response, RolloutEngine
from asyncflow.rewards.base import Sample
from asyncflow.telemetry.spans import Recorder
from asyncflow.transfer_queue.client import Leased, TransferQueueClient
from asyncflow.types import Array
from asyncflow.weight_sync.base import WeightReceiver
from asyncflow.workflows.board import Board
from asyncflow.workflows.loop import Producer, produce
from asyncflow.workflows.samples import Request, Shape, requests
from asyncflow.workflows.signal import Signal


class Rollout:
    """The producers of one worker: one coroutine per group, as many as the engine and the worker's fair share have room for."""

    def __init__(
        self,
        queue: TransferQueueClient,
        board: Board,
        engine: RolloutEngine,
        receiver: WeightReceiver,
        score: Callable[[Sample], Awaitable[float]],
        decode: Callable[[Array], str],
        shape: Shape,
        spans: Recorder,
        keep_sample: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._queue, self._board, self._engine, self._receiver = queue, board, engine, receiver
        self._shape, self._spans = shape, spans
        self._producer = Producer(queue, engine, score, decode, shape, self._responded, self._scored, keep_sample)
        self._share = -(-shape.prompts_per_step // shape.num_rollout_workers) * shape.group_size
        self._installed = 0
        self._is_installing = False
        self._has_served = False  # anything since the last installation
        self._generating = 0  # rows without a response yet
        self._scoring = 0
        self._changed = Signal()

    async def run(self) -> None:
        """Until the board says that the run is stopping; what is unfinished then is abandoned."""
        await self._board.installed(0)
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(self._take_groups())
            await self._follow_weights()
            taking.cancel()

    async def _take_groups(self) -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                self._show_lane()
                await self._changed.until(lambda: not self._is_installing and self._room() > 0)
                version = self._installed
                leased = await self._queue.lease("rollout", groups=self._room(), installed=version)
                if leased is None:  # withdrawn for an installation, or closed
                    await self._changed.until(partial(self._has_moved_on, version))
                    continue
                for request in requests(leased):
                    self._generating += len(request.rows)
                    groups.create_task(self._produce(leased, request))

    def _has_moved_on(self, version: int) -> bool:
        return self._installed != version

    def _room(self) -> int:
        """How many more groups may be taken."""
        rows = min(self._share - self._generating, self._engine.free_slots)
        return rows // self._shape.group_size if self._generating else max(1, rows // self._shape.group_size)

    async def _produce(self, leased: Leased, request: Request) -> None:
        start, meta = self._spans.clock(), request.meta
        await produce(self._producer, leased, request)
        self._spans.beside(
            "generate_group", start, step=meta.step, version=self._installed, group=meta.group, rows=len(request.rows)
        )

    def _responded(self, response: Response) -> None:
        self._spans.add(rows=1, tokens=len(response.token_ids))
        self._generating -= 1
        self._scoring += 1
        self._show_lane()
        self._changed.notify()

    def _scored(self) -> None:
        self._scoring -= 1
        self._has_served = True
        self._show_lane()

    async def _follow_weights(self) -> None:
        """Fetch every published version in the background and install it when the board grants it."""
        while (manifest := await self._board.newer_than(self._installed)) is not None:
            start = self._spans.clock()
            tensors = await self._receiver.fetch(manifest)
            await self._engine.prepare(manifest.version, tensors)
            self._spans.beside("fetch", start, version=manifest.version, bytes=manifest.num_bytes)
            if not await self._board.may_install(manifest.version):
                return
            self._is_installing = True
            await self._queue.withdraw("rollout")  # nothing is leased while weights are being changed
            with self._spans.busy("install", version=manifest.version, bytes=manifest.num_bytes):
                await self._engine.install(manifest.version, tensors)
            self._installed, self._is_installing, self._has_served = manifest.version, False, False
            await self._board.installed(manifest.version)
            self._changed.notify()

    def _show_lane(self) -> None:
        if self._is_installing:
            return
        if self._generating:
            self._spans.enter("generate", version=self._installed)
        elif self._scoring:
            self._spans.waiting("reward")
        else:
            self._spans.waiting("weights" if self._has_served else "prompts")
