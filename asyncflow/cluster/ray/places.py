"""Places of workers in a Ray cluster: placement groups, with a bundle and a host for each worker.

    reserve (a pool's workers) --> a bundle that another has left | one of a new placement group --> RayHost: host.py
    leave --> the bundle is free for another of the pool; the group is given back with its last worker

consumes: the workers of a pool, and what they need, by requirements.py
waits for: room in the cluster, `start_seconds` at most; a host that is told to leave
is unblocked by: Ray; others of the pool, which leave meanwhile
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from asyncflow.cluster.base import WorkerSpec
from asyncflow.cluster.ray.connection import ASK_SECONDS, HOST_SECONDS, RayConnection, first_sentence, import_ray
from asyncflow.cluster.ray.host import RayHost
from asyncflow.cluster.ray.requirements import RayOptions, Wish
from asyncflow.config import Config
from asyncflow.types import RunError, UserError
from asyncflow.waits import RAY_ROOM, waiting

_NODE_LABEL: Final = "ray.io/node-id"


@dataclass(slots=True, eq=False)
class _PlacementGroup:
    """A placement group, the workers that are in it still, and the bundles that no worker has any more."""

    group: Any
    members: set[str]
    name: str = ""
    bundles: Sequence[Mapping[str, float]] = ()
    free: list[int] = field(default_factory=list)

    def take(self, needs: Mapping[str, float]) -> int | None:
        """The number of a free bundle of just these needs; None if there is none. It is no longer free."""
        number = next((number for number in self.free if self.bundles[number] == needs), None)
        if number is not None:
            self.free.remove(number)
        return number


@dataclass(slots=True, eq=False)
class WorkerPlace:
    """A worker's bundle of a placement group, and its host."""

    spec: WorkerSpec
    pool: _PlacementGroup
    bundle: int
    needs: Mapping[str, float]
    host: Any = None
    has_begun: bool = False
    apart: Mapping[str, str] = field(default_factory=dict)
    """Variables that replace those of its environment, since its pool lies on several nodes."""

    def begin_host(self) -> Any:
        """A new host, on the node of the bundle."""
        ray, needs = import_ray(), dict(self.needs)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self.pool.group, self.bundle)
        actor = ray.remote(RayHost).options(
            num_cpus=needs.pop("CPU", 0),
            num_gpus=needs.pop("GPU", 0),
            memory=needs.pop("memory", None),
            resources=needs,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=4,
            scheduling_strategy=strategy,
        )
        self.host = actor.remote()
        return self.host

    def end_host(self) -> None:
        """End the host, if there is one, and with it the worker."""
        if self.host is not None:
            with contextlib.suppress(import_ray().exceptions.RayError, RuntimeError, ValueError):
                import_ray().kill(self.host)
            self.host = None


class RayPlaces:
    """The places of a run's workers."""

    def __init__(self, connection: RayConnection) -> None:
        self.by_name: dict[str, WorkerPlace] = {}  # of workers that have one
        self.is_closed = False  # no worker is placed any more
        self._connection = connection
        self._pools: list[_PlacementGroup] = []
        self._guests: dict[str, int] = {}  # how many share the devices of a worker, by its name

    def check_open(self) -> None:
        """Raises `RunError` when no worker is placed any more."""
        if self.is_closed:
            raise RunError("the run is ending: no worker is placed on its Ray cluster any more")

    async def reserve(self, name: str, specs: Sequence[WorkerSpec], options: RayOptions, config: Config) -> None:
        """A bundle for each of these workers of one pool: one that another has left, or else of a new placement group.

        Raises `UserError` when there is no room, `RunError` when the head of the cluster does not answer, or the run is ending.
        """
        wanted = [options.wish(name, spec) for spec in specs]
        why_here, group = options.why_here(name, config), None
        deadline = asyncio.get_running_loop().time() + options.start_seconds
        try:
            with waiting(RAY_ROOM, seconds=options.start_seconds) as wait:
                while wanted:
                    wait.facts["workers"] = ", ".join(spec.name for spec, _ in wanted)
                    try:
                        await self._connection.check_head()  # else Ray's functions wait for it
                    except ConnectionError as error:
                        raise RunError(str(error)) from error
                    self.check_open()
                    if left := self._take_free(name, wanted):  # they may come free at any time, as workers leave
                        self._remove(group)
                        wanted, group = [each for each in wanted if each not in left], None
                        continue
                    if group is None:
                        group = import_ray().util.placement_group(
                            [bundle for _, bundle in wanted],
                            strategy=options.strategy(name),
                            bundle_label_selector=options.labels(name, wanted, config, {_NODE_LABEL: self._connection.node}),
                        )
                    is_there = await _in_thread(group.wait, ASK_SECONDS)
                    self.check_open()
                    if is_there:
                        pool = _PlacementGroup(group, set(), name, [bundle for _, bundle in wanted])
                        self._pools.append(pool)
                        group = None
                        for number, (spec, bundle) in enumerate(wanted):
                            self._take(pool, number, spec, bundle)
                        return
                    if asyncio.get_running_loop().time() > deadline:
                        _raise_no_room(name, [bundle for _, bundle in wanted], options.start_seconds, why_here)
        except ValueError as error:  # an amount of a kind of which it knows more than `options_of`
            raise UserError(
                f"Ray has no such workers as {name} with {wanted[0][1]}: {first_sentence(error)}; change cluster.resources.{name}"
            ) from error
        finally:
            self._remove(group)

    def _take_free(self, name: str, wanted: Sequence[Wish]) -> list[Wish]:
        """Give workers what others of their pool have left. Returns those that have got something."""
        placed = []
        for spec, bundle in wanted:
            for pool in self._pools:
                if pool.name == name and (number := pool.take(bundle)) is not None:
                    self._take(pool, number, spec, bundle)
                    placed.append((spec, bundle))
                    break
        return placed

    def _take(self, pool: _PlacementGroup, number: int, spec: WorkerSpec, bundle: Mapping[str, float]) -> None:
        pool.members.add(spec.name)
        self.by_name[spec.name] = place = WorkerPlace(spec, pool, number, _part(bundle, self._guests.get(spec.name, 0)))
        place.begin_host()

    def expect(self, guests: Sequence[WorkerSpec]) -> None:
        """Workers that will compute on the devices of others: room for them is left there."""
        for spec in guests:
            self._guests[spec.shares] = self._guests.get(spec.shares, 0) + 1

    def join(self, guests: Sequence[WorkerSpec]) -> None:
        """Place workers in the bundles of those whose devices they share, each with an equal part."""
        for spec in guests:
            host = self.by_name[spec.shares]
            host.pool.members.add(spec.name)
            self.by_name[spec.name] = place = WorkerPlace(spec, host.pool, host.bundle, host.needs)
            place.begin_host()

    async def end_silent_host(self, place: WorkerPlace, host: Any) -> None:
        """End a host that does not answer, and with it its worker, whose control pipe it has. The worker's next start has
        another one."""
        if place.host is host and await self._connection.may_be_asked() and place.host is host:
            place.end_host()

    async def leave(self, name: str) -> None:
        """Free the place of a worker that has ended for good. It has no place any more when `leave_all` came first."""
        if (place := self.by_name.pop(name, None)) is not None:
            await self._leave(place)

    async def leave_all(self) -> None:
        """Give back all places: all workers have ended for good."""
        places, self.by_name = self.by_name, {}
        await asyncio.gather(*(self._leave(place) for place in places.values()))

    async def _leave(self, place: WorkerPlace) -> None:
        if place.host is not None and not self._connection.is_over:
            with contextlib.suppress(TimeoutError, import_ray().exceptions.RayError):
                async with asyncio.timeout(HOST_SECONDS):
                    await place.host.leave.remote()
        if not await self._connection.may_be_asked():
            return
        place.end_host()
        pool = place.pool
        pool.members.discard(place.spec.name)
        if not place.spec.shares:  # else the bundle is another's
            pool.free.append(place.bundle)
        if not pool.members:
            self._pools = [each for each in self._pools if each is not pool]
            self._remove(pool.group)

    def _remove(self, group: Any) -> None:
        """A placement group that nobody needs any more, or None."""
        if group is not None and not self._connection.is_over:
            with contextlib.suppress(import_ray().exceptions.RayError, RuntimeError):
                import_ray().util.remove_placement_group(group)


def _part(bundle: Mapping[str, float], guests: int) -> dict[str, float]:
    """An equal part of a bundle, which so many others share. Ray counts in ten-thousandths, and above 1 in whole numbers."""
    if not guests:
        return dict(bundle)
    parts = {kind: count / (1 + guests) for kind, count in bundle.items()}
    return {kind: math.floor(part) if part >= 1 else math.floor(part * 1e4) / 1e4 for kind, part in parts.items()}


def _raise_no_room(name: str, bundles: Sequence[Mapping[str, float]], seconds: float, why_here: str) -> NoReturn:
    free = {kind: count for kind, count in import_ray().available_resources().items() if kind in bundles[0]}
    raise UserError(
        f"the Ray cluster has had no room for {len(bundles)} {name} worker(s) of {bundles[0]} each for "
        f"{seconds:g} s{why_here and f', and {why_here}'}; free, on all its nodes, is {free}: "
        f"start fewer workers, or change cluster.resources or cluster.placement"
    )


async def _in_thread(function: Callable[[float], bool], seconds: float) -> bool:
    """Call it in a thread, and be there when it returns: it may not ask Ray when Ray is gone."""
    call = asyncio.ensure_future(asyncio.to_thread(function, seconds))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call], timeout=HOST_SECONDS)
        raise
