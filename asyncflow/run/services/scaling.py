"""Rollout workers that join and leave a run: `asyncflow cluster scale rollout=4 --run RUN`.

    scale --> PolicyVersions.resize: changed pool --> Cluster.start: they load the model, join `PolicyVersions`, take prompts
                                               '--> Cluster.end: told by `PolicyVersions`, they end what they hold, or are killed

consumes: how many there are to be
waits for: leavers, for as long as they may take
is unblocked by: their end

Nothing is moved: a joiner begins with the version that is needed, as one that was started again does, and what a leaver could not
end in time is given to others, as when one dies. The shares of a step follow with each worker's next version.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

from asyncflow.cluster.base import Cluster
from asyncflow.config import Config
from asyncflow.control.policy_versions import PolicyVersions
from asyncflow.run.device_shares import devices_each
from asyncflow.run.fleet import rollout_worker
from asyncflow.run.preparation.checks import check_rollout_engine
from asyncflow.transport import remote
from asyncflow.types import RunError, UserError

POOL = "rollout"
_ENDING = "this run is ending: no worker joins or leaves it any more"


class Devices:
    """Number of devices of a run, over its time."""

    def __init__(self, count: int, now: Callable[[], float]) -> None:
        self._now = now
        self._changes: list[tuple[float, int]] = [(-math.inf, count)]  # (since, so many)

    def change(self, by: int) -> None:
        """Add devices from now on, or remove some (`by` below 0)."""
        self._changes.append((self._now(), self._changes[-1][1] + by))

    def mean(self, start: float, end: float) -> float:
        """Mean number of devices between two moments of the clock."""
        parts = [
            (min(until, end) - max(since, start), count)
            for (since, count), (until, _) in pairwise([*self._changes, (math.inf, 0)])
            if since <= start < until or start < since < end
        ]
        return sum(seconds * count for seconds, count in parts) / (end - start) if len(parts) > 1 else parts[0][1]


class Scaling:
    """The service. `start` runs work beside the run."""

    def __init__(
        self,
        config: Config,
        versions: PolicyVersions,
        cluster: Cluster,
        devices: Devices,
        *,
        start: Callable[[Coroutine[Any, Any, None]], None],
        log: Callable[[str], None],
    ) -> None:
        self._config, self._versions, self._cluster, self._devices = config, versions, cluster, devices
        self._start, self._log = start, log
        self._one_by_one = asyncio.Lock()
        self._is_open = False
        self._under_way: set[asyncio.Task[str]] = set()

    def begin(self) -> None:
        """The workers that the run begins with are started: others may join and leave."""
        self._is_open = True

    async def stop(self) -> None:
        """Stop joining workers that have not joined yet, and ask none to leave any more."""
        under_way = list(self._under_way)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    @remote
    async def scale(self, pool: str, size: int, grace_seconds: float) -> str:
        """Have so many workers in a pool; those that leave may take so long to end what they hold. Returns what is begun, in words.

        Raises `UserError` for a number that the run cannot have, or another pool than `rollout`; `RunError` when the run is ending,
        or a worker cannot be started.
        """
        self._check(pool, size)
        if grace_seconds < 0:
            raise UserError(f"workers that leave cannot be given {grace_seconds:g} s: take 0 or more")
        if not self._is_open:
            raise RunError("this run is still starting its workers: others may join and leave when it has")
        resizing = asyncio.create_task(self._resize(size, grace_seconds))
        self._under_way.add(resizing)
        resizing.add_done_callback(self._is_through)
        await asyncio.wait([resizing])  # the caller may go: it is done all the same
        if resizing.cancelled():
            raise RunError(_ENDING)
        return resizing.result()

    def _is_through(self, resizing: asyncio.Task[str]) -> None:
        self._under_way.discard(resizing)
        if not resizing.cancelled():
            resizing.exception()  # taken, if nobody waits for it any more

    def _check(self, pool: str, size: int) -> None:
        prompts, least = self._config.train.prompts_per_step, self._config.weight_sync.min_healthy_workers
        if pool != POOL:
            raise UserError(f"only rollout workers may join and leave a run, by rollout=NUMBER: {pool!r} stays as it is")
        if size < 1:
            raise UserError(f"a run needs a rollout worker, so it cannot have {size}: to end it, send it SIGINT or SIGTERM")
        if size < least:
            raise UserError(f"weight_sync.min_healthy_workers={least} is more than rollout={size}: take {least} or more")
        if size > prompts:
            raise UserError(
                f"rollout={size} is more than train.prompts_per_step={prompts}, so {size - prompts} of them would have nothing to "
                f"generate: take {prompts} or fewer"
            )
        check_rollout_engine(self._config, size)

    async def _resize(self, size: int, grace_seconds: float) -> str:
        async with self._one_by_one:
            if self._versions.is_stopping:
                raise RunError(_ENDING)
            before = len(self._versions.workers.working) - len(self._versions.workers.guests)
            coming, going = self._versions.resize(size)
            for name in going:
                self._start(self._end(name, grace_seconds))
            for number, name in enumerate(coming):
                try:
                    await self._cluster.start([rollout_worker(self._config, name)])
                except (OSError, UserError, RunError) as error:  # no room: the run goes on with those that it has
                    self._versions.never_came(coming[number:])
                    why = error.strerror if isinstance(error, OSError) else error
                    raise RunError(f"worker {name} could not be started: {why or error}") from error
                self._devices.change(devices_each(self._config))
            if not coming and not going:
                return f"the run has {size} rollout workers already"
            changes = [f"rollout workers: from {before} to {size}"]
            changes += [f"{_listed(coming)} join{'s' * (len(coming) == 1)}"] if coming else []
            changes += [f"{_listed(going)} leave{'s' * (len(going) == 1)}, within {grace_seconds:g} s"] if going else []
            self._log("; ".join(changes))
            return "; ".join(changes)

    async def _end(self, name: str, grace_seconds: float) -> None:
        is_in_time = await self._cluster.end(name, grace_seconds)
        self._versions.left(name)
        self._devices.change(-devices_each(self._config))
        if not self._versions.is_stopping:
            self._log(
                f"worker {name} has left"
                if is_in_time
                else f"worker {name} did not end what it held within {grace_seconds:g} s and was killed: others make it again"
            )


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
