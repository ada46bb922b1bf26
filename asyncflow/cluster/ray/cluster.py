"""Workers that Ray places: on this machine, or over the nodes of a cluster.

    RayCluster (driver) --placement group of each pool--> Ray --> RayHost (of each worker, on some node): host.py
               |  node, start, kill                                 |  spawns, and holds the control pipe of
               +<------------- what it prints, its end -------------+ child.py: the worker, in a process of its own

consumes: worker specs; each worker's output and end, as its host tells
waits for: room in the cluster, `start_seconds` at most; then for the workers' words
is unblocked by: Ray; a worker's output or end; the loss of a host, with its node perhaps

Below: connection.py (how the driver is connected to Ray), places.py (which worker has which bundle of
which placement group, and its host), process.py (a worker's process, as its host tells of it), requirements.py (options).

Ray places and supervises: samples travel by the transfer queue, weights by weight sync, and a worker itself knows nothing of Ray.
One that dies is started again as `local` does it, by its host, or by another one if that is gone too: Ray itself retries nothing.

Workers on the driver's own node are as those of `local`: they come through the private socket. Those on others come through
`queue.listen`, with the run's key. The first trainer writes the model into the run's folder, and publishes weights beside the
driver: it stays on the driver's node. The others may be elsewhere if told so, where the folder is seen: they write checkpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import uuid
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from asyncflow.cluster.base import OWN_DEVICES, BadEnd, Settle, WorkerSpec
from asyncflow.cluster.ray.connection import HOST_SECONDS, RayConnection, first_sentence, import_ray
from asyncflow.cluster.ray.host import Letter
from asyncflow.cluster.ray.places import RayPlaces, WorkerPlace
from asyncflow.cluster.ray.process import NeverBegan, RayProcess
from asyncflow.cluster.ray.requirements import options_of, pool_of
from asyncflow.cluster.supervised import SupervisedCluster, WorkerProcess
from asyncflow.config import load
from asyncflow.devices import COUNTED_AS
from asyncflow.run_dir import CONFIG_FILE, JOB_FILE, KEY_FILE
from asyncflow.types import RunError, UserError


class RayCluster(SupervisedCluster):
    """See `Cluster`, and the module's head. Raises `UserError` for options that are none, or where Ray is not installed."""

    def __init__(self, run_dir: Path, **options: Any) -> None:
        super().__init__(run_dir)
        self._options = options_of(options)
        if importlib.util.find_spec("ray") is None:
            raise UserError("cluster=ray needs Ray, which is not installed: pip install 'asyncflow-rl[ray]'")
        self._run_id = uuid.uuid4().hex[:12]
        self._connection = RayConnection(run_dir, self._run_id)
        self._places = RayPlaces(self._connection)
        self._at_work: set[asyncio.Future[None]] = set()  # calls of `start` and `end` that ask Ray

    async def start(self, workers: Sequence[WorkerSpec]) -> None:
        """See `Cluster.start`."""
        config = load(self._run_dir / CONFIG_FILE)
        names = {spec.name for spec in workers}  # torchrun's trainers are not among them
        own, guests = [spec for spec in workers if spec.shares not in names], [spec for spec in workers if spec.shares in names]
        pools = {name: [spec for spec in own if pool_of(spec) == name] for name in self._options.in_order(own, config)}
        for name, specs in pools.items():
            self._options.check(name, len(specs), config)
        with self._working():
            if not self._connection.node:
                self._places.check_open()
                await self._connection.connect(self._options)
                address = self._connection.head
                self._options = msgspec.structs.replace(self._options, address=address)  # known for `auto`, too, from now on
            self._places.expect(guests)
            for name in self._options.in_order(own, config):
                await self._places.reserve(name, pools[name], self._options, config)
            self._places.join(guests)
            await self._look_for_devices([spec for spec in workers if spec.device])
            await self._look_apart([spec for specs in pools.values() for spec in specs if spec.apart])
            await super().start(workers)

    async def end(self, name: str, grace_seconds: float) -> bool:
        """See `Cluster.end`."""
        with self._working():
            is_in_time = await super().end(name, grace_seconds)
            await self._places.leave(name)
        return is_in_time

    async def stop(self, grace_seconds: float, settle: Settle | None = None, keep: Collection[str] = ()) -> dict[str, BadEnd]:
        """See `Cluster.stop`."""
        self._places.is_closed = True
        try:
            ended = await super().stop(grace_seconds, settle, keep)
            await self._places.leave_all()
            if self._at_work:  # their workers have ended: they have only to leave
                await asyncio.wait(self._at_work, timeout=HOST_SECONDS)
        finally:
            await self._connection.disconnect()
        return ended

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Context in which Ray is needed."""
        done = asyncio.get_running_loop().create_future()
        self._at_work.add(done)
        try:
            yield
        finally:
            self._at_work.discard(done)
            done.set_result(None)

    def pids(self) -> dict[str, int]:
        """See `Cluster`: of those on this machine."""
        running = {name: child.process for name, child in self._children.items() if child.process.returncode is None}
        return {name: process.pid for name, process in running.items() if getattr(process, "is_here", False)}

    async def _spawn(self, spec: WorkerSpec, log: Path) -> WorkerProcess:
        """Start the worker on a host of its own. One that has begun before and cannot be started has died once more."""
        place, seconds = self._places.by_name[spec.name], self._options.start_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._spawn_at(place, log)
        except (TimeoutError, ConnectionError, import_ray().exceptions.RayError) as error:
            is_late = isinstance(error, TimeoutError)
            why = f"it could not be started on Ray within {seconds:g} s" if is_late else first_sentence(error)
            if not place.has_begun:
                await self._places.leave(spec.name)
                raise RunError(f"worker {spec.name} could not be started: {why}") from error
            if not isinstance(error, ConnectionError):
                place.end_host()
            with log.open("a") as file:
                print(why, file=file)
            return NeverBegan()

    async def _spawn_at(self, place: WorkerPlace, log: Path) -> RayProcess:
        await self._connection.check_head()
        if not (place.has_begun and place.spec.outlives_others):  # workers that end with the run still need those
            self._places.check_open()
        try:
            host = place.host or place.begin_host()
            is_remote = await self._connection.answer(host.node.remote()) != self._connection.node
        except import_ray().exceptions.RayError:  # gone since the worker's last start
            place.end_host()
            host = place.begin_host()
            is_remote = await self._connection.answer(host.node.remote()) != self._connection.node
        sees_run = await self._sees_run(host)
        letter = Letter(
            name=place.spec.name,
            entry=place.spec.entry,
            run_dir=str(self._run_dir.absolute() if is_remote else self._run_dir),
            cwd=os.getcwd(),
            run_id=self._run_id,
            is_remote=is_remote,
            environment=self._environment(place, is_remote=is_remote),
            files=self._files() if is_remote and not sees_run else {},
        )
        pid = await self._connection.answer(host.start.remote(msgspec.msgpack.encode(letter)))
        place.has_begun = True
        end_host = partial(self._places.end_silent_host, place, host)
        return RayProcess(host, pid, log, self._connection, end_host, is_here=not is_remote)

    def _environment(self, place: WorkerPlace, *, is_remote: bool) -> dict[str, str]:
        forwarded, own = dict(os.environ), {**place.spec.environment, **place.apart}
        if is_remote:
            forwarded = self._options.forwarded(forwarded)
        if place.needs.keys() & {*COUNTED_AS.values()}:
            own[OWN_DEVICES] = "1"
            if "LOCAL_RANK" in own:
                own["LOCAL_RANK"] = "0"
        return forwarded | own

    async def _sees_run(self, host: Any) -> bool:
        """Whether a host sees the run's folder."""
        if (sees_run := self._options.shares_files) is not None:
            return sees_run
        job_file = self._run_dir.absolute() / JOB_FILE
        digest = hashlib.sha256(job_file.read_bytes()).hexdigest() if job_file.exists() else ""
        return bool(await host.sees.remote(str(job_file), digest))

    async def _look_for_devices(self, specs: Sequence[WorkerSpec]) -> None:
        """Have PyTorch look for the devices of workers where they are placed, before any worker is started.

        Raises `UserError` with the node that lacks one, `RunError` where a host says nothing.
        """
        hosts = [self._places.by_name[spec.name].host for spec in specs]
        try:
            async with asyncio.timeout(self._options.start_seconds):
                nodes = await asyncio.gather(*(host.node.remote() for host in hosts))
                asked = {(node, spec.device): host for node, spec, host in zip(nodes, specs, hosts, strict=True)}
                lacking = await asyncio.gather(*(host.lacks.remote(device) for (_, device), host in asked.items()))
        except (TimeoutError, import_ray().exceptions.RayError) as error:
            raise RunError(f"the hosts of workers have not all said which devices they have: {first_sentence(error)}") from error
        for (node, _), why in zip(asked, lacking, strict=True):
            if why:
                raise UserError(f"on the node {node[:12]} of the Ray cluster: {why}")

    async def _look_apart(self, specs: Sequence[WorkerSpec]) -> None:
        """Tell workers of one pool that do their work together whether they are on several nodes.

        Raises `UserError` where one of them is on a node that does not see the run's folder, `RunError` where one says nothing.
        """
        places = [self._places.by_name[spec.name] for spec in specs]
        if self._options.trainers != "anywhere" or len(places) < 2:
            return
        try:
            async with asyncio.timeout(self._options.start_seconds):
                nodes = await asyncio.gather(*(place.host.node.remote() for place in places))
                there = [(place, node) for place, node in zip(places, nodes, strict=True) if node != self._connection.node]
                see = await asyncio.gather(*(self._sees_run(place.host) for place, _ in there))
        except (TimeoutError, import_ray().exceptions.RayError) as error:
            raise RunError(f"the hosts of trainers have not all said where they are: {first_sentence(error)}") from error
        for (place, _), sees_run in zip(there, see, strict=True):
            if not sees_run:
                raise UserError(
                    f"{place.spec.name} would be on a node that does not see {self._run_dir.absolute()}, where trainers write "
                    "checkpoints: share it, or leave cluster.trainers out, and all trainers stay on this machine"
                )
        for place, node in zip(places, nodes, strict=True) if there else ():
            place.apart = {**place.spec.apart, "LOCAL_WORLD_SIZE": str(nodes.count(node))}

    def _files(self) -> dict[str, bytes]:
        """Files of the run's folder that a worker reads."""
        return {name: (self._run_dir / name).read_bytes() for name in (CONFIG_FILE, JOB_FILE, KEY_FILE)}
