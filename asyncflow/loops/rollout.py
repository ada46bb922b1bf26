"""A rollout worker: which groups it takes, which weights it serves.

consumes: admitted groups that its installed version may generate, at most its free slots and its share of a step
waits for: groups; another version to serve and the leave of `PolicyVersions` to install it
is unblocked by: the feed, its own responses (which free slots), the trainer's publishing, the end of the other workers' rows, the
stop of the run

Weights are fetched in the background as soon as they are published. Once `PolicyVersions` grants it, the worker takes nothing more,
ends what it may not end under the new version (everything, unless the schedule installs in flight), installs, and takes groups
again. One that is to leave takes nothing more, ends what it has, and leaves.

An evaluator is the same with groups of evaluations, and `PolicyVersions` of its own (evaluation.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from asyncflow.attestation import Attestation, Probe
from asyncflow.control.policy_versions import Target
from asyncflow.control.signal import Signal
from asyncflow.engines.base import RolloutEngine, Timing
from asyncflow.loops.algorithm1 import Producer, produce
from asyncflow.loops.context import LoopContext, ResponseScoring
from asyncflow.loops.episode import EpisodePlayer
from asyncflow.loops.samples import EVALUATE_TASK, GroupRequest, requests
from asyncflow.transfer_queue.client import Leased
from asyncflow.transfer_queue.leases import Want
from asyncflow.types import Array
from asyncflow.waits import FETCH, OWN_RESPONSES, waiting
from asyncflow.weight_sync.base import Manifest, WeightReceiver, WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

LANES = {"rollout": "generate", EVALUATE_TASK: EVALUATE_TASK}
"""State of a worker's lane while it generates, by its task."""
RETRY_SECONDS = (0.5, 2.0)
"""Pause after weights could not be fetched: at first, and at most (a worker that pauses does not hear that the run is stopping)."""


class EngineVersion(NamedTuple):
    """Weights that an engine has: their version, and the hash in its manifest; "" for those of the worker's own files."""

    version: int
    hash: str


FIRST = EngineVersion(0, "")
"""Weights that an engine was built with."""


def share_of(num_prompts: int, place: int, num_workers: int, version: int) -> int:
    """Prompts of a step that the worker at this place (0 to `num_workers` - 1) generates at once, while all serve this version.

    The prompts of one version after another are dealt out to the workers in turn, one by one. So the shares of a version add up
    to all of its prompts and differ by at most one, and so do the workers' sums of shares over any number of versions.
    """
    return len(range((place - version * num_prompts) % num_workers, num_prompts, num_workers))


@dataclass(slots=True)
class ServedWeights:
    """Weights that a rollout worker serves: published ones from its `receiver`, and those of its own files."""

    receiver: WeightReceiver
    original: Callable[[], Mapping[str, Tensor]]
    """Tensors of the worker's own files: of the version that has no manifest."""
    has: EngineVersion | None = FIRST
    """Weights that the engine has; None: some, or parts of some."""


class Rollout:
    """The producers of one worker: one coroutine per group, as many as the engine and the worker's share have room for."""

    def __init__(
        self,
        context: LoopContext,
        engine: RolloutEngine,
        weights: ServedWeights,
        scoring: ResponseScoring,
        task: str = "rollout",
        episodes: EpisodePlayer | None = None,
        at_once: int = 0,
    ) -> None:
        """`task`: whose groups are taken. `at_once`: episodes under way at a time; 0: as many as the engine has slots."""
        episodes = episodes or EpisodePlayer(engine)
        self._queue, self._versions, self._schedule = context.queue, context.versions, context.schedule
        self._engine, self._weights = engine, weights
        self._shape, self._spans, self._task = context.shape, context.spans, task
        self._timings: Callable[[], Sequence[Timing]] = getattr(engine, "timings", tuple)
        self._producer = Producer(context.queue, engine, episodes, scoring, context.shape, self._played, self._scored)
        self._at_once = at_once or engine.num_slots
        self._share = 0  # rows of a step, by what `PolicyVersions` last said: which of how many workers this one is
        self._installed = 0
        self._attestation: Attestation | None = None  # of the version that is installed
        self._is_installing = True  # until `PolicyVersions` has said which version to begin with
        self._is_stale = self._is_leaving = False
        self._is_paused = False  # the engine, since an installation in flight
        self._retry_seconds = RETRY_SECONDS[0]
        self._has_served = False  # anything since the last installation
        self._is_asking = False  # for groups, which may be on their way here
        self._under_way: list[GroupRequest] = []  # with rows whose episodes have not ended; of a group, as often as it was taken
        self._generating = 0  # those rows
        self._observing = 0  # of these, rows that wait for their environments
        episodes.on_waiting = self._waits_for_environment
        self._scoring = 0
        self._changed = Signal()

    async def run(self) -> None:
        """Generate until the worker is to leave, or the run is stopping; unfinished groups are then abandoned."""
        while (target := await self._versions.join()) is not None:
            if self._weights.has == _weights_of(target):
                if await self._is_confirmed(target):
                    self._serve(target)
                    break
            elif (tensors := await self._fetched(target)) is not None:
                await self._install(target, tensors)
                if not self._is_stale:
                    break
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(self._take_groups())
            await self._follow_weights()
            await self._leave(taking)
            taking.cancel()

    async def _leave(self, taking: asyncio.Task[None]) -> None:
        """Take nothing more, and return when all that is here has ended, or else when the run stops."""
        self._is_leaving = True
        self._changed.notify()
        await self._queue.withdraw(self._task)
        await self._unless_stopped(taking)

    async def _unless_stopped(self, task: asyncio.Future[None]) -> None:
        """Wait until the task is done, or the run stops. Raises what the task raises."""
        stopped = asyncio.ensure_future(self._versions.stopped())
        try:
            for ended in (await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED))[0]:
                ended.result()
        finally:
            stopped.cancel()

    async def _take_groups(self) -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                self._show_lane()
                await self._changed.until(lambda: self._is_leaving or self._may_take(), OWN_RESPONSES)
                if self._is_leaving:
                    return  # when the groups that were taken have ended
                version, self._is_asking = self._installed, True
                leased = await self._queue.lease(self._task, Want(groups=self._room(), installed=version))
                self._is_asking = False
                if leased is not None:
                    for request in requests(leased):
                        self._generating += len(request.rows)
                        self._under_way.append(request)
                        groups.create_task(self._produce(leased, request))
                self._changed.notify()
                if leased is None and not self._is_stale:  # withdrawn, or closed; a stale worker may serve the same again
                    await self._changed.until(partial(self._has_moved_on, version), OWN_RESPONSES)

    def _may_take(self) -> bool:
        return not self._is_installing and not self._is_stale and self._room() > 0

    def _has_moved_on(self, version: int) -> bool:
        return self._installed != version or self._is_leaving

    def _room(self) -> int:
        """Number of groups that may be taken now: enough for every free slot and, but for a first group, within the worker's
        share."""
        size = self._shape.group_size
        wanted = -(-(self._at_once - self._generating) // size)
        return max(0 if self._generating else 1, min(wanted, (self._share - self._generating) // size))

    async def _produce(self, leased: Leased, request: GroupRequest) -> None:
        start, meta, version = self._spans.clock(), request.meta, self._installed
        await produce(self._producer, leased, request, partial(self._generated, request))
        self._spans.off_lane(
            "generate_group", start, step=meta.partition, version=version, group=meta.group, rows=len(request.rows)
        )

    def _generated(self, request: GroupRequest) -> None:
        ahead = self._spans.clock() - asyncio.get_running_loop().time()  # another machine's clock
        for timing in self._timings():
            counts = {name: getattr(timing, name) for name in ("rows", "tokens", "calls", "drafts", "accepted")}
            self._spans.off_lane(timing.task, timing.start + ahead, timing.end + ahead, version=self._installed, **counts)
        self._under_way = [other for other in self._under_way if other is not request]
        self._changed.notify()

    def _waits_for_environment(self, change: int) -> None:
        self._observing += change
        self._show_lane()

    def _played(self, num_sampled: int) -> None:
        self._spans.add(rows=1, tokens=num_sampled)
        self._generating -= 1
        self._scoring += 1
        self._show_lane()
        self._changed.notify()

    def _scored(self) -> None:
        self._scoring -= 1
        self._has_served = True
        self._show_lane()

    async def _follow_weights(self) -> None:
        while (target := await self._versions.next_target(self._installed)) is not None:
            # What could not be fetched is not needed any more. After an install that was refused there is nothing to serve.
            if target.version == self._installed and self._weights.has is not None:
                await self._versions.installed(target.version, self._attestation)
                self._serve(target)
                continue
            if (tensors := await self._fetched(target)) is None:
                continue
            if not await self._versions.may_install(target.version, self._installed):
                # It is to serve another one: the sender need not wait for the file of this one.
                await self._weights.receiver.release()
                continue
            self._is_installing = True
            await self._queue.withdraw(self._task)  # nothing is leased while weights are being changed
            if not await self._has_ended(target.version):
                return
            await self._install(target, tensors)

    async def _has_ended(self, version: int) -> bool:
        """Wait for what may not be ended under this version. False: the run is stopping, and what is under way is abandoned."""
        ended = asyncio.ensure_future(self._changed.until(partial(self._may_change_to, version), OWN_RESPONSES))
        try:
            await self._unless_stopped(ended)
            return ended.done()
        finally:
            ended.cancel()

    def _may_change_to(self, version: int) -> bool:
        """Whether everything under way may be ended under this version, and nothing more is on its way here.

        One that is called back ends all first: no response goes through more versions than the schedule promises.
        """
        if self._is_asking:
            return False
        if self._schedule.installs_in_flight and version > self._installed:
            return all(version in request.meta.interval for request in self._under_way)
        return not self._under_way

    async def _fetched(self, target: Target) -> Mapping[str, Tensor] | None:
        """The tensors of a version, in host memory. None, after a pause, if they could not be had: the worker is stale
        then, takes nothing, and asks `PolicyVersions` again, for which they may be too old by now."""
        start, manifest, weights = self._spans.clock(), target.manifest, self._weights
        try:
            with waiting(FETCH, version=target.version):
                tensors = weights.original() if manifest is None else await weights.receiver.fetch(manifest)
        except WeightSyncError as error:
            self._is_stale = True
            await self._queue.withdraw(self._task)
            await self._versions.failed(str(error))
            await asyncio.sleep(self._retry_seconds)
            self._retry_seconds = min(2 * self._retry_seconds, RETRY_SECONDS[1])
            return None
        self._retry_seconds = RETRY_SECONDS[0]
        if self._schedule.max_staleness:  # else nothing is generated meanwhile, and `install` needs no memory for it
            await self._engine.prepare(target.version, tensors)
        self._spans.off_lane("fetch", start, version=target.version, bytes=0 if manifest is None else manifest.num_bytes)
        return tensors

    async def _install(self, target: Target, tensors: Mapping[str, Tensor]) -> None:
        if self._under_way:
            self._is_paused = True
            await self._engine.pause()
        with self._spans.busy("install", version=target.version):
            self._weights.has = None
            await self._engine.install(target.version, tensors)
            self._weights.has = _weights_of(target)
        await self._weights.receiver.release()
        if not await self._is_confirmed(target):
            return
        if self._is_paused:  # perhaps by an installation before this one, which was refused
            await self._engine.resume()
            self._is_paused = False
        self._serve(target)

    async def _is_confirmed(self, target: Target) -> bool:
        """Say that the engine has a version. False, after a pause, if it generates with anything else: the worker is stale then."""
        attested = None if target.manifest is None else await self._attested(target.manifest)
        if fault := await self._versions.installed(target.version, attested):
            log.warning("version %d is not what the engine generates with: %s", target.version, fault)
            self._weights.has, self._is_stale = None, True
            await asyncio.sleep(self._retry_seconds)
            self._retry_seconds = min(2 * self._retry_seconds, RETRY_SECONDS[1])
            return False
        self._attestation = attested
        return True

    async def _attested(self, manifest: Manifest) -> Attestation | None:
        """Attestation of the engine, if it can give one: what it generates with, and what it makes of a version's probe."""
        start = self._spans.clock()
        attested: Attestation | None = None
        if (attest := getattr(self._engine, "attest", None)) is not None:
            attested = await attest()
        given = attested or Attestation(None)
        if manifest.probe is not None and given.log_probs is None and (log_probs := await self._probed(manifest.probe)) is not None:
            attested = msgspec.structs.replace(given, log_probs=log_probs)
        if attested is not None:
            self._spans.off_lane("attest", start, version=manifest.version)
        return attested

    async def _probed(self, probe: Probe) -> list[float] | None:
        score: Callable[..., Awaitable[Array | None]] | None = getattr(self._engine, "log_probs", None)
        if score is None:
            return None
        found = await score(np.array(probe.token_ids, np.int64))
        return None if found is None else found.tolist()

    def _serve(self, target: Target) -> None:
        self._installed, self._is_installing, self._is_stale, self._has_served = target.version, False, False, False
        prompts = share_of(self._shape.prompts_at_first, target.place, target.num_workers, target.version)
        self._share = prompts * self._shape.group_size
        self._changed.notify()

    def _show_lane(self) -> None:
        if self._is_installing:
            return
        if self._generating and self._observing == self._generating:
            self._spans.waiting("environment")
        elif self._generating:
            self._spans.enter(LANES[self._task], version=self._installed)
        elif self._scoring:
            self._spans.waiting("reward")
        else:
            self._spans.waiting("weights" if self._has_served else "prompts")


def _weights_of(target: Target) -> EngineVersion:
    return EngineVersion(target.version, "" if target.manifest is None else target.manifest.hash)
